"""Rounds, medians and reports of `bireme bench`, without starting a rank."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bireme.bench import peers, plot, run
from bireme.bench.machine import cpu_model, machine
from bireme.bench.peers import Failed, Outcome
from bireme.bench.run import Settings
from bireme.bench.tally import Tally
from bireme.bench.worker import Plan
from bireme.cli import main
from bireme.errors import EngineError, UsageError

ROOT = Path(__file__).resolve().parents[2]


def outcome(*results: dict[str, Any]) -> Outcome:
    return Outcome({"numpy": "2"}, [{"rank": 0, "pid": 7}], list(results))


def found(key: str, time_us: float, wrong: int = 0, half: str = "out") -> dict[str, Any]:
    return {"key": key, "half": half, "time_us": time_us, "wrong": wrong, "switches": 1.0}


def test_medians_over_rounds() -> None:
    tally = Tally(["bireme", "gloo"], checked=True)
    for number, time_us in enumerate([5.0, 1.0, 3.0], 1):
        tally.add(number, "bireme", outcome(found("a", time_us, wrong=number - 1)))
    assert tally.median("bireme", "a", "out") == 3.0
    assert tally.median("bireme", "a", "in") is None
    assert tally.median("bireme", "a", "out", "memcpy_us") is None
    assert tally.wrong("bireme", "a", "out") == tally.all_wrong("bireme") == 2
    assert [row["round"] for row in tally.rounds] == [1, 2, 3]


def test_values_that_were_not_checked_are_not_counted() -> None:
    tally = Tally(["bireme"], checked=False)
    tally.add(1, "bireme", outcome(found("a", 1.0)))
    assert tally.wrong("bireme", "a", "out") is None


def test_reasons_are_said_once_and_a_dropped_side_is_silent() -> None:
    tally = Tally(["bireme", "gloo"], checked=True)
    lacks = [{"key": f"put {n}", "half": "out", "lacks": "no put"} for n in (8, 16)]
    tally.add(1, "gloo", outcome(*lacks))
    assert tally.lacks() == ["gloo (put, out): no put"]
    tally.drop("gloo", "it fell")
    assert (tally.lacks(), tally.sides) == ([], ["bireme"])
    assert tally.missing == {"gloo": "it fell"}


# ---- whole runs, with made-up times -------------------------------------------------------------

SPEED = {"bireme": 2.0, "gloo": 20.0, "mpich": 6.0, "openmpi": 4.0}


class Stage:
    """Stands in for the ranks: notes who was started and answers with made-up times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[str] = []
        self.fails: dict[str, str] = {}
        self.wrong: dict[str, int] = {}
        monkeypatch.setattr(peers, "prepare", lambda name: None)
        monkeypatch.setattr(peers, "run_side", self.run_side)

    def run_side(self, name: str, ranks: int, plan: Plan) -> Outcome:
        self.started.append(name)
        if name in self.fails:
            raise Failed(self.fails[name])
        results = []
        for case in plan.cases:
            for half in case.halves:
                row = found(case.key, SPEED[name], self.wrong.get(name, 0), half)
                row |= {"memcpy_us": 1.0} if case.op in ("put", "get") else {}
                results.append(row)
        return outcome(*results)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def bench(op: str, **options: Any) -> tuple[int, list[str]]:
    out = io.StringIO()
    settings = Settings(op, **{"max_bytes": 128, "rounds": 2, **options})
    return run.bench(settings, out, io.StringIO()), out.getvalue().splitlines()


def test_sides_take_turns(stage: Stage) -> None:
    bench("all_reduce", peers=("gloo", "openmpi"))
    assert stage.started == ["bireme", "gloo", "openmpi"] * 2


