"""One message is one datagram on a Unix SOCK_SEQPACKET socket: a JSON object and descriptors.

Nothing that arrives is executed or unpickled; a message that is too long, malformed or cut off is
refused and the descriptors that came with it are closed. Received descriptors are close-on-exec.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import time
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from bireme.errors import EngineError, PeerLost, Timeout

__all__ = ["MAX_BYTES", "MAX_FDS", "Message", "close_all", "receive", "send"]

Message = dict[str, Any]

MAX_BYTES = 64 * 1024
"""Most bytes of one message's JSON text."""

MAX_FDS = 16
"""Most descriptors attached to one message."""

_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_POLL_S = 60.0
_SEND_RETRY_S = 0.001


def encode(value: Message) -> bytes:
    """Return the JSON text of a message.

    Raises:
        TypeError: If the value is not a dict of JSON values.
        ValueError: If the text is longer than ``MAX_BYTES``.
    """
    if not isinstance(value, dict):
        raise TypeError(f"expected a dict as message, found {type(value).__name__}")
    data = json.dumps(value, separators=(",", ":")).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(
            f"expected at most {MAX_BYTES} bytes of JSON in a bootstrap message, found {len(data)}:"
            " pass large data in a memfd"
        )
    return data


def send(
    sock: socket.socket, value: Message, fds: Sequence[int] = (), timeout_s: float = 60.0
) -> None:
    """Send one message, waiting while the other end does not read.

    Args:
        sock: A connected SOCK_SEQPACKET socket.
        value: The JSON object.
        fds: Descriptors to attach, at most ``MAX_FDS``; the caller keeps its own.
        timeout_s: Longest wait, in seconds.

    Raises:
        TypeError: If the value is not a dict of JSON values.
        ValueError: If the message is too long or has too many descriptors.
        PeerLost: If the other end has closed.
        Timeout: If the other end does not read in time.
    """
    data = encode(value)
    check_fds(fds)
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return send_now(sock, data, fds)
        except BlockingIOError:
            if not _poll(sock, select.POLLOUT, deadline):
                raise _late("nobody read our message", timeout_s) from None
            time.sleep(_SEND_RETRY_S)
        except ConnectionError:
            raise _closed() from None


def send_now(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """Send encoded bytes without waiting.

    Raises:
        BlockingIOError: If the socket's buffer is full, or too many descriptors are under way
            (ETOOMANYREFS): try again later.
        ConnectionError: If the other end has closed.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    try:
        sock.sendmsg([data], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except OSError as error:
        if error.errno == errno.ETOOMANYREFS:
            raise BlockingIOError(error.errno, str(error)) from None
        raise


def receive(sock: socket.socket, timeout_s: float) -> tuple[Message, list[int]]:
    """Receive one message; the caller owns the descriptors that came with it.

    Args:
        sock: A connected SOCK_SEQPACKET socket.
        timeout_s: Longest wait, in seconds.

    Raises:
        PeerLost: If the other end has closed.
        Timeout: If nothing came in time.
        EngineError: If the message is too long, not a JSON object, or has too many descriptors.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(BlockingIOError):
            return receive_now(sock)
        if not _poll(sock, select.POLLIN, deadline):
            raise _late("no message came", timeout_s)


def receive_now(sock: socket.socket) -> tuple[Message, list[int]]:
    """Receive one message without waiting; see ``receive``.

    Raises:
        BlockingIOError: If there is no message now.
        PeerLost: If the other end has closed.
        EngineError: If the message is refused.
    """
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        data, ancillary, got, _ = sock.recvmsg(MAX_BYTES, _ANCILLARY_BYTES, flags)
    except ConnectionError:
        raise _closed() from None
    fds = _descriptors(ancillary)
    try:
        return _decode(data, got), fds
    except BaseException:
        close_all(fds)
        raise


def check_fds(fds: Sequence[int]) -> None:
    """Refuse more descriptors than one message carries.

    Raises:
        ValueError: If there are more than ``MAX_FDS``.
    """
    if len(fds) > MAX_FDS:
        raise ValueError(f"a message carries at most {MAX_FDS} descriptors, found {len(fds)}")


def close_all(fds: Iterable[int]) -> None:
    """Close descriptors; those that are closed already are skipped."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


def _decode(data: bytes, flags: int) -> Message:
    if flags & socket.MSG_TRUNC:
        raise EngineError(f"refused a bootstrap message of more than {MAX_BYTES} bytes")
    if flags & socket.MSG_CTRUNC:
        raise EngineError(
            f"refused a bootstrap message: more than {MAX_FDS} descriptors came with it, or this "
            "process may open no more of them (see ulimit -n)"
        )
    if not data:
        raise _closed()
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise EngineError(f"refused a bootstrap message that is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise EngineError(f"expected a JSON object as message, found {type(value).__name__}")
    return value


def _poll(sock: socket.socket, event: int, deadline: float) -> bool:
    """Wait for an event until the deadline; False when it has passed."""
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        return False
    poller = select.poll()
    poller.register(sock, event)
    poller.poll(int(min(left_s, _POLL_S) * 1000) + 1)
    return True


def _late(what: str, timeout_s: float) -> Timeout:
    return Timeout(f"{what} on the bootstrap socket within {timeout_s:g} s")


def _closed() -> PeerLost:
    return PeerLost("the other end of the bootstrap socket has closed: its process has ended")
