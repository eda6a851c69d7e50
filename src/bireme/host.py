"""What a world holds on one host: the engine pair, the control segment, and how it is made.

``init`` finds the other ranks, shares memory with them and makes the pair. It is all or nothing:
a rank that cannot join tells the others, and all raise.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from bireme import _core, knobs, memory
from bireme.bootstrap import Rendezvous, join
from bireme.engines.null import NullCollective, NullOneSided
from bireme.engines.shm import ShmCollective, ShmOneSided
from bireme.errors import BiremeError, MismatchError, UsageError

if TYPE_CHECKING:
    from bireme.engines.base import CollectiveEngine, OneSidedEngine
    from bireme.streams import Stream
    from bireme.world import World

__all__ = ["Host", "current", "init"]

PEER_LOST, ABORTED = 3, 5  # native/layout.h: enum class Code
CLOSED, FINISHED, FAILED = 2, 3, 4  # native/layout.h: enum class RankState
_ADDRESSES = 32 << 40  # bytes of the address space that all heaps together may reserve
_NULL_HEAP_BYTES = 1 << 30
_SPINS = 2000  # polls before a wait yields, where every rank has a core of its own
log = logging.getLogger("bireme")
_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_lock = threading.Lock()


class Host:
    """The host pair and its control segment."""

    def __init__(
        self,
        rank: int,
        size: int,
        collective: CollectiveEngine,
        one_sided: OneSidedEngine,
        control: Any = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.collective = collective
        self.one_sided = one_sided
        self.control = control
        self.local_rank = rendezvous.local_rank if rendezvous else rank
        self.local_size = rendezvous.local_size if rendezvous else size
        self._rendezvous = rendezvous
        self._pid = os.getpid()

    def aborted(self) -> bool:
        """Return whether some rank has ended the world."""
        return self.control is not None and bool(self.control.aborted())

    def abort(self, code: int, text: str) -> None:
        """End the world for all ranks; the first text wins. A forked child ends nobody's."""
        if self.control is not None and self.ours:
            self.control.abort(code, text)

    def fail(self, error: BaseException) -> str:
        """Tell the other ranks that an exception ends this one; return its text."""
        text = f"{type(error).__name__}: {error}".strip(": ")
        self.abort(PEER_LOST, f"rank {self.rank} failed: {text}")
        return text

    def leave(self, streams: Sequence[Stream], state: int, note: str) -> None:
        """Let go of everything; ``state`` and ``note`` tell the other ranks why."""
        if self.control is not None and self.ours:
            self.control.set_state(state, note)
            self.control.stop()
            for stream in streams:
                stream.stop()
            self.control.forget()
        self.one_sided.close()
        if self.control is not None:
            self.control.close_descriptors()
        if self._rendezvous is not None:
            self._rendezvous.close()

    @property
    def ours(self) -> bool:
        """Whether this is the process that joined, not a forked child of it."""
        return self._pid == os.getpid()


def current() -> World | None:
    """Return the world that is open in this process, or ``None``."""
    return next((w for w in _worlds if not w.closed), None)


def init(
    *,
    engine: str | None = None,
    heap_bytes: int | str | None = None,
    timeout_s: float | None = None,
    warn_s: float | None = None,
    delivery: str | None = None,
    rank: int | None = None,
    size: int | None = None,
) -> World:
    """Join the world; every rank of the program calls it once.

    The ranks find each other through ``bireme run`` or torchrun; a process started alone is a world
    of one rank. What is not given comes from the knobs (docs/knobs.md).

    Args:
        engine: ``"shm"``, or ``"null"`` for one rank without others.
        heap_bytes: How far each rank's heap may grow, a number or ``"4G"``; equal on all.
        timeout_s: Deadline of every wait, in seconds.
        warn_s: After how many seconds a wait prints a warning.
        delivery: ``"eager"``; ``"lazy"`` or ``"random"`` test that a program synchronises enough.
        rank, size: Only with ``engine="null"``: which rank of how many to pretend to be.

    Returns:
        The world; use it in a ``with`` statement, or close it.

    Raises:
        UsageError: If this process has a world already.
        MismatchError: If the ranks give different settings.
        PeerLost, Timeout: If another rank fails or does not come.
        EngineError: If the system refuses what the engine needs.
    """
    from bireme.world import World

    settings = {
        "BIREME_ENGINE": engine,
        "BIREME_HEAP_BYTES": heap_bytes,
        "BIREME_TIMEOUT_S": timeout_s,
        "BIREME_WARN_S": warn_s,
        "BIREME_DELIVERY": delivery,
    }
    with _lock, knobs.override(**{k: v for k, v in settings.items() if v is not None}):
        if current() is not None:
            raise UsageError("init: this process has an open world already; close it first")
        _configure_log()
        if knobs.get("BIREME_ENGINE") == "null":
            world = World(_null_host(rank, size))
        elif rank is not None or size is not None:
            raise ValueError('init: rank= and size= are for engine="null"; others find them out')
        else:
            world = World(_shm_host())
        _worlds.add(world)
    return world


