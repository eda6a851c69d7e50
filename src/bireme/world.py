"""World and Group: what a user holds.

``init`` makes the world of all ranks; ``split`` and ``group`` make groups of some. Both have the
two faces: the collectives (``bireme.collectives``) and ``symmetric`` (``bireme.symmetric``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bireme import _core, arrays
from bireme.agenda import Agenda
from bireme.allocation import Block, Symmetric
from bireme.arena import Arena
from bireme.collectives import Collectives
from bireme.errors import BiremeError, MismatchError, UsageError
from bireme.host import ABORTED, CLOSED, FAILED, FINISHED
from bireme.routes import Routes

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

    from bireme.engines.base import CollectiveEngine, OneSidedEngine
    from bireme.host import Host
    from bireme.observe.record import Record
    from bireme.streams import Stream

__all__ = ["Group", "World"]

_INT64 = arrays.DTYPES.index("int64")


class Group(Collectives):
    """Some ranks of a world, with both faces. Made by ``split`` or ``group``, never directly."""

    def __init__(
        self, world: World, ranks: Sequence[int], collective: CollectiveEngine, arena: Arena
    ) -> None:
        self.world = world
        self.ranks = tuple(ranks)
        self.size = len(self.ranks)
        self.rank = self.ranks.index(world.world_index)
        self.collective = collective
        self.arena: Arena = arena
        self.symmetric: Symmetric = Symmetric(self)
        self._closed = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, ranks={self.ranks})"

    @property
    def one_sided(self) -> OneSidedEngine:
        """The engine of the one-sided face for host memory."""
        return self.world.host.one_sided

    @property
    def slot(self) -> int:
        """The group's number in the record of calls; 0 is the world."""
        return int(getattr(getattr(self.collective, "channel", None), "slot", 0))

    def world_rank(self, rank: int, what: str) -> int:
        """Return the world rank of a rank of this group.

        Raises:
            ValueError, TypeError: If there is no such rank; ``what`` names the call.
        """
        self._rank_of(rank, f"{what}: peer")
        return self.ranks[rank]

    def check_open(self, what: str) -> None:
        """Raise UsageError where the group or the world is closed."""
        if self._closed or self.world.closed:
            raise UsageError(f"{what}: rank {self.rank} has closed this group")

    def barrier(self, *, stream: Any = None) -> None:
        """Wait until all ranks of the group have come, with all their puts done (shmem_barrier)."""
        if stream is not None or not self.collective.barrier_lane():
            self.check_open("barrier")
            self.world.agenda.settle(stream)
            self.one_sided.quiet(self.slot)
            self.collective.run("barrier", _INT64, 0)
        self.world.agenda.quiet()
        if self.collective.all_dropped:
            self.symmetric.collect()

    def quiet(self, *, stream: Any = None) -> None:
        """Complete all earlier puts and gets of this rank, at their targets (shmem_quiet)."""
        if stream is not None or not self.collective.quiet_lane():
            self.world.agenda.settle(stream)
            self.one_sided.quiet(self.slot)
        self.world.agenda.quiet()

    def fence(self, *, stream: Any = None) -> None:
        """Order this rank's earlier puts before its later ones, peer by peer (shmem_fence)."""
        self.world.agenda.settle(stream)
        self.one_sided.fence(self.slot)

    def split(self, color: int | None, key: int = 0, heap_bytes: int = 0) -> Group | None:
        """Make one group of all ranks that give the same colour (ncclCommSplit, MPI_Comm_split).

        Every rank of this group calls it.

        Args:
            color: 0 or more; ``None`` to be in no new group.
            key: Order within the new group; equal keys keep this group's order.
            heap_bytes: Size of the new group's own part of the heap, for ``new.symmetric``, taken
                from this group's part. The same for all ranks of one colour.

        Returns:
            The new group, or ``None`` for colour ``None``.

        Raises:
            MismatchError: If some rank does not call split, or one colour has two heap sizes.
            EngineError: If the heap has no room, or no group slot is free.
        """
        with self.refusing("split"):
            self.check_open("split")
            wish = _wish(color, key, heap_bytes)
        self.collective.run("split", _INT64, 0)
        table = self.exchange(wish)
        for c in set(table[:, 0].tolist()) - {-1}:
            sizes = table[table[:, 0] == c, 2]
            if len(set(sizes.tolist())) > 1:
                raise MismatchError(
                    f"split: expected one heap_bytes for colour {c}, found {sizes.tolist()} "
                    f"on ranks {np.flatnonzero(table[:, 0] == c).tolist()}"
                )
        room = int(table[table[:, 0] >= 0, 2].max(initial=0))
        members = sorted(
            (r for r in range(self.size) if table[r, 0] == wish[0]), key=lambda r: (table[r, 1], r)
        )
        return self._part(members if color is not None else None, room, wish[2])

    def group(self, ranks: Sequence[int], heap_bytes: int = 0) -> Group | None:
        """Make a group of the given ranks, in that order; every rank of this group calls it.

        Args:
            ranks: Ranks of this group, without repetition; the same on all ranks.
            heap_bytes: As in ``split``.

        Returns:
            The new group, or ``None`` on ranks that are not in it.
        """
        with self.refusing("split"):
            for r in ranks:
                self._rank_of(r, "ranks")
            if len(set(ranks)) != len(ranks):
                raise ValueError(f"ranks: expected no repetition, found {list(ranks)}")
            room = _wish(None, 0, heap_bytes)[2]
            self.check_open("split")
        wanted = f"group of ranks {[int(r) for r in ranks]}, heap_bytes {room}"
        self.collective.run("split", _INT64, 0, detail=wanted)
        return self._part([int(r) for r in ranks] if self.rank in ranks else None, room, room)

    def _part(self, members: list[int] | None, room: int, own: int) -> Group | None:
        """Make the group of ``members``; every rank sets ``room`` bytes aside, ``own`` for its use.

        What was set aside is a block of this group's memory: it is free again when the members
        have closed their group and no view is left. Ranks without the group drop it at once.
        """
        block = Block(self, *self.arena.allocate(room)) if room else None
        arena = Arena(block.offset, own, block) if block else Arena(0, 0)
        engine = self.collective.split(members)
        if engine is None or members is None:
            return None
        return Group(self.world, [self.ranks[r] for r in members], engine, arena)

    def exchange(self, words: Sequence[int]) -> np.ndarray[Any, Any]:
        """Return one row of int64 words from every rank; a collective of the group."""
        mine = np.array(words, np.int64)
        table = np.empty((self.size, len(words)), np.int64)
        self.collective.run(
            "agree", _INT64, len(words), src=mine.ctypes.data, dst=table.ctypes.data
        )
        return table

    @contextlib.contextmanager
    def flow(self, label: str) -> Iterator[None]:
        """Label the calls of this thread inside the block, for routes and the flow table."""
        if self.world.host.control is None:
            yield
            return
        before = _core.current_flow()
        _core.set_flow(_core.flow(self.world.host.control, label))
        try:
            yield
        finally:
            _core.set_flow(before)

    def close(self) -> None:
        """Leave the group; every rank of it calls it. Its arrays are gone afterwards."""
        if self._closed or self.world.closed:
            return
        self.world.agenda.settle(None)
        self.one_sided.quiet(self.slot)
        self._closed = True
        self.collective.close()
        self.arena = Arena(0, 0)


