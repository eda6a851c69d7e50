"""The one-sided face: symmetric arrays, put and get, signals, atomics.

A symmetric array has the same shape and the same place in the heap on every rank of its group. Any
rank may write, read and signal any other's part without that rank taking part. Words have
OpenSHMEM's meanings: a put is complete at its target after ``quiet`` (or ``barrier``); a put's
signal says that this put's data has arrived; ``fence`` only orders.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from bireme import _core, arrays
from bireme.arrays import Buffer, numpy_dtype
from bireme.errors import EngineError
from bireme.signals import Signal, scalar

if TYPE_CHECKING:
    from bireme.allocation import Block
    from bireme.world import Group

__all__ = ["SymmetricArray"]


class SymmetricArray:
    """An array that every rank of a group has at the same place of its heap.

    Made by ``group.symmetric.empty / zeros / full``; ``x[3]`` and ``x[2:5]`` are symmetric arrays
    over the same memory. Passing one to a collective passes this rank's own part, without staging.
    """

    def __init__(
        self, block: Block, offset: int, shape: tuple[int, ...], dtype: int, *, torch: bool
    ) -> None:
        self._block = block
        self._offset = offset
        self._dtype = dtype
        self._torch = torch
        self.shape = shape
        self.size = arrays.count_of(shape)
        self.place = block.place and block.place.part(offset, self.size)

    @property
    def group(self) -> Group:
        """The group whose ranks all have this array."""
        return self._block.group

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type, as a NumPy dtype."""
        return numpy_dtype(self._dtype)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of one rank's part in bytes."""
        return self.size * self.dtype.itemsize

    @property
    def offset_bytes(self) -> int:
        """Where the array starts in every rank's heap."""
        return self._offset

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a symmetric array with no dimension")
        return self.shape[0]

    def __repr__(self) -> str:
        return (
            f"SymmetricArray(shape={self.shape}, dtype={arrays.DTYPES[self._dtype]}, "
            f"ranks={self.group.size})"
        )

    def __bireme_buffer__(self) -> Buffer:
        """Return this rank's own part for a collective or as the source of a put."""
        self._block.check("array")
        pointer = self.group.one_sided.address(self.group.world.rank, self._offset) or 0
        return Buffer(
            pointer if self.size else 0, self.size, self._dtype, self.shape, self, self._torch
        )

    @property
    def local(self) -> Any:
        """This rank's own part: a torch tensor for a torch dtype, else a NumPy array."""
        return self.torch() if self._torch else self.numpy()

    def numpy(self) -> np.ndarray[Any, Any]:
        """Return this rank's own part as a NumPy array over the same memory."""
        return self._view(self.group.rank)

    def torch(self) -> Any:
        """Return this rank's own part as a torch tensor over the same memory."""
        return arrays.torch_view(self.numpy())

    def on(self, rank: int) -> Any:
        """Return a view of another rank's part, for plain loads and stores.

        Args:
            rank: Rank in the array's group.

        Raises:
            ValueError: If there is no such rank.
            EngineError: If the engine cannot reach that rank's memory by load and store.
        """
        world_rank = self.group.world_rank(rank, "on")
        if self.group.one_sided.address(world_rank, self._offset) is None:
            raise EngineError(
                f"on({rank}): engine {self.group.one_sided.name} cannot load from and store to "
                f"rank {rank}'s memory; use put and get"
            )
        view = self._view(rank)
        return arrays.torch_view(view) if self._torch else view

    def _view(self, rank: int) -> np.ndarray[Any, Any]:
        self._block.check("array")
        world_rank = self.group.world_rank(rank, "on")
        raw = self._block.bytes_on(world_rank, self._offset, self.nbytes)
        return raw.view(self.dtype).reshape(self.shape)

    def __getitem__(self, key: Any) -> SymmetricArray:
        """Return the part of the array that ``key`` selects: ints and slices, contiguous only."""
        if type(key) is int and self.shape and -self.shape[0] <= key < self.shape[0]:
            return self._item(key + self.shape[0] if key < 0 else key)
        keys = key if isinstance(key, tuple) else (key,)
        for k in keys:
            legal = k is Ellipsis or isinstance(k, (int, np.integer, slice))
            if not legal or isinstance(k, bool):
                raise TypeError(f"index: expected integers, slices or ..., found {k!r}")
        # A stand-in of the same shape that is never read tells the part's shape and offset.
        plan = np.lib.stride_tricks.as_strided(
            np.empty(1, np.uint8), self.shape, _byte_strides(self.shape), writeable=False
        )
        part = plan[keys if Ellipsis in keys else (*keys, Ellipsis)]
        if not part.flags.c_contiguous and part.size > 1:
            raise ValueError(
                f"index {key!r}: expected a contiguous part, found strides in {self!r}"
            )
        start = part.__array_interface__["data"][0] - plan.__array_interface__["data"][0]
        offset = self._offset + (start * self.dtype.itemsize if part.size else 0)
        return SymmetricArray(self._block, offset, part.shape, self._dtype, torch=self._torch)

    def _item(self, index: int) -> SymmetricArray:
        rest = self.shape[1:]
        offset = self._offset + index * arrays.count_of(rest) * self.dtype.itemsize
        return SymmetricArray(self._block, offset, rest, self._dtype, torch=self._torch)

    # ---- put and get ------------------------------------------------------------------------

    def put(
        self,
        src: Any,
        peer: int,
        *,
        signal: Signal | None = None,
        signal_value: int = 1,
        signal_op: str = "set",
        stream: Any = None,
    ) -> None:
        """Write ``src`` into this array at ``peer`` (shmem_put, shmem_put_signal).

        Called by one rank alone. ``src`` may be reused when the call returns; the data has arrived
        after ``quiet`` or ``barrier``, or when ``peer`` sees the signal.

        Args:
            src: Array of the same dtype and number of elements.
            peer: Rank in the array's group; the own rank is legal.
            signal: Updated at ``peer`` after the data of this put has arrived.
            signal_value: What to set it to or add to it; 0 to 2**64 - 1.
            signal_op: ``"set"`` or ``"add"``.
            stream: Waited for first.

        Raises:
            ValueError, TypeError: If the arguments do not fit; nothing has moved then.
        """
        if stream is None and self.place is not None:
            at = signal.place if type(signal) is Signal else None
            if (at is not None or signal is None) and self.place.put(
                src, peer, at, signal_value, signal_op
            ):
                return
        self._put(src, peer, signal, signal_value, signal_op, stream, nbi=False)

    def put_nbi(
        self,
        src: Any,
        peer: int,
        *,
        signal: Signal | None = None,
        signal_value: int = 1,
        signal_op: str = "set",
        stream: Any = None,
    ) -> None:
        """As ``put``, but ``src`` must stay as it is until ``quiet`` or ``barrier``."""
        self._put(src, peer, signal, signal_value, signal_op, stream, nbi=True)

    def _put(
        self,
        src: Any,
        peer: int,
        signal: Signal | None,
        value: int,
        op: str,
        stream: Any,
        *,
        nbi: bool,
    ) -> None:
        self._block.check("put")
        buffer = arrays.read(src, "src")
        self._fits(buffer, "src")
        world_rank = self.group.world_rank(peer, "put")
        at = None
        if signal is not None:
            if not isinstance(signal, Signal):
                raise TypeError(f"signal: expected a Signal, found {type(signal).__name__}")
            at = signal.checked(value, op, self.group)
        self.group.world.agenda.settle(stream)
        if nbi:
            self.group.world.agenda.keep_until_quiet(buffer.owner)
        self.group.one_sided.put(
            self.group.slot, self._dtype, buffer.count, self._offset, world_rank, buffer.pointer,
            nbi=nbi, signal=at, value=value, add=op == "add",
        )  # fmt: skip

    def get(self, out: Any = None, *, peer: int, stream: Any = None) -> Any:
        """Read this array at ``peer`` (shmem_get). Called by one rank alone.

        Args:
            out: Where to read to, same dtype and number of elements; ``None`` makes a new array.
            peer: Rank in the array's group.
            stream: Waited for first.

        Returns:
            ``out``, or the new array; it holds the data when the call returns.
        """
        plain = out is not None and stream is None and self.place is not None
        if plain and self.place.get(out, peer):
            return out
        return self._get(out, peer, stream, nbi=False)

    def get_nbi(self, out: Any = None, *, peer: int, stream: Any = None) -> Any:
        """As ``get``, but the data is there only after ``quiet`` or ``barrier``."""
        return self._get(out, peer, stream, nbi=True)

    def _get(self, out: Any, peer: int, stream: Any, *, nbi: bool) -> Any:
        self._block.check("get")
        world_rank = self.group.world_rank(peer, "get")
        if out is None:
            out = arrays.new(self.shape, self.__bireme_buffer__())
        buffer = arrays.write(out, "out")
        self._fits(buffer, "out")
        self.group.world.agenda.settle(stream)
        if nbi:
            self.group.world.agenda.keep_until_quiet(buffer.owner)
        self.group.one_sided.get(
            self.group.slot, self._dtype, buffer.count, self._offset, world_rank, buffer.pointer,
            nbi=nbi,
        )  # fmt: skip
        return out

    def _fits(self, buffer: Buffer, what: str) -> None:
        if buffer.dtype != self._dtype:
            raise TypeError(
                f"{what}: expected dtype {arrays.DTYPES[self._dtype]}, found {buffer.name}"
            )
        if buffer.count != self.size:
            raise ValueError(
                f"{what}: expected {self.size} elements for {self!r}, found {buffer.count} "
                f"(shape {buffer.shape}); a slice such as x[:{buffer.count}] addresses a part"
            )

    # ---- atomics ----------------------------------------------------------------------------

    def atomic_set(self, value: float, peer: int) -> None:
        """Store ``value`` in this one element at ``peer`` atomically (shmem_atomic_set)."""
        self._atomic("set", peer, value)

    def atomic_add(self, value: float, peer: int) -> None:
        """Add ``value`` to this one element at ``peer`` (shmem_atomic_add); integers wrap."""
        self._atomic("add", peer, value)

    def atomic_inc(self, peer: int) -> None:
        """Add 1 to this one element at ``peer`` (shmem_atomic_inc)."""
        self._atomic("add", peer, 1)

    def atomic_and(self, value: int, peer: int) -> None:
        """Bitwise-and ``value`` into this one integer at ``peer`` (shmem_atomic_and)."""
        self._atomic("and", peer, value)

    def atomic_or(self, value: int, peer: int) -> None:
        """Bitwise-or ``value`` into this one integer at ``peer`` (shmem_atomic_or)."""
        self._atomic("or", peer, value)

    def atomic_xor(self, value: int, peer: int) -> None:
        """Bitwise-xor ``value`` into this one integer at ``peer`` (shmem_atomic_xor)."""
        self._atomic("xor", peer, value)

    def atomic_fetch(self, peer: int) -> Any:
        """Return this one element at ``peer``, read atomically (shmem_atomic_fetch)."""
        return self._atomic("fetch", peer, 0)

    def atomic_fetch_add(self, value: float, peer: int) -> Any:
        """As ``atomic_add``; return the element's old value (shmem_atomic_fetch_add)."""
        return self._atomic("add", peer, value)

    def atomic_fetch_inc(self, peer: int) -> Any:
        """As ``atomic_inc``; return the element's old value (shmem_atomic_fetch_inc)."""
        return self._atomic("add", peer, 1)

    def atomic_fetch_and(self, value: int, peer: int) -> Any:
        """As ``atomic_and``; return the element's old value (shmem_atomic_fetch_and)."""
        return self._atomic("and", peer, value)

    def atomic_fetch_or(self, value: int, peer: int) -> Any:
        """As ``atomic_or``; return the element's old value (shmem_atomic_fetch_or)."""
        return self._atomic("or", peer, value)

    def atomic_fetch_xor(self, value: int, peer: int) -> Any:
        """As ``atomic_xor``; return the element's old value (shmem_atomic_fetch_xor)."""
        return self._atomic("xor", peer, value)

    def atomic_swap(self, value: float, peer: int) -> Any:
        """Store ``value`` and return the element's old value (shmem_atomic_swap)."""
        return self._atomic("swap", peer, value)

    def atomic_compare_swap(self, expected: int, desired: int, peer: int) -> Any:
        """Store ``desired`` where the element equals ``expected``; return its old value."""
        return self._atomic("compare_swap", peer, desired, expected)

    def _atomic(self, op: str, peer: int, value: Any, condition: Any = 0) -> Any:
        self._block.check(f"atomic {op}")
        if self.size != 1:
            raise ValueError(f"atomic {op}: expected one element such as x[3], found {self!r}")
        engine = self.group.one_sided
        why = engine.lacks.get(f"atomic:{arrays.DTYPES[self._dtype]}")
        if why:
            raise TypeError(f"atomic {op} on {arrays.DTYPES[self._dtype]}: {why}")
        if self._dtype in arrays.FLOATS and op in ("and", "or", "xor", "compare_swap"):
            raise TypeError(
                f"atomic {op}: expected an integer array, found {arrays.DTYPES[self._dtype]}"
            )
        world_rank = self.group.world_rank(peer, f"atomic {op}")
        value, condition = (scalar(v, self.dtype, op) for v in (value, condition))
        self.group.world.agenda.settle(None)
        return engine.atomic(
            self.group.slot, self._dtype, self._offset, world_rank, op, value, condition
        )

    def free(self) -> None:
        """Give the memory back; every rank of the group calls it.

        Raises:
            UsageError: If this is a slice, was freed before, or a view of it is still alive.
        """
        self.group.symmetric.free(self)

    @property
    def block(self) -> Block:
        """The allocation behind the array."""
        return self._block


_core.set_symmetric(SymmetricArray)


def _byte_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