def _configure_log() -> None:
    log.setLevel(knobs.get("BIREME_LOG").upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("bireme: %(message)s"))
        log.addHandler(handler)


def _null_host(rank: int | None, size: int | None) -> Host:
    me, n = rank or 0, 1 if size is None else size
    if not 0 <= me < n:
        raise ValueError(f"init: expected a rank from 0 to {n - 1}, found {me}")
    asked = knobs.get("BIREME_HEAP_BYTES")
    heap = NullOneSided(_NULL_HEAP_BYTES if asked is None else asked, me)
    return Host(me, n, NullCollective(n, me), heap)


def _shm_host() -> Host:
    deadline = min(float(knobs.get("BIREME_TIMEOUT_S")), 300.0)
    rendezvous = join(timeout_s=deadline)
    try:
        host = _share(rendezvous, deadline)
    except BaseException as error:
        with contextlib.suppress(BiremeError, OSError):
            rendezvous.fail(f"{type(error).__name__}: {error}")
        rendezvous.close()
        raise
    if rendezvous.rank == 0:
        log.info("engine shm on %d ranks, folds with %s", rendezvous.size, _core.isa())
    return host


def _share(rendezvous: Rendezvous, deadline: float) -> Host:
    """Exchange the descriptors and make the pair."""
    rank, size = rendezvous.rank, rendezvous.size
    heap_bytes = _heap_bytes(size)
    delivery = knobs.get("BIREME_DELIVERY")
    own = [_core.create_segment("bireme-control", _core.segment_bytes(size))] if rank == 0 else []
    try:
        told = rendezvous.all_gather("control", {}, own, timeout_s=deadline)
    finally:
        _close_all(own)
    control_fd = told[0][1][0]
    pidfd = _pidfd()
    own = [_core.create_segment("bireme-heap", 0), *pidfd]
    value = {"pid": os.getpid(), "heap_bytes": heap_bytes, "delivery": delivery}
    try:
        told = rendezvous.all_gather("ranks", value, own, timeout_s=deadline)
    finally:
        _close_all(own)
    heaps = [fds[0] for _, fds in told]
    pidfds = [fds[1] if len(fds) > 1 else -1 for _, fds in told]
    for name in ("heap_bytes", "delivery"):
        found = [v[name] for v, _ in told]
        if len(set(map(str, found))) > 1:
            _close_all([control_fd, *heaps, *(fd for fd in pidfds if fd >= 0)])
            raise MismatchError(f"init: expected one {name} on all ranks, found {found}")
    cores = len(os.sched_getaffinity(0))
    spin = knobs.get("BIREME_SPIN")
    control = _core.Control(
        control_fd, rank, size, pidfds, [int(v["pid"]) for v, _ in told],
        float(knobs.get("BIREME_TIMEOUT_S")), float(knobs.get("BIREME_WARN_S")),
        spin if spin >= 0 else (_SPINS if size <= cores else 0),
    )  # fmt: skip
    one_sided = ShmOneSided(
        control, heaps, heap_bytes, delivery, seed=knobs.get("BIREME_SEED") + rank
    )
    collective = ShmCollective(control, one_sided.native, 0, range(size), rank)
    rendezvous.all_gather("ready", {}, timeout_s=deadline)
    return Host(rank, size, collective, one_sided, control, rendezvous)


def _heap_bytes(size: int) -> int:
    """Return how many addresses to reserve for each rank's heap."""
    nbytes = knobs.get("BIREME_HEAP_BYTES")
    if nbytes is None:  # no more than the machine has; all heaps must fit the address space
        nbytes = min(memory.total_bytes(), _ADDRESSES // size)
    return -(-int(nbytes) // 4096) * 4096


def _pidfd() -> list[int]:
    try:
        return [os.pidfd_open(os.getpid())]
    except (AttributeError, OSError) as error:
        log.info("no pidfd (%s): peers are watched by their process id", error)
        return []


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _at_exit() -> None:
    for world in list(_worlds):
        if not world.closed:
            world.exit()


def _after_fork() -> None:
    for world in list(_worlds):
        if world.host.control is not None:
            world.host.control.forked()


def _failing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Tell the other ranks why this one ends, then do what Python would do."""
    for world in list(_worlds):
        if not world.closed and world.host.control is not None and world.host.ours:
            world.host.control.set_state(FAILED, world.host.fail(error))
    _previous_hook(kind, error, trace)


_previous_hook = sys.excepthook
sys.excepthook = _failing
atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork)
_core.set_package(str(Path(__file__).parent) + os.sep)
