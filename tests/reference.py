"""What results are compared with: plain NumPy, written apart from the library.

A reduction is the left fold in rank order; half types are held in float32 and rounded once. Inputs
come from a seed made of case and rank, so every rank knows what every other rank holds.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

BOOL = ("bool",)
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")
INTEGERS = SIGNED + UNSIGNED
HALVES = ("float16", "bfloat16")
FLOATS = (*HALVES, "float32", "float64")
ALL = BOOL + INTEGERS + FLOATS
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
BLOCKED = ("reduce_scatter", "scatter", "all_to_all")  # x holds one block for each rank
JOINING = ("all_gather", "gather")  # the result holds one block of each rank
ROOTED = ("reduce", "broadcast", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


def dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def reductions_of(name: str) -> tuple[str, ...]:
    return REDUCTIONS if name in FLOATS else REDUCTIONS[:-1]


def data(name: str, shape: int | tuple[int, ...], rank: int, case: str = "") -> Array:
    """Random values of a rank: integers over their whole range, floats where rounding shows."""
    rng = np.random.default_rng([zlib.crc32(f"{case} {name} {shape}".encode()), rank])
    if name == "bool":
        return rng.integers(0, 2, shape, np.uint8).astype(np.bool_)
    if name in INTEGERS:
        limits = np.iinfo(name)
        return np.asarray(
            rng.integers(limits.min, limits.max, shape, np.dtype(name), endpoint=True)
        )
    sign = rng.choice([-1.0, 1.0], shape)
    values: Array = np.asarray(sign * 2.0 ** rng.uniform(-3, 3, shape)).astype(dtype(name))
    return values


def same_bits(found: Any, wanted: Any) -> bool:
    """Whether two arrays agree in dtype, shape and every bit."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return (
        found.dtype == wanted.dtype
        and found.shape == wanted.shape
        and found.tobytes() == wanted.tobytes()
    )


def _sum(a: Array, b: Array) -> Array:
    return np.logical_or(a, b) if a.dtype == np.bool_ else np.add(a, b)


def _prod(a: Array, b: Array) -> Array:
    return np.logical_and(a, b) if a.dtype == np.bool_ else np.multiply(a, b)


def _min(a: Array, b: Array) -> Array:
    return np.where((b < a) | (b != b), b, a)


def _max(a: Array, b: Array) -> Array:
    return np.where((b > a) | (b != b), b, a)


_STEPS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": _sum,
    "prod": _prod,
    "min": _min,
    "max": _max,
    "avg": _sum,
}


def fold(parts: Sequence[Array], op: str) -> Array:
    """The left fold in rank order."""
    kind = parts[0].dtype
    wide = [p.astype(np.float32) if kind.itemsize == 2 and _is_float(kind) else p for p in parts]
    with np.errstate(all="ignore"):
        result = wide[0]
        for part in wide[1:]:
            result = np.asarray(_STEPS[op](result, part))
        if op == "avg":
            result = np.asarray(result / result.dtype.type(len(parts)))
        return np.array(result.astype(kind))


def _is_float(kind: np.dtype[Any]) -> bool:
    return kind.kind == "f" or kind == dtype("bfloat16")


def expected(
    op: str, inputs: Sequence[Array], rank: int, reduction: str = "sum", root: int = 0
) -> Array | None:
    """What a collective gives a rank; ``None`` where it gives nothing.

    Args:
        op: The collective's name.
        inputs: What the ranks pass, in rank order.
        rank: Whose result.
        reduction: How to combine.
        root: The rank that gets or gives.
    """
    n = len(inputs)
    if op in ("reduce", "gather") and rank != root:
        return None
    if op in ("all_reduce", "reduce"):
        return fold(inputs, reduction)
    if op == "reduce_scatter":
        return np.split(fold(inputs, reduction), n)[rank]
    if op == "broadcast":
        return inputs[root]
    if op == "scatter":
        return np.split(inputs[root], n)[rank]
    if op in JOINING:
        return np.concatenate([np.atleast_1d(x) for x in inputs])
    return np.concatenate([np.split(x, n)[rank] for x in inputs])


def until(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    """Look until something holds, without any call that blocks in the library."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.0005)
