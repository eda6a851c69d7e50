"""The two contracts: what an engine must do to carry a world's traffic.

A world holds one pair per kind of memory: a collective and a one-sided engine for host memory, and
another pair for device memory where there are GPUs. The faces (``collectives``, ``symmetric``)
check every argument before they call an engine once; an engine may trust what it is given.

``lacks`` maps a feature to the reason why this engine has it not. The faces refuse a call that
needs a lacking feature before anything moves. The features are::

    "send_recv"     two-sided messages          "split"         groups
    "bits"          the left fold in rank order  "async"         work on a stream
    "lazy"          late delivery for tests      "peer_address"  load/store access to peers
    "reduce:<dtype>" / "atomic:<dtype>"          reductions and atomics of one element type
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

__all__ = ["CollectiveEngine", "OneSidedEngine"]


class CollectiveEngine(Protocol):
    """One group's way to move data by calls that all its ranks make (an NCCL communicator)."""

    name: str
    lacks: Mapping[str, str]

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
        """Run one collective; every rank of the group calls it.

        Args:
            op: ``"all_reduce"``, ``"barrier"``, ``"allocate"``, ... as the recorder names them.
            dtype: Index into ``arrays.DTYPES``.
            count: Elements of one rank's part.
            reduction: Index into ``arrays.REDUCTIONS``.
            root: Rank in the group, or -1.
            src, dst: Addresses; 0 where this rank has none.
            stream: Where to queue the work; ``None`` runs it before returning.
            detail: What else must be the same on all ranks, in words.

        Returns:
            A native work handle, or ``None`` when the work is done.
        """

    def lane(self, kind: int, x: Any, out: Any, op: Any, root: Any) -> bool:
        """Run a call at once where its arguments need no more than a glance.

        Args:
            kind: Index into the recorder's names.
            x, out, op, root: As the user gave them.

        Returns:
            False where the face must check them in full; nothing has happened then.
        """

    @property
    def all_dropped(self) -> bool:
        """Whether every rank told the last barrier of arrays that it has dropped."""

    def dropped(self, by: int) -> None:
        """Count arrays that this rank has dropped, for the next barrier to tell."""

    def quiet_lane(self) -> bool:
        """Complete this rank's puts at once; False where the face must."""

    def barrier_lane(self) -> bool:
        """Complete this rank's puts and run a barrier at once; False where the face must."""

    def refuse(self, op: str, why: str) -> None:
        """Tell the group that this rank's arguments were wrong, using up the call's number."""

    def send(self, dtype: int, count: int, peer: int, src: int, stream: Any = None) -> Any:
        """Send to a rank of the group, which must call ``recv`` with the same dtype and count."""

    def recv(self, dtype: int, count: int, peer: int, dst: int, stream: Any = None) -> Any:
        """Receive what ``send`` sent."""

    def split(self, members: Sequence[int] | None) -> CollectiveEngine | None:
        """Make the engine of a subgroup; every rank of this group calls it.

        Args:
            members: Ranks of this group that form the caller's new group, in its order; ``None``
                where the caller joins none.
        """

    def close(self) -> None:
        """Leave the group; every rank calls it."""


class OneSidedEngine(Protocol):
    """A world's symmetric heap, addressed by offset, and what one rank alone can do with it."""

    name: str
    lacks: Mapping[str, str]
    heap_bytes: int
    defers: bool  # whether the source of a put_nbi is read after the call has returned

    def view(self, rank: int, offset: int, nbytes: int, owner: object) -> Any:
        """Return the heap of ``rank`` as a uint8 array that keeps ``owner`` alive."""

    def address(self, rank: int, offset: int) -> int | None:
        """Return where this process can load and store that memory, or ``None``."""

    def commit(self, offset: int, nbytes: int, ranks: int) -> int | None:
        """Take memory for the own part of that range, as ``ranks`` ranks of this host do now.

        Returns:
            ``None`` when it is taken. Where the system has not enough for all of them, how many
            bytes it has; nothing is taken then.
        """

    def zero(self, offset: int, nbytes: int) -> None:
        """Clear the own part."""

    def release(self, offset: int, nbytes: int) -> None:
        """Give the memory of the own part back; it reads as zeros afterwards."""

    def place(
        self, group: CollectiveEngine, ranks: Sequence[int], offset: int, count: int, dtype: int
    ) -> Any:
        """Return an object whose ``put`` and ``get`` do the plain cases at once, or ``None``."""

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
        """Write ``count`` elements to ``offset`` at ``peer`` (a world rank), then its signal."""

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
        """Read ``count`` elements from ``offset`` at ``peer``."""

    def atomic(
        self, group: int, dtype: int, offset: int, peer: int, op: str, value: Any, condition: Any
    ) -> Any:
        """Apply one atomic operation and return the old value."""

    def signal(self, group: int, offset: int, peer: int, value: int, *, add: bool) -> None:
        """Set or add to a signal word at ``peer``."""

    def signal_wait(
        self, group: int, ranks: Sequence[int], offset: int, compare: str, value: int
    ) -> int:
        """Wait until the own signal word compares; return its value."""

    def signal_read(self, offset: int) -> int:
        """Return the own signal word."""

    def fence(self, group: int) -> None:
        """Order earlier puts before later ones, peer by peer."""

    def quiet(self, group: int) -> None:
        """Complete all earlier puts and gets of this rank, at their targets."""

    def close(self) -> None:
        """Let the heap go; memory that views still show stays mapped."""
