"""Processes that a test started: their stray output, their stacks, their end."""

from __future__ import annotations

import contextlib
import os
import signal
import time

__all__ = ["Log", "dump_stacks", "how_it_ended"]

_DUMP_S = 2.0  # for the stacks to be written


class Log:
    """A file in memory that a worker writes its stray output and its stacks to."""

    def __init__(self, name: str) -> None:
        self.fd = os.memfd_create(name)
        self._read = 0

    def size(self) -> int:
        """Return how much was written."""
        return os.fstat(self.fd).st_size

    def take(self) -> str:
        """Return what was written since the last call."""
        data = os.pread(self.fd, self.size() - self._read, self._read)
        self._read += len(data)
        return data.decode(errors="replace")

    def close(self) -> None:
        """Give the memory back once the worker has closed its end too."""
        os.close(self.fd)


def how_it_ended(code: int) -> str:
    """Name an exit code as ``subprocess`` gives it."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    return f"was ended by signal {-code}"


def dump_stacks(logs: dict[int, Log]) -> dict[int, str]:
    """Ask processes for their stacks (``faulthandler`` on SIGUSR1) and collect them.

    Args:
        logs: Where each process, by its id, writes its stacks.
    """
    for pid, log in logs.items():
        log.take()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    sizes, deadline = None, time.monotonic() + _DUMP_S
    while time.monotonic() < deadline:
        time.sleep(0.05)
        now = {pid: log.size() for pid, log in logs.items()}
        if now == sizes:
            break
        sizes = now
    return {pid: _own_frames(log.take()) for pid, log in logs.items()}


def _own_frames(stacks: str) -> str:
    """Leave out the frames of pytest itself."""
    foreign = ("/_pytest/", "/pluggy/", "/bireme/testing/", '"<string>"')
    lines = [line for line in stacks.splitlines() if not any(part in line for part in foreign)]
    return "\n".join(lines)
