"""Asynchronous calls: streams, work, and what they keep alive."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
from contract import contract, refused

import bireme as bm
import reference as ref
from bireme import _core

BIG = 2 * _core.CHUNK_BYTES // 8 + 3


def lacks_async(world: bm.World) -> bool:
    return refused(world, "async", lambda: world.all_reduce(np.ones(1), async_op=True))


def every_collective(world: bm.World) -> None:
    if lacks_async(world):
        return
    n, rank = world.size, world.rank
    for size in (n, BIG * n):
        parts = [ref.data("float64", size, r) for r in range(n)]
        x = parts[rank].copy()
        root = n - 1
        whole = np.empty(size * n)
        block = np.empty(size // n)
        works = {
            "all_gather": world.all_gather(x, async_op=True),
            "gather": world.gather(x, root, out=whole, async_op=True),
            "reduce_scatter": world.reduce_scatter(x, async_op=True),
            "scatter": world.scatter(x, root, out=block, async_op=True),
            "all_to_all": world.all_to_all(x, async_op=True),
            "reduce": world.reduce(x, root, out=np.empty(size), async_op=True),
            "all_reduce": world.all_reduce(x, out=np.empty(size), async_op=True),
        }
        told = world.broadcast(np.full(3, rank), root, async_op=True)
        for op, work in works.items():
            assert isinstance(work, bm.Work)
            found, wanted = work.wait(), ref.expected(op, parts, rank, "sum", root)
            assert wanted is None or ref.same_bits(found, wanted), (op, size)
            assert work.done()
        assert told.wait().tolist() == [root] * 3


def a_work(world: bm.World) -> None:
    if lacks_async(world):
        return
    x = np.ones(3)
    work = world.all_reduce(x, async_op=True)
    assert work.wait() is x
    assert work.result() is x
    assert work.wait(0.0) is x, "a finished work needs no time"
    assert work.exception() is None
    assert x.tolist() == [world.size] * 3


def late_peers(world: bm.World) -> None:
    if lacks_async(world) or world.size == 1:
        return
    ready = world.symmetric.signal()
    x = np.ones(3)
    if world.rank == 0:
        work = world.all_reduce(x, async_op=True)
        assert not work.done()
        with pytest.raises(TimeoutError, match=r"has not finished within 0.05 s; it goes on"):
            work.wait(0.05)
        with pytest.raises(TimeoutError, match="it goes on"):
            work.exception(0.05)
        # The others have not come: one-sided calls go to another stream.
        with world.use(world.stream()):
            for peer in range(1, world.size):
                ready.set(1, peer)
        assert work.wait(20) is x
    else:
        ready.wait(1)
        world.all_reduce(x)
    assert x.tolist() == [world.size] * 3


def order_within_a_stream(world: bm.World) -> None:
    if lacks_async(world):
        return
    x = np.ones(BIG)
    for _ in range(5):
        world.all_reduce(x, async_op=True)
    world.all_reduce(x)  # waits for what was queued before
    assert (x == float(world.size) ** 6).all()
    y = world.symmetric.zeros(BIG, "float64")
    world.all_reduce(x, async_op=True)
    y.put(x, (world.rank + 1) % world.size)
    world.barrier()
    assert (y.local == float(world.size) ** 7).all(), "a put waits for its stream first"


def many_in_flight(world: bm.World) -> None:
    if lacks_async(world):
        return
    arrays = [np.full(17 * number, world.rank + number) for number in range(200)]
    works = [world.all_reduce(array, async_op=True) for array in arrays]
    base = sum(range(world.size))
    for number in reversed(range(200)):
        assert (works[number].wait() == base + world.size * number).all(), number
    assert all(work.done() for work in works)


def several_streams(world: bm.World) -> None:
    if lacks_async(world):
        return
    streams = [world.stream() for _ in range(3)]
    arrays = [np.ones(1 + BIG * (number % 2)) for number in range(12)]
    for number, array in enumerate(arrays):
        world.all_reduce(array, async_op=True, stream=streams[number % 3])
    world.synchronize()
    assert all((array == world.size).all() for array in arrays)
    streams[0].synchronize()
    world.all_reduce(arrays[0], async_op=True, stream=streams[1])
    streams[1].synchronize()
    assert (arrays[0] == world.size**2).all()


def the_current_stream(world: bm.World) -> None:
    if lacks_async(world):
        return
    x = np.ones(BIG)
    outer, inner = world.stream(), world.stream()
    with world.use(outer) as entered:
        assert entered is outer
        world.all_reduce(x, async_op=True)
        with world.use(inner):
            work = world.all_reduce(np.ones(1), async_op=True)
        world.all_reduce(x)  # the stream is outer's again, which is waited for
        assert (x == world.size**2).all()
    assert work.wait() == world.size
    world.all_reduce(x, async_op=True, stream=inner)
    world.barrier(stream=inner)
    assert (x == world.size**3).all()


def waits_for_a_given_stream(world: bm.World) -> None:
    if lacks_async(world):
        return
    mine = world.stream()
    x, y = np.ones(BIG), world.symmetric.zeros(BIG, "float64")
    for wait in (world.quiet, world.fence, world.barrier):
        x[:] = 1
        world.all_reduce(x, async_op=True, stream=mine)
        wait(stream=mine)
        assert (x == world.size).all()
    world.all_reduce(x, async_op=True, stream=mine)
    y.put(x, world.rank, stream=mine)
    world.quiet()
    assert (y.local == world.size**2).all()
    world.all_reduce(x, async_op=True, stream=mine)
    y.get(x, peer=world.rank, stream=mine)
    assert (x == world.size**2).all(), "the get came after the reduction"


def buffers_stay_alive(world: bm.World) -> None:
    if lacks_async(world):
        return
    ready = world.symmetric.signal()

    class Watched(np.ndarray):  # type: ignore[type-arg]
        pass

    x = np.ones(BIG).view(Watched)
    seen = weakref.ref(x)
    if world.rank == 0 and world.size > 1:
        work = world.all_reduce(x, async_op=True)
        del x, work
        gc.collect()
        assert seen() is not None, "the call still needs it"
        with world.use(world.stream()):
            for peer in range(1, world.size):
                ready.set(1, peer)
        world.synchronize()
    else:
        if world.size > 1:
            ready.wait(1)
        world.all_reduce(x)
        del x
    world.all_reduce(np.ones(1), async_op=True).wait()
    gc.collect()
    assert seen() is None, "nothing keeps it any longer"


def closing_finishes_the_queue(world: bm.World) -> None:
    if lacks_async(world):
        return
    x = np.ones(BIG)
    for _ in range(4):
        work = world.all_reduce(x, async_op=True)
    world.close()
    assert work.done()
    assert (x == float(world.size) ** 4).all()


def scatter_needs_out(world: bm.World) -> None:
    x = np.ones(world.size)
    with pytest.raises(ValueError, match="scatter: expected out= with async_op=True"):
        world.scatter(x, 0, async_op=True)
    assert world.all_reduce(np.ones(1))[0] == world.size


test_eager, test_lazy, test_null = contract(
    every_collective,
    a_work,
    late_peers,
    order_within_a_stream,
    many_in_flight,
    several_streams,
    the_current_stream,
    waits_for_a_given_stream,
    buffers_stay_alive,
    closing_finishes_the_queue,
    scatter_needs_out,
)


@pytest.mark.ranks(2, 3)
def test_a_failed_work_raises_at_its_wait(world: bm.World) -> None:
    works = [world.all_reduce(np.ones(2 + world.rank), async_op=True) for _ in range(2)]
    error = works[0].exception()
    assert isinstance(error, bm.MismatchError)
    assert "test_async.py:" in str(error)
    with pytest.raises(bm.MismatchError, match="different calls"):
        works[0].wait()
    with pytest.raises(bm.MismatchError):
        works[1].result()
    assert all(work.done() for work in works)
    world.close()


@pytest.mark.ranks(2, 3)
def test_a_refused_call_fails_only_its_own_work(world: bm.World) -> None:
    # The error belongs to the work: were it raised by the next call that waits for the stream, that
    # call would be missing on this rank and the ranks out of step.
    work = None
    if world.rank == 0:
        late = world.symmetric.signal()
        late.wait(world.size - 1)
        with pytest.raises(ValueError, match="expected one of sum"):
            world.all_reduce(np.ones(1), "wrong", async_op=True)
    else:
        late = world.symmetric.signal()
        work = world.all_reduce(np.ones(1), async_op=True)
        with world.use(world.stream()):
            late.add(1, 0)
    assert world.all_reduce(np.ones(1))[0] == world.size
    if work is not None:
        error = work.exception()
        assert isinstance(error, bm.MismatchError)
        assert "rank 0 refused" in str(error)
