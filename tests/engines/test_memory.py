"""Symmetric memory: the same offsets everywhere, freed by all, and its end."""

from __future__ import annotations

import gc
import itertools

import numpy as np
import pytest
from contract import contract

import bireme as bm
import reference as ref

MIB = 1 << 20


def offsets_agree(world: bm.World) -> None:
    arrays = []
    for turn in range(60):
        rng = np.random.default_rng(turn)
        shape = tuple(rng.integers(0, 30, rng.integers(0, 3)).tolist())
        arrays.append(world.symmetric.empty(shape, ref.ALL[turn % len(ref.ALL)]))
        if turn % 3 == 2:
            arrays.pop(int(rng.integers(len(arrays)))).free()
    offsets = np.array([array.offset_bytes for array in arrays])
    everybody = world.all_gather(offsets).reshape(world.size, -1)
    assert (everybody == offsets).all()
    spans = sorted((array.offset_bytes, array.offset_bytes + array.nbytes) for array in arrays)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start, "no two arrays overlap"
    assert all(offset % 64 == 0 for offset in offsets), "on cache lines"


def cycles_leave_nothing(world: bm.World) -> None:
    before = world.arena.free_bytes, world.arena.largest_bytes
    for turn in range(40):
        arrays = [world.symmetric.zeros(1 + 100 * number, "float64") for number in range(5)]
        arrays[turn % 5][:1].put(np.ones(1), world.rank)
        for number in np.random.default_rng(turn).permutation(5):
            arrays[number].free()
    assert (world.arena.free_bytes, world.arena.largest_bytes) == before


def dropped_arrays_are_freed(world: bm.World) -> None:
    before = world.arena.free_bytes
    kept = world.symmetric.zeros(1000, "float64")
    after = world.arena.free_bytes
    for _ in range(3):
        world.symmetric.zeros(1000, "float64")
    dropped = world.symmetric.zeros(1000, "float64")
    view = dropped.numpy()
    view[:] = 7
    del dropped
    gc.collect()
    world.barrier()
    world.symmetric.zeros(1).free()
    assert world.arena.free_bytes <= after, "a view holds its memory"
    assert (view == 7).all()
    del view
    gc.collect()
    world.barrier()
    world.symmetric.zeros(1).free()
    assert world.arena.free_bytes == after
    kept.free()
    assert world.arena.free_bytes == before


def dropped_signals_are_freed(world: bm.World) -> None:
    before = world.arena.free_bytes
    signals = world.symmetric.signals(3)
    one = signals[1]
    del signals
    gc.collect()
    world.barrier()
    world.symmetric.zeros(1).free()
    assert world.arena.free_bytes < before, "one of them is still held"
    one.set(4, world.rank)
    assert one.value == 4
    del one
    gc.collect()
    world.barrier()
    world.symmetric.zeros(1).free()
    assert world.arena.free_bytes == before


def dropped_on_some_ranks_only(world: bm.World) -> None:
    after = world.arena.free_bytes
    x = world.symmetric.full(1000, world.rank, "float64")
    if world.rank == 0:
        kept = x
    del x
    gc.collect()
    world.barrier()
    y = world.symmetric.zeros(1000, "float64")
    world.barrier()
    if world.rank == 0:
        assert kept.get(peer=world.size - 1).tolist() == [world.size - 1] * 1000
        del kept
    world.barrier()
    del y
    gc.collect()
    world.barrier()
    world.symmetric.zeros(1).free()
    assert world.arena.free_bytes == after


def freed_memory_is_fresh(world: bm.World) -> None:
    for name in ("uint8", "float64"):
        x = world.symmetric.full(50_000, 7, name)
        offset = x.offset_bytes
        x.free()
        y = world.symmetric.zeros(50_000, name)
        assert y.offset_bytes == offset, "the first range that fits"
        assert not y.local.any()
        y.free()


def use_after_free(world: bm.World) -> None:
    x = world.symmetric.zeros(4, "int64")
    part = x[1]
    signal = world.symmetric.signal()
    x.free()
    ones = np.ones(4, np.int64)
    calls = (
        lambda: x.put(ones, 0),
        lambda: x.get(peer=0),
        lambda: x.local,
        lambda: x.on(0),
        lambda: part.atomic_add(1, 0),
        lambda: world.all_reduce(x),
        lambda: world.all_gather(part),
        lambda: world.symmetric.zeros(4, "int64").put(x, 0),
        lambda: x.free(),
    )
    for number, call in enumerate(calls):
        with pytest.raises(bm.UsageError, match=f"was freed on rank {world.rank}"):
            call()
        assert world.all_reduce(np.ones(1))[0] == world.size, number
    signal.set(1, world.rank)
    assert signal.wait(1) == 1


def only_whole_arrays_are_freed(world: bm.World) -> None:
    x = world.symmetric.zeros((4, 4))
    with pytest.raises(bm.UsageError, match="expected the whole array, found a slice"):
        x[1].free()
    group = world.split(0, heap_bytes=8192)
    theirs = group.symmetric.zeros(4)
    with pytest.raises(bm.UsageError, match="another group's"):
        world.symmetric.free(theirs)
    theirs.free()
    x.free()


