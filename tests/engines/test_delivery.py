"""Lazy delivery: what the rules do not promise does not happen, what they promise does.

Rank 0 puts, rank 1 looks. Rank 0 must not block before rank 1 has looked, for then its puts may
land: it polls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import bireme as bm
import reference as ref
from reference import until

lazy = pytest.mark.world(delivery="lazy")
DATA = np.arange(1, 9)
EMPTY = np.zeros(8, np.int64)


@dataclass
class Scene:
    """Two arrays, a go from rank 0 to rank 1 and the answer."""

    world: bm.World
    x: bm.SymmetricArray
    y: bm.SymmetricArray
    go: bm.Signal
    seen: bm.Signal

    def looks(self, check: Callable[[], None]) -> None:
        """Rank 1: wait for the go, look, answer."""
        self.go.wait(1)
        check()
        self.seen.set(1, 0)

    def holds(self, array: bm.SymmetricArray, wanted: ref.Array, what: str) -> None:
        assert ref.same_bits(array.local, wanted), f"{what}: found {array.local}"

    def until_seen(self) -> None:
        """Rank 0: until rank 1 has looked, without blocking in the library."""
        until(lambda: self.seen.test(1), "rank 1 has looked")


@pytest.fixture
def scene(world: bm.World) -> Any:
    x, y = (world.symmetric.zeros(8, "int64") for _ in range(2))
    return Scene(world, x, y, world.symmetric.signal(), world.symmetric.signal())


@lazy
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nbi", [False, True], ids=["put", "put_nbi"])
def test_a_put_is_not_there_before_quiet(world: bm.World, scene: Scene, nbi: bool) -> None:
    if world.rank == 0:
        (scene.x.put_nbi if nbi else scene.x.put)(DATA, 1)
        scene.go.set(1, 1)
        scene.until_seen()
        world.quiet()
        scene.go.set(2, 1)
    elif world.rank == 1:
        scene.looks(lambda: scene.holds(scene.x, EMPTY, "a signal of its own carries nothing"))
        scene.go.wait(2)
        scene.holds(scene.x, DATA, "after quiet")


@pytest.mark.ranks(2, 3)
def test_eager_puts_are_there(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        scene.x.put(DATA, 1)
        scene.go.set(1, 1)
        scene.until_seen()
    elif world.rank == 1:
        scene.looks(lambda: scene.holds(scene.x, DATA, "eager"))


@lazy
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("nbi", [False, True], ids=["put", "put_nbi"])
def test_a_signal_carries_its_own_put_only(world: bm.World, scene: Scene, nbi: bool) -> None:
    def check() -> None:
        scene.holds(scene.y, DATA, "the signal's own data")
        scene.holds(scene.x, EMPTY, "an earlier put")

    if world.rank == 0:
        scene.x.put(DATA, 1)
        (scene.y.put_nbi if nbi else scene.y.put)(DATA, 1, signal=scene.go)
        scene.until_seen()
    elif world.rank == 1:
        scene.looks(check)
    world.barrier()
    if world.rank == 1:
        scene.holds(scene.x, DATA, "after the barrier")


def _with_put(scene: Scene) -> None:
    scene.y.put(DATA, 1, signal=scene.go)


def _with_signal(scene: Scene) -> None:
    scene.go.add(1, 1)


def _with_atomic(scene: Scene) -> None:
    scene.y[0].atomic_set(1, 1)


@lazy
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("later", [_with_put, _with_signal, _with_atomic])
def test_a_fence_puts_earlier_before_later(
    world: bm.World, scene: Scene, later: Callable[[Scene], None]
) -> None:
    if world.rank == 0:
        scene.x.put(DATA, 1)
        world.fence()
        later(scene)
        scene.until_seen()
    elif world.rank == 1:
        if later is _with_atomic:
            until(lambda: scene.y.on(1)[0] == 1, "the atomic")
        else:
            scene.go.wait(1)
        scene.holds(scene.x, DATA, "what the fence puts first")
        scene.seen.set(1, 0)


@lazy
@pytest.mark.ranks(3, 4)
def test_a_fence_delivers_nothing_by_itself(world: bm.World, scene: Scene) -> None:
    # Rank 2 passes the word on, so that rank 0 does nothing more towards rank 1.
    if world.rank == 0:
        scene.x.put(DATA, 1)
        world.fence()
        scene.go.set(1, 2)
        scene.until_seen()
    elif world.rank == 2:
        scene.go.wait(1)
        scene.go.set(1, 1)
    elif world.rank == 1:
        scene.looks(lambda: scene.holds(scene.x, EMPTY, "fence only orders"))


@lazy
@pytest.mark.ranks(2, 3)
def test_what_comes_after_the_fence_may_still_be_late(world: bm.World, scene: Scene) -> None:
    def check() -> None:
        scene.holds(scene.x, DATA, "before the fence")
        scene.holds(scene.y, EMPTY, "after the fence")

    if world.rank == 0:
        scene.x.put(DATA, 1)
        world.fence()
        scene.y.put(DATA, 1)
        scene.go.set(1, 1)
        scene.until_seen()
    elif world.rank == 1:
        scene.looks(check)


@lazy
@pytest.mark.ranks(2, 3)
def test_puts_to_one_place_land_in_order_of_the_fence(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        for turn in range(5):
            scene.x.put(DATA + turn, 1)
            world.fence()
        scene.go.set(1, 1)
        scene.until_seen()
    elif world.rank == 1:
        scene.looks(lambda: scene.holds(scene.x, DATA + 4, "the last one"))


@lazy
@pytest.mark.ranks(1, 2, 3)
def test_get_nbi_shows_poison_until_quiet(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    for name in ref.ALL:
        if name == "bool":
            continue  # 0xff is no bool
        x = world.symmetric.full(5, 3, name)
        out = np.ones(5, ref.dtype(name))
        x.get_nbi(out, peer=peer)
        assert out.tobytes() == b"\xff" * out.nbytes, name
        world.quiet()
        assert ref.same_bits(out, np.full(5, 3, ref.dtype(name))), name
        x.get_nbi(out, peer=peer)
        world.barrier()
        assert ref.same_bits(out, np.full(5, 3, ref.dtype(name))), name


@lazy
@pytest.mark.ranks(2, 3)
def test_get_nbi_reads_when_it_lands(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        out = np.zeros(8, np.int64)
        scene.x.get_nbi(out, peer=1)
        scene.go.set(1, 1)
        scene.until_seen()
        world.quiet()
        assert ref.same_bits(out, DATA)
    elif world.rank == 1:
        scene.go.wait(1)
        scene.x.local[:] = DATA
        scene.seen.set(1, 0)


@lazy
@pytest.mark.ranks(1, 2, 3)
def test_get_waits_for_nothing(world: bm.World) -> None:
    x = world.symmetric.full(5, 3, "int64")
    assert x.get(peer=world.size - 1).tolist() == [3] * 5


@lazy
@pytest.mark.ranks(1, 2, 3)
def test_nbi_reads_its_source_when_it_lands(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    x, y = (world.symmetric.zeros(8, "int64") for _ in range(2))
    later, copied = DATA.copy(), DATA.copy()
    x.put_nbi(later, peer)
    y.put(copied, peer)
    later[:] = copied[:] = -1
    world.quiet()
    world.barrier()
    assert x.local.tolist() == [-1] * 8, "the program broke the rule of put_nbi, and it shows"
    assert y.local.tolist() == DATA.tolist(), "a blocking put has copied its source"


@lazy
@pytest.mark.ranks(1, 2, 3)
def test_nbi_keeps_its_source_alive(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    x = world.symmetric.zeros((50, 1000), "int64")
    for turn in range(50):
        x[turn].put_nbi(np.full(1000, turn), peer)
    got = [x.get_nbi(peer=world.rank) for _ in range(5)]
    world.barrier()
    wanted = np.repeat(np.arange(50)[:, None], 1000, axis=1)
    assert (x.local == wanted).all()
    assert all(array.shape == (50, 1000) for array in got)


@lazy
@pytest.mark.ranks(2, 3)
def test_puts_land_when_their_origin_blocks(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        scene.x.put(DATA, 1)
        scene.seen.wait(1)  # a right program may wait so: the peer polls the data itself
    elif world.rank == 1:
        view = scene.x.local
        until(lambda: bool(view[-1] == DATA[-1]), "the put has landed")
        assert ref.same_bits(view, DATA)
        scene.seen.set(1, 0)


@lazy
@pytest.mark.ranks(2, 3)
def test_puts_land_when_their_origin_blocks_in_a_collective(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        scene.x.put(DATA, 1)
    elif world.rank == 1:
        view = scene.x.local
        until(lambda: bool(view[-1] == DATA[-1]), "the put has landed")
        assert ref.same_bits(view, DATA)
    assert world.all_reduce(np.ones(1))[0] == world.size


@lazy
@pytest.mark.ranks(2, 3)
def test_atomics_do_not_wait(world: bm.World, scene: Scene) -> None:
    if world.rank == 0:
        scene.x[0].atomic_add(5, 1)
        scene.go.set(1, 1)
        scene.until_seen()
    elif world.rank == 1:
        scene.looks(lambda: scene.holds(scene.x[0], np.array(5), "an atomic is there at once"))


@lazy
@pytest.mark.ranks(2, 3)
def test_a_closing_rank_delivers(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    group = world.split(0, heap_bytes=4096)
    x = group.symmetric.zeros(8, "int64")
    view = x.numpy()
    group.barrier()
    x.put(DATA, peer)
    group.close()
    world.barrier()
    assert ref.same_bits(view, DATA)
    last = world.symmetric.zeros(8, "int64")
    view = last.numpy()
    last.put(DATA, peer)
    world.close()
    assert ref.same_bits(view, DATA), "closing is a barrier"


@lazy
@pytest.mark.ranks(2, 3)
def test_freeing_delivers_first(world: bm.World) -> None:
    peer = (world.rank + 1) % world.size
    x = world.symmetric.zeros(8, "int64")
    x.put(DATA, peer)
    x.free()
    y = world.symmetric.zeros(8, "int64")
    world.barrier()
    assert not y.local.any(), "a put to what was freed does not land in what comes after"


@pytest.mark.ranks(2)
def test_delivery_is_one_of_two(world: bm.World) -> None:
    world.close()
    with pytest.raises(ValueError, match="BIREME_DELIVERY: expected one of eager, lazy"):
        bm.init(delivery="late")
