"""Lets the ranks of a job in through a listening socket, one seat per rank.

Whoever connects must have our user id and say within seconds which rank it is. A stranger, a rank
that has joined already and a rank that does not exist are told why and turned away.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable
from functools import partial

from bireme.bootstrap import messages
from bireme.bootstrap.messages import Message
from bireme.errors import BiremeError

__all__ = ["Door", "peer_uid"]

_PATIENCE_S = 5.0
_CREDENTIALS = struct.Struct("iII")  # struct ucred: pid, uid, gid


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end (SO_PEERCRED)."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(data)[1])


class Door:
    """Accepts connections on a selector that the hub runs.

    Args:
        listener: A listening SOCK_SEQPACKET socket; it becomes ours.
        selector: Where to register; the data of a key is a function of the events.
        seat: Called with (join message, socket); returns None when it has taken the socket, else
            why not.
        closed: Called once when the door has closed.
        patience_s: How long a stranger may stay silent, in seconds.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        seat: Callable[[Message, socket.socket], str | None],
        closed: Callable[[], None],
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._listener = listener
        self._selector = selector
        self._seat = seat
        self._closed = closed
        self._patience_s = patience_s
        self._strangers: dict[socket.socket, float] = {}
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def pause_s(self) -> float | None:
        """Return how long the hub may sleep before ``tick`` has something to do."""
        if not self._strangers:
            return None
        return max(0.0, min(self._strangers.values()) - time.monotonic())

    def tick(self) -> None:
        """Turn away strangers that stayed silent for too long."""
        now = time.monotonic()
        for sock in [sock for sock, until in self._strangers.items() if until <= now]:
            self._release(sock)
            _refuse(sock, f"no join message within {self._patience_s:g} s")

    def close(self) -> None:
        """Accept nobody any more."""
        self._selector.unregister(self._listener)
        self._listener.close()
        for sock in list(self._strangers):
            self._release(sock)
            sock.close()
        self._closed()

    def _accept(self, _events: int) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it went away again, or we may open no more descriptors now
        uid = peer_uid(sock)
        if uid != os.geteuid():
            _refuse(sock, f"this job belongs to user {os.geteuid()}, you are user {uid}")
            return
        self._strangers[sock] = time.monotonic() + self._patience_s
        self._selector.register(sock, selectors.EVENT_READ, partial(self._hear, sock))

    def _hear(self, sock: socket.socket, _events: int) -> None:
        if sock not in self._strangers:
            return
        self._release(sock)
        try:
            message, fds = messages.receive_now(sock)
        except (BiremeError, OSError) as error:
            _refuse(sock, str(error))
            return
        messages.close_all(fds)
        error_text = self._seat(message, sock)
        if error_text is not None:
            _refuse(sock, error_text)

    def _release(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._strangers[sock]


def _refuse(sock: socket.socket, error: str) -> None:
    with contextlib.suppress(OSError):
        messages.send_now(sock, messages.encode({"kind": "refused", "error": error}))
    sock.close()
