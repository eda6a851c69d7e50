"""Groups: some ranks of a world, with both faces, their own order and their own memory."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import numpy as np
import pytest

import bireme as bm
import reference as ref


def ones() -> ref.Array:
    return np.ones(3)


def total(group: bm.Group) -> int:
    """How many ranks take part in a reduction of the group."""
    return int(group.all_reduce(ones())[0])


# ---- making them ------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3, 4)
def test_split_by_color_and_key(world: bm.World) -> None:
    group = world.split(world.rank % 2, key=-world.rank)
    members = sorted((r for r in range(world.size) if r % 2 == world.rank % 2), reverse=True)
    assert group.ranks == tuple(members)
    assert (group.size, group.rank) == (len(members), members.index(world.rank))
    assert group.all_gather(np.array([world.rank])).tolist() == members
    assert f"ranks={group.ranks}" in repr(group)
    same = world.split(7, key=0)
    assert same.ranks == tuple(range(world.size)), "equal keys keep the order"
    high = world.split(2**40, key=(-1) ** world.rank)
    assert high.ranks == tuple(sorted(range(world.size), key=lambda r: ((-1) ** r, r)))


@pytest.mark.ranks(1, 2, 3, 4)
def test_split_without_color(world: bm.World) -> None:
    group = world.split(None if world.rank == 0 else 0)
    assert (group is None) == (world.rank == 0)
    if group is not None:
        assert group.ranks == tuple(range(1, world.size))
        assert total(group) == world.size - 1
    assert world.split(None) is None, "nobody wants a group"
    assert total(world) == world.size


@pytest.mark.ranks(1, 2, 3, 4)
def test_groups_by_members(world: bm.World) -> None:
    for count in range(1, world.size + 1):
        for members in itertools.permutations(range(world.size), count):
            group = world.group(members)
            assert (group is None) == (world.rank not in members), members
            if group is None:
                continue
            assert group.ranks == members
            found = group.all_gather(np.array([world.rank]))
            assert found.tolist() == list(members)
            group.close()


@pytest.mark.ranks(2, 3)
def test_a_group_of_nobody(world: bm.World) -> None:
    assert world.group([]) is None
    assert total(world) == world.size


@pytest.mark.ranks(3, 4)
def test_nested_groups(world: bm.World) -> None:
    outer = world.split(0 if world.rank else 1, key=-world.rank)
    if world.rank == 0:
        assert outer.split(0).ranks == (0,)
        return
    assert outer.ranks == tuple(range(world.size - 1, 0, -1))
    inner = outer.group([outer.size - 1, 0])
    if inner is not None:
        assert inner.ranks == (1, world.size - 1), "ranks of the outer group"
        assert inner.all_gather(np.array([world.rank])).tolist() == [1, world.size - 1]
        assert inner.broadcast(np.array([world.rank]), 1)[0] == world.size - 1
        alone = inner.split(inner.rank)
        assert total(alone) == 1
        alone.close()
        inner.close()
    assert total(outer) == world.size - 1


@pytest.mark.ranks(1, 3)
def test_groups_of_one(world: bm.World) -> None:
    group = world.split(world.rank, heap_bytes=4096)
    assert (group.size, group.rank) == (1, 0)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"):
        assert getattr(group, op)(np.array([world.rank])).tolist() == [world.rank], op
    group.barrier()
    x = group.symmetric.full(3, world.rank, "int64")
    x.put(np.array([7, 8, 9]), 0)
    group.quiet()
    assert x.local.tolist() == [7, 8, 9]


@pytest.mark.ranks(2, 3)
def test_wrong_splits(world: bm.World) -> None:
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "color: expected at least 0, found -1", lambda: world.split(-1)),
        (TypeError, "color: expected an integer, found 'a'", lambda: world.split("a")),
        (TypeError, "color: expected an integer, found True", lambda: world.split(True)),
        (TypeError, "key: expected an integer, found 0.5", lambda: world.split(0, 0.5)),
        (TypeError, "heap_bytes: expected an integer", lambda: world.split(0, 0, "1M")),
        (ValueError, "heap_bytes: expected at least 0", lambda: world.split(0, heap_bytes=-1)),
        (ValueError, "ranks: expected no repetition, found", lambda: world.group([0, 0])),
        (ValueError, f"found {world.size}", lambda: world.group([world.size])),
        (TypeError, "ranks: expected a rank, found '0'", lambda: world.group(["0"])),
        (TypeError, "not iterable", lambda: world.group(0)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    assert total(world.split(0)) == world.size


# ---- use --------------------------------------------------------------------------------------


@pytest.mark.ranks(2, 3, 4)
def test_disjoint_groups_at_once(world: bm.World) -> None:
    group = world.split(world.rank % 2)
    members = group.ranks
    for turn in range(100):
        x = ref.data("float32", 1000 if turn % 10 else 100_000, world.rank, str(turn))
        parts = [ref.data("float32", x.size, r, str(turn)) for r in members]
        assert ref.same_bits(group.all_reduce(x), ref.fold(parts, "sum")), turn
        if world.rank % 2:
            group.barrier()  # the groups need not call alike


@pytest.mark.ranks(4)
def test_overlapping_groups(world: bm.World) -> None:
    row, column = world.split(world.rank // 2), world.split(world.rank % 2)
    x = np.array([1 << world.rank])
    for _ in range(20):
        found = column.all_reduce(row.all_reduce(x.copy()))
        assert found[0] == 0b1111
    works = [g.all_reduce(ones(), async_op=True) for g in (row, column, world)]
    assert [work.wait()[0] for work in works] == [2, 2, 4]


@pytest.mark.ranks(2, 3, 4)
def test_heaps_of_groups(world: bm.World) -> None:
    before = world.arena.free_bytes
    group = world.split(world.rank % 2, heap_bytes=64 << 10)
    assert group.arena.free_bytes == 64 << 10
    assert world.arena.free_bytes == before - (64 << 10)
    # The groups need different amounts, and the world's memory is apart from theirs.
    mine = [group.symmetric.full(50, world.rank, "int64") for _ in range(1 + world.rank % 2)]
    ours = world.symmetric.full(1000, -1, "int64")
    for array in mine:
        start, end = array.offset_bytes, array.offset_bytes + array.nbytes
        assert end <= ours.offset_bytes or ours.offset_bytes + ours.nbytes <= start
        offsets = group.all_gather(np.array([start]))
        assert (offsets == start).all()
        assert (array.local == world.rank).all()
    with pytest.raises(bm.EngineError, match="in an arena of 65536"):
        group.symmetric.zeros(64 << 10, "uint8")
    world.barrier()
    assert (ours.local == -1).all()


@pytest.mark.ranks(2, 3)
def test_heaps_differ_by_color(world: bm.World) -> None:
    group = world.split(world.rank % 2, heap_bytes=4096 << world.rank % 2)
    assert group.arena.free_bytes == 4096 << world.rank % 2
    group.symmetric.zeros(4096 << world.rank % 2, "uint8")
    inner = world.split(0, heap_bytes=8192)
    nested = inner.split(0, heap_bytes=4096)
    assert inner.arena.free_bytes == 4096
    x = nested.symmetric.full(4, world.rank, "int64")
    assert x.get(peer=0).tolist() == [nested.ranks[0]] * 4


@pytest.mark.ranks(1, 2)
def test_without_heap_bytes_there_is_no_memory(world: bm.World) -> None:
    group = world.split(0)
    with pytest.raises(bm.EngineError, match=r"in an arena of 0.*split\(heap_bytes=") as caught:
        group.symmetric.zeros(1)
    assert "BIREME_HEAP_BYTES" in str(caught.value)
    with pytest.raises(bm.EngineError, match="arena of 0"):
        group.symmetric.signal()
    assert total(group) == world.size


@pytest.mark.ranks(1, 2, 3)
def test_no_room_for_a_group(world: bm.World) -> None:
    before = world.arena.free_bytes
    with pytest.raises(bm.EngineError, match="heap is full"):
        world.split(0, heap_bytes=before + 1)
    assert world.arena.free_bytes == before
    assert total(world.split(0)) == world.size


@pytest.mark.ranks(3, 4)
def test_one_sided_with_group_ranks(world: bm.World) -> None:
    group = world.group(range(world.size - 1, 0, -1), heap_bytes=64 << 10)
    if group is None:
        return
    left, right = (group.rank - 1) % group.size, (group.rank + 1) % group.size
    x, count = group.symmetric.zeros(4, "int64"), group.symmetric.zeros(1, "int64")
    ready = group.symmetric.signal()
    x.put(np.full(4, group.rank), right, signal=ready)
    ready.wait(1)
    assert x.local.tolist() == [left] * 4
    group.barrier()
    assert x.get(peer=right).tolist() == [group.rank] * 4
    assert x.on(right).tolist() == [group.rank] * 4
    count[0].atomic_add(group.rank + 1, 0)
    group.barrier()
    assert count.get(peer=0)[0] == sum(range(1, group.size + 1))
    with pytest.raises(ValueError, match=f"from 0 to {group.size - 1}, found {group.size}"):
        x.put(np.zeros(4, np.int64), group.size)
    group.close()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("heap_bytes", [0, 1 << 20])
def test_many_groups(world: bm.World, heap_bytes: int) -> None:
    before = world.arena.free_bytes
    for turn in range(300):
        group = world.split(turn % 2 if world.rank else 0, heap_bytes=heap_bytes)
        assert total(group) == group.size
        if heap_bytes:
            x = group.symmetric.full(3, turn, "int64")
            assert x.local.tolist() == [turn] * 3, "a group's memory starts empty"
        group.close()
    world.barrier()
    last = world.split(0)
    assert last.slot < 10, "closed groups give their numbers back"
    assert world.arena.free_bytes == before, "and their memory"


@pytest.mark.ranks(2)
def test_all_groups_in_use(world: bm.World) -> None:
    groups = [world.split(0) for _ in range(200)]
    assert len({group.slot for group in groups}) == 200
    for group in groups[::37]:
        assert total(group) == 2
    for group in reversed(groups):
        group.close()
    assert total(world.split(0)) == 2


@pytest.mark.ranks(1)
def test_no_more_group_slots(world: bm.World) -> None:
    groups = []
    with pytest.raises(bm.EngineError, match=r"all 1024 groups of the world are in use; close\(\)"):
        for _ in range(1100):
            groups.append(world.split(0))
    assert len(groups) == 1023
    assert total(groups[500]) == 1
    groups.pop().close()
    assert total(world.split(0)) == 1
    for group in groups:
        group.close()


# ---- the end ----------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_a_closed_group(world: bm.World) -> None:
    group = world.split(0, heap_bytes=4096)
    x = group.symmetric.full(3, world.rank, "int64")
    signal = group.symmetric.signal()
    view = x.local
    group.close()
    group.close()
    calls = (
        lambda: total(group),
        lambda: group.barrier(),
        lambda: group.split(0),
        lambda: group.symmetric.zeros(1),
        lambda: group.send(ones(), (group.rank + 1) % group.size),
        lambda: x.put(np.zeros(3, np.int64), 0),
        lambda: x.get(peer=0),
        lambda: x.local,
        lambda: x.free(),
        lambda: signal.set(1, 0),
        lambda: signal.wait(0),
        lambda: signal.test(0),
        lambda: signal.value,
    )
    for number, call in enumerate(calls):
        if number == 4 and world.size == 1:
            continue
        with pytest.raises(bm.UsageError, match="closed"):
            call()
        assert total(world) == world.size, f"the world goes on after call {number}"
    assert view.tolist() == [world.rank] * 3, "views stay readable"


@pytest.mark.world(engine="null")
def test_a_closed_group_on_null(world: bm.World) -> None:
    group = world.split(0)
    group.close()
    for call in (lambda: total(group), group.barrier, lambda: group.split(0)):
        with pytest.raises(bm.UsageError, match="closed"):
            call()


@pytest.mark.ranks(2, 3)
def test_groups_that_are_dropped(world: bm.World) -> None:
    for _ in range(5):
        group = world.split(world.rank)
        assert total(group) == 1
        del group
    gc.collect()
    assert total(world.split(0)) == world.size


@pytest.mark.ranks(2, 3)
def test_the_world_ends_with_groups_open(world: bm.World) -> None:
    group = world.split(0)
    world.close()
    with pytest.raises(bm.UsageError, match="closed"):
        total(group)
    group.close()
