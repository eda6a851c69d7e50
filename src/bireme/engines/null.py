"""The engine without processes: a world of one rank, or one rank that pretends to be among n.

At size 1 every result is right. With pretended ranks shapes, dtypes and errors are right and the
others seem to hold what this rank holds: for planners, layers and unit tests.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bireme.arrays import numpy_dtype
from bireme.errors import Timeout

__all__ = ["NullCollective", "NullOneSided"]

_CONCATENATES = frozenset({"all_gather", "gather", "agree"})
_PICKS_A_BLOCK = frozenset({"scatter", "reduce_scatter"})
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "==": operator.eq, "!=": operator.ne, ">": operator.gt,
    ">=": operator.ge, "<": operator.lt, "<=": operator.le,
}  # fmt: skip
_COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "set": lambda old, new: new, "swap": lambda old, new: new, "add": operator.add,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor, "fetch": lambda old, new: old,
}  # fmt: skip


class _Owned(np.ndarray[Any, Any]):
    """A view that keeps an object alive."""

    owner: object = None


class NullCollective:
    """Collectives in which all other ranks seem to do what this one does."""

    name = "null"
    lacks: Mapping[str, str] = {
        "async": "the null engine has no progress thread",
        "send_recv": "the null engine has no peers",
    }

    def __init__(self, size: int, index: int) -> None:
        self._size = size
        self._index = index
        self._dropped = 0

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
        part = count * numpy_dtype(dtype).itemsize
        if not (src and dst and part):
            return
        if op in _CONCATENATES:
            for rank in range(self._size):
                ctypes.memmove(dst + rank * part, src, part)
        elif op == "all_to_all":
            ctypes.memmove(dst, src, part * self._size)
        else:
            source = src + (self._index * part if op in _PICKS_A_BLOCK else 0)
            if dst != source:  # a root's memory may be read-only
                ctypes.memmove(dst, source, part)

    def lane(self, kind: int, x: Any, out: Any, op: Any, root: Any) -> bool:
        """See ``CollectiveEngine.lane``: no haste."""
        return False

    @property
    def all_dropped(self) -> bool:
        """See ``CollectiveEngine.all_dropped``."""
        return self._dropped > 0

    def dropped(self, by: int) -> None:
        """See ``CollectiveEngine.dropped``."""
        self._dropped += by

    def quiet_lane(self) -> bool:
        """See ``CollectiveEngine.quiet_lane``."""
        return False

    def barrier_lane(self) -> bool:
        """See ``CollectiveEngine.barrier_lane``."""
        return False

    def refuse(self, op: str, why: str) -> None:
        """See ``CollectiveEngine.refuse``: nobody is there to be told."""

    def send(self, dtype: int, count: int, peer: int, src: int, stream: Any = None) -> Any:
        """See ``CollectiveEngine.send``: lacking, so never called."""

    def recv(self, dtype: int, count: int, peer: int, dst: int, stream: Any = None) -> Any:
        """See ``CollectiveEngine.recv``: lacking, so never called."""

    def split(self, members: Sequence[int] | None) -> NullCollective | None:
        """See ``CollectiveEngine.split``."""
        if members is None:
            return None
        return NullCollective(len(members), list(members).index(self._index))

    def close(self) -> None:
        """See ``CollectiveEngine.close``."""


class NullOneSided:
    """A symmetric heap of which only the own part exists; what goes to others is dropped."""

    name = "null"
    lacks: Mapping[str, str] = {
        f"atomic:{dtype}": "atomics exist on 4- and 8-byte numbers only, as on the shm engine"
        for dtype in ("bool", "int8", "int16", "uint8", "uint16", "float16", "bfloat16")
    }

    def __init__(self, heap_bytes: int, rank: int) -> None:
        self.heap_bytes = heap_bytes
        self.defers = False
        self._rank = rank
        self._memory = np.zeros(heap_bytes, np.uint8)

    def view(self, rank: int, offset: int, nbytes: int, owner: object) -> Any:
        """See ``OneSidedEngine.view``; the heap of a pretended rank looks like the own one."""
        view = self._memory[offset : offset + nbytes].view(_Owned)
        view.owner = owner
        return view

    def address(self, rank: int, offset: int) -> int | None:
        """See ``OneSidedEngine.address``."""
        return self._at(offset) if rank == self._rank else None

    def _at(self, offset: int) -> int:
        return int(self._memory.__array_interface__["data"][0]) + offset

    def commit(self, offset: int, nbytes: int, ranks: int) -> int | None:
        """See ``OneSidedEngine.commit``: taken when it is touched."""
        return None

    def zero(self, offset: int, nbytes: int) -> None:
        """See ``OneSidedEngine.zero``."""
        self._memory[offset : offset + nbytes] = 0

    release = zero

    def place(self, group: Any, ranks: Sequence[int], offset: int, count: int, dtype: int) -> None:
        """See ``OneSidedEngine.place``: no haste."""

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
        if peer == self._rank:
            ctypes.memmove(self._at(offset), src, count * numpy_dtype(dtype).itemsize)
            if signal is not None:
                self.signal(group, signal, peer, value, add=add)

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
        ctypes.memmove(dst, self._at(offset), count * numpy_dtype(dtype).itemsize)

    def atomic(
        self, group: int, dtype: int, offset: int, peer: int, op: str, value: Any, condition: Any
    ) -> Any:
        """See ``OneSidedEngine.atomic``."""
        kind = numpy_dtype(dtype)
        word = self._memory[offset : offset + kind.itemsize].view(kind)
        old = word[0].item()
        if op == "compare_swap":
            new = value if old == condition else old
        else:
            new = _COMBINE[op](old, value)
        if peer == self._rank:
            bits = 8 * kind.itemsize
            word[0] = (
                new if kind.kind == "f" else np.array(new % 2**bits, f"u{bits // 8}").view(kind)
            )
        return old

    def signal(self, group: int, offset: int, peer: int, value: int, *, add: bool) -> None:
        """See ``OneSidedEngine.signal``."""
        if peer == self._rank:
            old = self.signal_read(offset) if add else 0
            self._memory[offset : offset + 8].view(np.uint64)[0] = (old + value) % 2**64

    def signal_wait(
        self, group: int, ranks: Sequence[int], offset: int, compare: str, value: int
    ) -> int:
        """See ``OneSidedEngine.signal_wait``: pretended ranks have always signalled."""
        found = self.signal_read(offset)
        if COMPARE[compare](found, value):
            return found
        if len(ranks) > 1:
            return value
        raise Timeout(
            f"rank {self._rank}: signal.wait expects {compare} {value}, found {found}, and a world "
            "of one rank has nobody else to set it"
        )

    def signal_read(self, offset: int) -> int:
        """See ``OneSidedEngine.signal_read``."""
        return int(self._memory[offset : offset + 8].view(np.uint64)[0])

    def fence(self, group: int) -> None:
        """See ``OneSidedEngine.fence``."""

    def quiet(self, group: int) -> None:
        """See ``OneSidedEngine.quiet``."""

    def close(self) -> None:
        """See ``OneSidedEngine.close``."""
