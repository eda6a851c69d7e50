"""Writes how each rank ended into the job's control segment, where the other ranks read it."""

from __future__ import annotations

import contextlib
import importlib
import os
import threading

from bireme.bootstrap.messages import Message
from bireme.errors import BiremeError

__all__ = ["Fates"]

_EXIT = 1
_SIGNAL = 2


class Fates:
    """How the ranks ended, and the control segment once rank 0 has made it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._codes: dict[int, int] = {}

    def observe(self, tag: str, parts: list[tuple[Message, list[int]]]) -> None:
        """Take the control segment from a hub's round: rank 0's descriptor under tag "control"."""
        fds = parts[0][1]
        if tag != "control" or not fds:
            return
        with self._lock:
            self._drop()
            self._fd = os.dup(fds[0])
            for rank, code in self._codes.items():
                self._write(rank, code)

    def note(self, rank: int, code: int) -> None:
        """Note a rank's end.

        Args:
            rank: The rank.
            code: Its exit code, or the negative number of the signal that killed it.
        """
        with self._lock:
            self._codes[rank] = code
            if self._fd >= 0:
                self._write(rank, code)

    def close(self) -> None:
        """Let go of the control segment."""
        with self._lock:
            self._drop()

    def _write(self, rank: int, code: int) -> None:
        kind = _SIGNAL if code < 0 else _EXIT
        # Not ours, or of a world that was never made because its ranks did not agree.
        with contextlib.suppress(BiremeError, ImportError, OSError, ValueError, RuntimeError):
            core = importlib.import_module("bireme._core")
            core.note_exit(self._fd, rank, kind, abs(code))

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
