"""The shared-memory engine: all ranks of one host, through the C++ core in ``native/``."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bireme import _core, memory

__all__ = ["ShmCollective", "ShmOneSided"]

_KINDS = {name: code for code, name in enumerate(_core.KINDS)}
_COMPARE = {"==": 0, "!=": 1, ">": 2, ">=": 3, "<": 4, "<=": 5}
_ATOMIC = {
    name: code
    for code, name in enumerate(("fetch", "set", "add", "and", "or", "xor", "swap", "compare_swap"))
}
DELIVERIES = ("eager", "lazy", "random")  # native/heap.h: enum class Delivery
_STEP_BYTES = 64 << 20
_INT64 = _core.DTYPES.index("int64")
_NO_SIGNAL = 2**64 - 1


def _digest(detail: str) -> int:
    """Return the number that stands for a detail when calls are compared; 0 for none."""
    return (zlib.crc32(detail.encode()) or 1) if detail else 0


class ShmCollective:
    """The collectives of one group over shared memory. See ``native/channel.h`` for how."""

    name = "shm"
    lacks: Mapping[str, str] = {}

    def __init__(
        self, control: Any, heap: Any, slot: int, members: Sequence[int], index: int
    ) -> None:
        self._control = control
        self._heap = heap
        self._members = tuple(members)
        self._index = index
        self.channel = _core.Channel(control, heap, slot, list(members), index)
        self.lane = functools.partial(_core.collective, self.channel)
        self.quiet_lane = functools.partial(_core.quiet, self.channel, heap)
        self.barrier_lane = functools.partial(_core.barrier, self.channel, heap)

    def run(
        self,
        op: str,
        dtype: int,
        count: int,
        reduction: int = 0,
        root: int = -1,
        src: int = 0,
        dst: int = 0,
        stream: Any = None,
        detail: str = "",
    ) -> Any:
        """See ``CollectiveEngine.run``."""
        return self.channel.run(
            _KINDS[op], dtype, count, reduction, root, src, dst, _digest(detail), detail, "", stream
        )

    def refuse(self, op: str, why: str) -> None:
        """See ``CollectiveEngine.refuse``."""
        self.channel.run(_KINDS[op], 0, 0, 0, -1, 0, 0, 0, "", why or "unknown reason", None)

    def send(self, dtype: int, count: int, peer: int, src: int, stream: Any = None) -> Any:
        """See ``CollectiveEngine.send``."""
        return self.channel.send(dtype, count, peer, src, stream)

    def recv(self, dtype: int, count: int, peer: int, dst: int, stream: Any = None) -> Any:
        """See ``CollectiveEngine.recv``."""
        return self.channel.recv(dtype, count, peer, dst, stream)

    def split(self, members: Sequence[int] | None) -> ShmCollective | None:
        """See ``CollectiveEngine.split``. The first member takes a slot of the control segment."""
        leads = members is not None and members[0] == self._index
        mine = np.array([self._control.take_group_slot() if leads else -1], np.int64)
        slots = np.empty(len(self._members), np.int64)
        self.run("agree", _INT64, 1, src=mine.ctypes.data, dst=slots.ctypes.data)
        if members is None:
            return None
        return ShmCollective(
            self._control,
            self._heap,
            int(slots[members[0]]),
            [self._members[i] for i in members],
            list(members).index(self._index),
        )

    def close(self) -> None:
        """See ``CollectiveEngine.close``. Slot 0 is the world's and ends with its segment."""
        self.channel.close(self.channel.slot == 0)

    @property
    def all_dropped(self) -> bool:
        """See ``CollectiveEngine.all_dropped``."""
        return bool(self.channel.all_dropped)

    def dropped(self, by: int) -> None:
        """See ``CollectiveEngine.dropped``."""
        self.channel.dropped(by)

    @property
    def staged_bytes(self) -> int:
        """Bytes that this rank copied into staging memory; none where buffers lie in the heap."""
        return int(self.channel.staged_bytes)


