"""The arena: ranges never overlap, and all come back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.arena import ALIGN, Arena
from bireme.errors import EngineError

START, SIZE = 4096, 64 * ALIGN

# Each step takes a range of some bytes, or gives back one of those that are held.
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, SIZE // 4)),
        st.tuples(st.just("give"), st.integers(0, 1000)),
    ),
    max_size=80,
)


def check(arena: Arena, held: list[tuple[int, int]]) -> None:
    spans = sorted((offset, offset + size) for offset, size in held)
    for (_, end), (start, _) in itertools.pairwise(spans):
        assert end <= start, "two ranges overlap"
    assert all(start >= START and end <= START + SIZE for start, end in spans)
    assert arena.free_bytes == SIZE - sum(size for _, size in held)
    assert arena.largest_bytes <= arena.free_bytes


@given(STEPS)
def test_ranges_never_overlap(steps: list[tuple[str, int]]) -> None:
    arena, held = Arena(START, SIZE), []
    for step, number in steps:
        if step == "take":
            largest = arena.largest_bytes
            try:
                offset, size = arena.allocate(number)
            except EngineError:
                assert max(number, 1) > largest, "refused although there was room"
            else:
                assert size >= max(number, 1)
                assert size % ALIGN == 0
                assert offset % ALIGN == START % ALIGN
                held.append((offset, size))
        elif held:
            arena.release(*held.pop(number % len(held)))
        check(arena, held)
    for entry in held:
        arena.release(*entry)
    assert (arena.free_bytes, arena.largest_bytes) == (SIZE, SIZE), "all comes back as one range"
    assert arena.allocate(SIZE) == (START, SIZE)


@given(STEPS)
def test_all_ranks_get_the_same(steps: list[tuple[str, int]]) -> None:
    def offsets() -> list[tuple[int, int]]:
        arena, held, found = Arena(START, SIZE), [], []
        for step, number in steps:
            if step == "take" and arena.largest_bytes >= max(number, 1):
                held.append(arena.allocate(number))
                found.append(held[-1])
            elif step == "give" and held:
                arena.release(*held.pop(number % len(held)))
        return found

    assert offsets() == offsets()


def test_an_empty_array_takes_one_unit() -> None:
    arena = Arena(0, 2 * ALIGN)
    assert arena.allocate(0) == (0, ALIGN)
    assert arena.allocate(1) == (ALIGN, ALIGN)


def test_a_full_arena_names_the_sizes_and_the_knob() -> None:
    arena = Arena(0, 4 * ALIGN)
    ranges = [arena.allocate(ALIGN) for _ in range(4)]
    arena.release(*ranges[0])
    arena.release(*ranges[2])
    with pytest.raises(EngineError) as caught:
        arena.allocate(ALIGN + 1)
    text = str(caught.value)
    for word in (
        f"a free range of {2 * ALIGN} bytes",
        f"at most {ALIGN} of {2 * ALIGN} free bytes in an arena of {4 * ALIGN}",
        "BIREME_HEAP_BYTES",
        "init(heap_bytes=",
        "split(heap_bytes=",
    ):
        assert word in text, text


def test_no_memory_at_all() -> None:
    arena = Arena(0, 0)
    assert (arena.free_bytes, arena.largest_bytes) == (0, 0)
    with pytest.raises(EngineError, match="at most 0 of 0 free bytes in an arena of 0"):
        arena.allocate(0)


def test_the_first_range_that_fits() -> None:
    arena = Arena(0, 10 * ALIGN)
    a, b, c = (arena.allocate(2 * ALIGN) for _ in range(3))
    arena.release(*a)
    arena.release(*c)
    assert arena.allocate(3 * ALIGN)[0] == 4 * ALIGN, "joined with the range behind it"
    assert arena.allocate(ALIGN)[0] == 0
    arena.release(*b)
    assert arena.allocate(3 * ALIGN)[0] == ALIGN