def test_ratios_say_how_much_faster_bireme_is(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, lines = bench("all_reduce", peers=("gloo",), json=str(path))
    assert status == 0
    assert "         128          2.00         20.00   10.00x" in lines
    written = json.loads(path.read_text())
    assert [row["size"] for row in written["results"]] == [8, 32, 128]
    last = written["results"][-1]
    assert (last["count"], last["type"], last["redop"], last["root"]) == (32, "float", "sum", -1)
    for half in ("out_of_place", "in_place"):
        assert last[half]["time"] == 2.0
        assert last[half]["alg_bw"] == last[half]["bus_bw"] == pytest.approx(0.064)
        assert last[half]["nwrong"] == 0
        assert last[half]["peers"] == {"gloo": {"time": 20.0, "ratio": 10.0}}
    assert written["out_of_bounds"] == {"count": 0, "okay": True}
    assert written["average_bus_bandwidth"]["bandwidth"] == pytest.approx((8 + 32 + 128) / 6000)
    assert [(r["round"], r["side"]) for r in written["rounds"]] == [
        (1, "bireme"), (1, "gloo"), (2, "bireme"), (2, "gloo"),
    ]  # fmt: skip
    assert written["machine"]["cores"] >= 1
    assert set(written["versions"]) == {"bireme", "gloo"}


def test_a_form_that_does_not_exist(stage: Stage) -> None:
    _, lines = bench("broadcast", root=1)
    row = next(line for line in lines if line.startswith("           8 "))
    assert row.split()[3:9] == ["none", "1", "N/A", "N/A", "N/A", "N/A"]


def test_one_sided_table(stage: Stage) -> None:
    _, lines = bench("put", peers=("mpich",))
    assert "           8          2.00             0.00       0          1.00     2.00x" in lines
    assert "           8          2.00          6.00    3.00x" in lines


def test_fixed_table_compares_with_the_better_mpi(stage: Stage, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    status, lines = bench("engine", peers=("gloo", "mpich", "openmpi"), json=str(path))
    assert status == 0
    put = next(line for line in lines if "put 64 MiB" in line).split()[3:]
    assert put == ["2.00", "20.00", "6.00", "4.00", "2.00x", "10.00x", "2.00x", "1.00"]
    item = json.loads(path.read_text())["results"][0]
    assert (item["item"], item["x_mpi"], item["x_gloo"]) == ("all_reduce 8 B, heap", 2.0, 10.0)


@pytest.mark.parametrize("side", ["bireme", "mpich"])
def test_wrong_values_give_exit_status_1(stage: Stage, side: str) -> None:
    stage.wrong[side] = 3
    status, lines = bench("all_reduce", peers=("mpich",))
    assert status == 1
    assert f"# {side} has wrong values: 18" in lines
    assert ("# Out of bounds values : 18 FAILED" in lines) == (side == "bireme")


def test_it_goes_on_without_a_peer_that_fails(stage: Stage) -> None:
    stage.fails["mpich"] = "no luck"
    status, lines = bench("all_reduce", peers=("mpich", "openmpi"))
    assert status == 0
    assert stage.started == ["bireme", "mpich", "openmpi", "bireme", "openmpi"]
    assert "# mpich is missing: round 1: no luck" in lines


def test_it_goes_on_without_a_peer_that_cannot_be_made(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise Failed("no network")

    monkeypatch.setattr(peers, "prepare", refuse)
    _, lines = bench("all_reduce", peers=("mpich",))
    assert "# mpich is missing: no network" in lines


def test_it_does_not_go_on_without_bireme(stage: Stage) -> None:
    stage.fails["bireme"] = "no luck"
    with pytest.raises(EngineError, match="bireme could not be measured in round 1: no luck"):
        bench("all_reduce")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": "nothing"}, "operation: expected one of all_reduce"),
        ({"op": "put", "ranks": 1}, "put: expected at least 2 ranks, found 1"),
        ({"op": "engine", "ranks": 1}, "engine: expected at least 2 ranks"),
        ({"root": 2}, "root: expected a rank from 0 to 1, found 2"),
        ({"dtype": "float16"}, "dtype: expected one of int8"),
        ({"redop": "mean"}, "reduction: expected one of sum"),
        ({"redop": "avg", "dtype": "int32"}, "reduction: expected a float type for avg"),
        ({"place": "disk"}, "place: expected one of private, heap"),
        ({"peers": ("nccl",)}, "peers: expected one of gloo, mpich, openmpi, found 'nccl'"),
        ({"factor": 1}, "sizes: expected a factor"),
    ],
)
def test_settings_that_do_not_fit(stage: Stage, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        bench(**{"op": "all_reduce", **options})
    assert stage.started == []


# ---- plot ---------------------------------------------------------------------------------------


def test_a_plot_without_matplotlib_is_refused_first(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--plot needs matplotlib: pip install 'bireme\[plot\]'"):
        bench("all_reduce", plot="out.png")
    assert stage.started == []


class Canvas:
    """Stands in for matplotlib's figure and axes: notes what is drawn."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.drawn: list[Any] = []

    def subplots(self) -> Canvas:
        return self

    def plot(self, x: Any, y: Any, **options: Any) -> None:
        self.drawn.append((options["label"], x, y))

    def barh(self, places: Any, values: Any, thick: float, label: str) -> None:
        self.drawn.append((label, values))

    def savefig(self, path: str, dpi: int) -> None:
        self.drawn.append(path)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def test_plots(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    canvas = Canvas()
    monkeypatch.setattr(plot, "_figure", lambda *_, **__: (canvas, canvas))
    monkeypatch.setattr(plot, "require", lambda: None)
    bench("broadcast", peers=("gloo",), plot="out.png")
    assert canvas.drawn == [
        ("bireme, in place", [8, 32, 128], [2.0] * 3),
        ("gloo, in place", [8, 32, 128], [20.0] * 3),
        "out.png",
    ]
    canvas.drawn.clear()
    bench("barrier", peers=("gloo",), plot="out.svg")
    assert canvas.drawn == [("bireme", [2.0]), ("gloo", [20.0]), "out.svg"]


@pytest.mark.may_leak("descriptor", reason="matplotlib keeps its fonts open")
def test_plots_with_matplotlib(stage: Stage, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for op in ("all_reduce", "engine"):
        bench(op, plot=str(tmp_path / f"{op}.png"))
        assert (tmp_path / f"{op}.png").read_bytes().startswith(b"\x89PNG")


# ---- command line, machine, make ----------------------------------------------------------------


def test_command_line(stage: Stage) -> None:
    stage.wrong["bireme"] = 1
    words = ["bench", "all_reduce", "-n", "3", "-b", "1K", "-e", "2K", "-i", "512", "--rounds", "1"]
    done = CliRunner().invoke(main, [*words, "--peers", "gloo,mpich"])
    assert done.exit_code == 1
    assert stage.started == ["bireme", "gloo", "mpich"]
    assert "nRanks 3 minBytes 1024 maxBytes 2048 step: 512(bytes)" in done.output


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (["all_reduce", "-b", "many"], 2, "expected a size such as"),
        (["hop"], 2, "operation: expected one of"),
        (["all_reduce", "--json", "/no/such/folder/out.json", "-e", "8"], 1, "No such file"),
    ],
)
def test_errors_of_the_command_line(stage: Stage, words: list[str], code: int, text: str) -> None:
    done = CliRunner().invoke(main, ["bench", *words])
    assert done.exit_code == code
    assert text in done.output


def test_failures_on_the_command_line(stage: Stage) -> None:
    stage.fails["bireme"] = "no luck"
    done = CliRunner().invoke(main, ["bench", "barrier"])
    assert done.exit_code == 1
    assert "Error: bireme could not be measured in round 1: no luck" in done.output


def test_machine(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: A chip: fast\n")
    assert cpu_model(str(tmp_path / "cpuinfo")) == "A chip: fast"
    assert cpu_model(str(tmp_path / "none"))
    assert set(machine()) == {"cpu", "cores", "memory_bytes", "kernel", "load", "date"}


def test_the_target_of_make() -> None:
    command = ["make", "-n", "-W", "pyproject.toml", "bench"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line = "bireme bench engine -n 2 --peers gloo,mpich,openmpi --json benchmarks/latest.json"
    assert line in done.stdout