class ShmOneSided:
    """The symmetric heap in shared memory. See ``native/heap.h`` for the delivery modes."""

    name = "shm"
    lacks: Mapping[str, str] = {
        f"atomic:{dtype}": "the processor has atomics on 4- and 8-byte numbers only"
        for dtype in ("bool", "int8", "int16", "uint8", "uint16", "float16", "bfloat16")
    }

    def __init__(
        self, control: Any, fds: list[int], heap_bytes: int, delivery: str, seed: int
    ) -> None:
        self.native = _core.Heap(control, fds, heap_bytes, DELIVERIES.index(delivery), seed)
        self.heap_bytes = heap_bytes
        self._budget = memory.Budget()
        self.defers = delivery != "eager"

    def view(self, rank: int, offset: int, nbytes: int, owner: object) -> Any:
        """See ``OneSidedEngine.view``."""
        return self.native.view(rank, offset, nbytes, owner)

    def address(self, rank: int, offset: int) -> int:
        """See ``OneSidedEngine.address``: every peer is mapped."""
        return int(self.native.address(rank, offset))

    def commit(self, offset: int, nbytes: int, ranks: int) -> int | None:
        """See ``OneSidedEngine.commit``: in steps, while the system has enough for all ranks."""
        if not self._budget.spend(nbytes * ranks):
            return self._budget.room
        for at in range(offset, offset + nbytes, _STEP_BYTES):
            step = min(_STEP_BYTES, offset + nbytes - at)
            crowded = at > offset and not self._budget.spend(step * ranks)
            if crowded or not self.native.commit(at, step):
                self.native.release(offset, at - offset)
                return self._budget.room
        return None

    def zero(self, offset: int, nbytes: int) -> None:
        """See ``OneSidedEngine.zero``."""
        self.native.zero(offset, nbytes)

    def release(self, offset: int, nbytes: int) -> None:
        """See ``OneSidedEngine.release``."""
        self.native.release(offset, nbytes)

    def place(
        self, group: Any, ranks: Sequence[int], offset: int, count: int, dtype: int
    ) -> _core.Place:
        """See ``OneSidedEngine.place``."""
        return _core.Place(self.native, group.channel, list(ranks), offset, count, dtype)

    def put(
        self,
        group: int,
        dtype: int,
        count: int,
        offset: int,
        peer: int,
        src: int,
        *,
        nbi: bool = False,
        signal: int | None = None,
        value: int = 1,
        add: bool = False,
        stream: Any = None,
    ) -> None:
        """See ``OneSidedEngine.put``."""
        at = _NO_SIGNAL if signal is None else signal
        self.native.put(dtype, count, group, offset, peer, src, nbi, at, value, int(add))

    def get(
        self,
        group: int,
        dtype: int,
        count: int,
        offset: int,
        peer: int,
        dst: int,
        *,
        nbi: bool = False,
        stream: Any = None,
    ) -> None:
        """See ``OneSidedEngine.get``."""
        self.native.get(dtype, count, group, offset, peer, dst, nbi)

    def atomic(
        self, group: int, dtype: int, offset: int, peer: int, op: str, value: Any, condition: Any
    ) -> Any:
        """See ``OneSidedEngine.atomic``."""
        return self.native.atomic(dtype, group, offset, peer, _ATOMIC[op], value, condition)

    def signal(self, group: int, offset: int, peer: int, value: int, *, add: bool) -> None:
        """See ``OneSidedEngine.signal``."""
        self.native.signal(group, offset, peer, value, int(add))

    def signal_wait(
        self, group: int, ranks: Sequence[int], offset: int, compare: str, value: int
    ) -> int:
        """See ``OneSidedEngine.signal_wait``."""
        return int(self.native.signal_wait(group, list(ranks), offset, _COMPARE[compare], value))

    def signal_read(self, offset: int) -> int:
        """See ``OneSidedEngine.signal_read``."""
        return int(self.native.signal_read(offset))

    def fence(self, group: int) -> None:
        """See ``OneSidedEngine.fence``."""
        self.native.fence(group)

    def quiet(self, group: int) -> None:
        """See ``OneSidedEngine.quiet``."""
        self.native.quiet(group)

    def close(self) -> None:
        """See ``OneSidedEngine.close``: the mapping ends with the last array or view."""
        self.native.close_descriptors()
