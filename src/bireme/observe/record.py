"""The record of calls: read from the ring that every rank keeps in shared memory."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from bireme import _core

if TYPE_CHECKING:
    from rich.table import Table

    from bireme.world import World

__all__ = ["Call", "Flow", "Record", "flow_table"]

_ENGINES = ("shm",)
_ONE_SIDED = frozenset({"put", "get", "atomic", "signal", "signal.wait", "quiet", "fence"})
_MOVES_NOTHING = frozenset(
    {"barrier", "close", "split", "free", "allocate", "agree", "refused", "none"}
)


@dataclass(frozen=True)
class Call:
    """One call of one rank.

    Args:
        seq: Its number on that rank.
        op: Its name.
        state: ``"running"``, ``"done"`` or ``"failed"``.
        dtype, count, bytes: What it moves.
        peer: Root or other side, -1 for none.
        site: The user's file and line.
        flow: Its label.
        start_s, time_s, wait_s: When it began, how long it took, how long of that it waited.
    """

    seq: int
    op: str
    state: str
    dtype: str
    count: int
    bytes: int
    peer: int
    site: str
    flow: str
    start_s: float
    time_s: float
    wait_s: float


@dataclass(frozen=True)
class Flow:
    """The totals of one flow on one face of this rank.

    Args:
        flow: The label, ``""`` for calls without one.
        face: ``"collective"`` or ``"one-sided"``.
        engine: Name of the engine.
        ops: Names of the calls that moved data, most bytes first.
        calls: Number of calls that moved data.
        bytes: Payload in bytes.
        time_s: Time inside these calls, their waits included.
        wait_s: Time that calls of the flow waited for other ranks, waits for signals included.
    """

    flow: str
    face: str
    engine: str
    ops: tuple[str, ...]
    calls: int
    bytes: int
    time_s: float
    wait_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the row as plain values, with ``gb_per_s``."""
        return {**asdict(self), "ops": list(self.ops), "gb_per_s": self.gb_per_s}

    @property
    def gb_per_s(self) -> float:
        """Payload over time, in 10**9 bytes per second."""
        return self.bytes / self.time_s / 1e9 if self.time_s else 0.0


class Record:
    """Reads the record of a world: ``world.record``."""

    def __init__(self, control: Any, size: int) -> None:
        self._control = control
        self._size = size

    def calls(self, rank: int, last: int = 100) -> list[Call]:
        """Return the latest calls of any rank, oldest first.

        Args:
            rank: World rank.
            last: How many at most; the ring holds 4096.
        """
        if not 0 <= rank < self._size:
            raise ValueError(f"rank: expected 0 to {self._size - 1}, found {rank}")
        if self._control is None:
            return []
        return [_call(c) for c in _core.calls(self._control, rank, last)]

    def flows(self) -> list[Flow]:
        """Return this rank's totals since init, by flow and face."""
        parts: dict[tuple[str, str, str], list[Any]] = {}
        for label, engine, op, *numbers in self._totals():
            face = "one-sided" if op in _ONE_SIDED else "collective"
            parts.setdefault((label, face, _ENGINES[engine]), []).append((op, *numbers))
        return [_flow(*key, rows) for key, rows in sorted(parts.items())]

    def flows_of_all(self, world: World) -> list[Flow]:
        """Return the totals of all ranks together; a collective, every rank calls it.

        Args:
            world: The world whose record this is.

        Returns:
            By flow and face: calls, bytes and times summed over the ranks; the same on all.
        """
        mine = np.frombuffer(json.dumps([asdict(f) for f in self.flows()]).encode(), np.uint8)
        sizes = world.all_gather(np.array([mine.size], np.int64))
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: mine.size] = mine
        texts = world.all_gather(padded).reshape(world.size, -1)
        rows = [
            r for text, n in zip(texts, sizes, strict=True) for r in json.loads(bytes(text[:n]))
        ]
        parts: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
        for row in rows:
            parts.setdefault((row["flow"], row["face"], row["engine"]), []).append(row)
        return [_summed(*key, rows) for key, rows in sorted(parts.items())]

    @property
    def wait_s(self) -> float:
        """Time that this rank's calls have waited for other ranks since init."""
        return 1e-9 * float(sum(t[6] for t in self._totals()))

    @property
    def time_s(self) -> float:
        """Time that this rank has spent inside calls since init."""
        return 1e-9 * float(sum(t[5] for t in self._totals()))

    def _totals(self) -> list[Any]:
        return list(_core.totals(self._control)) if self._control is not None else []


def _call(c: dict[str, Any]) -> Call:
    end_ns = c["end_ns"] or c["start_ns"]
    return Call(
        c["seq"], c["kind"], c["state"], c["dtype"], c["count"], c["bytes"], c["peer"], c["site"],
        c["flow"], c["start_ns"] * 1e-9, (end_ns - c["start_ns"]) * 1e-9, c["wait_ns"] * 1e-9,
    )  # fmt: skip


def _flow(label: str, face: str, engine: str, rows: list[Any]) -> Flow:
    rows = sorted(rows, key=lambda row: -row[2])
    moving = [row for row in rows if row[0] not in _MOVES_NOTHING]
    data = [row for row in moving if row[2]]
    return Flow(
        label, face, engine, tuple(row[0] for row in data),
        sum(row[1] for row in data), sum(row[2] for row in data),
        sum(row[3] for row in data) * 1e-9, sum(row[4] for row in rows) * 1e-9,
    )  # fmt: skip


def _summed(label: str, face: str, engine: str, rows: list[dict[str, Any]]) -> Flow:
    ops = dict.fromkeys(op for row in rows for op in row["ops"])
    names = ("calls", "bytes", "time_s", "wait_s")
    return Flow(label, face, engine, tuple(ops), *(sum(r[n] for r in rows) for n in names))


def flow_table(flows: Sequence[Flow], title: str = "flows") -> Table:
    """Return the flows as a table for the terminal."""
    from rich.table import Table

    table = Table(title=title)
    for name in ("flow", "face", "engine", "ops"):
        table.add_column(name)
    for name in ("calls", "MB", "time s", "wait s", "GB/s"):
        table.add_column(name, justify="right")
    for f in flows:
        table.add_row(
            f.flow or "-", f.face, f.engine, ", ".join(f.ops), str(f.calls), f"{f.bytes / 1e6:.1f}",
            f"{f.time_s:.3f}", f"{f.wait_s:.3f}", f"{f.gb_per_s:.2f}",
        )  # fmt: skip
    return table
