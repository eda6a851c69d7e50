"""`bireme run`: starts the ranks, watches them, and says who failed first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, final

from bireme import knobs
from bireme.bootstrap import Hub
from bireme.errors import UsageError
from bireme.launch import binding, report
from bireme.launch.fates import Fates
from bireme.launch.logs import Logs
from bireme.launch.output import Output, write
from bireme.launch.processes import spawn

__all__ = ["run"]

TIMED_OUT = 124
_NOTICE_S = 2.0
_TERM_S = 3.0
_GRACE_S = 5.0
_TIMEOUT_GRACE_S = 2.0
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(
    argv: Sequence[str],
    size: int,
    timeout_s: float | None = None,
    *,
    bind: bool = False,
    log_dir: str | None = None,
) -> int:
    """Run a program as the ranks of one job, and wait for all of them.

    Signals that arrive meanwhile go to the ranks, if this is the main thread. After a rank's
    failure the others have 2 s to notice by themselves, then they are ended. A report on stderr
    says which rank failed first.

    Args:
        argv: Program and arguments.
        size: Number of ranks.
        timeout_s: End all ranks after this time, in seconds.
        bind: Give each rank its share of the cores that this process may use.
        log_dir: Folder in which each rank's output also goes to a file, ``rank-<r>.log``.

    Returns:
        0, the exit code of the first failure (128 + n for signal n), or 124 after ``timeout_s``.

    Raises:
        UsageError: If the program cannot be started, or the folder cannot be used.
        EngineError: If the ranks cannot be bound to cores.
    """
    cores = _bind(size) if bind else None
    fates = Fates()
    hub = Hub(size, fates.observe)
    with contextlib.ExitStack() as stack:
        stack.callback(fates.close)
        stack.callback(hub.stop)
        logs = None if log_dir is None else stack.enter_context(Logs(log_dir, size))
        with _Signals() as signals:
            pipe = subprocess.PIPE
            processes = spawn(argv, size, hub, cores=cores, stdout=pipe, stderr=pipe)
            try:
                output = Output(processes, logs)
                stack.callback(output.finish)
                output.start()
                hub.start()
                job = _Job(processes, hub, fates, timeout_s)
                job.watch(signals)
            finally:
                _kill(processes)
    return _conclude(job, output)


def _bind(size: int) -> list[list[int]]:
    """Return the cores of each rank, and say them where decisions are to be shown."""
    cores = binding.shares(os.sched_getaffinity(0), size)
    try:
        level = knobs.get("BIREME_LOG")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if level in ("info", "debug"):
        text = f"bireme run: bound to cores: {binding.describe(cores)}\n"
        with contextlib.suppress(OSError, ValueError):
            write(sys.stderr, text.encode())
    return cores


def _kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """End what still runs, which is nothing unless an error cut the watch short."""
    for process in processes:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _conclude(job: _Job, output: Output) -> int:
    first = report.first_failure(job.ends, output.tail)
    if first or job.headline:
        text = "\n".join(report.lines(job.ends, first, job.headline, output.tail)) + "\n"
        with contextlib.suppress(OSError, ValueError):
            write(sys.stderr, text.encode(errors="replace"))
    if job.timed_out:
        return TIMED_OUT
    if first:
        return report.exit_code(first.code)
    return 128 + job.interrupt if job.interrupt and any(end.code for end in job.ends) else 0


@final
class _Signals:
    """Collects signals instead of acting on them, while it is entered, in the main thread."""

    def __init__(self) -> None:
        self._saved: dict[signal.Signals, Any] = {}
        self._ours, self._theirs = socket.socketpair()
        self._before: int | None = None

    def __enter__(self) -> _Signals:
        self._ours.setblocking(False)
        self._theirs.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            wake = self._theirs.fileno()
            self._before = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
            for number in _FORWARDED:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # as under nohup
                    self._saved[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._saved.items():
            signal.signal(number, handler)
        if self._before is not None:
            signal.set_wakeup_fd(self._before)
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        """Return a descriptor that is readable when a signal has come."""
        return self._ours.fileno()

    def read(self) -> list[signal.Signals]:
        """Return the signals that have come; call it when the descriptor is readable."""
        numbers = self._ours.recv(4096)
        return [number for number in self._saved if number in numbers]


def _do_nothing(_number: int, _frame: object) -> None:
    """Stand in for a signal's handler; the wake-up descriptor has its number."""


