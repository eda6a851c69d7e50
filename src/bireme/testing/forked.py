"""``run``: call a function on n forked ranks and get each rank's value, for notebooks and tests."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from bireme import knobs
from bireme.errors import Aborted, PeerLost, UsageError
from bireme.testing.processes import Log, dump_stacks, how_it_ended

if TYPE_CHECKING:
    from bireme.bootstrap import Hub

__all__ = ["RankFailure", "run"]

_VALUE, _TYPE_ERROR, _FAILURE, _ECHO = b"v", b"t", b"f", b"e"  # an echo of another's failure
_PR_SET_PDEATHSIG = 1
_GRACE_S = 5.0  # for the other ranks once one has failed


class RankFailure(AssertionError):
    """A function failed, hung or ended the process on at least one rank; the text has them all."""


def run(fn: Callable[..., Any], ranks: int = 2, *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call ``fn(world, *args)`` on forked ranks of a fresh world and return each rank's value.

    Args:
        fn: Any callable; a child gets it and ``args`` by fork, so closures are fine.
        ranks: The number of ranks.
        args: Passed on.
        timeout_s: After so many seconds all ranks are killed.

    Returns:
        One value per rank, in rank order. A value may be None, bool, int, float, str, bytes, a
        NumPy array, or a list, tuple or dict of those.

    Raises:
        RankFailure: If a rank raised, ended early or did not finish in time.
        TypeError: If a rank returned a value of another type.
        UsageError: If this process has a world open, which its children could not use.
        ValueError: If ``ranks`` is not positive.
    """
    from bireme import bootstrap

    if ranks < 1:
        raise ValueError(f"expected a positive number of ranks, found {ranks}")
    _refuse_open_world()
    hub = bootstrap.Hub(ranks)
    children: list[_Child] = []
    try:
        _start(children, hub, ranks, fn, args)
        hub.start()
        late = _collect(children, timeout_s)
        return _values(children, late, timeout_s)
    finally:
        for child in children:
            child.end()
        hub.stop()


class _Child:
    """One forked rank, as the caller sees it."""

    def __init__(self, rank: int, pid: int, pipe: int, log: Log) -> None:
        self.rank = rank
        self.pid = pid
        self.log = log
        self.data = bytearray()
        self.code: int | None = None
        self._pipe = pipe

    def fileno(self) -> int:
        return self._pipe

    def read(self) -> bool:
        """Read on; return whether this was the end."""
        chunk = os.read(self._pipe, 1 << 20)
        self.data += chunk
        return not chunk

    def failed(self) -> bool:
        """Whether the rank sent something else than its value, or nothing."""
        return self.data[:1] != _VALUE

    def wait(self) -> None:
        """Take the exit code."""
        self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Kill the process if it still runs, and give back what belonged to it."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()
        os.close(self._pipe)
        self.log.close()


def _start(
    children: list[_Child], hub: Hub, size: int, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    not_theirs: list[int] = []  # descriptors of the caller and of earlier ranks
    for rank in range(size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, sending = os.pipe()
        log = Log(f"bireme-run-rank{rank}")
        not_theirs += [ours.fileno(), reading]
        hub.add(rank, ours)
        pid = _fork()
        if pid == 0:
            bootstrap_fd = theirs.fileno()
            ours_now = {
                "BIREME_RANK": rank,
                "BIREME_SIZE": size,
                "BIREME_BOOTSTRAP_FD": bootstrap_fd,
            }
            with knobs.override(**ours_now):
                _live(sending, log, not_theirs, fn, args)
        theirs.close()
        os.close(sending)
        children.append(_Child(rank, pid, reading, log))


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        # Python warns of forking beside threads; the child uses nothing that they hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _live(
    sending: int,
    log: Log,
    not_ours: list[int],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> NoReturn:
    """The life of a child, which never goes back to the caller's code."""
    code = 1
    try:
        for fd in not_ours:
            os.close(fd)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        faulthandler.register(signal.SIGUSR1, file=log.fd, all_threads=True, chain=False)
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the threads of its pool did not come along
        answer = _answer(fn, args)
        with open(sending, "wb") as pipe:
            pipe.write(answer)
        code = 0
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _answer(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import bireme
    from bireme.testing import codec

    try:
        with bireme.init() as world:
            value = fn(world, *args)
    except (Aborted, PeerLost):
        return _ECHO + traceback.format_exc().encode(errors="replace")
    except BaseException:  # noqa: BLE001 - also SystemExit: the caller hears of every end
        return _FAILURE + traceback.format_exc().encode(errors="replace")
    try:
        return _VALUE + codec.encode(value)
    except TypeError as error:
        return _TYPE_ERROR + str(error).encode(errors="replace")


def _collect(children: list[_Child], timeout_s: float) -> list[_Child]:
    """Read what each child sends; return those that are late."""
    deadline = time.monotonic() + timeout_s
    waiting = set(children)
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child, selectors.EVENT_READ, child)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                child = key.data
                if child.read():
                    selector.unregister(child)
                    waiting.discard(child)
                    child.wait()
                    if child.failed():
                        deadline = min(deadline, time.monotonic() + _GRACE_S)
    return [child for child in children if child in waiting]


def _values(children: list[_Child], late: list[_Child], timeout_s: float) -> list[Any]:
    from bireme.testing import codec

    stacks = dump_stacks({child.pid: child.log for child in late})
    failures: list[str] = []
    echoes: list[str] = []
    refused: list[str] = []
    for child in children:
        kind, text = child.data[:1], child.data[1:].decode(errors="replace")
        if child in late:
            text = f"no value within {timeout_s:g} s\n{stacks[child.pid]}"
        elif not kind and child.code is not None:
            text = f"the process {how_it_ended(child.code)}"
        if kind == _TYPE_ERROR:
            refused.append(f"rank {child.rank}: {text}")
        elif kind != _VALUE:
            found = echoes if kind == _ECHO else failures
            found.append(f"rank {child.rank}:\n{text}")
    if failures or echoes:
        raise RankFailure("\n\n".join(["the function failed", *failures, *echoes]))
    if refused:
        raise TypeError("\n".join(refused))
    return [codec.decode(bytes(child.data[1:])) for child in children]


def _refuse_open_world() -> None:
    import bireme

    world = bireme.current()
    if world is not None:
        raise UsageError(
            f"run: rank {world.rank} has a world open, and its forked children could not use it; "
            "close it first"
        )
