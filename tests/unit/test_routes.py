"""What is said of a call's way is what the record shows of it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import bireme as bm
from bireme import _core
from bireme.routes import PATHS, Route

INLINE, CHUNK = _core.INLINE_BYTES, _core.CHUNK_BYTES


@pytest.fixture
def alone() -> Iterator[bm.World]:
    with bm.init(engine="shm") as world:
        yield world


@pytest.mark.parametrize(
    ("op", "nbytes", "in_heap", "path", "words"),
    [
        ("barrier", 0, False, "none", "announcements"),
        ("all_reduce", 0, True, "none", "announcements"),
        ("all_reduce", 1, False, "inline", f"at most {INLINE} bytes"),
        ("all_to_all", INLINE, True, "inline", "travel with the announcement"),
        ("all_reduce", INLINE + 1, False, "staged", f"chunks of {CHUNK} bytes"),
        ("broadcast", 10 * CHUNK, False, "staged", "private memory"),
        ("all_reduce", INLINE + 1, True, "sliced", "without staging"),
        ("reduce", 10 * CHUNK, True, "sliced", "folds its slice"),
        ("reduce_scatter", INLINE + 1, True, "direct", "reads the others' sources"),
        ("all_gather", 10 * CHUNK, True, "direct", "in the heap"),
    ],
)
def test_ways(alone: bm.World, op: str, nbytes: int, in_heap: bool, path: str, words: str) -> None:
    route = alone.routes.explain(op, nbytes, in_heap=in_heap)
    assert (route.engine, route.path) == ("shm", path)
    assert path in PATHS
    assert words in route.why


def test_null_has_one_way() -> None:
    with bm.init(engine="null") as world:
        route = world.routes.explain("all_reduce", 10 * CHUNK)
        assert route == Route("null", "none", "no other rank exists")


def test_routes_are_values(alone: bm.World) -> None:
    first, second = (alone.routes.explain("gather", 5) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.ranks(2, 3)
def test_the_record_agrees(world: bm.World) -> None:
    for nbytes in (0, 8, INLINE, INLINE + 8, 3 * CHUNK):
        for in_heap in (False, True):
            count = nbytes // 8
            x = world.symmetric.zeros(count, "float64") if in_heap else np.zeros(count)
            for op in ("all_reduce", "reduce", "broadcast"):
                getattr(world, op)(x)
                taken = _core.calls(world.host.control, world.rank, 1)[0]["path"]
                said = world.routes.explain(op, nbytes, in_heap=in_heap).path
                assert PATHS[taken] == said, (op, nbytes, in_heap)
