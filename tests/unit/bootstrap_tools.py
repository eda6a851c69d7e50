"""What the tests of the bootstrap share: ranks as threads, memfds, one hub per test."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bireme.bootstrap import Hub, Rendezvous
from bireme.bootstrap.rounds import Observer

JOIN_S = 20.0


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


@contextlib.contextmanager
def pairs() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = pair()
    with left, right:
        yield left, right


@contextlib.contextmanager
def memfd(text: bytes) -> Iterator[int]:
    fd = os.memfd_create("test")
    try:
        os.write(fd, text)
        yield fd
    finally:
        os.close(fd)


def take_text(fd: int) -> bytes:
    """Read a memfd and close it."""
    try:
        return os.pread(fd, 1000, 0)
    finally:
        os.close(fd)


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def settles_at(count: int) -> bool:
    """Whether so many descriptors are open, soon: a hub closes its own in its own thread."""
    deadline = time.monotonic() + 5.0
    while open_fds() != count and time.monotonic() < deadline:
        time.sleep(0.005)
    return open_fds() == count


def raw_hub(size: int, observer: Observer | None = None) -> tuple[Hub, list[socket.socket]]:
    hub = Hub(size, observer)
    socks = []
    for rank in range(size):
        ours, theirs = pair()
        hub.add(rank, theirs)
        socks.append(ours)
    hub.start()
    return hub, socks


@contextlib.contextmanager
def raw(size: int, observer: Observer | None = None) -> Iterator[list[socket.socket]]:
    """A hub and the ranks' bare sockets."""
    hub, socks = raw_hub(size, observer)
    try:
        yield socks
    finally:
        for sock in socks:
            sock.close()
        hub.stop()


@contextlib.contextmanager
def ranks(size: int, observer: Observer | None = None) -> Iterator[list[Rendezvous]]:
    """A hub and the ranks' rendezvous."""
    hub, socks = raw_hub(size, observer)
    ends = [Rendezvous(rank, size, sock, origin="launcher") for rank, sock in enumerate(socks)]
    try:
        yield ends
    finally:
        for end in ends:
            end.close()
        hub.stop()


def together(count: int, call: Callable[[int], Any]) -> list[Any]:
    """Call a function in one thread per rank; return the results, an exception for one raised."""
    results: list[Any] = [None] * count

    def body(rank: int) -> None:
        try:
            results[rank] = call(rank)
        except Exception as error:  # noqa: BLE001 - it is handed to the test
            results[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
        assert not thread.is_alive(), "a rank hangs"
    return results
