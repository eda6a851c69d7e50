"""Starts the ranks, each with one end of a socketpair to the hub, and lets none outlive us.

A rank leads a session and process group of its own and is killed by the kernel when the thread
that started it ends. A small watchdog process kills what the ranks have started themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from bireme import knobs
from bireme.bootstrap import Hub
from bireme.errors import EngineError, UsageError

__all__ = ["spawn"]

Stream = int | IO[Any] | None

_FOREIGN_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_WATCHDOG = os.path.join(os.path.dirname(os.path.abspath(__file__)), "watchdog.py")
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


def spawn(
    argv: Sequence[str],
    size: int,
    hub: Hub,
    *,
    env: Mapping[str, str] | None = None,
    cores: Sequence[Sequence[int]] | None = None,
    pass_fds: Sequence[Sequence[int]] | None = None,
    stdout: Stream = None,
    stderr: Stream = None,
    stdin: Stream = None,
) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a job; returns when all have been started.

    Call it from a thread that outlives the ranks (they die with it), and before ``hub.start``, so
    that no other thread runs while it forks. ``poll`` or ``wait`` for every returned process: when
    the last one has ended, this also ends what the ranks have left in their process groups.

    Args:
        argv: Program and arguments, the same for every rank.
        size: Number of ranks.
        hub: Gets the other ends of the ranks' sockets.
        env: Variables on top of our own environment. A foreign launcher's RANK, WORLD_SIZE,
            LOCAL_RANK and LOCAL_WORLD_SIZE are left out.
        cores: Numbers of the cores that each rank is bound to, one list per rank; default: ours.
        pass_fds: Descriptors that each rank inherits under the same number, one list per rank.
        stdout: As in ``subprocess.Popen``, for every rank.
        stderr: As in ``subprocess.Popen``, for every rank.
        stdin: As in ``subprocess.Popen``, for rank 0; the others read nothing.

    Raises:
        ValueError: If ``pass_fds`` or ``cores`` has not one list per rank.
        UsageError: If the program cannot be started.
        EngineError: If a rank cannot be bound to its cores.
    """
    extra = _for_each_rank("pass_fds", pass_fds, size)
    bound = _for_each_rank("cores", cores, size)
    environment = _environment(size, env or {})
    guard = _Guard()
    ranks: list[subprocess.Popen[bytes]] = []
    streams = {"stdout": stdout, "stderr": stderr}
    try:
        for rank in range(size):
            streams["stdin"] = stdin if rank == 0 else subprocess.DEVNULL
            ranks.append(
                _start(guard, argv, hub, rank, environment, extra[rank], bound[rank], streams)
            )
    except BaseException as error:
        _abandon(guard, ranks)
        if isinstance(error, OSError):
            raise UsageError(f"cannot start {argv[0]!r}: {error.strerror}") from None
        if isinstance(error, subprocess.SubprocessError):  # all that Python tells of its child
            where = f"cores {', '.join(map(str, bound[len(ranks)]))}"
            raise EngineError(
                f"cannot bind rank {len(ranks)} to {where}: use --bind none"
            ) from None
        raise
    return ranks


def _for_each_rank(
    name: str, lists: Sequence[Sequence[int]] | None, size: int
) -> Sequence[Sequence[int]]:
    if lists is not None and len(lists) != size:
        raise ValueError(f"expected {name} for {size} ranks, found {len(lists)}")
    return [()] * size if lists is None else lists


def _environment(size: int, extra: Mapping[str, str]) -> dict[str, str]:
    environment = knobs.child_environment(dict(extra))
    for name in _FOREIGN_RANKS:
        environment.pop(name, None)
    cores = len(os.sched_getaffinity(0))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // size)))
    environment.setdefault("PYTHONUNBUFFERED", "1")
    environment["BIREME_SIZE"] = str(size)
    return environment


def _start(
    guard: _Guard,
    argv: Sequence[str],
    hub: Hub,
    rank: int,
    environment: dict[str, str],
    fds: Sequence[int],
    cores: Sequence[int],
    streams: Mapping[str, Stream],
) -> subprocess.Popen[bytes]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub.add(rank, ours)
    with theirs, warnings.catch_warnings():
        # Python warns of forking beside threads; the child only asks the kernel for a few things.
        warnings.simplefilter("ignore", DeprecationWarning)
        number = theirs.fileno()
        process = _Rank(
            guard,
            list(argv),
            env={**environment, "BIREME_RANK": str(rank), "BIREME_BOOTSTRAP_FD": str(number)},
            pass_fds=(number, *fds),
            start_new_session=True,
            preexec_fn=_prepare(os.getpid(), cores),
            **streams,
        )
    guard.watch(process.pid)
    return process


def _prepare(parent: int, cores: Sequence[int]) -> Callable[[], None]:
    """Return what has a child die with its parent and run on these cores, if there are any."""

    def prepare() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended before we asked
            os._exit(1)
        if cores:
            os.sched_setaffinity(0, cores)

    return prepare


def _abandon(guard: _Guard, ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        process.kill()
    for process in ranks:
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    guard.close()


class _Guard:
    """Our end of the watchdog process of one job."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._watchdog: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-I", "-S", _WATCHDOG],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            env={},
            start_new_session=True,
        )

    def watch(self, pid: int) -> None:
        """Have a process group watched."""
        self._running.add(pid)
        if self._watchdog.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it
                self._watchdog.stdin.write(b"%d\n" % pid)

    def ended(self, pid: int) -> None:
        """Note that a rank has been reaped; after the last one the watchdog ends."""
        with self._lock:
            self._running.discard(pid)
            done = not self._running
        if done:
            self.close()

    def close(self) -> None:
        """Have what is left of the groups killed, and wait for the watchdog to end."""
        with self._lock:
            if self._watchdog.stdin is not None:
                self._watchdog.stdin.close()
            self._watchdog.wait()


class _Rank(subprocess.Popen[bytes]):
    """A rank's process, which tells the guard when it has been reaped."""

    def __init__(self, guard: _Guard, argv: list[str], **options: Any) -> None:
        self._guard = guard
        super().__init__(argv, **options)

    def poll(self) -> int | None:
        """Return the exit status, or None while the rank runs."""
        code = super().poll()
        if code is not None:
            self._guard.ended(self.pid)
        return code

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the rank to end and return its exit status."""
        code = super().wait(timeout)
        self._guard.ended(self.pid)
        return code
