"""The collective face: every rank of a group makes the same call.

Each method checks its arguments, then calls the engine once. A call that is refused here is
published as refused, so that the other ranks raise instead of waiting; the group stays usable.
On the host engines a reduction is the left fold in rank order, the same bits on every rank; half
types are held in float32 and rounded once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bireme import _core, arrays
from bireme.arrays import Buffer
from bireme.errors import BiremeError, EngineError, UsageError

if TYPE_CHECKING:
    from bireme.engines.base import CollectiveEngine
    from bireme.world import World

__all__ = ["Collectives"]

_INT64 = arrays.DTYPES.index("int64")
_BOOL = arrays.DTYPES.index("bool")
_ALL_REDUCE, _REDUCE_SCATTER, _BROADCAST, _ALL_GATHER, _ALL_TO_ALL = (
    _core.KINDS.index(name)
    for name in ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all")
)
_META = 16  # int64 words in which scatter tells its dtype and shape
_F = TypeVar("_F", bound=Callable[..., Any])


def published(method: _F) -> _F:
    """Publish a call that its arguments rule out as refused, then let the error go on."""

    @functools.wraps(method)
    def call(self: Collectives, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError, UsageError) as error:
            self._refuse(method.__name__.removeprefix("_"), error)
            raise

    return call  # type: ignore[return-value]


class Collectives:
    """The collectives of a group, which is what this class is mixed into."""

    rank: int
    size: int
    collective: CollectiveEngine
    world: World

    if TYPE_CHECKING:

        def check_open(self, what: str) -> None:
            """See ``Group.check_open``."""

    # ---- reductions -------------------------------------------------------------------------

    def all_reduce(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combine ``x`` over all ranks, elementwise, on every rank (ncclAllReduce).

        Every rank of the group calls it with the same shape, dtype and op.

        Args:
            x: Array; overwritten with the result unless ``out`` is given.
            op: ``"sum"``, ``"prod"``, ``"min"``, ``"max"`` or ``"avg"``. Sum of bool is logical or,
                avg needs a float type, integers wrap, NaN wins in min and max.
            out: Array of the same shape and dtype for the result.
            async_op: Return a ``Work`` at once; the buffers must not be touched before its wait.
            stream: Whose order to keep; ``None`` is the current stream.

        Returns:
            ``x`` or ``out``; with ``async_op`` a ``Work`` whose result that is.

        Raises:
            TypeError, ValueError: If this rank's arguments do not fit.
            MismatchError: If the ranks' calls differ, or another rank refused its arguments.
        """
        plain = not async_op and stream is None
        if plain and self.collective.lane(_ALL_REDUCE, x, out, op, -1):
            return x if out is None else out
        return self._all_reduce(x, op, out, async_op, stream)

    @published
    def _all_reduce(self, x: Any, op: str, out: Any, async_op: bool, stream: Any) -> Any:
        src, dst = self._in_out(x, out)
        return self._run(
            "all_reduce", src, dst, src.count, _reduction(op, src), -1, async_op, stream
        )

    @published
    def reduce(
        self,
        x: Any,
        root: int = 0,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combine ``x`` over all ranks on ``root`` only (ncclReduce); see ``all_reduce``.

        Args:
            x: Array; on ``root`` overwritten with the result unless ``out`` is given.
            root: Rank that gets the result.
            op: As in ``all_reduce``.
            out: Array for the result; used on ``root``.
            async_op, stream: As in ``all_reduce``.

        Returns:
            ``x`` or ``out`` on ``root``; ``x``, unchanged, elsewhere.
        """
        self._rank_of(root, "root")
        if self.rank == root:
            src, dst = self._in_out(x, out)
        else:
            src, dst = arrays.read(x, "x"), None
        return self._run("reduce", src, dst, src.count, _reduction(op, src), root, async_op, stream)

    def reduce_scatter(
        self,
        x: Any,
        op: str = "sum",
        *,
        out: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Combine ``x`` over all ranks and give rank i block i of the result (ncclReduceScatter).

        Args:
            x: Array of shape (size * n, ...): dim 0 is split into equal blocks.
            op: As in ``all_reduce``.
            out: Array of shape (n, ...); ``None`` makes one. May be the own block of ``x``.
            async_op, stream: As in ``all_reduce``.

        Returns:
            The block, of shape (n, ...).
        """
        plain = out is not None and not async_op and stream is None
        if plain and self.collective.lane(_REDUCE_SCATTER, x, out, op, -1):
            return out
        return self._reduce_scatter(x, op, out, async_op, stream)

    @published
    def _reduce_scatter(self, x: Any, op: str, out: Any, async_op: bool, stream: Any) -> Any:
        src = arrays.read(x, "x")
        shape = self._block_shape(src, "x")
        out, dst = _target(out, shape, src)
        self._allow_overlap(src, dst, self.rank * dst.nbytes)
        reduction = _reduction(op, src)
        return self._run("reduce_scatter", src, dst, dst.count, reduction, -1, async_op, stream)

    # ---- moving without combining -----------------------------------------------------------

    def broadcast(
        self, x: Any, root: int = 0, *, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Give every rank what ``x`` holds on ``root`` (ncclBroadcast).

        Args:
            x: Array, the same shape and dtype everywhere; overwritten on ranks other than root.
            root: The rank whose data all get.
            async_op, stream: As in ``all_reduce``.

        Returns:
            ``x``.
        """
        plain = not async_op and stream is None
        if plain and self.collective.lane(_BROADCAST, x, None, None, root):
            return x
        return self._broadcast(x, root, async_op, stream)

    @published
    def _broadcast(self, x: Any, root: int, async_op: bool, stream: Any) -> Any:
        self._rank_of(root, "root")
        src = arrays.read(x, "x") if self.rank == root else arrays.write(x, "x")
        return self._run("broadcast", src, src, src.count, 0, root, async_op, stream)

    def all_gather(
        self, x: Any, *, out: Any = None, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Join the ranks' arrays on dim 0, on every rank (ncclAllGather).

        Args:
            x: Array of shape (n, ...), the same everywhere; a 0-d array counts as shape (1,).
            out: Array of shape (size * n, ...); ``None`` makes one. ``x`` may be its own block.
            async_op, stream: As in ``all_reduce``.

        Returns:
            The joined array, of shape (size * n, ...).
        """
        plain = out is not None and not async_op and stream is None
        if plain and self.collective.lane(_ALL_GATHER, x, out, None, -1):
            return out
        return self._all_gather(x, out, async_op, stream)

    @published
    def _all_gather(self, x: Any, out: Any, async_op: bool, stream: Any) -> Any:
        src = arrays.read(x, "x")
        out, dst = _target(out, self._joined_shape(src), src)
        self._allow_overlap(dst, src, self.rank * src.nbytes)
        return self._run("all_gather", src, dst, src.count, 0, -1, async_op, stream)

    @published
    def gather(
        self,
        x: Any,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Join the ranks' arrays on dim 0, on ``root`` only (ncclGather).

        Args:
            x: Array of shape (n, ...), the same everywhere.
            root: Rank that gets the result.
            out: Array of shape (size * n, ...), used on ``root``; ``None`` makes one.
            async_op, stream: As in ``all_reduce``.

        Returns:
            The joined array on ``root``, ``None`` elsewhere.
        """
        self._rank_of(root, "root")
        src, dst = arrays.read(x, "x"), None
        if self.rank == root:
            out, dst = _target(out, self._joined_shape(src), src)
            self._allow_overlap(dst, src, self.rank * src.nbytes)
        return self._run(
            "gather", src, dst, src.count, 0, root, async_op, stream, result=dst and dst.owner
        )

    @published
    def scatter(
        self,
        x: Any = None,
        root: int = 0,
        *,
        out: Any = None,
        async_op: bool = False,
        stream: Any = None,
    ) -> Any:
        """Give rank i block i of what ``x`` holds on ``root`` (ncclScatter).

        Args:
            x: Array of shape (size * n, ...) on ``root``; not looked at elsewhere.
            root: The rank whose array is split.
            out: Array of shape (n, ...); ``None`` makes one; needed with ``async_op``.
            async_op, stream: As in ``all_reduce``.

        Returns:
            The block, of shape (n, ...).
        """
        self._rank_of(root, "root")
        src = arrays.read(x, "x") if self.rank == root else None
        if src is not None:
            self._block_shape(src, "x")
        if async_op and out is None:
            raise ValueError("scatter: expected out= with async_op=True, found none")
        given = arrays.write(out, "out") if out is not None else None
        block = given if async_op and given else self._told_by_root(src, root, given)
        out, dst = _target(out, block.shape, block)
        if src is not None:
            self._allow_overlap(src, dst, self.rank * dst.nbytes)
        return self._run("scatter", src, dst, dst.count, 0, root, async_op, stream)

    def all_to_all(
        self, x: Any, *, out: Any = None, async_op: bool = False, stream: Any = None
    ) -> Any:
        """Send block i of ``x`` to rank i and join what arrives in rank order (ncclAlltoAll).

        Args:
            x: Array of shape (size * n, ...): dim 0 is split into equal blocks.
            out: Array of the same shape, ``x`` itself for in place; ``None`` makes one.
            async_op, stream: As in ``all_reduce``.

        Returns:
            The joined array, of the shape of ``x``.
        """
        plain = out is not None and not async_op and stream is None
        if plain and self.collective.lane(_ALL_TO_ALL, x, out, None, -1):
            return out
        return self._all_to_all(x, out, async_op, stream)

    @published
    def _all_to_all(self, x: Any, out: Any, async_op: bool, stream: Any) -> Any:
        src = arrays.read(x, "x")
        self._block_shape(src, "x")
        out, dst = _target(out, src.shape, src)
        self._allow_overlap(src, dst, 0)
        return self._run("all_to_all", src, dst, src.count // self.size, 0, -1, async_op, stream)

    # ---- two ranks --------------------------------------------------------------------------

    def send(self, x: Any, peer: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Send ``x`` to ``peer``, which calls ``recv`` with the same dtype and count (ncclSend).

        Messages between two ranks arrive in order. ``x`` may be reused when the call returns.

        Args:
            x: Array.
            peer: Another rank of the group.
            async_op, stream: As in ``all_reduce``.
        """
        src = arrays.read(x, "x")
        later = self._two_sided("send", peer, async_op, stream)
        native = self.collective.send(src.dtype, src.count, peer, src.pointer, later)
        return self.world.agenda.work("send", native, None, (src,)) if async_op else None

    def recv(self, x: Any, peer: int, *, async_op: bool = False, stream: Any = None) -> Any:
        """Receive into ``x`` what ``peer`` sends (ncclRecv).

        Args:
            x: Array of the same dtype and count as what is sent; overwritten.
            peer: Another rank of the group.
            async_op, stream: As in ``all_reduce``.

        Returns:
            ``x``.

        Raises:
            MismatchError: If dtype or count differ from what was sent.
        """
        dst = arrays.write(x, "x")
        later = self._two_sided("recv", peer, async_op, stream)
        native = self.collective.recv(dst.dtype, dst.count, peer, dst.pointer, later)
        return self.world.agenda.work("recv", native, x, (dst,)) if async_op else x

    def _two_sided(self, op: str, peer: int, async_op: bool, stream: Any) -> Any:
        self._rank_of(peer, "peer")
        if peer == self.rank:
            raise ValueError(f"{op}: expected another rank as peer, found the own rank {peer}")
        self._has("send_recv", op)
        self.check_open(op)
        return self.world.agenda.settle(stream, async_op=async_op)

    # ---- shared checks ----------------------------------------------------------------------

    def _rank_of(self, rank: Any, what: str) -> None:
        if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)):
            raise TypeError(f"{what}: expected a rank, found {rank!r}")
        if not 0 <= rank < self.size:
            raise ValueError(f"{what}: expected a rank from 0 to {self.size - 1}, found {rank}")

    def _in_out(self, x: Any, out: Any) -> tuple[Buffer, Buffer]:
        if out is None:
            buffer = arrays.write(x, "x")
            return buffer, buffer
        src = arrays.read(x, "x")
        _, dst = _target(out, src.shape, src)
        self._allow_overlap(src, dst, 0)
        return src, dst

    def _block_shape(self, buffer: Buffer, what: str) -> tuple[int, ...]:
        if not buffer.shape or buffer.shape[0] % self.size:
            raise ValueError(
                f"{what}: expected dim 0 to split into {self.size} equal blocks, "
                f"found shape {buffer.shape}"
            )
        return (buffer.shape[0] // self.size, *buffer.shape[1:])

    def _joined_shape(self, buffer: Buffer) -> tuple[int, ...]:
        first, *rest = buffer.shape or (1,)
        return (first * self.size, *rest)

    def _allow_overlap(self, outer: Buffer, inner: Buffer, at: int) -> None:
        if arrays.overlap(outer, inner) and inner.pointer != outer.pointer + at:
            raise ValueError(
                "out: expected memory apart from x, or exactly in place; found an overlap that "
                "would corrupt the result"
            )

    def _told_by_root(self, src: Buffer | None, root: int, like: Buffer | None) -> Buffer:
        """Return a stand-in of the shape (n, ...) and dtype that root scatters."""
        words = np.zeros(_META, np.int64)
        if src is not None:
            shape = self._block_shape(src, "x")
            words[: 3 + len(shape)] = [src.dtype, src.torch, len(shape), *shape]
        pointer = words.ctypes.data
        self.collective.run("broadcast", _INT64, _META, 0, root, pointer, pointer)
        dtype, torch, ndim = (int(w) for w in words[:3])
        shape = tuple(int(w) for w in words[3 : 3 + ndim])
        torch = like.torch if like is not None else bool(torch)
        return Buffer(0, arrays.count_of(shape), dtype, shape, None, torch)

    def _has(self, feature: str, op: str) -> None:
        why = self.collective.lacks.get(feature)
        if why:
            raise EngineError(f"{op}: engine {self.collective.name} lacks {feature}: {why}")

    # ---- the one call -----------------------------------------------------------------------

    def _run(
        self,
        op: str,
        src: Buffer | None,
        dst: Buffer | None,
        count: int,
        reduction: int,
        root: int,
        async_op: bool,
        stream: Any,
        result: Any = ...,
    ) -> Any:
        if async_op:
            self._has("async", op)
        self.check_open(op)
        later = self.world.agenda.settle(stream, async_op=async_op)
        some = src or dst
        native = self.collective.run(
            op,
            some.dtype if some else 0,
            count,
            reduction,
            root,
            src.pointer if src else 0,
            dst.pointer if dst else 0,
            later,
        )
        if result is ...:
            result = dst.owner if dst else src.owner if src else None
        return self.world.agenda.work(op, native, result, (src, dst)) if async_op else result

    def _refuse(self, op: str, error: Exception) -> None:
        with contextlib.suppress(BiremeError):
            self.collective.refuse(op, f"{type(error).__name__}: {error}")

    def refusing(self, op: str) -> _Refusing:
        """Publish ``op`` as refused when the block raises for its arguments."""
        return _Refusing(functools.partial(self._refuse, op))


class _Refusing:
    """No generator: the frames of contextlib would stand where the user's line is looked for."""

    def __init__(self, refuse: Callable[[Exception], None]) -> None:
        self._refuse = refuse

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, (TypeError, ValueError, UsageError)):
            self._refuse(error)


def _reduction(op: str, buffer: Buffer) -> int:
    if op not in arrays.REDUCTIONS:
        raise ValueError(f"op: expected one of {', '.join(arrays.REDUCTIONS)}, found {op!r}")
    if op == "avg" and buffer.dtype not in arrays.FLOATS:
        raise TypeError(f"op: expected a float dtype for avg, found {buffer.name}")
    return arrays.REDUCTIONS.index(op)


def _target(out: Any, shape: Sequence[int], like: Buffer) -> tuple[Any, Buffer]:
    """Return where a result of ``shape`` goes: ``out`` after checks, or a new array."""
    if out is None:
        out = arrays.new(shape, like)
        return out, arrays.write(out, "out")
    dst = arrays.write(out, "out")
    if dst.dtype != like.dtype:
        raise TypeError(f"out: expected dtype {like.name}, found {dst.name}")
    if dst.shape != tuple(shape):
        raise ValueError(f"out: expected shape {tuple(shape)}, found {dst.shape}")
    return out, dst
