"""Two-sided messages: in order between two ranks, of any dtype and size."""

from __future__ import annotations

import numpy as np
import pytest
from contract import contract

import bireme as bm
import reference as ref
from bireme import _core

SLOT = _core.PIPE_BYTES // 2
SIZES = (0, 1, 1000, SLOT - 1, SLOT, SLOT + 1, _core.PIPE_BYTES, 5 * SLOT + 3)


def neighbours(world: bm.World) -> tuple[int, int]:
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def alone(world: bm.World) -> bool:
    """Whether there is nobody to send to; sending to oneself is refused on every engine."""
    with pytest.raises(ValueError, match="expected another rank as peer, found the own rank"):
        world.send(np.ones(1), world.rank)
    with pytest.raises(ValueError, match="recv: expected another rank as peer"):
        world.recv(np.ones(1), world.rank)
    return world.size == 1


def every_dtype_in_a_ring(world: bm.World) -> None:
    if alone(world):
        return
    left, right = neighbours(world)
    for name in ref.ALL:
        mine, wanted = (ref.data(name, (3, 5), rank) for rank in (world.rank, left))
        x = np.empty((3, 5), ref.dtype(name))
        world.send(mine, right)  # small messages are buffered: nobody receives yet
        assert world.recv(x, left) is x
        assert ref.same_bits(x, wanted), name


def every_size(world: bm.World) -> None:
    if alone(world):
        return
    for size in SIZES:
        for source in range(world.size):
            mine = ref.data("uint8", size, source)
            peer = (source + 1) % world.size
            if world.rank == source:
                world.send(mine, peer)
            elif world.rank == peer:
                x = np.empty(size, np.uint8)
                world.recv(x, source)
                assert ref.same_bits(x, mine), (size, source)


def messages_keep_their_order(world: bm.World) -> None:
    if alone(world):
        return
    for number in range(50):
        for peer in range(world.size):
            if world.rank == 0 and peer:
                world.send(np.array([number, peer]), peer)
            elif world.rank == peer and peer:
                found = world.recv(np.zeros(2, np.int64), 0)
                assert found.tolist() == [number, peer]


def sources_may_be_reused(world: bm.World) -> None:
    if alone(world):
        return
    left, right = neighbours(world)
    x = np.full(100, world.rank)
    world.send(x, right)
    x[:] = -1
    assert (world.recv(np.zeros(100, np.int64), left) == left).all()


def heap_and_private(world: bm.World) -> None:
    if alone(world):
        return
    left, right = neighbours(world)
    x = world.symmetric.full(7, world.rank, "float64")
    world.send(x[2:5], right)
    assert world.recv(x[:3], left).local.tolist() == [left] * 3
    assert x.local.tolist() == [left] * 3 + [world.rank] * 4


def among_collectives(world: bm.World) -> None:
    if alone(world):
        return
    left, right = neighbours(world)
    for number in range(20):
        world.send(np.array([number]), right)
        assert world.all_reduce(np.ones(3))[0] == world.size
        assert world.recv(np.zeros(1, np.int64), left)[0] == number


def asynchronous(world: bm.World) -> None:
    if alone(world):
        return
    left, right = neighbours(world)
    big = np.full(4 * SLOT, world.rank, np.uint8)
    out = np.zeros(4 * SLOT, np.uint8)
    sending, receiving = world.stream(), world.stream()
    works = [
        world.recv(out, left, async_op=True, stream=receiving),
        world.send(big, right, async_op=True, stream=sending),
    ]
    assert works[0].wait() is out
    assert works[1].wait() is None
    assert (out == left).all()


def wrong_arguments(world: bm.World) -> None:
    if alone(world):
        return
    locked = np.ones(2)
    locked.flags.writeable = False
    left, right = neighbours(world)
    world.send(locked, right)
    with pytest.raises(ValueError, match="read-only"):
        world.recv(locked, left)
    for call in (world.send, world.recv):
        with pytest.raises(ValueError, match=f"found {world.size}"):
            call(np.ones(2), world.size)
        with pytest.raises(TypeError, match="expected a rank, found 'x'"):
            call(np.ones(2), "x")
        with pytest.raises(TypeError, match="expected a NumPy array"):
            call([1], right)
    assert world.recv(np.zeros(2), left).tolist() == [1, 1], "nothing was taken or sent meanwhile"


test_eager, test_lazy, test_null = contract(
    every_dtype_in_a_ring,
    every_size,
    messages_keep_their_order,
    sources_may_be_reused,
    heap_and_private,
    among_collectives,
    asynchronous,
    wrong_arguments,
)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (np.ones(3), np.ones(4)),
        (np.ones(3), np.ones(3, np.int64)),
        (np.ones(0), np.ones(1)),
        (np.ones(5 * SLOT, np.uint8), np.ones(4 * SLOT, np.uint8)),
    ],
    ids=["count", "dtype", "empty", "large"],
)
def test_mismatch(world: bm.World, sent: ref.Array, taken: ref.Array) -> None:
    caught = None
    try:
        if world.rank == 0:
            world.send(sent, 1)
        elif world.rank == 1:
            world.recv(taken, 0)
        world.barrier()
    except bm.MismatchError as error:
        caught = str(error)
    assert caught is not None, "every rank raises"
    for word in ("rank 0: send", "rank 1: recv", "test_send_recv.py:", "same dtype and count"):
        assert word in caught, caught
    for array in (sent, taken):
        elements = f"{array.size} element" + "s" * (array.size != 1)
        assert f"({array.dtype.name}, {elements}" in caught, caught
    world.close()


@pytest.mark.ranks(3)
def test_groups_have_their_own_messages(world: bm.World) -> None:
    group = world.group([2, 0])
    if world.rank == 0:
        world.send(np.array([1]), 2)
        group.send(np.array([2]), 0)
    elif world.rank == 2:
        assert group.recv(np.zeros(1, np.int64), 1)[0] == 2
        assert world.recv(np.zeros(1, np.int64), 0)[0] == 1
