"""Allocation of symmetric memory: collective, agreed, and freed without anybody asking.

All ranks of a group allocate and free in the same order and so at the same offsets. An array that
the program drops is only noted; the next allocation or barrier frees what all ranks have dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from bireme import arrays
from bireme.arrays import numpy_dtype
from bireme.errors import EngineError, UsageError
from bireme.signals import Signal, Signals
from bireme.symmetric import SymmetricArray

if TYPE_CHECKING:
    from bireme.world import Group

__all__ = ["Block", "Symmetric"]

_UINT8 = arrays.DTYPES.index("uint8")


class _Lease:
    """What keeps a view alive in the block's books."""

    __slots__ = ("__weakref__", "block", "within")

    def __init__(self, block: Block) -> None:
        self.block = block
        self.within = block.group.arena.within


class Block:
    """One allocation: the range behind an array and all its slices.

    Arrays, slices and views hold it; when the last of them is gone, the program has dropped it.
    """

    def __init__(self, group: Group, offset: int, size: int) -> None:
        self.group = group
        self.offset = offset
        self.size = size
        self.count = 0  # elements of the whole array
        self.freed = False
        self.leases: weakref.WeakSet[_Lease] = weakref.WeakSet()
        self.place: Any = None  # see OneSidedEngine.place
        self.number = group.symmetric.adopt(offset, size)

    def __del__(self) -> None:
        if not self.freed:
            self.group.symmetric.drop(self.number)

    def check(self, what: str) -> None:
        """Refuse a call on memory that is no longer ours."""
        if self.freed:
            raise UsageError(f"{what}: the symmetric array was freed on rank {self.group.rank}")
        self.group.check_open(what)

    def bytes_on(self, world_rank: int, offset: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Return a uint8 view of a rank's memory that counts as a live view."""
        lease = _Lease(self)
        self.leases.add(lease)
        view = self.group.one_sided.view(world_rank, offset, nbytes, lease)
        return cast("np.ndarray[Any, Any]", view)


class Symmetric:
    """A group's symmetric memory: ``group.symmetric``. All ranks of the group call alike."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._live: dict[int, tuple[int, int]] = {}  # number -> range, the same on all ranks
        self._dropped: set[int] = set()
        self._next = 0

    def adopt(self, offset: int, size: int) -> int:
        """Enter a new block in the books and return its number."""
        self._next += 1
        self._live[self._next] = (offset, size)
        return self._next

    def drop(self, number: int) -> None:
        """Note that this rank's program has dropped a block; any thread, no communication."""
        self._dropped.add(number)
        self._group.collective.dropped(1)

    def collect(self) -> None:
        """Free, in the order of their numbers, the blocks that all ranks have dropped.

        A collective of the group, called inside allocations and barriers.
        """
        numbers = sorted(self._live)
        if not numbers:
            return
        group = self._group
        group.one_sided.quiet(group.slot)
        dropped = self._dropped.copy()
        mine = np.array([n in dropped for n in numbers], np.uint8)
        all_flags = np.empty((group.size, mine.size), np.uint8)
        group.collective.run(
            "agree", _UINT8, mine.size, src=mine.ctypes.data, dst=all_flags.ctypes.data
        )
        chosen = np.flatnonzero(all_flags.all(axis=0)).tolist()
        for number in (numbers[i] for i in chosen):
            self._dropped.discard(number)
            group.collective.dropped(-1)
            self._release(number)

    def _release(self, number: int) -> None:
        offset, size = self._live.pop(number)
        self._group.one_sided.release(offset, size)
        self._group.arena.release(offset, size)

    def empty(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: Any = None
    ) -> SymmetricArray:
        """Allocate a symmetric array; a collective of the group.

        Args:
            shape: An int or a sequence of ints; the same on all ranks.
            dtype: A name, NumPy, ml_dtypes or torch dtype; the same on all ranks.
            device: Where the memory lies; ``None`` or ``"cpu"`` for host memory.

        Raises:
            MismatchError: If the ranks ask for different shapes or dtypes.
            EngineError: If the heap is full, or the device has no one-sided engine.
        """
        return self._allocate(shape, dtype, device, None)

    def zeros(
        self, shape: int | Sequence[int], dtype: Any = "float32", *, device: Any = None
    ) -> SymmetricArray:
        """As ``empty``, filled with zeros before any rank returns."""
        return self._allocate(shape, dtype, device, 0)

    def full(
        self, shape: int | Sequence[int], value: Any, dtype: Any = "float32", *, device: Any = None
    ) -> SymmetricArray:
        """As ``empty``, filled with ``value`` before any rank returns."""
        return self._allocate(shape, dtype, device, value)

    def signal(self) -> Signal:
        """Allocate one signal, 0 on every rank; a collective of the group."""
        return self.signals(1)[0]  # type: ignore[no-any-return]

    def signals(self, n: int) -> Signals:
        """Allocate ``n`` signals, 0 on every rank; a collective of the group."""
        return Signals(self._allocate((n,), "uint64", None, 0))

    def _allocate(self, shape: Any, dtype: Any, device: Any, value: Any) -> SymmetricArray:
        group = self._group
        with group.refusing("allocate"):
            sizes = arrays.shape_of(shape)
            code, is_torch = arrays.dtype_of(dtype)
            if device is not None and str(device) != "cpu":
                raise ValueError(f"device: expected cpu, found {device}; no engine carries it here")
            fill = None if value is None else _element(value, numpy_dtype(code))
            group.check_open("allocate")
        group.world.agenda.settle(None)
        count = arrays.count_of(sizes)
        group.collective.run("allocate", code, count, detail=f"shape {sizes}")
        self.collect()
        block = self._take(count * numpy_dtype(code).itemsize)
        block.count = count
        block.place = group.one_sided.place(
            group.collective, group.ranks, block.offset, count, code
        )
        array = SymmetricArray(block, block.offset, sizes, code, torch=is_torch)
        if fill is not None:
            if any(fill.tobytes()):
                array.numpy()[...] = fill
            else:
                group.one_sided.zero(block.offset, block.size)
            group.collective.run("barrier", code, 0)
        return array

    def _take(self, nbytes: int) -> Block:
        """Return a block whose memory all ranks of the group have, or raise on all."""
        group = self._group
        offset, size = group.arena.allocate(nbytes)
        short = group.one_sided.commit(offset, size, group.size)
        found = group.exchange([-1 if short is None else short])[:, 0]
        if (found < 0).all():
            return Block(group, offset, size)
        if short is None:
            group.one_sided.release(offset, size)
        group.arena.release(offset, size)
        answers = {r: int(n) for r, n in enumerate(found) if n >= 0}
        raise EngineError(
            f"the system has no memory for a symmetric array: expected {size} bytes on each of "
            f"{group.size} ranks, found only this many bytes on ranks: {answers}"
        )

    def free(self, array: SymmetricArray) -> None:
        """Give an array's memory back; see ``SymmetricArray.free``."""
        group, block = self._group, array.block
        with group.refusing("free"):
            block.check("free")
            whole = array.offset_bytes == block.offset and array.size == block.count
            if not whole or block.group is not group:
                raise UsageError("free: expected the whole array, found a slice or another group's")
            if len(block.leases):
                raise UsageError(
                    f"free: {len(block.leases)} views of the array are alive on rank {group.rank}; "
                    "drop what .local, .numpy(), .torch() and .on() returned first"
                )
        group.one_sided.quiet(group.slot)
        group.collective.run("free", 0, block.size, detail=f"array {block.number}")
        block.freed = True
        if block.place is not None:
            block.place.close()
        self._release(block.number)
        group.collective.run("barrier", 0, 0)


def _element(value: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Return a fill value as one element, or raise where it is none."""
    try:
        if np.asarray(value).dtype.kind == "c":
            raise TypeError("a complex number would lose its imaginary part")
        return np.full((), value, dtype)
    except (OverflowError, TypeError, ValueError) as error:
        raise ValueError(f"value: expected one {dtype.name}, found {value!r} ({error})") from None
