"""A world under the launchers of others: their environments by hand, and a real mpiexec."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bireme import knobs
from bireme.bootstrap import discover, launchers

LIMIT_S = 60.0
CODE = (
    "import bireme, os, numpy as np\n"
    "for step in range(2):\n"
    "    with bireme.init() as world:\n"
    "        x = np.full(1000, world.rank + 1.0)\n"
    "        world.all_reduce(x)\n"
    "        assert (x == sum(range(1, world.size + 1))).all()\n"
    "        line = f'{step} {world.rank} of {world.size} {x[0]}\\n'\n"
    "        os.write(1, line.encode())\n"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in (*discover._OURS, *launchers.VARIABLES):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.setenv("BIREME_RUN_DIR", str(folder))
    monkeypatch.setenv("BIREME_TIMEOUT_S", "30")
    yield
    assert list(folder.iterdir()) == []


def expected(size: int) -> list[str]:
    total = float(sum(range(1, size + 1)))
    return sorted(f"{step} {rank} of {size} {total}" for step in range(2) for rank in range(size))


# ---- by hand


def torchrun(rank: int, size: int) -> dict[str, object]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**numbers, "MASTER_PORT": 29512, "TORCHELASTIC_RUN_ID": "by hand"}


def openmpi(rank: int, size: int) -> dict[str, object]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}


def openmpi_with_a_name(rank: int, size: int) -> dict[str, object]:
    return {**openmpi(rank, size), "PMIX_NAMESPACE": "prterun-host-1@1"}


def mpich(rank: int, size: int) -> dict[str, object]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size}
    return {**numbers, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}


def slurm(rank: int, size: int) -> dict[str, object]:
    numbers = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": rank}
    step = {"SLURM_STEP_TASKS_PER_NODE": f"{size}(x1)", "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}
    return {**numbers, **step}


@contextlib.contextmanager
def started(
    kind: Callable[[int, int], dict[str, object]], size: int
) -> Iterator[list[subprocess.Popen[str]]]:
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(size):
            given = {name: str(value) for name, value in kind(rank, size).items()}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", CODE],
                    env={**os.environ, **given},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    "kind", [torchrun, openmpi, openmpi_with_a_name, mpich, slurm], ids=lambda kind: kind.__name__
)
def test_ranks_with_its_variables_are_one_world(
    kind: Callable[[int, int], dict[str, object]],
) -> None:
    size = 3
    with started(kind, size) as processes:
        lines: list[str] = []
        for process in processes:
            out, _ = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, out
            lines += out.splitlines()
    assert sorted(lines) == expected(size)


def test_the_script_of_an_allocation_does_not_wait_for_others() -> None:
    def batch(rank: int, size: int) -> dict[str, object]:
        return {**slurm(rank, 4), "SLURM_STEP_ID": "4294967291"}

    with started(batch, 1) as [process]:
        out, _ = process.communicate(timeout=LIMIT_S)
        assert (out.splitlines(), process.returncode) == (expected(1), 0)


# ---- a real mpiexec


def installed() -> list[str]:
    """The mpiexec on PATH and those that `bireme bench` has installed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    peers = Path(knobs.get("BIREME_PEERS_DIR") or cache / "bireme" / "peers")
    folders = [str(peers / name / "bin") for name in ("mpich", "openmpi")]
    found = [shutil.which("mpiexec"), *(shutil.which("mpiexec", path=path) for path in folders)]
    return list(dict.fromkeys(path for path in found if path))


MPIEXECS = installed()
needs_mpiexec = pytest.mark.skipif(
    not MPIEXECS, reason="no mpiexec on PATH, and none installed by `bireme bench`"
)


def mpiexec(path: str, size: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=LIMIT_S)
    open_mpi = "Open MPI" in version.stdout or "OpenRTE" in version.stdout
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    options = ["--oversubscribe"] if open_mpi else []
    return subprocess.run(
        [path, *options, "-n", str(size), *command],
        env={**os.environ, **root},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@needs_mpiexec
@pytest.mark.parametrize("path", MPIEXECS or ["none"])
@pytest.mark.parametrize("size", [1, 3])
def test_mpiexec(path: str, size: int) -> None:
    ended = mpiexec(path, size, [sys.executable, "-c", CODE])
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == expected(size), ended.stderr


@needs_mpiexec
@pytest.mark.parametrize("path", MPIEXECS or ["none"])
def test_mpiexec_with_a_shell_between(path: str) -> None:
    ended = mpiexec(path, 2, ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", CODE])
    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == expected(2), ended.stderr


@needs_mpiexec
@pytest.mark.parametrize("path", MPIEXECS or ["none"])
def test_our_launcher_below_mpiexec_counts(path: str) -> None:
    command = [sys.executable, "-m", "bireme.cli", "run", "-n", "2", "--", sys.executable, "-c"]
    ended = mpiexec(path, 1, [*command, CODE])
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    assert sorted(lines) == expected(2), ended.stderr
