"""How a world begins and ends: init, close, fork, interrupts, deadlines."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import launch

import bireme as bm
from reference import until


def ones(count: int = 3) -> Any:
    return np.ones(count)


# ---- init and close ---------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_one_world_at_a_time(world: bm.World) -> None:
    assert bm.current() is world
    for settings in ({}, {"engine": "null"}):
        with pytest.raises(bm.UsageError, match="has an open world already; close it first"):
            bm.init(**settings)
    assert world.all_reduce(ones())[0] == world.size
    world.close()
    assert bm.current() is None
    with bm.init(engine="null") as other:
        assert bm.current() is other
    again = bm.init()
    assert again.all_reduce(ones())[0] == again.size
    again.close()


def test_alone() -> None:
    with bm.init(engine="shm") as world:
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert world.all_reduce(ones())[0] == 1
        assert world.device == "cpu"
        assert repr(world) == "World(rank=0, size=1, ranks=(0,))"
    assert world.closed


@pytest.mark.ranks(1, 2, 3)
def test_use_after_close(world: bm.World) -> None:
    x, signal_ = world.symmetric.zeros(3, "float64"), world.symmetric.signal()
    stream = world.stream()
    world.close()
    world.close()
    peer = (world.rank + 1) % world.size
    calls: list[Callable[[], Any]] = [
        lambda: world.all_reduce(ones()),
        lambda: world.all_gather(ones()),
        lambda: world.all_reduce(ones(), async_op=True),
        lambda: world.all_reduce(ones(), async_op=True, stream=stream),
        world.barrier,
        world.quiet,
        world.fence,
        lambda: world.split(0),
        lambda: world.group([0]),
        lambda: world.symmetric.zeros(3),
        lambda: world.symmetric.signals(2),
        lambda: x.put(ones(), 0),
        lambda: x.get(peer=0),
        lambda: x.on(0),
        lambda: x[0].atomic_add(1, 0),
        x.free,
        lambda: world.all_reduce(x),
        lambda: signal_.set(1, 0),
        lambda: signal_.wait(1),
        lambda: signal_.test(1),
    ]
    if world.size > 1:
        calls += [lambda: world.send(ones(), peer), lambda: world.recv(ones(), peer)]
    for number, call in enumerate(calls):
        with pytest.raises(bm.UsageError, match="closed"):
            call()
        assert world.closed, number


@pytest.mark.ranks(1, 2)
def test_what_works_after_close(world: bm.World) -> None:
    world.all_reduce(ones())
    world.close()
    world.synchronize()
    assert world.record.calls(world.rank)[-1].op == "close"
    assert world.record.flows()
    assert world.routes.explain("barrier", 0).path == "none"
    world.fail(ValueError("too late to matter"))
    world.exit()
    assert "rank=" in repr(world)


@pytest.mark.ranks(2, 3)
def test_descriptors_are_closed(world: bm.World) -> None:
    # A program that keeps the closed world, or never collects garbage, must not run out of them.
    world.close()
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    named = [os.readlink(link) for link in links if os.path.islink(link)]
    ours = ("bireme-control", "bireme-heap", "[pidfd]")
    assert not [name for name in named if any(word in name for word in ours)], named


@pytest.mark.ranks(2, 3)
def test_the_with_statement(world: bm.World) -> None:
    world.close()
    with bm.init() as inner:
        inner.all_reduce(ones())
    assert inner.closed
    with pytest.raises(SystemExit), bm.init() as inner:
        sys.exit(0)  # as good as falling off the end
    assert inner.closed
    if inner.rank == 0:
        with pytest.raises(KeyError), bm.init() as inner:
            raise KeyError("mine")
    else:
        with (
            pytest.raises(bm.PeerLost, match="rank 0 failed: KeyError: 'mine'"),
            bm.init() as inner,
        ):
            inner.barrier()
    assert inner.closed


def test_interpreter_exit_closes_nothing_twice(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        """
        world = bm.init(timeout_s=15)
        view = world.symmetric.full(100_000, 7).local
        group = world.split(0)
        work = world.all_reduce(ones(), async_op=True)
        world.use(world.stream()).__enter__()
        world.barrier()
        class Late:
            def __del__(self):
                assert view[5] == 7
        late = Late()
        """,
    )
    assert (ran.code, ran.stderr) == (0, ""), ran


# ---- deadlines --------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3)
@pytest.mark.world(timeout_s=1.0)
def test_a_deadline_says_where_all_are(world: bm.World) -> None:
    here = 0
    if world.rank == 0:
        until(world.host.aborted, "the others' deadline")
        with pytest.raises(bm.Timeout) as caught:
            world.barrier()
    else:
        here = sys._getframe().f_lineno + 2
        with pytest.raises(bm.Timeout) as caught:
            world.all_reduce(ones())
    text = str(caught.value)
    assert isinstance(caught.value, TimeoutError)
    assert "all_reduce did not finish within 1 s (BIREME_TIMEOUT_S)" in text, text
    lines = text.splitlines()[1:]
    assert [line.split(":")[0] for line in lines] == [f"  rank {r}" for r in range(world.size)]
    assert "outside any call for " in lines[0], text
    assert "its last: barrier at " in lines[0], text
    for line in lines[1:]:
        assert "in all_reduce(float64, 3 elements, sum) at test_ends.py:" in line, text
        assert not here or f"test_ends.py:{here}," in line
    with pytest.raises(bm.Timeout):
        world.all_reduce(ones())
    world.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.world(timeout_s=0.5)
def test_a_signal_that_nobody_sends(world: bm.World) -> None:
    ready = world.symmetric.signal()
    if world.rank == 0:
        with pytest.raises(bm.Timeout, match=r"signal.wait did not finish within 0.5 s"):
            ready.wait(1)
        world.symmetric  # noqa: B018 - a property access is never collective
        for peer in range(1, world.size):
            ready.set(1, peer)
    else:
        until(lambda: ready.test(1), "rank 0 goes on")
    assert world.all_reduce(ones())[0] == world.size, "such a wait breaks nothing"


@pytest.mark.ranks(2, 3)
@pytest.mark.world(timeout_s=0.5)
def test_a_message_that_nobody_sends(world: bm.World) -> None:
    if world.rank == 0:
        with pytest.raises(bm.Timeout, match="recv did not finish"):
            world.recv(ones(), 1)
    else:
        until(world.host.aborted, "rank 0's deadline")
        with pytest.raises(bm.Timeout, match="rank 0: recv did not finish"):
            world.barrier()
    world.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.world(timeout_s=0.5)
def test_a_deadline_of_asynchronous_work(world: bm.World) -> None:
    if world.rank == 0:
        until(world.host.aborted, "the others' deadline")
    else:
        work = world.all_reduce(ones(), async_op=True)
        assert isinstance(work.exception(), bm.Timeout)
    world.close()


@pytest.mark.ranks(2)
@pytest.mark.world(warn_s=0.2)
def test_a_long_wait_is_reported(world: bm.World, capfd: Any) -> None:
    if world.rank == 0:
        ready = world.symmetric.signal()
        ready.wait(1)
    else:
        ready = world.symmetric.signal()
        time.sleep(0.6)
        ready.set(1, 0)
    world.barrier()
    printed = capfd.readouterr().err
    if world.rank == 0:
        assert printed.count("bireme: rank 0 has waited 0 s in signal.wait; where the ranks") == 1
        assert "rank 1: outside any call for" in printed
    else:
        assert "rank 1 has waited" not in printed


# ---- interrupts -------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(after_s: float, handler: Any = signal.default_int_handler) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


@pytest.mark.ranks(1, 2, 3)
def test_ctrl_c_in_a_signal_wait(world: bm.World) -> None:
    ready = world.symmetric.signal()
    if world.rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(0.3):
            ready.wait(1)
    assert world.all_reduce(ones())[0] == world.size, "such a wait breaks nothing"


WAITS: dict[str, Callable[[bm.World], Any]] = {
    "all_reduce": lambda world: world.all_reduce(ones()),
    "large": lambda world: world.all_reduce(ones(300_000)),
    "barrier": lambda world: world.barrier(),
    "recv": lambda world: world.recv(ones(), 1),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", WAITS)
def test_ctrl_c_in_a_wait_for_others(world: bm.World, name: str) -> None:
    if world.rank == 0:
        with pytest.raises(KeyboardInterrupt), interrupted(0.3):
            WAITS[name](world)
    else:
        until(world.host.aborted, "rank 0's interrupt")
    op = {"large": "all_reduce"}.get(name, name)
    with pytest.raises(bm.Aborted, match=f"rank 0 was interrupted in {op}"):
        world.barrier()
    world.close()


@pytest.mark.ranks(2, 3)
def test_ctrl_c_in_a_wait_for_work(world: bm.World) -> None:
    ready = world.symmetric.signal()
    if world.rank == 0:
        work = world.all_reduce(ones(), async_op=True)
        with pytest.raises(KeyboardInterrupt), interrupted(0.3):
            work.wait()
        assert not work.done()
        with world.use(world.stream()):
            for peer in range(1, world.size):
                ready.set(1, peer)
        assert work.wait()[0] == world.size, "the call has gone on"
    else:
        ready.wait(1)
        world.all_reduce(ones())


@pytest.mark.ranks(2)
def test_ctrl_c_before_a_turn(world: bm.World) -> None:
    if world.rank == 0:
        world.all_reduce(ones(), async_op=True)
        with pytest.raises(KeyboardInterrupt), interrupted(0.3):
            world.all_reduce(ones(), async_op=False, stream=world.stream())
    else:
        until(world.host.aborted, "rank 0's interrupt")
    with pytest.raises(bm.Aborted, match="rank 0 was interrupted before its turn"):
        world.barrier()
    world.close()


@pytest.mark.ranks(2)
def test_a_handler_that_does_not_raise(world: bm.World) -> None:
    ready, seen = world.symmetric.signal(), []
    if world.rank == 0:
        with interrupted(0.2, lambda *_: seen.append(ready.set(1, 0))):
            assert ready.wait(1) == 1, "the handler itself may communicate"
        assert len(seen) == 1
    assert world.all_reduce(ones())[0] == world.size


def test_ctrl_c_of_a_job(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        signal.signal(signal.SIGINT, signal.default_int_handler)
        world = bm.init(timeout_s=15)
        ready = world.symmetric.signal()
        world.barrier()
        if world.rank == 1:
            threading.Timer(0.3, os.kill, (os.getppid(), signal.SIGINT)).start()
        waits = [lambda: ready.wait(1), lambda: world.recv(ones(), 0), world.barrier]
        waits[world.rank]()
        """,
    )
    assert ran.code == 130, ran
    assert "bireme run: stopped by SIGINT" in ran.stderr
    ends = [line for line in ran.stderr.splitlines() if line.startswith("bireme run: rank ")]
    assert len(ends) == 3
    for line in ends:  # a rank hears of another's interrupt, or of its own
        assert "KeyboardInterrupt" in line or "Aborted" in line, ran.stderr
