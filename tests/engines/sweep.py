"""One collective over dtypes, reductions, sizes and places, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import bireme as bm
import reference as ref
from bireme import _core

# Where x and out lie, by rank: whether each is in the symmetric heap.
PLACES = {
    "private": lambda rank: (False, False),
    "heap": lambda rank: (True, True),
    "x in heap": lambda rank: (True, False),
    "out in heap": lambda rank: (False, True),
    "mixed": lambda rank: (rank % 2 == 0, rank % 3 == 0),
}
IN_PLACE = ("private", "heap", "mixed")
# One dtype of each item size for the sizes that take time.
LARGE = ("uint8", "bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Case:
    """One call; ``part`` is the number of elements of one block."""

    op: str
    name: str
    part: int
    reduction: str
    root: int
    place: str = "private"
    in_place: bool = False


class Memory:
    """Room for x and out of one dtype, private and in the heap, with a guard on each side."""

    def __init__(self, world: bm.World, name: str, room: int) -> None:
        kind = ref.dtype(name)
        self.guard = np.frombuffer(b"\xa5" * kind.itemsize, kind)[0]
        self.heap = [world.symmetric.empty(room + 2, kind) for _ in range(2)]
        self.local = [np.empty(room + 2, kind) for _ in range(2)]
        self._views = [array.numpy() for array in self.heap]

    def take(self, which: int, size: int, in_heap: bool) -> tuple[Any, ref.Array, ref.Array]:
        """Return what to pass, its values, and its guards with them."""
        whole = (self._views if in_heap else self.local)[which][: size + 2]
        whole[0] = whole[-1] = self.guard
        passed = self.heap[which][1 : size + 1] if in_heap else whole[1:-1]
        return passed, whole[1:-1], whole

    def intact(self, whole: ref.Array) -> bool:
        """Whether nothing was written beside the array."""
        guard = self.guard.tobytes()
        return whole[0].tobytes() == guard and whole[-1].tobytes() == guard

    def free(self) -> None:
        """Give the heap's part back."""
        self._views.clear()
        for array in self.heap:
            array.free()


def cases(op: str, size: int, name: str) -> Iterator[Case]:
    """Small sizes with every reduction; the paths' limits from both sides."""
    reductions = ref.reductions_of(name) if op in ref.REDUCING else ("sum",)
    blocks = size if op in ref.BLOCKED else 1
    item = ref.dtype(name).itemsize
    inline = _core.INLINE_BYTES // item // blocks
    # A staged chunk holds a piece of every block, cut to cache lines.
    chunk = _core.CHUNK_BYTES // blocks // 64 * 64 // item
    parts = [(part, r) for part in (0, 1, 7, inline + 1) for r in reductions]
    parts += [(part, reductions[part % len(reductions)]) for part in (inline - 1, inline)]
    if name in LARGE:
        large = (chunk - 1, chunk, chunk + 1, 2 * chunk + 13)
        parts += [(part, reductions[part % len(reductions)]) for part in large]
    for number, (part, reduction) in enumerate(parts):
        yield Case(op, name, part, reduction, number % size)


def sweep(world: bm.World, op: str) -> None:
    """Run one collective over all its cases."""
    for name in ref.ALL:
        todo = list(cases(op, world.size, name))
        room = max(case.part for case in todo) * world.size
        memory = Memory(world, name, room)
        for case in todo:
            _sweep_places(world, memory, case)
        memory.free()


def _sweep_places(world: bm.World, memory: Memory, case: Case) -> None:
    count = case.part * (world.size if case.op in ref.BLOCKED else 1)
    inputs = [ref.data(case.name, count, rank, str(case)) for rank in range(world.size)]
    wanted = ref.expected(case.op, inputs, world.rank, case.reduction, case.root)
    for place in PLACES:
        if case.op != "broadcast":
            once(world, memory, _at(case, place, False), inputs, wanted)
    for place in IN_PLACE:
        once(world, memory, _at(case, place, True), inputs, wanted)


def _at(case: Case, place: str, in_place: bool) -> Case:
    return Case(case.op, case.name, case.part, case.reduction, case.root, place, in_place)


def once(
    world: bm.World,
    memory: Memory,
    case: Case,
    inputs: list[ref.Array],
    wanted: ref.Array | None,
) -> None:
    """Make one call and compare its result, its source and the memory beside them."""
    mine = inputs[world.rank]
    (x, x_values, x_whole), (out, out_values, out_whole) = _lay(world, memory, case, mine.size)
    x_values[...] = mine
    returned = call(world, case, x, out)
    found = x_values if out is None else out_values
    if wanted is None:
        assert case.op != "reduce" or returned is x, case
        assert case.op != "gather" or returned is None, case
    else:
        assert returned is (x if out is None else out), case
        assert ref.same_bits(found, wanted), _difference(world, case, found, wanted)
    if wanted is None or not case.in_place:
        assert ref.same_bits(x_values, mine), f"rank {world.rank}: the source changed in {case}"
    for whole in (x_whole, out_whole):
        assert whole is None or memory.intact(whole), f"rank {world.rank}: outside of {case}"


def call(world: bm.World, case: Case, x: Any, out: Any) -> Any:
    """Make the call as a user would."""
    more: dict[str, Any] = {}
    if case.op in ref.REDUCING:
        more["op"] = case.reduction
    if case.op in ref.ROOTED:
        more["root"] = case.root
    if out is not None:
        more["out"] = out
    if case.op == "scatter" and world.rank != case.root:
        x = None
    return getattr(world, case.op)(x, **more)


def _lay(world: bm.World, memory: Memory, case: Case, count: int) -> Any:
    """Return x and out, each as (passed, values, with guards)."""
    x_in_heap, out_in_heap = PLACES[case.place](world.rank)
    gives = case.op not in ("reduce", "gather") or world.rank == case.root
    if case.in_place:
        return _lay_in_place(world, memory, case, count, x_in_heap)
    size = count * world.size if case.op in ref.JOINING else count
    size = case.part if case.op in ("reduce_scatter", "scatter") else size
    out = memory.take(1, size, out_in_heap) if gives else (None, None, None)
    return memory.take(0, count, x_in_heap), out


def _lay_in_place(world: bm.World, memory: Memory, case: Case, count: int, in_heap: bool) -> Any:
    block = slice(world.rank * case.part, (world.rank + 1) * case.part)
    rooted = case.op in ("gather", "scatter") and world.rank != case.root
    if case.op in ref.JOINING and not rooted:
        passed, values, whole = memory.take(1, count * world.size, in_heap)
        return (passed[block], values[block], None), (passed, values, whole)
    if case.op in ("reduce_scatter", "scatter") and not rooted:
        passed, values, whole = memory.take(0, count, in_heap)
        return (passed, values, whole), (passed[block], values[block], None)
    x = memory.take(0, count, in_heap)
    if case.op == "all_to_all":
        return x, x
    if case.op == "scatter":
        return x, memory.take(1, case.part, in_heap)
    return x, (None, None, None)


def _difference(world: bm.World, case: Case, found: ref.Array, wanted: ref.Array) -> str:
    wrong = np.flatnonzero(found != wanted)
    first = int(wrong[0]) if wrong.size else -1
    return (
        f"rank {world.rank} of {world.size}: {case}: {wrong.size} of {wanted.size} elements "
        f"differ, the first at {first}: found {found[first]}, wanted {wanted[first]}"
    )
