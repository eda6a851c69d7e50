"""After a fork the child's world cannot be used, and whatever the child does harms nobody."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import launch

import bireme as bm


def in_child(body: Callable[[], None]) -> int:
    """Run a function in a forked child; returns the child's exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            signal.alarm(4)  # a child that hangs is a failure, not a reason to wait
            body()
            code = 0
        except BaseException:  # noqa: BLE001 - the child must not go back to the tests
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ones() -> Any:
    return np.ones(3)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    "delivery", ["eager", pytest.param("lazy", marks=pytest.mark.world(delivery="lazy"))]
)
def test_the_childs_world_is_unusable(world: bm.World, delivery: str) -> None:
    x, ready = world.symmetric.full(3, world.rank, "float64"), world.symmetric.signal()
    group = world.split(0)
    world.all_reduce(ones(), async_op=True).wait()  # a progress thread, which the child has not
    calls: list[Callable[[], Any]] = [
        lambda: world.all_reduce(ones()),
        world.barrier,
        world.quiet,
        world.fence,
        lambda: group.all_reduce(ones()),
        lambda: world.split(0),
        lambda: world.symmetric.zeros(3),
        lambda: x.put(ones(), 0),
        lambda: x.put_nbi(ones(), 0),
        lambda: x.get(peer=0),
        lambda: x.get_nbi(peer=0),
        lambda: x[0].atomic_add(1, 0),
        lambda: ready.set(1, 0),
        lambda: ready.wait(1),
        lambda: world.all_reduce(ones(), async_op=True).wait(),
        lambda: (
            world.send(ones(), (world.rank + 1) % world.size) if world.size > 1 else world.barrier()
        ),
        lambda: x.free(),
    ]

    def child() -> None:
        for number, call in enumerate(calls):
            with pytest.raises(bm.UsageError, match="forked") as caught:
                call()
            assert f"forked from rank {world.rank}" in str(caught.value), number

    assert in_child(child) == 0
    assert world.all_reduce(ones())[0] == world.size, "the parent goes on"
    assert (x.local == world.rank).all()
    assert ready.value == 0


@pytest.mark.ranks(1, 2)
def test_inherited_views_stay_readable(world: bm.World) -> None:
    x = world.symmetric.full(100_000, world.rank + 1, "int64")
    mine, peers = x.local, x.on(world.size - 1)
    world.barrier()

    def child() -> None:
        assert (mine == world.rank + 1).all()
        assert (peers == world.size).all()
        assert (x.numpy() == world.rank + 1).all()
        assert x.get_nbi is not None
        assert x.nbytes == 800_000

    assert in_child(child) == 0
    world.barrier()


@pytest.mark.ranks(1, 2)
def test_a_child_may_close_its_copy(world: bm.World) -> None:
    def closes() -> None:
        try:
            world.close()
        except bm.UsageError as error:
            assert "forked" in str(error)
        assert world.closed
        world.close()

    def aborts() -> None:
        world.abort("only the child")

    def fails() -> None:
        world.fail(ValueError("only the child"))

    def leaves() -> None:
        try:
            with world:
                raise KeyError("only the child")
        except KeyError:
            pass

    for child in (closes, aborts, fails, leaves):
        assert in_child(child) == 0, child
        assert world.all_reduce(ones())[0] == world.size, child


@pytest.mark.ranks(1)
def test_a_child_may_have_a_world_of_its_own(world: bm.World) -> None:
    def child() -> None:
        with pytest.raises(bm.UsageError):
            world.close()
        with bm.init(engine="null") as mine:
            assert mine.all_reduce(ones())[0] == 1

    assert in_child(child) == 0


# How a forked child ends; the parents' jobs must not notice.
ENDINGS = {
    "finishes": "pass",
    "exits": "sys.exit(4)",
    "raises": "raise RuntimeError('only the child')",
    "raises in with": "with world:\n                raise KeyError('only the child')",
    "leaves at once": "os._exit(4)",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
}


@pytest.mark.parametrize("name", ENDINGS)
def test_however_the_child_ends(tmp_path: Path, name: str) -> None:
    ran = launch(
        tmp_path,
        2,
        f"""
        world = bm.init(timeout_s=15)
        view = world.symmetric.full(1000, 5).local
        world.all_reduce(ones(), async_op=True).wait()
        stream = world.stream()
        world.all_reduce(ones(), async_op=True, stream=stream).wait()
        pid = os.fork()
        if pid == 0:
            signal.alarm(5)
            assert view[7] == 5
            {ENDINGS[name]}
            sys.exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        for _ in range(20):
            world.all_reduce(ones())
            time.sleep(0.01)
        world.close()
        tell(["child", status])
        """,
    )
    codes = {"finishes": 0, "exits": 4, "raises": 1, "raises in with": 1, "leaves at once": 4}
    assert ran.told == [[["child", codes.get(name, -9)]]] * 2, ran
    assert ran.code == 0, ran.stderr


@pytest.mark.ranks(2)
def test_worker_processes_of_multiprocessing(world: bm.World) -> None:
    # As a DataLoader does: workers read what they inherited and send it through pipes of their own.
    x = world.symmetric.full(1000, world.rank + 1, "float32")
    view = x.local
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    workers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for part in range(3):
            workers.append(context.Process(target=_reads, args=(view, part, theirs)))
            workers[-1].start()
    found = sorted(ours.recv() for _ in workers)
    for worker in workers:
        worker.join(10)
        assert worker.exitcode == 0
        worker.close()
    ours.close()
    theirs.close()
    assert found == [(part, 100.0 * (world.rank + 1)) for part in range(3)]
    assert world.all_reduce(ones())[0] == 2


def _reads(view: Any, part: int, pipe: Any) -> None:
    pipe.send((part, float(view[100 * part : 100 * part + 100].sum())))
    pipe.close()
