"""Buffers in the symmetric heap are used where they lie; private ones go through staging memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import bireme as bm
from bireme import _core

# A part above the inline limit, and over several chunks with a rest.
COUNTS = (_core.INLINE_BYTES // 4 + 1, 3 * _core.CHUNK_BYTES // 4 + 5)
Call = Callable[[bm.World, Any, Any], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda world, x, out: world.all_reduce(x),
    "all_reduce out": lambda world, x, out: world.all_reduce(x, out=out),
    "reduce": lambda world, x, out: world.reduce(x, world.size - 1),
    "reduce_scatter": lambda world, x, out: world.reduce_scatter(x, out=_first(world, out)),
    "broadcast": lambda world, x, out: world.broadcast(x, world.size - 1),
    "all_gather": lambda world, x, out: world.all_gather(_first(world, x), out=out),
    "gather": lambda world, x, out: world.gather(_first(world, x), 0, out=out),
    "scatter": lambda world, x, out: world.scatter(x, 0, out=_first(world, out)),
    "all_to_all": lambda world, x, out: world.all_to_all(x, out=out),
}


def _first(world: bm.World, x: Any) -> Any:
    return x[: x.size // world.size]


def staged(world: bm.World, call: Call, x: Any, out: Any) -> int:
    """Return how many bytes this rank staged in a call."""
    before = world.collective.staged_bytes
    call(world, x, out)
    return int(world.collective.staged_bytes - before)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
def test_heap_is_not_staged(world: bm.World, name: str) -> None:
    for count in COUNTS:
        size = count * world.size
        x, out = (world.symmetric.full(size, 1, "float32") for _ in range(2))
        assert staged(world, CALLS[name], x, out) == 0, count


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
def test_private_is_staged(world: bm.World, name: str) -> None:
    for count in COUNTS:
        size = count * world.size
        x, out = (np.ones(size, np.float32) for _ in range(2))
        found = staged(world, CALLS[name], x, out)
        gives = name not in ("broadcast", "scatter") or world.rank == (
            world.size - 1 if name == "broadcast" else 0
        )
        part = count if name in ("all_gather", "gather") else size
        assert found == (4 * part if gives else 0), count


@pytest.mark.ranks(2, 3)
def test_one_private_source_makes_all_stage(world: bm.World) -> None:
    x = world.symmetric.full(COUNTS[0], 1, "float32")
    mine = np.ones(COUNTS[0], np.float32) if world.rank == 1 else x
    assert staged(world, CALLS["all_reduce"], mine, None) == 4 * COUNTS[0]


@pytest.mark.ranks(1, 3)
def test_small_calls_travel_with_the_announcement(world: bm.World) -> None:
    x = np.ones(_core.INLINE_BYTES // 4, np.float32)
    assert staged(world, CALLS["all_reduce"], x, None) == 0
    assert (x == world.size).all()
