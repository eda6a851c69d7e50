"""The engine without processes: pretended ranks have shapes, dtypes and errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import bireme as bm


@pytest.fixture
def pretended() -> Iterator[bm.World]:
    """Rank 2 of four that are not there."""
    with bm.init(engine="null", rank=2, size=4) as world:
        yield world


def test_who_it_is(pretended: bm.World) -> None:
    assert (pretended.rank, pretended.size, pretended.ranks) == (2, 4, (0, 1, 2, 3))
    assert (pretended.local_rank, pretended.local_size) == (2, 4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rank": 4, "size": 4}, "expected a rank from 0 to 3, found 4"),
        ({"rank": -1, "size": 4}, "found -1"),
        ({"rank": 1}, "from 0 to 0, found 1"),
        ({"size": 0}, "from 0 to -1, found 0"),
        ({"size": -3}, "found 0"),
    ],
)
def test_ranks_that_do_not_exist(settings: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        bm.init(engine="null", **settings)
    assert bm.current() is None


@pytest.mark.parametrize("kind", ["bool", "bfloat16", "float32", "int64"])
def test_shapes_and_dtypes(pretended: bm.World, kind: Any) -> None:
    x = pretended.symmetric.full((8, 3), 1, kind).local
    for op, shape in (
        ("all_reduce", (8, 3)),
        ("reduce", (8, 3)),
        ("broadcast", (8, 3)),
        ("all_gather", (32, 3)),
        ("reduce_scatter", (2, 3)),
        ("scatter", (2, 3)),
        ("all_to_all", (8, 3)),
    ):
        root = {"root": 2} if op == "scatter" else {}
        found = getattr(pretended, op)(x.copy(), **root)
        assert (found.shape, found.dtype) == (shape, x.dtype), op
        assert (found == x[0, 0]).all(), op
    assert pretended.gather(x, 0) is None
    assert pretended.gather(x, 2).shape == (32, 3)


def test_the_own_block(pretended: bm.World) -> None:
    x = np.arange(8)
    assert pretended.reduce_scatter(x).tolist() == [4, 5]
    assert pretended.scatter(x, 2).tolist() == [4, 5]
    assert pretended.all_gather(x[:2]).tolist() == [0, 1] * 4
    assert pretended.all_to_all(x).tolist() == list(range(8))


def test_wrong_arguments(pretended: bm.World) -> None:
    for call in (
        lambda: pretended.reduce_scatter(np.ones(6)),
        lambda: pretended.all_to_all(np.ones(2)),
        lambda: pretended.broadcast(np.ones(2), 4),
        lambda: pretended.symmetric.zeros(3).put(np.ones(3, np.float32), 4),
    ):
        with pytest.raises(ValueError, match="expected"):
            call()
    with pytest.raises(TypeError, match="float dtype for avg"):
        pretended.all_reduce(np.ones(2, np.int32), "avg")
    with pytest.raises(ValueError, match="the own rank 2"):
        pretended.send(np.ones(1), 2)


def test_what_it_lacks(pretended: bm.World) -> None:
    with pytest.raises(bm.EngineError, match="all_reduce: engine null lacks async: the null"):
        pretended.all_reduce(np.ones(1), async_op=True)
    for call in (pretended.send, pretended.recv):
        with pytest.raises(bm.EngineError, match=r"engine null lacks send_recv: .* no peers"):
            call(np.ones(1), 0)
    x = pretended.symmetric.zeros(3)
    with pytest.raises(bm.EngineError, match=r"on\(0\): engine null cannot load.*use put and get"):
        x.on(0)
    assert x.on(2).shape == (3,)


def test_one_sided_calls_to_others_go_nowhere(pretended: bm.World) -> None:
    x, s = pretended.symmetric.full(3, 5, "int64"), pretended.symmetric.signal()
    x.put(np.array([1, 2, 3]), 0, signal=s)
    s.set(9, 1)
    x[0].atomic_add(100, 3)
    pretended.fence()
    pretended.barrier()
    assert x.local.tolist() == [5, 5, 5]
    assert s.value == 0
    assert x.get(peer=0).tolist() == [5, 5, 5], "others seem to hold the same"
    assert x[1].atomic_fetch(0) == 5
    x.put(np.array([1, 2, 3]), 2, signal=s, signal_value=4)
    assert (x.local.tolist(), s.value) == ([1, 2, 3], 4)


def test_pretended_ranks_have_always_signalled(pretended: bm.World) -> None:
    s = pretended.symmetric.signal()
    assert s.wait(7) == 7
    assert s.value == 0
    s.set(3, 2)
    assert s.wait(2, ">=") == 3, "the own word where it holds"


def test_a_wait_that_nobody_can_satisfy() -> None:
    with bm.init(engine="null") as world:
        s = world.symmetric.signal()
        with pytest.raises(bm.Timeout, match=r"rank 0: signal.wait expects >= 2, found 0, and a"):
            s.wait(2, ">=")
        s.set(2, 0)
        assert s.wait(2, ">=") == 2


def test_groups(pretended: bm.World) -> None:
    everybody = pretended.split(0, heap_bytes=4096)
    assert everybody.ranks == (0, 1, 2, 3), "the others seem to give the same colour"
    part = pretended.group([3, 2])
    assert pretended.split(None) is None
    assert (part.ranks, part.rank) == ((3, 2), 1)
    assert part.all_gather(np.array([7])).tolist() == [7, 7]
    assert part.reduce_scatter(np.arange(4)).tolist() == [2, 3]
    assert pretended.group([0, 1]) is None


def test_the_size_of_the_heap() -> None:
    with bm.init(engine="null", heap_bytes="64K") as world:
        x = world.symmetric.zeros(64 << 10, "uint8")
        assert x.local.size == 64 << 10
        with pytest.raises(bm.EngineError, match="heap is full"):
            world.symmetric.zeros(1)
        x.free()
        view = world.symmetric.full(4, 3).local
    assert view.tolist() == [3] * 4, "views outlive the world"


def test_the_environment_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_ENGINE", "null")
    with bm.init(rank=1, size=3) as world:
        assert (world.collective.name, world.rank, world.size) == ("null", 1, 3)
    assert bm.current() is None
