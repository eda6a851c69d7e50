"""What is measured: sizes, counts, factors and the fixed list."""

from __future__ import annotations

import pytest

from bireme.bench import cases
from bireme.bench.worker import Case


def one(op: str, nbytes: int, ranks: int, dtype: str = "float") -> Case:
    return cases.op_cases(op, [nbytes], dtype, "sum", 0, "private", ranks)[0]


def test_sizes_by_factor_and_by_step() -> None:
    assert cases.sizes(8, 2048, factor=4) == [8, 32, 128, 512, 2048]
    assert cases.sizes(8, 100, factor=4) == [8, 32]
    assert cases.sizes(8, 8, factor=2) == [8]
    assert cases.sizes(10, 40, factor=4, step_bytes=15) == [10, 25, 40]


@pytest.mark.parametrize(("least", "most", "factor"), [(0, 8, 2), (16, 8, 2)])
def test_sizes_without_a_beginning(least: int, most: int, factor: int) -> None:
    with pytest.raises(ValueError, match="expected 0 < first <= last"):
        cases.sizes(least, most, factor)


@pytest.mark.parametrize("factor", [-1, 0, 1])
def test_sizes_without_an_end(factor: int) -> None:
    with pytest.raises(ValueError, match="expected a factor of 2 or more or a step"):
        cases.sizes(8, 64, factor)


# nccl-tests' factors, of n ranks.
FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "reduce": lambda n: 1,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "sendrecv": lambda n: 1,
}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("op", FACTORS)
def test_bandwidths(op: str, ranks: int) -> None:
    case = one(op, 1 << 20, ranks)
    algbw, busbw = cases.bandwidths(case, ranks, 100.0)
    assert algbw == pytest.approx(cases.size_bytes(case, ranks) / 100e-6 / 1e9)
    assert busbw == pytest.approx(algbw * FACTORS[op](ranks))


def test_no_time_is_no_bandwidth() -> None:
    assert cases.bandwidths(one("all_reduce", 8, 2), 2, 0.0) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("op", "nbytes", "dtype", "ranks", "count", "size"),
    [
        ("all_reduce", 8, "float", 2, 2, 8),
        ("all_reduce", 9, "half", 2, 4, 8),
        ("all_gather", 8, "float", 2, 0, 0),
        ("all_gather", 32, "float", 2, 4, 32),
        ("all_gather", 100, "float", 3, 8, 96),
        ("all_to_all", 1 << 20, "double", 4, 32768, 1 << 20),
        ("reduce_scatter", 64, "int8", 2, 32, 64),
        ("sendrecv", 100, "int32", 3, 25, 100),
        ("put", 8, "float", 2, 2, 8),
    ],
)
def test_counts(op: str, nbytes: int, dtype: str, ranks: int, count: int, size: int) -> None:
    case = one(op, nbytes, ranks, dtype)
    assert (case.count, cases.size_bytes(case, ranks)) == (count, size)


def test_what_has_no_sizes_is_measured_once() -> None:
    barrier = cases.op_cases("barrier", [8, 64], "float", "sum", 0, "private", 2)
    atomic = cases.op_cases("atomic", [8, 64], "float", "sum", 0, "private", 2)
    assert [(c.count, c.dtype) for c in barrier] == [(0, "float")]
    assert [(c.count, c.dtype) for c in atomic] == [(1, "int64")]


def test_reduction_and_root_go_to_those_that_have_them() -> None:
    for op in cases.OPS:
        case = cases.op_cases(op, [64], "float", "max", 1, "heap", 2)[0]
        assert case.redop == ("max" if cases.OPS[op].reduces else "sum")
        assert case.root == (1 if cases.OPS[op].rooted else 0)
        assert case.place == "heap"


def test_the_fixed_list() -> None:
    found = cases.engine_cases()
    assert len({case.key for case in found}) == len(found)
    sizes = [8, 1 << 10, 1 << 20, 64 << 20]
    for place in ("heap", "private"):
        reduces = [c for c in found if c.op == "all_reduce" and c.place == place]
        assert [cases.size_bytes(c, 2) for c in reduces] == sizes
    assert [c.op for c in found if c.op != "all_reduce"] == [
        "barrier", "put", "put", "get", "get", "put_local", "put",
    ]  # fmt: skip
    assert found[-1].source == "torch"


@pytest.mark.parametrize(
    ("nbytes", "name"),
    [(0, "0 B"), (8, "8 B"), (1000, "1000 B"), (1 << 10, "1 KiB"), (3 << 20, "3 MiB")],
)
def test_names_of_sizes(nbytes: int, name: str) -> None:
    assert cases.size_name(nbytes) == name
