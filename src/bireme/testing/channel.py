"""One line of JSON per message over a socket: how a test session talks to its workers."""

from __future__ import annotations

import json
import socket
from typing import Any

__all__ = ["Channel", "Message"]

Message = dict[str, Any]


class Channel:
    """One end of a stream of messages.

    Args:
        sock: A connected stream socket; the channel owns it.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor, which is what ``selectors`` asks for."""
        return self._sock.fileno()

    def send(self, message: Message) -> None:
        """Send one message; blocks while the socket is full.

        Raises:
            OSError: If the other end is gone.
        """
        # What tests attach to reports may be of any type: their text is enough.
        self._sock.sendall(json.dumps(message, default=str).encode() + b"\n")

    def poll(self) -> Message | None:
        """Read once and return a message if one is complete; sets ``ended`` at end of stream."""
        if b"\n" not in self._buffer:
            try:
                chunk = self._sock.recv(1 << 20)
            except ConnectionError:
                chunk = b""
            self._buffer += chunk
            self.ended = not chunk
        line, found, rest = self._buffer.partition(b"\n")
        if not found:
            return None
        self._buffer = rest
        message: Message = json.loads(line)
        return message

    def receive(self) -> Message | None:
        """Return the next message, or None once the other end is gone; blocks."""
        while not self.ended:
            message = self.poll()
            if message is not None:
                return message
        return None

    def close(self) -> None:
        """Close the socket; the other end reads the end of the stream."""
        self._sock.close()
