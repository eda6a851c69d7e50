"""What the launchers of others say in the environment: one entry of a table for each kind.

An entry says which variables hold the numbers, how to tell that this launcher has started the
process, and what names the job. Of several launchers the first in the table counts: the one that
is nearest to the process when one starts the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bireme.bootstrap import ancestry
from bireme.bootstrap.rendezvous import Origin
from bireme.errors import EngineError, UsageError

__all__ = ["LAUNCHERS", "VARIABLES", "Job", "Launcher", "find"]

Variables = Mapping[str, str]

_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # from here on: batch, interactive, extern and pending steps
_TASKS = re.compile(r"([0-9]+)(?:\(x[0-9]+\))?")


@dataclass(frozen=True)
class Job:
    """What a launcher says of this process.

    Args:
        origin: The launcher.
        name: The same on all ranks of the job, and on no others.
        rank: This process's rank.
        size: Number of ranks.
        local_rank: Rank on this host.
        local_size: Ranks on this host.
    """

    origin: Origin
    name: tuple[str, ...]
    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Launcher:
    """How one launcher speaks; where there are several variables, the first that is set counts.

    Args:
        origin: Its name.
        rank: Variables with the rank.
        size: Variables with the number of ranks.
        local_rank: Variables with the rank on this host.
        local_size: Variables with the number of ranks on this host.
        names: Sets of variables that name the job; the first that is complete counts, and the
            process that started the ranks where none is.
        others: More variables that ``recognise`` reads.
        recognise: Whether it started this process; default: if any of the numbers is set.
        count: Reads the number of ranks on this host.
    """

    origin: Origin
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]
    names: tuple[tuple[str, ...], ...] = ()
    others: tuple[str, ...] = ()
    recognise: Callable[[Variables], bool] | None = None
    count: Callable[[str], int] = int

    @property
    def numbers(self) -> tuple[str, ...]:
        """Return the variables with numbers."""
        return (*self.rank, *self.size, *self.local_rank, *self.local_size)

    @property
    def variables(self) -> tuple[str, ...]:
        """Return all variables that are read."""
        return (*self.numbers, *(name for names in self.names for name in names), *self.others)

    def started(self, variables: Variables) -> bool:
        """Return whether this launcher has started the process."""
        if self.recognise is not None:
            return self.recognise(variables)
        return any(name in variables for name in self.numbers)

    def read(self, variables: Variables) -> Job:
        """Return what it says.

        Raises:
            UsageError: If a number is missing or contradicts another.
            EngineError: If the ranks are on several hosts.
        """
        wanted = (self.rank, self.size, self.local_rank, self.local_size)
        given = {name: variables[name] for name in self.numbers if name in variables}
        found = ", ".join(f"{name}={text}" for name, text in given.items()) or "none"
        texts = [next((given[name] for name in names if name in given), None) for names in wanted]
        rank, size, local_rank, local_size = self._convert(texts, found)
        if not 0 <= local_rank < local_size <= size or not 0 <= rank < size:
            raise UsageError(f"expected ranks below their sizes, found {found}")
        if local_size != size:
            raise EngineError(
                f"rank {rank}: expected all ranks on one host, found {found}: "
                "bireme joins ranks of one host only for now"
            )
        return Job(self.origin, self._name(variables, given), rank, size, local_rank, local_size)

    def _convert(self, texts: list[str | None], found: str) -> tuple[int, int, int, int]:
        rank, size, local_rank, local_size = texts
        if rank is None or size is None or local_rank is None or local_size is None:
            wanted = (self.rank, self.size, self.local_rank, self.local_size)
            expected = ", ".join(" or ".join(names) for names in wanted)
            raise UsageError(
                f"expected all or none of {expected}, found {found}: "
                "set the others too, or none to run alone"
            )
        try:
            return int(rank), int(size), int(local_rank), self.count(local_size)
        except ValueError:
            raise UsageError(f"expected integers, found {found}") from None

    def _name(self, variables: Variables, given: Variables) -> tuple[str, ...]:
        for names in self.names:
            if all(variables.get(name) for name in names):
                return (self.origin, *(variables[name] for name in names))
        return (self.origin, *ancestry.starter(given))


def find(variables: Variables) -> Job | None:
    """Return what the launcher of this process says; None where there is none.

    Args:
        variables: The environment, or those of ``VARIABLES`` that are set.

    Raises:
        UsageError: If the variables are incomplete or contradict each other.
        EngineError: If the ranks are on several hosts.
    """
    for launcher in LAUNCHERS:
        if launcher.started(variables):
            return launcher.read(variables)
    return None


def _is_step(variables: Variables) -> bool:
    """Return whether srun started this process.

    In the script of an allocation SLURM_PROCID and SLURM_NTASKS may be set though it runs once.
    Such a script, an interactive shell and the like have no step, or one with a special id.
    """
    step = variables.get("SLURM_STEP_ID", "")
    normal = step.isascii() and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP
    return normal and "SLURM_PROCID" in variables


def _is_hydra(variables: Variables) -> bool:
    """Return whether MPICH's mpiexec started this process; srun sets some of its variables too."""
    if "MPI_LOCALRANKID" in variables or "MPI_LOCALNRANKS" in variables:
        return True
    return ("PMI_RANK" in variables or "PMI_SIZE" in variables) and not _is_step(variables)


def _tasks_per_node(text: str) -> int:
    """Read Slurm's "4", "4(x2)" or "4(x2),3": the most tasks that any one node has."""
    parts = [_TASKS.fullmatch(part) for part in text.split(",")]
    return max(int(part[1] if part else "none") for part in parts)


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "torchrun",
        rank=("RANK",),
        size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_size=("LOCAL_WORLD_SIZE",),
        names=(
            ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
            ("TORCHELASTIC_RUN_ID", "MASTER_PORT"),
            ("TORCHELASTIC_RUN_ID",),
            ("MASTER_PORT",),
            (),
        ),
    ),
    Launcher(
        "openmpi",
        rank=("OMPI_COMM_WORLD_RANK",),
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        names=(("PMIX_NAMESPACE",), ("OMPI_MCA_ess_base_jobid",)),
    ),
    Launcher(
        "mpich",
        rank=("PMI_RANK",),
        size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_size=("MPI_LOCALNRANKS",),
        recognise=_is_hydra,
    ),
    Launcher(
        "slurm",
        rank=("SLURM_PROCID",),
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_size=("SLURM_STEP_TASKS_PER_NODE", "SLURM_NTASKS_PER_NODE"),
        names=(("SLURM_JOB_ID", "SLURM_STEP_ID"),),
        others=("SLURM_STEP_ID",),
        recognise=_is_step,
        count=_tasks_per_node,
    ),
)
"""The launchers, first the one that counts where several are found."""

VARIABLES = tuple(dict.fromkeys(name for launcher in LAUNCHERS for name in launcher.variables))
"""All variables that the table reads."""
