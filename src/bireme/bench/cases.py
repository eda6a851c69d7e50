"""What is measured: the operations, their sizes, and the factors of the bus bandwidth.

Sizes, counts and factors are those of nccl-tests, so that a table can be laid beside one of its.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bireme.bench.worker import ONE_SIDED, Case, numpy_dtype

__all__ = [
    "DTYPES",
    "ENGINE",
    "ONE_SIDED",
    "OPS",
    "REDOPS",
    "Op",
    "bandwidths",
    "engine_cases",
    "op_cases",
    "size_bytes",
    "size_name",
    "sizes",
]

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "half", "float", "double",
          "bfloat16")  # fmt: skip
REDOPS = ("sum", "prod", "min", "max", "avg")
ENGINE = "engine"  # the name of the fixed table
_ALIGN_BYTES = 16  # of a rank's part, where the size is that of all ranks' parts


def _moved_twice(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


def _all_but_own(ranks: int) -> float:
    return (ranks - 1) / ranks


def _as_it_is(_ranks: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Op:
    """How nccl-tests counts an operation.

    Args:
        factor: Bus bandwidth over algorithm bandwidth, of the number of ranks.
        joined: Whether the size is that of all ranks' parts together.
        reduces: Whether it has a reduction.
        rooted: Whether it has a root.
        halves: ``"out"`` of place, ``"in"`` place.
        sized: Whether it comes in sizes.
        least_ranks: How many ranks it needs.
    """

    factor: Callable[[int], float] = _as_it_is
    joined: bool = False
    reduces: bool = False
    rooted: bool = False
    halves: tuple[str, ...] = ("out", "in")
    sized: bool = True
    least_ranks: int = 1


OPS: dict[str, Op] = {
    "all_reduce": Op(_moved_twice, reduces=True),
    "reduce": Op(reduces=True, rooted=True),
    "broadcast": Op(rooted=True, halves=("in",)),
    "all_gather": Op(_all_but_own, joined=True),
    "reduce_scatter": Op(_all_but_own, joined=True, reduces=True),
    "gather": Op(_all_but_own, joined=True, rooted=True),
    "scatter": Op(_all_but_own, joined=True, rooted=True),
    "all_to_all": Op(_all_but_own, joined=True),
    "sendrecv": Op(halves=("out",), least_ranks=2),
    "barrier": Op(halves=("out",), sized=False),
    "put": Op(halves=("out",), least_ranks=2),
    "get": Op(halves=("out",), least_ranks=2),
    "atomic": Op(halves=("out",), least_ranks=2, sized=False),
    "put_signal": Op(halves=("out",), least_ranks=2),
}


def sizes(least: int, most: int, factor: int = 0, step_bytes: int = 0) -> list[int]:
    """Return the sizes from ``least`` to ``most``, in bytes.

    Args:
        least: The first, in bytes.
        most: None is larger, in bytes.
        factor: Each is so many times the one before.
        step_bytes: Each is so much more than the one before, in bytes; instead of ``factor``.

    Raises:
        ValueError: If there would be no size, or no end.
    """
    if not 0 < least <= most:
        raise ValueError(f"sizes: expected 0 < first <= last, found {least} and {most}")
    if step_bytes <= 0 and factor < 2:
        raise ValueError(f"sizes: expected a factor of 2 or more or a step, found {factor}")
    found = [least]
    while (size := found[-1] + step_bytes if step_bytes > 0 else found[-1] * factor) <= most:
        found.append(size)
    return found


def count_of(op: str, nbytes: int, dtype: str, ranks: int) -> int:
    """Return the elements of one rank's part, of joined parts rounded down as nccl-tests does.

    Args:
        op: One of ``OPS``.
        nbytes: The size that was asked for.
        dtype: One of ``DTYPES``.
        ranks: Number of ranks.
    """
    item = numpy_dtype(dtype).itemsize
    if not OPS[op].joined:
        return nbytes // item
    unit = max(_ALIGN_BYTES // item, 1)
    return nbytes // item // ranks // unit * unit


def size_bytes(case: Case, ranks: int) -> int:
    """Return what the size column shows for a case."""
    joined = case.op in OPS and OPS[case.op].joined
    return case.count * numpy_dtype(case.dtype).itemsize * (ranks if joined else 1)


def bandwidths(case: Case, ranks: int, time_us: float) -> tuple[float, float]:
    """Return the algorithm bandwidth and the bus bandwidth, in 10**9 bytes per second."""
    algorithm = size_bytes(case, ranks) / (time_us * 1e-6) / 1e9 if time_us else 0.0
    return algorithm, algorithm * OPS[case.op].factor(ranks)


def op_cases(
    op: str, wanted_bytes: Sequence[int], dtype: str, redop: str, root: int, place: str, ranks: int
) -> list[Case]:
    """Return the cases of one operation, one for each size; one in all where it has no sizes.

    Args:
        op: One of ``OPS``.
        wanted_bytes: The sizes.
        dtype: One of ``DTYPES``.
        redop: One of ``REDOPS``; used by operations that reduce.
        root: Used by operations that have one.
        place: ``"private"`` or ``"heap"``.
        ranks: Number of ranks.
    """
    kind = OPS[op]
    one = Case(
        op, op, 0, dtype,
        redop=redop if kind.reduces else "sum",
        root=root if kind.rooted else 0,
        place=place,
        halves=kind.halves,
    )  # fmt: skip
    if op == "atomic":
        return [replace(one, count=1, dtype="int64")]
    if not kind.sized:
        return [one]
    return [
        replace(one, key=f"{op} {nbytes}", count=count_of(op, nbytes, dtype, ranks))
        for nbytes in wanted_bytes
    ]


def engine_cases() -> list[Case]:
    """Return the fixed list: float32, all_reduce in place, put and get from private memory."""
    found = [
        Case(f"all_reduce {size_name(nbytes)}, {place}", "all_reduce", nbytes // 4, place=place,
             halves=("in",))
        for place in ("heap", "private")
        for nbytes in (8, 1 << 10, 1 << 20, 64 << 20)
    ]  # fmt: skip
    found.append(Case("barrier", "barrier", 0, halves=("out",)))
    found += [
        Case(f"{op} {size_name(nbytes)}", op, nbytes // 4, halves=("out",))
        for op in ("put", "get")
        for nbytes in (8, 64 << 20)
    ]
    found.append(Case("put 8 B, not completed", "put_local", 2, halves=("out",)))
    found.append(Case("put 8 B, torch tensor", "put", 2, halves=("out",), source="torch"))
    return found


def size_name(nbytes: int) -> str:
    """Return ``8 B``, ``1 KiB`` or ``64 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes and nbytes % (1 << power) == 0:
            return f"{nbytes >> power} {unit}"
    return f"{nbytes} B"