class _Job:
    """The ranks while they run."""

    def __init__(
        self,
        processes: Sequence[subprocess.Popen[bytes]],
        hub: Hub,
        fates: Fates,
        timeout_s: float | None,
    ) -> None:
        self.ends: list[report.End] = []
        self.headline = ""
        self.timed_out = False
        self.interrupt: signal.Signals | None = None
        self._hub = hub
        self._fates = fates
        self._timeout_s = timeout_s
        self._time_out_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._running = dict(enumerate(processes))
        self._pidfds = {os.pidfd_open(process.pid): rank for rank, process in self._running.items()}
        self._told: signal.Signals | None = None
        self._plan: deque[tuple[float, signal.Signals]] = deque()

    def watch(self, signals: _Signals) -> None:
        """Wait until every rank has ended."""
        poller = select.poll()
        poller.register(signals, select.POLLIN)
        for fd in self._pidfds:
            poller.register(fd, select.POLLIN)
        try:
            self._loop(poller, signals)
        finally:
            for fd in self._pidfds:
                os.close(fd)

    def _loop(self, poller: select.poll, signals: _Signals) -> None:
        batch = 0
        while self._running:
            fds = {fd for fd, _ in poller.poll(self._pause_ms())}
            ended = [fd for fd in self._pidfds if fd in fds]
            for fd in ended:
                poller.unregister(fd)
                self._reap(fd, batch)
            batch += 1
            for number in signals.read() if signals.fileno() in fds else ():
                self._forward(number)
            self._keep_time()

    def _pause_ms(self) -> int | None:
        times = [self._plan[0][0]] if self._plan else []
        if self._time_out_at is not None:
            times.append(self._time_out_at)
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1) if times else None

    def _reap(self, fd: int, batch: int) -> None:
        """Take note of a rank that has ended."""
        rank = self._pidfds.pop(fd)
        os.close(fd)
        code = self._running[rank].wait()
        del self._running[rank]
        self._fates.note(rank, code)
        self._hub.lost(rank, f"its process has ended: {report.describe(code)}")
        self.ends.append(report.End(rank, code, batch, self._told if code else None))
        if code != 0 and not self._plan and self._told is None:
            self._schedule((_NOTICE_S, signal.SIGTERM), (_NOTICE_S + _TERM_S, signal.SIGKILL))

    def _schedule(self, *steps: tuple[float, signal.Signals]) -> None:
        now = time.monotonic()
        self._plan = deque((now + after_s, number) for after_s, number in steps)

    def _keep_time(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        if self._time_out_at is not None and now >= self._time_out_at:
            self._time_out()
        while self._plan and self._plan[0][0] <= now:
            _, self._told = self._plan.popleft()
            self._tell(self._told, self._running)

    def _time_out(self) -> None:
        self._time_out_at = None
        if self._running and not self.headline and not self._failed():
            self.timed_out = True
            names = ", ".join(str(rank) for rank in self._running)
            self.headline = f"timeout after {self._timeout_s:g} s; still running: rank {names}"
            self._schedule((0.0, signal.SIGTERM), (_TIMEOUT_GRACE_S, signal.SIGKILL))

    def _forward(self, number: signal.Signals) -> None:
        """Pass a signal on; an interrupt starts the clock, a second one ends all at once."""
        self._tell(number, self._running)
        if number not in (signal.SIGINT, signal.SIGTERM):
            return
        if not self.headline and not self._failed():
            self.headline = f"stopped by {number.name}"
        again = self.interrupt is not None and number == signal.SIGINT
        self.interrupt = number
        self._schedule((0.0 if again else _GRACE_S, signal.SIGKILL))

    def _failed(self) -> bool:
        return any(end.code for end in self.ends)

    def _tell(self, number: signal.Signals, ranks: Iterable[int]) -> None:
        """Send a signal to ranks.

        An interrupt goes to all their children too, as from a terminal, and so does a kill; other
        signals mean the rank itself.
        """
        for rank in ranks:
            process = self._running[rank]
            with contextlib.suppress(ProcessLookupError):
                if number in (signal.SIGINT, signal.SIGKILL):
                    os.killpg(process.pid, number)
                else:
                    os.kill(process.pid, number)