def a_first_part_is_a_slice(world: bm.World) -> None:
    x = world.symmetric.full((4, 4), 5)
    with pytest.raises(bm.UsageError, match="expected the whole array, found a slice"):
        x[0].free()
    assert (x.local == 5).all()


def live_views_prevent_free(world: bm.World) -> None:
    x = world.symmetric.full((3, 4), world.rank)
    views = [x.local, x[1].numpy(), x.on(world.size - 1), x.local[1:, ::2]]
    while views:
        views.pop()
        if views:
            with pytest.raises(
                bm.UsageError, match=f"{len(views)} views.* alive on rank {world.rank}"
            ):
                x.free()
    x.free()


def torch_views_prevent_free(world: bm.World) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    x = world.symmetric.zeros(4, "bfloat16")
    part = x.torch()[1:].view(3)
    with pytest.raises(bm.UsageError, match="1 views of the array are alive"):
        x.free()
    del part
    x.free()


def views_outlive_all(world: bm.World) -> None:
    x = world.symmetric.full(3000, world.rank, "int64")
    mine, theirs = x.local, x.on(world.size - 1)
    rows = mine.reshape(3, 1000)[1]
    world.barrier()
    world.close()
    del x
    gc.collect()
    assert (mine[:1000] == world.rank).all()
    assert (theirs[:1000] == world.size - 1).all()
    rows[:] = -1  # others may still look at the first thousand
    assert (mine[1000:2000] == -1).all()


def a_full_heap_says_so(world: bm.World) -> None:
    total = world.arena.free_bytes
    some = world.symmetric.empty(1024, "uint8")
    with pytest.raises(bm.EngineError) as caught:
        world.symmetric.zeros(total, "uint8")
    text = str(caught.value)
    for word in (str(total), str(total - 1024), "BIREME_HEAP_BYTES", "init(heap_bytes=", "split("):
        assert word in text, text
    assert world.arena.free_bytes == total - 1024, "nothing was taken"
    assert world.all_reduce(np.ones(1))[0] == world.size
    some.free()


test_eager, test_lazy, test_null = contract(
    offsets_agree,
    cycles_leave_nothing,
    dropped_arrays_are_freed,
    dropped_signals_are_freed,
    dropped_on_some_ranks_only,
    freed_memory_is_fresh,
    use_after_free,
    only_whole_arrays_are_freed,
    a_first_part_is_a_slice,
    live_views_prevent_free,
    torch_views_prevent_free,
    views_outlive_all,
    a_full_heap_says_so,
    ranks=(1, 2, 3),
    lazy=(2,),
)


@pytest.mark.ranks(1, 3)
@pytest.mark.world(heap_bytes="1M")
def test_dropping_is_enough_in_a_loop(world: bm.World) -> None:
    for turn in range(20):
        x = world.symmetric.full(MIB // 3, turn % 100, "uint8")
        assert (x.numpy() == turn % 100).all()
        del x


@pytest.mark.ranks(1, 2)
@pytest.mark.world(heap_bytes=5000)
def test_the_heap_is_of_whole_pages(world: bm.World) -> None:
    assert world.arena.free_bytes == 8192


@pytest.mark.ranks(1, 2)
@pytest.mark.world(heap_bytes=0)
def test_no_heap(world: bm.World) -> None:
    with pytest.raises(bm.EngineError, match="found at most 0 of 0 free bytes"):
        world.symmetric.zeros(1)
    assert world.all_reduce(np.ones(5000))[0] == world.size


@pytest.mark.ranks(2, 3)
def test_a_view_on_one_rank_prevents_free_on_all(world: bm.World) -> None:
    x = world.symmetric.zeros(4)
    view = x.local if world.rank == 1 else None
    expected = bm.UsageError if world.rank == 1 else bm.MismatchError
    with pytest.raises(expected, match=r"views of the array are alive on rank 1"):
        x.free()
    x.put(np.ones(4, np.float32), 1)
    world.barrier()
    assert view is None or view.tolist() == [1] * 4
    del view
    x.free()


@pytest.mark.ranks(2, 3)
def test_memory_of_a_released_view_is_given_back_to_the_system(world: bm.World) -> None:
    x = world.symmetric.full(8 * MIB, 1, "uint8")
    used = _resident_shared()
    x.free()
    assert _resident_shared() <= used - 7 * MIB


def _resident_shared() -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("RssShmem:"))
    return int(line.split()[1]) * 1024


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.world(heap_bytes="1M")
def test_the_whole_heap(world: bm.World) -> None:
    total = world.arena.free_bytes
    x = world.symmetric.empty(total, "uint8")
    x[total - 1].local[...] = 9
    world.barrier()
    x[total - 1 :].put(np.array([world.rank], np.uint8), (world.rank + 1) % world.size)
    world.barrier()
    assert x[-1].local == (world.rank - 1) % world.size
    with pytest.raises(bm.EngineError, match="heap is full"):
        world.symmetric.empty(1)
    x.free()
    assert world.arena.free_bytes == total
