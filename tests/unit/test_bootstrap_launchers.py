"""What each launcher says in the environment, and which one counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bireme import knobs
from bireme.bootstrap import ancestry, discover, join, launchers
from bireme.bootstrap.launchers import LAUNCHERS, Job, find
from bireme.errors import EngineError, UsageError

LIMIT_S = 20.0
PARENT = ancestry.starter({"A_VARIABLE_THAT_NOBODY_HAS": ""})


def torchrun(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local}
    return texts(numbers, LOCAL_WORLD_SIZE=local_size, TORCHELASTIC_RUN_ID="run")


def openmpi(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": local_size}
    named = {f"OMPI_COMM_WORLD_{name}": number for name, number in numbers.items()}
    return texts(named, PMIX_NAMESPACE="prterun-host-1@1")


def mpich(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    numbers = {"PMI_RANK": rank, "PMI_SIZE": size}
    return texts(numbers, MPI_LOCALRANKID=local, MPI_LOCALNRANKS=local_size)


def slurm(rank: int, size: int, local: int, local_size: int) -> dict[str, str]:
    numbers = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": local}
    more = {"SLURM_STEP_TASKS_PER_NODE": local_size, "SLURM_JOB_ID": 7, "SLURM_STEP_ID": 0}
    return texts(numbers, **more)


def texts(numbers: dict[str, int], **more: object) -> dict[str, str]:
    return {name: str(value) for name, value in {**numbers, **more}.items()}


KINDS = (torchrun, openmpi, mpich, slurm)
NAMES = {
    "torchrun": ("torchrun", "run"),
    "openmpi": ("openmpi", "prterun-host-1@1"),
    "mpich": ("mpich", *PARENT),
    "slurm": ("slurm", "7", "0"),
}
Kind = Callable[[int, int, int, int], dict[str, str]]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*discover._OURS, *launchers.VARIABLES):
        monkeypatch.delenv(name, raising=False)


# ---- the table


def test_the_table_is_in_the_order_of_precedence() -> None:
    assert [launcher.origin for launcher in LAUNCHERS] == [kind.__name__ for kind in KINDS]
    for index, kind in enumerate(KINDS):
        several = {k: v for later in KINDS[index:] for k, v in later(1, 2, 1, 2).items()}
        job = find(several)
        assert job is not None
        assert job.origin == kind.__name__


def test_every_variable_has_a_description() -> None:
    assert set(launchers.VARIABLES) <= set(knobs.FOREIGN)


def test_without_any_the_process_is_alone() -> None:
    assert find({}) is None
    assert find({"PMIX_NAMESPACE": "x", "MASTER_PORT": "1", "SLURM_JOB_ID": "7"}) is None


@each_kind
def test_what_is_read(kind: Kind) -> None:
    origin = kind.__name__
    name = NAMES[origin]
    assert find(kind(1, 3, 1, 3)) == Job(origin, name, 1, 3, 1, 3)  # type: ignore[arg-type]


@each_kind
def test_a_job_of_one_needs_nobody(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in kind(0, 1, 0, 1).items():
        monkeypatch.setenv(name, text)
    end = join(0.0)
    assert (end.rank, end.size, end.origin) == (0, 1, kind.__name__)


def test_our_own_launcher_comes_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in KINDS:
        for name, text in kind(0, 1, 0, 1).items():
            monkeypatch.setenv(name, text)
    monkeypatch.setenv("BIREME_RANK", "0")
    with pytest.raises(UsageError, match="found BIREME_RANK=0"):
        join(0.0)


@each_kind
def test_several_hosts_are_refused(kind: Kind) -> None:
    with pytest.raises(EngineError, match=r"rank 3: .*one host, found .*=4.*one host only for now"):
        find(kind(3, 4, 1, 2))


@each_kind
@pytest.mark.parametrize(
    "numbers",
    [(2, 2, 0, 2), (-1, 2, 0, 2), (0, 2, 2, 2), (0, 2, -1, 2), (0, 2, 0, 3), (0, 0, 0, 0)],
)
def test_numbers_that_contradict_each_other(kind: Kind, numbers: tuple[int, ...]) -> None:
    with pytest.raises(
        UsageError, match=f"expected ranks below their sizes, found .*={numbers[1]}"
    ):
        find(kind(*numbers))


@each_kind
def test_what_is_no_number(kind: Kind) -> None:
    given = kind(0, 2, 0, 2)
    for name in list(given)[:4]:
        with pytest.raises(UsageError, match=f"expected integers, found .*{name}=many"):
            find({**given, name: "many"})


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.__name__)
def test_any_one_that_is_missing_is_named(kind: Kind) -> None:
    given = kind(0, 2, 0, 2)
    numbers = list(given)[:4]
    for name in numbers:
        rest = {other: text for other, text in given.items() if other != name}
        found = ", ".join(f"{other}=." for other in numbers if other != name)
        expected = f"expected all or none of .*{name}.*, found {found}: set the others"
        with pytest.raises(UsageError, match=expected):
            find(rest)
        with pytest.raises(UsageError, match=f"found {name}=.: set the others"):
            find({name: given[name]})


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        ("SLURM_NTASKS", "SLURM_STEP_NUM_TASKS or SLURM_NTASKS"),
        ("SLURM_LOCALID", "SLURM_LOCALID"),
        ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE or SLURM_NTASKS_PER_NODE"),
    ],
)
def test_what_a_step_must_say(missing: str, expected: str) -> None:
    given = slurm(0, 2, 0, 2)
    del given[missing]
    with pytest.raises(UsageError, match=f"{expected}.*, found SLURM_PROCID=0"):
        find(given)


# ---- Slurm


@pytest.mark.parametrize(
    "step",
    [
        "",
        "batch",
        "extern",
        "interactive",
        "-1",
        "4294967290",
        "4294967291",
        "4294967294",
        "\u0661",
    ],
)
def test_the_script_of_an_allocation_is_alone(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {**slurm(0, 4, 0, 4), "SLURM_STEP_ID": step}.items():
        monkeypatch.setenv(name, text)
    assert join(0.0).origin == "alone"
    monkeypatch.delenv("SLURM_STEP_ID")
    assert join(0.0).origin == "alone"
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.delenv("SLURM_PROCID")
    assert join(0.0).origin == "alone"


def test_the_step_counts_and_not_the_allocation() -> None:
    job = find({**slurm(1, 8, 1, 2), "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS_PER_NODE": "8"})
    assert job is not None
    assert (job.size, job.local_size) == (2, 2)
    given = {**slurm(1, 2, 1, 2), "SLURM_NTASKS_PER_NODE": "2"}
    del given["SLURM_STEP_TASKS_PER_NODE"]
    job = find(given)
    assert job is not None
    assert job.local_size == 2


@pytest.mark.parametrize(("text", "most"), [("4", 4), ("12(x1)", 12), ("2(x3),1", 2), ("1,3", 3)])
def test_tasks_per_node(text: str, most: int) -> None:
    assert launchers._tasks_per_node(text) == most


@pytest.mark.parametrize("text", ["", "4,", "(x2)", "4(x)", "4(x2", "-4", "4 (x2)", "\u0664"])
def test_what_are_no_tasks_per_node(text: str) -> None:
    with pytest.raises(ValueError, match="none"):
        launchers._tasks_per_node(text)
    with pytest.raises(UsageError, match="expected integers, found SLURM_PROCID=0"):
        find({**slurm(0, 4, 0, 4), "SLURM_STEP_TASKS_PER_NODE": text})


def test_sruns_own_pmi_is_not_mpichs() -> None:
    pmi = {"PMI_RANK": "1", "PMI_SIZE": "2"}
    job = find({**slurm(1, 2, 1, 2), **pmi})
    assert job is not None
    assert job.origin == "slurm"
    with pytest.raises(UsageError, match="MPI_LOCALRANKID"):
        find({**slurm(1, 2, 1, 2), **pmi, "SLURM_STEP_ID": "batch"})


# ---- the name of a job


@pytest.mark.parametrize(
    ("named", "name"),
    [
        ({}, ("torchrun",)),
        ({"MASTER_PORT": "5"}, ("torchrun", "5")),
        ({"TORCHELASTIC_RUN_ID": "r"}, ("torchrun", "r")),
        ({"TORCHELASTIC_RUN_ID": "r", "MASTER_PORT": "5"}, ("torchrun", "r", "5")),
        (
            {"TORCHELASTIC_RUN_ID": "r", "MASTER_PORT": "5", "TORCHELASTIC_RESTART_COUNT": "2"},
            ("torchrun", "r", "5", "2"),
        ),
    ],
)
def test_torchruns_name(named: dict[str, str], name: tuple[str, ...]) -> None:
    given = torchrun(0, 2, 0, 2)
    del given["TORCHELASTIC_RUN_ID"]
    job = find({**given, **named})
    assert job is not None
    assert job.name == name


def test_open_mpis_name() -> None:
    given = openmpi(0, 2, 0, 2)
    del given["PMIX_NAMESPACE"]
    job = find(given)
    assert job is not None
    assert job.name == ("openmpi", *PARENT)
    job = find({**given, "OMPI_MCA_ess_base_jobid": "99"})
    assert job is not None
    assert job.name == ("openmpi", "99")


def test_a_step_without_a_jobs_id_is_named_by_what_started_it() -> None:
    given = slurm(0, 2, 0, 2)
    del given["SLURM_JOB_ID"]
    job = find(given)
    assert job is not None
    assert job.name == ("slurm", *PARENT)


# ---- the process that started the ranks

SHOW = (
    "import json; from bireme.bootstrap import ancestry\n"
    "print(json.dumps(ancestry.starter({'PMI_RANK': '%d', 'PMI_SIZE': '2'})))"
)


def starter_seen_by(rank: int, wrapped: bool) -> list[str]:
    show = [sys.executable, "-c", SHOW % rank]
    shells = ["sh", "-c", 'sh -c \'"$@"; true\' sh "$@"; true', "sh", *show]
    given = {"PMI_RANK": str(rank), "PMI_SIZE": "2"}
    done = subprocess.run(
        shells if wrapped else show,
        env={**os.environ, **given},
        stdout=subprocess.PIPE,
        timeout=LIMIT_S,
        check=True,
    )
    found: list[str] = json.loads(done.stdout)
    return found


def test_what_started_us_is_named_with_its_time() -> None:
    pid, started = PARENT
    assert pid == str(os.getppid())
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    assert started == stat.rpartition(")")[2].split()[19]


def test_all_ranks_find_the_same_also_through_wrappers() -> None:
    stat = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
    us = [str(os.getpid()), stat.rpartition(")")[2].split()[19]]
    assert starter_seen_by(0, wrapped=False) == us
    assert starter_seen_by(1, wrapped=True) == us


def test_what_has_ended_or_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    monkeypatch.setattr(os, "getppid", lambda: ended.pid)
    assert ancestry.starter({"PMI_RANK": "0"}) == (str(ended.pid), "")


def test_the_first_process_has_no_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(_pid: int, _variables: Any) -> bool:
        return True

    monkeypatch.setattr(ancestry, "_has", everywhere)
    assert ancestry.starter({})[0] in ("0", "1")
