"""Atomics: each operation on each dtype, also where all ranks want the same word at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from contract import contract

import bireme as bm
import reference as ref

INTEGERS = ("int32", "int64", "uint32", "uint64")
FLOATS = ("float32", "float64")
OTHERS = sorted(set(ref.ALL) - {*INTEGERS, *FLOATS})
TURNS = 60


def one(world: bm.World, name: str, value: float = 0) -> bm.SymmetricArray:
    return world.symmetric.full(3, value, name)[1]


def operations(name: str) -> list[tuple[str, tuple[Any, ...], Any, Any]]:
    """Method, arguments before the peer, the start value, and what the word holds then."""
    limits = np.iinfo(name)
    top, bottom = int(limits.max), int(limits.min)
    return [
        ("set", (7,), 3, 7),
        ("add", (7,), 3, 10),
        ("add", (1,), top, bottom),
        ("add", (top,), 1, bottom),
        ("inc", (), 41, 42),
        ("inc", (), top, bottom),
        ("and", (0b1100,), 0b1010, 0b1000),
        ("or", (0b1100,), 0b1010, 0b1110),
        ("xor", (0b1100,), 0b1010, 0b0110),
        ("set", (bottom,), 0, bottom),
        ("set", (top,), 0, top),
    ]


def integers(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    for name in INTEGERS:
        for op, arguments, start, wanted in operations(name):
            x = one(world, name, start)
            assert getattr(x, f"atomic_{op}")(*arguments, peer) is None, op
            world.barrier()
            assert x.local == wanted, (name, op, arguments, start)
        x = one(world, name)
        x.local[...] = -5 if name.startswith("i") else 2 ** (8 * x.nbytes) - 5
        assert x.atomic_fetch(world.rank) == x.local, "signs and high bits come back"


def integers_with_results(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    for name in INTEGERS:
        todo = [(f"fetch_{op}", *rest) for op, *rest in operations(name) if op != "set"]
        todo += [("swap", *rest) for op, *rest in operations(name) if op == "set"]
        todo += [("compare_swap", (3, 9), 3, 9), ("compare_swap", (4, 9), 3, 3)]
        for op, arguments, start, wanted in todo:
            x = one(world, name, start)
            found = getattr(x, f"atomic_{op}")(*arguments, peer)
            assert (type(found), found) == (int, start), (name, op, arguments)
            world.barrier()
            assert x.local == wanted, (name, op, arguments, start)
            assert x.atomic_fetch(peer) == wanted


def floats(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    for name in FLOATS:
        x = one(world, name, 1.5)
        steps: list[tuple[str, tuple[float, ...], float | None, float]] = [
            ("add", (2.25,), None, 3.75),
            ("set", (-0.5,), None, -0.5),
            ("inc", (), None, 0.5),
            ("fetch", (), 0.5, 0.5),
            ("fetch_add", (0.25,), 0.5, 0.75),
            ("fetch_inc", (), 0.75, 1.75),
            ("swap", (float("inf"),), 1.75, float("inf")),
        ]
        for op, arguments, returned, wanted in steps:
            found = getattr(x, f"atomic_{op}")(*arguments, peer)
            assert found == returned, (name, op)
            world.barrier()
            assert x.local == wanted, (name, op)
            world.barrier()


def neighbours_are_untouched(world: bm.World) -> None:
    for name in (*INTEGERS, *FLOATS):
        x = world.symmetric.full(3, 5, name)
        x[1].atomic_add(1, world.rank)
        x[1].atomic_swap(9, world.rank)
        assert x.local.tolist() == [5, 9, 5], name


def everyone_adds(world: bm.World) -> None:
    for name in (*INTEGERS, *FLOATS):
        x = one(world, name)
        olds = [x.atomic_fetch_add(1, 0) for _ in range(TURNS)]
        for _ in range(TURNS):
            x.atomic_inc(0)
        world.barrier()
        assert x.atomic_fetch(0) == 2 * TURNS * world.size, name
        assert olds == sorted(set(olds)), "a rank sees the word grow"
        everybody = world.all_gather(np.array(olds, np.float64))
        assert len(set(everybody.tolist())) == TURNS * world.size, "no two adds saw the same"


def everyone_sets_bits(world: bm.World) -> None:
    for name in INTEGERS:
        x = one(world, name)
        for bit in range(4):
            x.atomic_or(1 << (4 * world.rank + bit), 0)
        world.barrier()
        assert x.atomic_fetch(0) == 2 ** (4 * world.size) - 1, name
        world.barrier()
        olds = [x.atomic_fetch_xor(1 << (4 * world.rank), 0) for _ in range(TURNS + 1)]
        mine = [old >> (4 * world.rank) & 1 for old in olds]
        assert mine == [1 - number % 2 for number in range(TURNS + 1)], "each toggle counts"
        world.barrier()
        x.atomic_and(~(1 << (4 * world.rank + 1)) & 2**31 - 1, 0)
        world.barrier()
        wanted = sum(0b1100 << (4 * rank) for rank in range(world.size))
        assert x.atomic_fetch(0) == wanted, name


def everyone_swaps(world: bm.World) -> None:
    for name in (*INTEGERS, *FLOATS):
        x = one(world, name)
        mine = [1 + world.rank * TURNS + turn for turn in range(TURNS)]
        olds = [x.atomic_swap(value, world.size - 1) for value in mine]
        world.barrier()
        left = x.atomic_fetch(world.size - 1)
        everybody = world.all_gather(np.array(olds, np.float64)).tolist()
        wanted = list(range(TURNS * world.size + 1))
        assert sorted([*everybody, left]) == wanted, f"{name}: each value is taken once"


def a_lock(world: bm.World) -> None:
    for name in INTEGERS:
        lock, count = one(world, name), world.symmetric.zeros(1, "int64")
        for _ in range(10):
            while lock.atomic_compare_swap(0, world.rank + 1, 0) != 0:
                pass
            held = count.get(peer=0)
            count.put(held + 1, 0)
            world.quiet()
            assert lock.atomic_swap(0, 0) == world.rank + 1, "nobody else took the lock"
        world.barrier()
        assert count.get(peer=0)[0] == 10 * world.size, name


def wrong_atomics(world: bm.World) -> None:
    x = world.symmetric.zeros((2, 2), "int32")
    f = world.symmetric.zeros(1, "float64")
    u = world.symmetric.zeros(1, "uint64")
    cell = x[0, 0]
    n = world.size
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, r"expected one element such as x\[3\]", lambda: x.atomic_add(1, 0)),
        (ValueError, "expected one element", lambda: x[0, :0].atomic_fetch(0)),
        (ValueError, "atomic add: peer: expected a rank", lambda: cell.atomic_add(1, n)),
        (TypeError, "atomic fetch: peer: expected a rank", lambda: cell.atomic_fetch(None)),
        (TypeError, "atomic add: expected an integer, found 1.5", lambda: cell.atomic_add(1.5, 0)),
        (TypeError, "expected an integer, found True", lambda: cell.atomic_set(True, 0)),
        (ValueError, "2147483648 does not fit int32", lambda: cell.atomic_add(2**31, 0)),
        (ValueError, "-1 does not fit uint64", lambda: u.atomic_add(-1, 0)),
        (ValueError, "does not fit", lambda: cell.atomic_compare_swap(2**40, 1, 0)),
        (ValueError, "abc", lambda: f.atomic_add("abc", 0)),
    ]
    for op in ("and", "or", "xor", "fetch_and", "fetch_or", "fetch_xor"):
        cases.append((TypeError, "integer array, found float64", _bits_of_a_float(f, op)))
    cases.append((TypeError, "atomic compare_swap", lambda: f.atomic_compare_swap(0, 1, 0)))
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    world.barrier()
    assert not x.local.any()
    assert not f.local.any()
    assert not u.local.any()


def _bits_of_a_float(x: bm.SymmetricArray, op: str) -> Callable[[], Any]:
    return lambda: getattr(x, f"atomic_{op}")(1, 0)


def small_types_have_no_atomics(world: bm.World) -> None:
    for name in OTHERS:
        x = one(world, name, 1)
        for call in (lambda x=x: x.atomic_add(1, 0), lambda x=x: x.atomic_fetch(0)):
            with pytest.raises(TypeError, match=f"on {name}: .*4- and 8-byte"):
                call()
        assert world.one_sided.lacks[f"atomic:{name}"]


test_eager, test_lazy, test_null = contract(
    integers,
    integers_with_results,
    floats,
    neighbours_are_untouched,
    everyone_adds,
    everyone_sets_bits,
    everyone_swaps,
    a_lock,
    wrong_atomics,
    small_types_have_no_atomics,
)
