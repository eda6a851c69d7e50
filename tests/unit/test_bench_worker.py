"""The ranks' side of a benchmark: data, what is expected of it, and the timing loop."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bireme.bench import cases, worker
from bireme.bench.worker import Case, Lacks, Plan, Side

RANKS = 3


def inputs(case: Case, rank: int) -> np.ndarray[Any, Any]:
    count, _ = worker.extents(case.op, case.count, RANKS)
    return worker.cut(worker.base(case, rank), 0, count)


def by_hand(case: Case, rank: int) -> np.ndarray[Any, Any] | None:
    """What MPI's text says, from the inputs."""
    n, every = case.count, [inputs(case, r) for r in range(RANKS)]
    total = np.sum(every, axis=0, dtype=every[0].dtype)
    mine = slice(rank * n, (rank + 1) * n)
    found = {
        "all_reduce": total,
        "reduce": total if rank == case.root else None,
        "reduce_scatter": total[mine],
        "broadcast": every[case.root],
        "scatter": every[case.root][mine],
        "sendrecv": every[rank - 1],
        "barrier": None,
    }
    if case.op in found:
        return found[case.op]
    if case.op == "all_to_all":
        return np.concatenate([part[mine] for part in every])
    return np.concatenate(every) if case.op == "all_gather" or rank == case.root else None


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("nbytes", [64, 4096, 40000])
@pytest.mark.parametrize("op", [op for op in cases.OPS if op not in cases.ONE_SIDED])
def test_expected_values(op: str, nbytes: int, rank: int) -> None:
    case = cases.op_cases(op, [nbytes], "int32", "sum", 1, "private", RANKS)[0]
    right, found = by_hand(case, rank), worker.expected(case, rank, RANKS)
    if right is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, right)


REDUCTIONS = [(d, o) for d in cases.DTYPES for o in cases.REDOPS if o != "avg" or "int" not in d]


@pytest.mark.parametrize(("dtype", "redop"), REDUCTIONS)
def test_expected_reductions(dtype: str, redop: str) -> None:
    case = Case("", "all_reduce", 100, dtype, redop)
    every = np.stack([inputs(case, r) for r in range(RANKS)]).astype(np.float64)
    ufunc = {"sum": np.sum, "prod": np.prod, "min": np.min, "max": np.max, "avg": np.mean}[redop]
    found = worker.expected(case, 0, RANKS)
    assert found is not None
    assert found.dtype == worker.numpy_dtype(dtype)
    np.testing.assert_array_equal(found, ufunc(every, axis=0).astype(found.dtype))


@pytest.mark.parametrize(
    ("op", "source", "holder"), [("put", 0, 1), ("put_local", 0, 1), ("get", 1, 0)]
)
def test_expected_one_sided_values(op: str, source: int, holder: int) -> None:
    case = Case("", op, 50)
    for rank in range(RANKS):
        found = worker.expected(case, rank, RANKS)
        if rank == holder:
            np.testing.assert_array_equal(found, inputs(case, source))
        else:
            assert found is None


def test_expected_of_signal_and_atomic() -> None:
    ping = Case("", "put_signal", 50)
    for rank in (0, 1):
        np.testing.assert_array_equal(worker.expected(ping, rank, RANKS), inputs(ping, 1 - rank))
    assert worker.expected(ping, 2, RANKS) is None
    atomic = Case("", "atomic", 1, "int64")
    assert [worker.expected(atomic, r, RANKS) for r in range(RANKS)] == [None, np.ones(1), None]


def test_wrong_values_are_counted_exactly() -> None:
    case, right = Case("", "all_reduce", 5), np.arange(1, 6, dtype=np.float32)
    assert worker.wrong_values(case, right, right, 2) == 0
    assert worker.wrong_values(case, np.nextafter(right, 9), right, 2) == 5
    assert worker.wrong_values(case, right * np.nan, right, 2) == 5


def test_wrong_values_within_rounding() -> None:
    case, right = Case("", "all_reduce", 5, redop="avg"), np.arange(1, 6, dtype=np.float32)
    assert worker.wrong_values(case, np.nextafter(right, 9), right, 2) == 0
    assert worker.wrong_values(case, right * np.float32(1.001), right, 2) == 5
    assert worker.wrong_values(case, right * np.nan, right, 2) == 5


def test_an_element_type_that_numpy_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Lacks, match="NumPy has no f8e4m3"):
        worker.numpy_dtype("f8e4m3")
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(Lacks, match="NumPy has no bfloat16"):
        worker.numpy_dtype("bfloat16")


def test_buffers_are_as_large_as_the_largest_case() -> None:
    plan = Plan([Case("a", "all_gather", 10), Case("b", "put", 70, halves=("out",))])
    assert worker.needs(plan, 4) == {
        ("x", "private", "float"): 70,
        ("out", "private", "float"): 40,
        ("window", "heap", "float"): 70,
    }


# ---- one rank alone -----------------------------------------------------------------------------


class Alone(Side):
    """Reduces over one rank, with NumPy; a private put has no peer."""

    memcpy_ops = ("all_gather",)

    def __init__(self) -> None:
        self.calls = 0

    def _all_reduce(self, case: Case, half: str, x: Any, out: Any) -> Any:
        def copy() -> None:
            self.calls += 1
            out[...] = x

        return copy

    def _all_gather(self, case: Case, half: str, x: Any, out: Any) -> Any:
        return lambda: np.copyto(out, x)

    def _broadcast(self, case: Case, half: str, x: Any, out: Any) -> Any:
        def refuse() -> None:
            raise RuntimeError("not\ntoday")

        return refuse

    def memcpy(self, case: Case, x: Any, out: Any) -> Any:
        return lambda: None