def _wish(color: int | None, key: int, heap_bytes: int) -> list[int]:
    words = {"color": 0 if color is None else color, "key": key, "heap_bytes": heap_bytes}
    for name, value in words.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise TypeError(f"{name}: expected an integer, found {value!r}")
        if value < 0 and name != "key":
            raise ValueError(f"{name}: expected at least 0, found {value}")
    return [-1 if color is None else int(color), int(key), int(heap_bytes)]


class World(Group):
    """All ranks of a program. Made by ``bireme.init``; a context manager that closes it."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.world_index = host.rank
        self.closed = False
        self.device = "cpu"
        self.local_rank = host.local_rank
        self.local_size = host.local_size
        self.agenda = Agenda(host)
        super().__init__(
            self, range(host.size), host.collective, Arena(0, host.one_sided.heap_bytes)
        )

    def __enter__(self) -> World:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.fail(error)

    @property
    def record(self) -> Record:
        """What happened: the calls and the flow table; see ``bireme.observe.record``."""
        from bireme.observe.record import Record

        return Record(self.host.control, self.size)

    @property
    def routes(self) -> Routes:
        """Which engine and algorithm carries a call, and why."""
        return Routes(self)

    def stream(self) -> Stream:
        """Make a stream: an ordered queue of asynchronous calls with its own progress thread."""
        return self.agenda.stream()

    def use(self, stream: Stream) -> AbstractContextManager[Stream]:
        """Make ``stream`` the current stream of this thread inside a ``with`` block."""
        return self.agenda.use(stream)

    def synchronize(self) -> None:
        """Block until all asynchronous calls on all streams have finished."""
        for stream in self.agenda.streams:
            stream.synchronize()

    # ---- the end ----------------------------------------------------------------------------

    def close(self) -> None:
        """End the world; every rank calls it, and it waits for them until the deadline.

        After a mismatch or another rank's failure it only lets go of this rank's part.

        Raises:
            MismatchError: If another rank made a different call instead.
            PeerLost, Timeout: If another rank does not come.
        """
        if self.closed:
            return
        try:
            if not self.host.aborted():
                with contextlib.suppress(BiremeError):
                    self.synchronize()
                self.one_sided.quiet(0)
                self.collective.close()
        finally:
            self._let_go(CLOSED, "")

    def fail(self, error: BaseException) -> None:
        """End this rank's part after an exception: the other ranks raise PeerLost with its text."""
        if self.closed:
            return
        self._let_go(FAILED, self.host.fail(error))

    def abort(self, text: str) -> None:
        """End the world for all ranks at once: every call raises Aborted with this text."""
        self.host.abort(ABORTED, f"rank {self.rank} aborted the world: {text}")

    def exit(self) -> None:
        """What interpreter exit does to a world that was not closed: the others hear of it."""
        if self.host.ours:
            self._let_go(FINISHED, "")

    def _let_go(self, state: int, note: str) -> None:
        self.closed = self._closed = True
        self.agenda.report(self.rank)
        self.host.leave(self.agenda.streams, state, note)
