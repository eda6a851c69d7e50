"""One trial of the chaos test: forked ranks make calls, and one of them ends at a random moment.

Ranks are forked from a process that has bireme loaded, so a trial takes a fraction of a second.
Each survivor reports what it raised and when; the parent knows when it struck.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import select
import signal
import socket
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import bireme as bm
from bireme import knobs
from bireme.bootstrap import Hub

DEADLINE_S = 30.0  # of a whole trial
STOPPED_TIMEOUT_S = 1.0  # the ranks' own deadline where a rank is stopped, not ended


@dataclasses.dataclass(frozen=True)
class Report:
    """What one survivor saw: the error's class and text, and how long after the strike."""

    rank: int
    error: str
    text: str
    after_s: float


@dataclasses.dataclass(frozen=True)
class Trial:
    """What happened: how many ranks, whom it struck, how, when, and the survivors' reports."""

    size: int
    victim: int
    end: str
    delay_s: float
    reports: list[Report]
    left: list[str]


def all_kinds(world: bm.World) -> dict[str, Callable[[], Any]]:
    """One call of each kind, the same on all ranks; each leaves the world as it found it."""
    x = world.symmetric.zeros(3000, "float64")
    ready = world.symmetric.signal()
    small, large = np.ones(3), np.ones(100_000)
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def put_and_wait() -> None:
        before = ready.value
        x[:3].put(small, right, signal=ready, signal_op="add")
        ready.wait(before + 1, ">=")
        world.barrier()

    def ring() -> None:
        work = world.send(small, right, async_op=True)
        world.recv(small, left)
        work.wait()

    def allocate() -> None:
        world.symmetric.zeros(100).free()

    def split() -> None:
        group = world.split(world.rank % 2)
        group.all_reduce(small)
        group.close()

    return {
        "all_reduce": lambda: world.all_reduce(small),
        "large all_reduce": lambda: world.all_reduce(large),
        "all_reduce in the heap": lambda: world.all_reduce(x),
        "all_to_all": lambda: world.all_to_all(np.ones(world.size * 1000)),
        "all_gather": lambda: world.all_gather(large),
        "broadcast": lambda: world.broadcast(small, root=world.size - 1),
        "asynchronous": lambda: world.all_reduce(large, async_op=True).wait(),
        "put": put_and_wait,
        "send": ring,
        "allocate": allocate,
        "split": split,
        "barrier": world.barrier,
    }


def survivor(rank: int, size: int, sock: socket.socket, seed: int, stopped: bool, out: int) -> None:
    """Run one rank until it raises, and report that."""
    timeout_s = STOPPED_TIMEOUT_S if stopped else DEADLINE_S
    settings = {"BIREME_RANK": rank, "BIREME_SIZE": size, "BIREME_BOOTSTRAP_FD": sock.fileno()}
    with knobs.override(**settings, BIREME_TIMEOUT_S=timeout_s):
        try:
            choose = random.Random(seed)
            while True:  # joining and closing are moments too
                with bm.init() as world:
                    limit = choose.randrange(1, 40)
                    calls = all_kinds(world)
                    names = sorted(calls)
                    for _ in range(limit):
                        calls[choose.choice(names)]()
        except BaseException as error:  # noqa: BLE001 - whatever it was, the parent judges it
            line = {"error": type(error).__name__, "text": str(error), "at": time.monotonic()}
            os.write(out, json.dumps(line).encode() + b"\n")


def end_by(kind: str, pid: int) -> None:
    """Strike one rank from outside."""
    os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)


def trial(seed: int, kind: str = "kill") -> Trial:
    """Run one trial.

    Args:
        seed: Decides the number of ranks, the victim, the moment and the calls.
        kind: ``"kill"`` (SIGKILL) or ``"stop"`` (SIGSTOP).
    """
    choose = random.Random(seed)
    size, delay_s = choose.randrange(2, 5), choose.random() * 0.25
    victim = choose.randrange(size)
    hub = Hub(size)
    pids, pipes = [], []
    for rank in range(size):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        hub.add(rank, ours)
        read, write = os.pipe()
        pids.append(_fork(lambda r=rank, s=theirs, w=write: survivor(
            r, size, s, seed, kind == "stop", w)))  # fmt: skip
        theirs.close()
        os.close(write)
        pipes.append(read)
    hub.start()
    try:
        time.sleep(delay_s)
        struck = time.monotonic()
        end_by(kind, pids[victim])
        if kind == "kill":
            os.waitpid(pids[victim], 0)
            hub.lost(victim, "was killed")
        reports = [_report(r, p, struck) for r, p in enumerate(pipes) if r != victim]
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        hub.stop()
        for pipe in pipes:
            os.close(pipe)
    left = [p.name for p in Path("/dev/shm").iterdir() if "bireme" in p.name]
    return Trial(size, victim, kind, delay_s, [r for r in reports if r], left)


def _fork(body: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking with the hub's thread
        pid = os.fork()
    if pid == 0:
        try:
            body()
        finally:
            os._exit(0)
    return pid


def _report(rank: int, pipe: int, struck: float) -> Report | None:
    """Wait for one survivor's line; ``None`` where none came in time."""
    ready, _, _ = select.select([pipe], [], [], DEADLINE_S)
    line = os.read(pipe, 1 << 16) if ready else b""
    if not line:
        return None
    told = json.loads(line)
    return Report(rank, told["error"], told["text"], told["at"] - struck)
