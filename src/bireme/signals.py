"""Signals: symmetric 64-bit words that say that something has arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bireme.engines.null import COMPARE

if TYPE_CHECKING:
    from bireme.symmetric import SymmetricArray
    from bireme.world import Group

__all__ = ["Signal", "Signals"]

_OPS = ("set", "add")


def scalar(value: Any, dtype: np.dtype[Any], op: str) -> Any:
    """Return ``value`` as the Python number that an element of ``dtype`` can hold."""
    if dtype.kind == "f":
        return float(value)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"atomic {op}: expected an integer, found {value!r}")
    limits = np.iinfo(dtype)
    if not limits.min <= value <= limits.max:
        raise ValueError(f"atomic {op}: {value} does not fit {dtype.name}")
    return int(value)


class Signal:
    """A symmetric 64-bit word that says that something has arrived (OpenSHMEM's signal)."""

    def __init__(self, array: SymmetricArray) -> None:
        self._array = array
        self.place = array.place

    def __repr__(self) -> str:
        return f"Signal(offset_bytes={self._array.offset_bytes}, ranks={self._array.group.size})"

    def checked(self, value: int, op: str, group: Group) -> int:
        """Return the signal's heap offset, or refuse what does not fit."""
        self._array.block.check("signal")
        if op not in _OPS:
            raise ValueError(f"signal_op: expected one of {_OPS}, found {op!r}")
        scalar(value, np.dtype(np.uint64), f"signal {op}")
        if self._array.group is not group:
            raise ValueError("signal: expected a signal of the array's own group")
        return self._array.offset_bytes

    def set(self, value: int, peer: int) -> None:
        """Set the signal at ``peer``; called by one rank alone, seen without ``quiet``."""
        self._update(value, peer, "set")

    def add(self, value: int, peer: int) -> None:
        """Add to the signal at ``peer`` atomically; called by one rank alone."""
        self._update(value, peer, "add")

    def _update(self, value: int, peer: int, op: str) -> None:
        group = self._array.group
        offset = self.checked(value, op, group)
        world_rank = group.world_rank(peer, f"signal {op}")
        group.world.agenda.settle(None)
        group.one_sided.signal(group.slot, offset, world_rank, int(value), add=op == "add")

    def wait(self, value: int, cmp: str = "==") -> int:
        """Block until this rank's own word compares (shmem_signal_wait_until).

        What was put with a signal that this wait has seen may be read afterwards.

        Args:
            value: What to compare with.
            cmp: One of ``== != > >= < <=``.

        Returns:
            The value that satisfied the comparison.

        Raises:
            PeerLost: If a rank of the group ended first.
            Timeout: If the deadline passed.
        """
        self._comparison(value, cmp)
        group = self._array.group
        group.world.agenda.settle(None)
        return group.one_sided.signal_wait(
            group.slot, group.ranks, self._array.offset_bytes, cmp, int(value)
        )

    def test(self, value: int, cmp: str = "==") -> bool:
        """Return whether this rank's own word compares now."""
        self._comparison(value, cmp)
        return COMPARE[cmp](self.value, int(value))

    def _comparison(self, value: int, cmp: str) -> None:
        self._array.block.check("signal.wait")
        if cmp not in COMPARE:
            raise ValueError(f"cmp: expected one of {' '.join(COMPARE)}, found {cmp!r}")
        scalar(value, np.dtype(np.uint64), "signal wait")

    @property
    def value(self) -> int:
        """This rank's own word."""
        self._array.block.check("signal")
        return self._array.group.one_sided.signal_read(self._array.offset_bytes)

    def reset(self, value: int = 0) -> None:
        """Set this rank's own word, between two uses of the signal."""
        self.set(value, self._array.group.rank)


class Signals(Sequence[Signal]):
    """Several signals side by side; index or iterate for one."""

    def __init__(self, array: SymmetricArray) -> None:
        self._array = array

    def __len__(self) -> int:
        return self._array.size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [Signal(self._array[i]) for i in range(*index.indices(len(self)))]
        return Signal(self._array[index])

    def __iter__(self) -> Iterator[Signal]:
        return (Signal(self._array[i]) for i in range(len(self)))
