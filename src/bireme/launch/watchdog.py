"""A process of its own that ends what a dead launcher or a dead rank leaves behind.

It reads process ids from its standard input, one a line; each leads a process group. When such a
process ends, what is left of its group gets a moment to finish and is killed. When the input ends,
because the launcher is done or dead, all groups are killed. It exits when nothing is left to watch.
It imports nothing of bireme, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time

__all__ = ["Watchdog"]

_GRACE_S = 0.5
_POLL_MS = 20


class Watchdog:
    """Watches process groups.

    Args:
        source: Descriptor on which process ids come, one a line.
    """

    def __init__(self, source: int) -> None:
        self._source = source
        self._open = True
        self._text = b""
        self._leaders: dict[int, int] = {}  # process id by pidfd
        self._dying: dict[int, float] = {}  # when to kill the rest of a group whose leader is dead
        self._poller = select.poll()
        self._poller.register(source, select.POLLIN)

    def run(self) -> None:
        """Watch until the input has ended and no group is left."""
        while self._open or self._leaders or self._dying:
            for fd, _ in self._poller.poll(_POLL_MS if self._dying else None):
                if fd == self._source:
                    self._read()
                else:
                    self._leader_ended(fd)
            self._bury()

    def _read(self) -> None:
        data = os.read(self._source, 4096)
        if not data:
            self._launcher_ended()
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            self._watch(int(line))

    def _watch(self, pid: int) -> None:
        try:
            fd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._dying[pid] = time.monotonic() + _GRACE_S
            return
        self._leaders[fd] = pid
        self._poller.register(fd, select.POLLIN)

    def _leader_ended(self, fd: int) -> None:
        self._poller.unregister(fd)
        os.close(fd)
        self._dying[self._leaders.pop(fd)] = time.monotonic() + _GRACE_S

    def _launcher_ended(self) -> None:
        self._open = False
        self._poller.unregister(self._source)
        for fd in self._leaders:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _bury(self) -> None:
        for group, kill_at in list(self._dying.items()):
            late = time.monotonic() >= kill_at
            try:
                os.killpg(group, signal.SIGKILL if late else 0)
            except (ProcessLookupError, PermissionError):
                late = True  # nothing is left of it
            if late:
                del self._dying[group]


def main() -> None:
    """Watch the processes named on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    Watchdog(0).run()


if __name__ == "__main__":
    main()
