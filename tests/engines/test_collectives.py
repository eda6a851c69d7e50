"""The collectives: the reference's bits on every rank, whatever the size and the place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract import contract
from sweep import sweep

import bireme as bm
import reference as ref


def all_reduce(world: bm.World) -> None:
    sweep(world, "all_reduce")


def reduce(world: bm.World) -> None:
    sweep(world, "reduce")


def reduce_scatter(world: bm.World) -> None:
    sweep(world, "reduce_scatter")


def broadcast(world: bm.World) -> None:
    sweep(world, "broadcast")


def all_gather(world: bm.World) -> None:
    sweep(world, "all_gather")


def gather(world: bm.World) -> None:
    sweep(world, "gather")


def scatter(world: bm.World) -> None:
    sweep(world, "scatter")


def all_to_all(world: bm.World) -> None:
    sweep(world, "all_to_all")


# ---- what a reduction means -------------------------------------------------------------------


def nan_wins(world: bm.World) -> None:
    for name in ref.FLOATS:
        for op in ("min", "max", "sum", "prod", "avg"):
            x = np.arange(world.size + 3).astype(ref.dtype(name))
            x[world.rank] = np.nan
            world.all_reduce(x, op)
            missing = np.isnan(x.astype(np.float64))
            wanted = np.arange(x.size) < world.size
            assert np.array_equal(missing, wanted), (name, op, x)


def infinities(world: bm.World) -> None:
    for name in ref.FLOATS:
        x = np.array([1, 2, -3, np.inf, -np.inf]).astype(ref.dtype(name))
        parts = [x] * world.size
        for op in ("min", "max", "sum"):
            found = world.all_reduce(x.copy(), op)
            assert ref.same_bits(found, ref.fold(parts, op)), (name, op)


def integers_wrap(world: bm.World) -> None:
    for name in ref.INTEGERS:
        limits = np.iinfo(name)
        x = np.array([limits.max, limits.min, 3], name)
        parts = [x] * world.size
        for op in ("sum", "prod"):
            found = world.all_reduce(x.copy(), op)
            assert ref.same_bits(found, ref.fold(parts, op)), (name, op)
            exact = int(limits.max) * world.size if op == "sum" else int(limits.max) ** world.size
            assert (int(found[0]) - exact) % 2 ** (8 * x.itemsize) == 0, (name, op)


def bools_are_logic(world: bm.World) -> None:
    mine = np.zeros(world.size + 1, np.bool_)
    mine[world.rank] = True
    somewhere = np.arange(world.size + 1) < world.size
    everywhere = somewhere & (world.size == 1)
    for op, wanted in (("sum", somewhere), ("max", somewhere)):
        assert ref.same_bits(world.all_reduce(mine.copy(), op), wanted), op
    for op, wanted in (("prod", everywhere), ("min", everywhere)):
        assert ref.same_bits(world.all_reduce(mine.copy(), op), wanted), op


def half_types_round_once(world: bm.World) -> None:
    # In bfloat16 256 + 1 is 256; held in float32, n times 1 and 256 come out exact.
    for name, big in (("bfloat16", 256.0), ("float16", 2048.0)):
        value = big if world.rank == 0 else 1.0
        found = world.all_reduce(np.full(5, value, ref.dtype(name)))
        wanted = np.float32(big + world.size - 1).astype(ref.dtype(name))
        assert (found == wanted).all(), (name, found, wanted)


def the_fold_goes_left(world: bm.World) -> None:
    # 2**24 + 1 is 2**24 in float32: only the order tells 2**24 + 1 + 1 from 1 + 1 + 2**24.
    for big_rank in range(world.size):
        x = np.full(3, 2.0**24 if world.rank == big_rank else 1.0, np.float32)
        wanted = np.float32(0)
        for rank in range(world.size):
            wanted += np.float32(2.0**24 if rank == big_rank else 1.0)
        assert (world.all_reduce(x) == wanted).all(), (big_rank, x, wanted)


def average_needs_floats(world: bm.World) -> None:
    for name in (*ref.BOOL, *ref.INTEGERS):
        x = np.ones(world.size, ref.dtype(name))
        for op in ("all_reduce", "reduce", "reduce_scatter"):
            with pytest.raises(TypeError, match=f"float dtype for avg, found {name}"):
                getattr(world, op)(x, op="avg")
        assert x.all()
    assert world.all_reduce(np.ones(2), "sum")[0] == world.size


# ---- shapes -----------------------------------------------------------------------------------


def shapes(world: bm.World) -> None:
    n, rank = world.size, world.rank
    parts = [ref.data("float32", (2 * n, 3, 5), r) for r in range(n)]
    x = parts[rank].copy()
    assert ref.same_bits(world.all_reduce(x.copy()), ref.fold(parts, "sum"))
    assert ref.same_bits(world.all_gather(x), np.concatenate(parts))
    assert ref.same_bits(world.reduce_scatter(x), np.split(ref.fold(parts, "sum"), n)[rank])
    assert ref.same_bits(world.all_to_all(x), ref.expected("all_to_all", parts, rank))
    root = n - 1
    assert ref.same_bits(world.scatter(x, root), np.split(parts[root], n)[rank])
    gathered = world.gather(x, root)
    assert gathered is None if rank != root else ref.same_bits(gathered, np.concatenate(parts))
    assert ref.same_bits(x, parts[rank])


def empty_shapes(world: bm.World) -> None:
    for shape in ((0,), (0, 3), (world.size, 0), (2 * world.size, 0, 4)):
        x = np.empty(shape, np.int16)
        joined = (shape[0] * world.size, *shape[1:])
        block = (shape[0] // world.size, *shape[1:])
        assert world.all_reduce(x).shape == shape
        assert world.broadcast(x).shape == shape
        assert world.all_gather(x).shape == joined
        assert world.reduce_scatter(x).shape == block
        assert world.scatter(x).shape == block
        assert world.all_to_all(x).shape == shape
        gathered = world.gather(x)
        assert gathered is None if world.rank else gathered.shape == joined


def no_dimension(world: bm.World) -> None:
    x = np.array(world.rank + 1.0)
    total = world.all_reduce(x)
    assert total is x
    assert x.shape == ()
    assert x == sum(range(1, world.size + 1))
    joined = world.all_gather(np.array(world.rank))
    assert ref.same_bits(joined, np.arange(world.size))
    gathered = world.gather(np.array(world.rank))
    assert world.rank or ref.same_bits(gathered, np.arange(world.size))
    told = np.array(world.rank, np.int8)
    assert world.broadcast(told, world.size - 1) is told
    assert told == world.size - 1


def scatter_tells_dtype_and_shape(world: bm.World) -> None:
    for name in ref.ALL:
        for root in range(world.size):
            whole = ref.data(name, (world.size * 2, 3), root)
            block = world.scatter(whole if world.rank == root else None, root)
            assert ref.same_bits(block, np.split(whole, world.size)[world.rank]), (name, root)


def results_are_what_was_passed(world: bm.World) -> None:
    x, out = np.ones(world.size), np.zeros(world.size)
    assert world.all_reduce(x) is x
    assert world.all_reduce(x, out=out) is out
    assert world.broadcast(x) is x
    assert world.reduce(x, out=out) is (x if world.rank else out)
    assert world.reduce(x) is x
    assert world.all_to_all(x, out=out) is out
    big = np.zeros(world.size**2)
    assert world.all_gather(x, out=big) is big
    assert world.gather(x, out=big) is (None if world.rank else big)
    small = np.zeros(1)
    assert world.scatter(x, out=small) is small
    assert world.reduce_scatter(x, out=small) is small


# ---- what is refused --------------------------------------------------------------------------


def wrong_calls_are_refused(world: bm.World) -> None:
    n = world.size
    x = np.ones(2 * n, np.float32)
    calls: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "op: expected one of sum, prod", lambda: world.all_reduce(x, "mean")),
        (ValueError, f"rank from 0 to {n - 1}, found {n}", lambda: world.broadcast(x, n)),
        (ValueError, "found -1", lambda: world.reduce(x, -1)),
        (TypeError, "root: expected a rank, found True", lambda: world.gather(x, True)),
        (TypeError, "found '0'", lambda: world.scatter(x, "0")),
        (TypeError, "found 0.0", lambda: world.broadcast(x, 0.0)),
        (TypeError, "dtype float32, found int8", lambda: world.all_reduce(x, out=x.astype("i1"))),
        (ValueError, "out: expected shape", lambda: world.all_reduce(x, out=x[:-1].copy())),
        (ValueError, "out: expected shape", lambda: world.all_gather(x, out=np.ones(1, "f4"))),
        (ValueError, "equal blocks", lambda: world.reduce_scatter(np.array(1.0))),
        (ValueError, "equal blocks", lambda: world.all_to_all(np.array(1.0))),
        (TypeError, "x: expected a NumPy array", lambda: world.all_reduce([1.0, 2.0])),
        (TypeError, "found NoneType", lambda: world.all_gather(None)),
    ]
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
        assert (x == 1).all(), text
    assert world.all_reduce(np.ones(1))[0] == n, "the world stays usable"


def uneven_blocks_are_refused(world: bm.World) -> None:
    if world.size == 1:
        return
    x = np.ones(world.size + 1)
    for call in (world.reduce_scatter, world.all_to_all):
        with pytest.raises(ValueError, match=f"{world.size} equal blocks, found shape"):
            call(x)
    expected = ValueError if world.rank == 0 else bm.MismatchError
    with pytest.raises(expected, match="equal blocks"):
        world.scatter(x, 0)
    assert world.all_reduce(np.ones(1))[0] == world.size


def partial_overlap_is_refused(world: bm.World) -> None:
    n, rank = world.size, world.rank
    whole = np.ones(4 * n * n + 1)
    calls = (
        lambda: world.all_reduce(whole[:-1], out=whole[1:]),
        lambda: world.all_to_all(whole[: 2 * n], out=whole[1 : 2 * n + 1]),
        lambda: world.all_gather(whole[rank * 2 + 1 : rank * 2 + 3], out=whole[: 2 * n]),
        lambda: world.reduce_scatter(whole[: 2 * n], out=whole[rank * 2 + 1 : rank * 2 + 3]),
    )
    for number, call in enumerate(calls):
        with pytest.raises(ValueError, match="would corrupt the result"):
            call()
        assert (whole == 1).all(), number
    rooted = (
        lambda: world.scatter(whole[: 2 * n], 0, out=whole[1:3]),
        lambda: world.gather(whole[1:3], 0, out=whole[: 2 * n]),
    )
    for call in rooted:
        with pytest.raises(ValueError if rank == 0 else bm.MismatchError, match="overlap"):
            call()
    assert world.all_reduce(np.ones(1))[0] == n


test_eager, test_lazy, test_null = contract(
    all_reduce,
    reduce,
    reduce_scatter,
    broadcast,
    all_gather,
    gather,
    scatter,
    all_to_all,
    nan_wins,
    infinities,
    integers_wrap,
    bools_are_logic,
    half_types_round_once,
    the_fold_goes_left,
    average_needs_floats,
    shapes,
    empty_shapes,
    no_dimension,
    scatter_tells_dtype_and_shape,
    results_are_what_was_passed,
    wrong_calls_are_refused,
    uneven_blocks_are_refused,
    partial_overlap_is_refused,
)
