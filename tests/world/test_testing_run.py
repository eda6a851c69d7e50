"""``bireme.testing.run``: a function on n forked ranks, its values, its failures."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import bireme
from bireme.testing import RankFailure, codec, run

VALUES = [
    None,
    True,
    -3,
    1 << 80,
    0.1,
    float("inf"),
    "text \u2713 \ud800",
    b"\x00\xff",
    [],
    (1, [2, (3,)]),
    {"a": 1, (1, 2): [None], 3: {"b": b""}},
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_keep_type_and_content(value: Any) -> None:
    found = codec.decode(codec.encode(value))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "u8", "f2", "f8", "c16", "M8[s]", "U3", "S2"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_arrays_keep_dtype_shape_and_content(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype("i8").astype(dtype)
    found = codec.decode(codec.encode(array))
    assert (found.dtype, found.shape) == (array.dtype, shape)
    assert np.array_equal(found, array)
    assert found.flags.writeable


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_arrays_of_small_types(name: str) -> None:
    array = np.arange(6).astype(getattr(ml_dtypes, name)).reshape(2, 3)
    found = codec.decode(codec.encode(array.T))
    assert found.dtype == array.dtype
    assert found.tobytes() == array.T.tobytes()


def test_scalars_of_numpy() -> None:
    for value in (np.float32(0.1), np.int64(-1), np.bool_(True), ml_dtypes.bfloat16(2)):
        found = codec.decode(codec.encode(value))
        assert (type(found), found) == (type(value), value)


class _Odd(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        ([{1, 2}], "builtins.set"),
        ({"x": _Odd()}, "test_testing_run._Odd"),
        (np.array([None]), "object"),
        (np.zeros(2, [("a", "i4")]), "'a'"),
        (np.zeros(2, "V3"), "V3"),
    ],
)
def test_other_types_are_refused_by_name(value: Any, name: str) -> None:
    with pytest.raises(TypeError, match="cannot send") as caught:
        codec.encode(value)
    assert name in str(caught.value)


def test_each_rank_gives_its_value() -> None:
    offset = 10  # closures are fine

    def body(world: bireme.World, factor: int) -> Any:
        return world.rank, world.all_reduce(np.full(2, offset * factor)), {"size": world.size}

    found = run(body, 3, 2)
    assert [rank for rank, _, _ in found] == [0, 1, 2]
    for _, total, sizes in found:
        assert total.tolist() == [60, 60]
        assert sizes == {"size": 3}


def test_every_failing_rank_is_in_the_text() -> None:
    def body(world: bireme.World) -> None:
        if world.rank > 0:
            raise ValueError(f"no {world.rank}")
        world.barrier()

    with pytest.raises(RankFailure) as caught:
        run(body, ranks=3)
    text = str(caught.value)
    assert isinstance(caught.value, AssertionError)
    assert "rank 1:\nTraceback" in text
    assert "ValueError: no 1" in text
    assert "ValueError: no 2" in text
    assert text.index("no 1") < text.index("rank 0:\n")


def test_ends_of_a_process() -> None:
    def exits(world: bireme.World) -> None:
        if world.rank == 1:
            sys.exit("by itself")
        world.barrier()

    def dies(world: bireme.World) -> None:
        if world.rank == 1:
            os._exit(7)
        world.barrier()

    def killed(world: bireme.World) -> None:
        os.kill(os.getpid(), 9)

    with pytest.raises(RankFailure, match="SystemExit: by itself"):
        run(exits)
    with pytest.raises(RankFailure, match="rank 1:\nthe process ended with exit code 7"):
        run(dies)
    with pytest.raises(
        RankFailure, match=r"rank 0:\nthe process was ended by signal 9 \(SIGKILL\)"
    ):
        run(killed, 1)


def test_a_hang_ends_with_all_stacks() -> None:
    def sleeps(world: bireme.World) -> None:
        if world.rank == 0:
            time.sleep(100)
        world.barrier()

    start = time.monotonic()
    with pytest.raises(RankFailure, match="rank 0:\nno value within 1 s") as caught:
        run(sleeps, timeout_s=1)
    assert time.monotonic() - start < 10
    assert str(caught.value).count("in sleeps") == 2


def test_a_value_that_cannot_be_sent() -> None:
    with pytest.raises(TypeError, match=r"rank 0: cannot send builtins\.set"):
        run(lambda world: {world.rank})


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a positive number of ranks, found 0"):
        run(lambda world: None, 0)
    with bireme.init(), pytest.raises(bireme.UsageError, match="rank 0 has a world open"):
        run(lambda world: None)