def results(plan: Plan, side: Side | None = None) -> list[dict[str, Any]]:
    return list(worker.run_plan(side or Alone(), plan))


def test_the_loop_calls_as_often_as_it_says() -> None:
    side = Alone()
    about, out, inside = results(Plan([Case("a", "all_reduce", 4)], iters=7, warmup=2), side)
    assert set(about) == {"about", "ranks"}
    assert side.calls == 2 * (1 + 2 + 7)  # a check, the warm-up, the measurement
    for half, found in (("out", out), ("in", inside)):
        assert (found["key"], found["half"], found["iters"], found["wrong"]) == ("a", half, 7, 0)
        assert found["time_us"] > 0
        assert found["switches"] >= 0


def test_the_loop_chooses_how_often_it_calls() -> None:
    plan = Plan([Case("a", "all_reduce", 4, halves=("out",))], seconds=0.001)
    assert 5 <= results(plan)[1]["iters"] <= 100_000


def test_a_spoilt_value_is_found() -> None:
    plan = Plan([Case("a", "all_reduce", 4)], iters=1, corrupt=True)
    assert [found["wrong"] for found in results(plan)[1:]] == [1, 1]
    assert [found["wrong"] for found in results(replace(plan, check=False))[1:]] == [0, 0]


def test_what_a_side_lacks_is_said() -> None:
    plan = Plan(
        [
            Case("a", "put", 4, halves=("out",)),
            Case("b", "broadcast", 4, halves=("in",)),
            Case("c", "all_reduce", 4, "f8e4m3", halves=("in",)),
        ],
        iters=1,
    )
    told = [found["lacks"] for found in results(plan)[1:]]
    assert told == ["no put", "not today", "NumPy has no f8e4m3 here"]


def test_a_copy_is_timed_beside() -> None:
    found = results(Plan([Case("a", "all_gather", 4, halves=("out",))], iters=2))[1]
    assert found["memcpy_us"] >= 0
    with pytest.raises(Lacks, match="no memory of a peer is mapped"):
        Side().memcpy(Case("", "put", 1), None, None)


def test_main_prints_lines_and_ends_the_others_on_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = types.SimpleNamespace(
        dump_traceback_later=lambda _limit_s, **_: None, cancel_dump_traceback_later=lambda: None
    )
    monkeypatch.setattr(worker, "faulthandler", clock)
    path = tmp_path / "plan.json"
    plan = Plan([Case("a", "all_reduce", 4)], iters=1)
    path.write_text(json.dumps(asdict(plan)))
    worker.main(lambda _plan: Alone(), str(path))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line.get("half") for line in lines] == [None, "out", "in"]

    class Broken(Alone):
        def barrier(self) -> None:
            raise OSError("gone")

    with pytest.raises(SystemExit):
        worker.main(lambda _plan: Broken(), str(path))
    assert "OSError: gone" in capsys.readouterr().err


def test_version_of_a_package() -> None:
    assert worker.version("numpy") == np.__version__
    assert worker.version("no-such-package-here") == "(not installed)"


# ---- sides --------------------------------------------------------------------------------------


def mpi_side(monkeypatch: pytest.MonkeyPatch) -> Any:
    """MPI's side over a stand-in of mpi4py that knows names only."""
    mpi: Any = types.ModuleType("mpi4py.MPI")
    mpi.COMM_WORLD = types.SimpleNamespace(rank=0, size=1, Allreduce=None)
    for name in ("INT8_T", "UINT8_T", "INT32_T", "UINT32_T", "INT64_T", "UINT64_T"):
        setattr(mpi, name, name)
    mpi.FLOAT, mpi.DOUBLE, mpi.SUM, mpi.IN_PLACE = "FLOAT", "DOUBLE", "SUM", "IN_PLACE"
    package: Any = types.ModuleType("mpi4py")
    package.MPI = mpi
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", mpi)
    monkeypatch.setitem(sys.modules, "worker", worker)
    path = Path(worker.__file__).with_name("side_mpi.py")
    spec = importlib.util.spec_from_file_location("side_mpi", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MpiSide(Plan([]))


def test_mpi_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    side = mpi_side(monkeypatch)
    half, single = np.zeros(2, np.float16), np.zeros(2, np.float32)
    with pytest.raises(Lacks, match="MPI has no float16"):
        side.call(Case("", "all_reduce", 2, "half"), "in", half, half)
    with pytest.raises(Lacks, match="MPI has no avg"):
        side.call(Case("", "all_reduce", 2, redop="avg"), "in", single, single)
    with pytest.raises(Lacks, match="no hop"):
        side.call(Case("", "hop", 2), "in", single, single)


def test_bireme_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from bireme.bench.side_bireme import BiremeSide

    case = Case("put", "put", 2, halves=("out",), source="torch")
    side = BiremeSide(Plan([case]))
    try:
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(Lacks, match="torch is not installed"):
            side.call(case, "out", np.zeros(2, np.float32), None)
    finally:
        side.close()
