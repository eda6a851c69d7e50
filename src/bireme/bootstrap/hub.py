"""The server of the bootstrap: an all-gather of small messages and descriptors among the ranks.

It runs in one daemon thread of our launcher, or of rank 0 under another, and never waits for any
one rank: every socket is read and written without blocking.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from bireme.bootstrap import messages
from bireme.bootstrap.door import Door
from bireme.bootstrap.messages import Message
from bireme.bootstrap.rounds import Descriptors, Observer, Rounds
from bireme.errors import BiremeError, EngineError, PeerLost, UsageError

__all__ = ["Hub"]

_DRAIN_S = 2.0
_CROWDED_S = 0.002
_CLOSED = "its process has ended, or it has closed its connection"


class _End:
    """Our end of one rank's connection."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank = rank
        self.sock = sock
        self.outbox: deque[tuple[bytes, Descriptors | None]] = deque()
        self.events = selectors.EVENT_READ
        self.farewell = _CLOSED

    def pop(self) -> None:
        """Drop the oldest message."""
        _, fds = self.outbox.popleft()
        if fds:
            fds.release()

    def close(self) -> None:
        while self.outbox:
            self.pop()
        self.sock.close()


class Hub:
    """Serves all-gathers to the ranks of one job.

    Each rank sends ``{"kind": "gather", "tag", "rank", "value"}`` with descriptors. When all have,
    each gets ``size`` such messages in rank order, with the descriptors of each rank. When a rank
    sends ``{"kind": "failed", "error"}``, disconnects, or is at another tag, each gets
    ``{"kind": "failed", "rank", "error"}`` in answer to its gather. A text ``ticket`` in a gather
    comes back in its answers. Rounds repeat on the same connections.

    Args:
        size: Number of ranks.
        observer: Called in the hub's thread with (tag, [(message, descriptors)] in rank order)
            when a round has ended well; the descriptors are closed afterwards, so keep a dup.

    Raises:
        ValueError: If the size is not positive.
    """

    def __init__(self, size: int, observer: Observer | None = None) -> None:
        if size < 1:
            raise ValueError(f"expected a size of at least 1, found {size}")
        self.size = size
        self._rounds = Rounds(size, self._post, observer)
        self._added: set[int] = set()
        self._ends: dict[int, _End] = {}
        self._dirty: set[_End] = set()
        self._door: Door | None = None
        self._todo: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._stop_by: float | None = None
        self._closed = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._woken)

    def add(self, rank: int, sock: socket.socket) -> None:
        """Give the hub its end of a rank's socketpair; it becomes the hub's to close.

        Args:
            rank: 0 to size - 1.
            sock: A connected SOCK_SEQPACKET socket.

        Raises:
            ValueError: If the rank is out of range.
            UsageError: If the rank has been added before, or the hub has stopped.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"expected a rank from 0 to {self.size - 1}, found {rank}")
        if rank in self._added:
            raise UsageError(f"rank {rank} has been added to this hub before")
        self._enqueue(partial(self._seat, rank, sock))
        self._added.add(rank)

    def listen(self, listener: socket.socket, closed: Callable[[], None]) -> None:
        """Let the ranks that were not added join through a listening socket.

        Args:
            listener: A listening SOCK_SEQPACKET socket; it becomes the hub's to close.
            closed: Called once, when all ranks have joined or the hub stops.

        Raises:
            UsageError: If the hub has stopped.
        """
        self._enqueue(partial(self._open_door, listener, closed))

    def lost(self, rank: int, error: str) -> None:
        """Tell the hub that a rank's process has ended, where its parent saw it first.

        Args:
            rank: The rank.
            error: How it ended, for the other ranks' error texts.
        """
        if not self._closed:
            self._enqueue(partial(self._lose, rank, error))

    def start(self) -> None:
        """Start serving in a daemon thread.

        Raises:
            UsageError: If the hub was started or stopped before.
        """
        if self._thread is not None or self._closed:
            raise UsageError("a hub starts once: make a new Hub")
        self._thread = threading.Thread(target=self._serve, name="bireme-hub", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Deliver what is under way (for 2 s at most), close every connection, join the thread."""
        if self._closed:
            return
        self._closed = True
        self._stop_by = time.monotonic() + _DRAIN_S
        if self._thread is None:
            self._serve()
        else:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        os.close(self._wake)

    # Everything below runs in the hub's thread.

    def _serve(self) -> None:
        try:
            self._run_todo()
            while self._stop_by is None or self._drains():
                for key, events in self._selector.select(self._pause_s()):
                    key.data(events)
                self._run_todo()
            self._run_todo()
        finally:
            self._close()

    def _drains(self) -> bool:
        busy = any(end.outbox for end in self._ends.values())
        return busy and self._stop_by is not None and time.monotonic() < self._stop_by

    def _pause_s(self) -> float | None:
        if self._stop_by is not None:
            return 0.01
        return self._door.pause_s() if self._door else None

    def _run_todo(self) -> None:
        while self._todo:
            self._todo.popleft()()
        if self._door:
            self._door.tick()
        while self._dirty:
            self._flush(self._dirty.pop())

    def _close(self) -> None:
        if self._door:
            self._door.close()
        for end in self._ends.values():
            end.close()
        self._ends.clear()
        self._rounds.close()
        self._selector.close()

    def _enqueue(self, call: Callable[[], None]) -> None:
        """Have the hub's thread call something; any thread may ask."""
        if self._closed:
            raise UsageError("this hub has stopped: make a new Hub")
        self._todo.append(call)
        os.eventfd_write(self._wake, 1)

    def _woken(self, _events: int) -> None:
        os.eventfd_read(self._wake)

    def _seat(self, rank: int, sock: socket.socket) -> None:
        end = _End(rank, sock)
        self._ends[rank] = end
        self._rounds.enter(rank)
        self._selector.register(sock, end.events, partial(self._ready, end))
        self._shut_door_when_full()

    def _open_door(self, listener: socket.socket, closed: Callable[[], None]) -> None:
        self._door = Door(listener, self._selector, self._join, closed)
        self._shut_door_when_full()

    def _shut_door_when_full(self) -> None:
        if self._door and len(self._ends) == self.size:
            self._door.close()
            self._door = None

    def _join(self, message: Message, sock: socket.socket) -> str | None:
        """Seat a rank that came through the door, or say why not."""
        rank, size = message.get("rank"), message.get("size", self.size)
        if message.get("kind") != "join" or type(rank) is not int:
            return 'expected {"kind": "join", "rank": r} as first message'
        if not 0 <= rank < self.size or size != self.size:
            return f"this job has {self.size} ranks, you are rank {rank} of {size!r}"
        if rank in self._ends:
            return f"rank {rank} has joined already: is another job using the same name?"
        self._seat(rank, sock)
        self._post(rank, {"kind": "joined", "size": self.size}, None)
        return None

    def _lose(self, rank: int, error: str) -> None:
        """Take what a dead rank has still said, then drop it."""
        end = self._ends.get(rank)
        if end is None:
            self._rounds.leave(rank, error)
            return
        end.farewell = error
        while self._ends.get(rank) is end and self._hear(end):
            pass
        self._drop(end, error)

    def _drop(self, end: _End, error: str) -> None:
        if self._ends.get(end.rank) is end:
            del self._ends[end.rank]
            self._dirty.discard(end)
            self._selector.unregister(end.sock)
            end.close()
            self._rounds.leave(end.rank, error)

    def _ready(self, end: _End, events: int) -> None:
        if self._ends.get(end.rank) is not end:
            return
        if events & selectors.EVENT_WRITE:
            self._dirty.add(end)
        if events & selectors.EVENT_READ:
            self._hear(end)

    def _hear(self, end: _End) -> bool:
        """Take one message of a rank; False when there is none."""
        try:
            message, fds = messages.receive_now(end.sock)
            self._obey(end.rank, message, Descriptors(fds))
        except BlockingIOError:
            return False
        except PeerLost:
            self._drop(end, end.farewell)
        except (BiremeError, OSError) as error:
            self._drop(end, str(error))
        return True

    def _obey(self, rank: int, message: Message, fds: Descriptors) -> None:
        kind = message.get("kind")
        if kind == "gather":
            return self._rounds.ask(rank, message, fds)
        fds.release()
        if kind != "failed":
            raise EngineError(f"sent a message of the unknown kind {kind!r}")
        return self._rounds.fail(rank, str(message.get("error", "no reason given")))

    def _post(self, rank: int, message: Message, fds: Descriptors | None) -> None:
        """Queue a message for a rank; ``_run_todo`` sends it."""
        end = self._ends.get(rank)
        if end:
            end.outbox.append((messages.encode(message), fds.hold() if fds else None))
            self._dirty.add(end)

    def _flush(self, end: _End) -> None:
        """Send what a rank's socket takes; what is left goes when it becomes writable."""
        while end.outbox:
            data, fds = end.outbox[0]
            try:
                messages.send_now(end.sock, data, fds.fds if fds else ())
            except BlockingIOError as error:
                if error.errno == errno.ETOOMANYREFS:
                    time.sleep(_CROWDED_S)
                break
            except OSError:
                pass  # it is gone; reading its socket will say so
            end.pop()
        self._select(end)

    def _select(self, end: _End) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if end.outbox else 0)
        if events != end.events:
            end.events = events
            self._selector.modify(end.sock, events, partial(self._ready, end))
