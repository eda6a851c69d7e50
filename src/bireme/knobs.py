"""Every setting of bireme in one table; nothing else reads the environment.

A knob is read from its environment variable each time it is asked for. ``override`` sets one for
a block of code, which is what tests use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

__all__ = ["FOREIGN", "KNOBS", "Knob", "foreign", "get", "markdown", "override"]


@dataclass(frozen=True)
class Knob:
    """One setting.

    Args:
        name: The environment variable.
        type: ``int``, ``float``, ``str`` or ``bytes`` (a size such as ``256M``).
        default: The value where the variable is not set.
        doc: One sentence.
        choices: The legal values, where only some are.
    """

    name: str
    type: type
    default: Any
    doc: str
    choices: tuple[str, ...] = ()


KNOBS: tuple[Knob, ...] = (
    Knob("BIREME_ENGINE", str, "shm", "The host engine of the world.", ("shm", "null")),
    Knob(
        "BIREME_HEAP_BYTES",
        bytes,
        None,
        "How far each rank's symmetric heap may grow; unset: as far as the machine has memory.",
    ),
    Knob("BIREME_TIMEOUT_S", float, 1800.0, "Deadline of every wait, in seconds."),
    Knob(
        "BIREME_WARN_S",
        float,
        60.0,
        "A wait longer than this prints a warning that names the missing rank.",
    ),
    Knob(
        "BIREME_DELIVERY",
        str,
        "eager",
        "When puts land: at once, as late as the rules allow, or at random.",
        ("eager", "lazy", "random"),
    ),
    Knob(
        "BIREME_SPIN", int, -1, "Polls of a wait before it yields; -1 chooses by ranks and cores."
    ),
    Knob(
        "BIREME_LOG",
        str,
        "warning",
        "What is printed to stderr; info shows decisions.",
        ("error", "warning", "info", "debug"),
    ),
    Knob("BIREME_SEED", int, 0, "Seed of random delivery."),
    Knob("BIREME_RANK", int, -1, "Set by `bireme run`: this process's rank."),
    Knob("BIREME_SIZE", int, -1, "Set by `bireme run`: number of ranks."),
    Knob(
        "BIREME_BOOTSTRAP_FD",
        int,
        -1,
        "Set by `bireme run`: the inherited socket on which the ranks find each other.",
    ),
    Knob(
        "BIREME_RUN_DIR",
        str,
        "",
        "Folder of the bootstrap socket under torchrun; default XDG_RUNTIME_DIR, then /tmp.",
    ),
    Knob(
        "BIREME_PEERS_DIR",
        str,
        "",
        "Folder of the MPI libraries that `bireme bench` compares with; default "
        "XDG_CACHE_HOME/bireme/peers, then ~/.cache/bireme/peers.",
    ),
)

# Variables of others that bireme reads or sets.
FOREIGN: dict[str, str] = {
    "RANK": "torchrun's rank.",
    "WORLD_SIZE": "torchrun's number of ranks.",
    "LOCAL_RANK": "torchrun's rank on this host.",
    "LOCAL_WORLD_SIZE": "torchrun's number of ranks on this host.",
    "MASTER_ADDR": "torchrun's rendezvous address.",
    "MASTER_PORT": "torchrun's rendezvous port.",
    "TORCHELASTIC_RUN_ID": "torchrun's job id.",
    "TORCHELASTIC_RESTART_COUNT": "torchrun's restart number.",
    "OMPI_COMM_WORLD_RANK": "Open MPI's rank.",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's number of ranks.",
    "OMPI_COMM_WORLD_LOCAL_RANK": "Open MPI's rank on this host.",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "Open MPI's number of ranks on this host.",
    "PMIX_NAMESPACE": "Open MPI's job id.",
    "OMPI_MCA_ess_base_jobid": "Open MPI's job id, in versions before 5.",
    "PMI_RANK": "MPICH's rank.",
    "PMI_SIZE": "MPICH's number of ranks.",
    "MPI_LOCALRANKID": "MPICH's rank on this host.",
    "MPI_LOCALNRANKS": "MPICH's number of ranks on this host.",
    "SLURM_PROCID": "Slurm's rank.",
    "SLURM_STEP_NUM_TASKS": "Slurm's number of ranks in this step.",
    "SLURM_NTASKS": "Slurm's number of ranks, where SLURM_STEP_NUM_TASKS is not set.",
    "SLURM_LOCALID": "Slurm's rank on this host.",
    "SLURM_STEP_TASKS_PER_NODE": "Slurm's number of ranks of this step on each host.",
    "SLURM_NTASKS_PER_NODE": "The same, where SLURM_STEP_TASKS_PER_NODE is not set.",
    "SLURM_JOB_ID": "Slurm's job id.",
    "SLURM_STEP_ID": "Slurm's step id; without one of a usual step, srun did not start us.",
    "OMP_NUM_THREADS": "Set by the launcher to max(1, cores // ranks) unless it is set.",
    "PYTHONUNBUFFERED": "Set by the launcher to 1 unless it is set.",
    "XDG_RUNTIME_DIR": "The user's private run folder.",
}

_BY_NAME = {knob.name: knob for knob in KNOBS}
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_overrides: dict[str, Any] = {}


def parse_bytes(text: str) -> int:
    """Read a size such as ``4096``, ``64K``, ``256M`` or ``1.5G`` (powers of 1024).

    Raises:
        ValueError: If the text is not a size.
    """
    digits = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = _UNITS.get(digits[-1:], 1)
    try:
        value = float(digits[:-1] if unit > 1 else digits) * unit
    except ValueError:
        value = -1.0
    if not 0 <= value < 2**63:
        raise ValueError(f"expected a size such as 64K, 256M or 1.5G, found {text!r}")
    return int(value)


def _convert(knob: Knob, text: Any) -> Any:
    try:
        value = parse_bytes(str(text)) if knob.type is bytes else knob.type(text)
    except ValueError as error:
        raise ValueError(f"{knob.name}: {error}") from None
    if knob.choices and value not in knob.choices:
        raise ValueError(f"{knob.name}: expected one of {', '.join(knob.choices)}, found {value!r}")
    return value


def get(name: str) -> Any:
    """Return the value of a knob: an override, the environment, or its default.

    Args:
        name: The environment variable, such as ``"BIREME_TIMEOUT_S"``.

    Raises:
        ValueError: If the variable holds something else than its type or choices allow.
    """
    knob = _BY_NAME[name]
    value = _overrides[name] if name in _overrides else os.environ.get(name, knob.default)
    return None if value is None else _convert(knob, value)


def foreign(name: str) -> str | None:
    """Return an environment variable of another program, one of ``FOREIGN``."""
    if name not in FOREIGN:
        raise KeyError(f"{name} is not listed in bireme.knobs.FOREIGN")
    return os.environ.get(name)


@contextlib.contextmanager
def override(**values: Any) -> Iterator[None]:
    """Set knobs for a block of code, such as ``BIREME_DELIVERY="lazy"``."""
    for name in values:
        if name not in _BY_NAME:
            raise KeyError(f"{name} is not a knob; see docs/knobs.md")
    before = dict(_overrides)
    _overrides.update(values)
    try:
        yield
    finally:
        _overrides.clear()
        _overrides.update(before)


def child_environment(extra: dict[str, str]) -> dict[str, str]:
    """Return a copy of the environment with ``extra`` on top, for a process to start."""
    return {**os.environ, **extra}


def markdown() -> str:
    """Return docs/knobs.md."""
    lines = [
        "# Settings",
        "",
        "Generated from `src/bireme/knobs.py` by `make docs`. Sizes take K, M, G (powers of 1024).",
        "",
        "| variable | type | default | meaning |",
        "|---|---|---|---|",
    ]
    for knob in KNOBS:
        kind = "size" if knob.type is bytes else knob.type.__name__
        choices = f" One of {', '.join(f'`{c}`' for c in knob.choices)}." if knob.choices else ""
        default = f"`{knob.default}`" if knob.default not in ("", None) else ""
        lines.append(f"| `{knob.name}` | {kind} | {default} | {knob.doc}{choices} |")
    lines += [
        "",
        "Variables of others that bireme reads or sets:",
        "",
        "| variable | meaning |",
        "|---|---|",
    ]
    lines += [f"| `{name}` | {doc} |" for name, doc in FOREIGN.items()]
    return "\n".join(lines) + "\n"
