"""The ranks of a benchmark: the same data, checks and timing loop, whoever moves the bytes.

This file stands alone: for MPI it is started by path, in an environment that has NumPy and mpi4py
but not bireme. A plan (JSON) says what to measure; rank 0 prints one JSON object a line: first what
the side is, then one for each measurement.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import json
import math
import os
import platform
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np

__all__ = [
    "ONE_SIDED",
    "Array",
    "Call",
    "Case",
    "Lacks",
    "Plan",
    "Side",
    "expected",
    "extents",
    "main",
]

Array = np.ndarray[Any, Any]
Call = Callable[[], object]

ONE_SIDED = ("put", "put_local", "get", "atomic", "put_signal")
NUMPY = {"half": "float16", "float": "float32", "double": "float64"}  # others have NumPy's name
_PERIOD = 1009  # of the test data: a prime, so that a block in the wrong place shows
_ROUNDING = {"half": 2**-10, "bfloat16": 2**-7, "float": 2**-23, "double": 2**-52}
_PILOT_S = 0.01  # how long the calls take from which the number of calls is chosen
_PILOT_CALLS = 1000
_MOST_CALLS = 100_000


class Lacks(Exception):
    """The side has no such call; the text says what is missing."""


@dataclass(frozen=True)
class Case:
    """One operation at one size.

    Args:
        key: Its name in the results.
        op: What is called.
        count: Elements of one rank's part, as nccl-tests counts.
        dtype: nccl-tests' name of the element type.
        redop: Reduction, for those that reduce.
        root: Root, for those that have one.
        place: ``"private"`` or ``"heap"``: where bireme's buffers lie.
        halves: ``"out"`` for out of place, ``"in"`` for in place.
        source: ``"numpy"`` or ``"torch"``: what a put of bireme reads.
    """

    key: str
    op: str
    count: int
    dtype: str = "float"
    redop: str = "sum"
    root: int = 0
    place: str = "private"
    halves: Sequence[str] = ("out", "in")
    source: str = "numpy"


@dataclass(frozen=True)
class Plan:
    """What a side measures and how.

    Args:
        cases: In this order.
        iters: Calls of one measurement; 0 chooses.
        seconds: How long a measurement should take where ``iters`` is 0.
        warmup: Calls before it.
        check: Compare the values with NumPy's first.
        corrupt: Spoil one value before the comparison, to test the comparison.
        limit_s: The process ends itself after this time, in seconds.
        store: A file through which the ranks of Gloo find each other.
    """

    cases: Sequence[Case]
    iters: int = 0
    seconds: float = 0.2
    warmup: int = 5
    check: bool = True
    corrupt: bool = False
    limit_s: float = 600.0
    store: str = ""


# ---- data ---------------------------------------------------------------------------------------


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of nccl-tests' name."""
    try:
        if name == "bfloat16":
            import ml_dtypes  # noqa: F401 - it teaches NumPy the name
        return np.dtype(NUMPY.get(name, name))
    except (ModuleNotFoundError, TypeError):
        raise Lacks(f"NumPy has no {name} here") from None


def extents(op: str, count: int, size: int) -> tuple[int, int]:
    """Return the number of elements of the source and of the result, on one rank.

    Args:
        op: The operation.
        count: Elements of one rank's part.
        size: Number of ranks.
    """
    every = count * size
    return {
        "all_gather": (count, every),
        "gather": (count, every),
        "reduce_scatter": (every, count),
        "scatter": (every, count),
        "all_to_all": (every, every),
    }.get(op, (count, count))


def base(case: Case, rank: int) -> Array:
    """Return one period of what ``rank`` contributes: small integers, so that sums are exact."""
    if case.op == "atomic":
        return np.zeros(1, np.int64)
    values = (np.arange(_PERIOD) * (rank + 1) + 3 * rank) % (2 if case.redop == "prod" else 5) + 1
    return values.astype(numpy_dtype(case.dtype))


def cut(period: Array, start: int, count: int) -> Array:
    """Return ``count`` elements from ``start`` of the endless repetition of a period."""
    if count == 0:
        return period[:0]
    return np.resize(np.roll(period, -(start % period.size)), count)


def folded(case: Case, size: int) -> Array:
    """Return one period of the reduction over all ranks, by NumPy."""
    parts = [base(case, rank) for rank in range(size)]
    dtype = parts[0].dtype
    wide = np.dtype(np.float64) if case.dtype in _ROUNDING else dtype
    ufunc = {"prod": np.multiply, "min": np.minimum, "max": np.maximum}.get(case.redop, np.add)
    total = parts[0].astype(wide)
    for part in parts[1:]:
        total = ufunc(total, part.astype(wide))
    return np.asarray(total / size if case.redop == "avg" else total).astype(dtype)


def expected(case: Case, rank: int, size: int) -> Array | None:
    """Return what the result must hold on ``rank``, or ``None`` where there is none.

    Args:
        case: The operation and its size.
        rank: Whose result.
        size: Number of ranks.
    """
    n = case.count
    if case.op in ONE_SIDED:
        return _expected_one_sided(case, rank)
    if case.op in ("reduce", "gather") and rank != case.root:
        return None
    if case.op in ("all_reduce", "reduce"):
        return cut(folded(case, size), 0, n)
    if case.op == "reduce_scatter":
        return cut(folded(case, size), rank * n, n)
    if case.op in ("all_gather", "gather"):
        return np.concatenate([cut(base(case, r), 0, n) for r in range(size)])
    if case.op == "all_to_all":
        return np.concatenate([cut(base(case, r), rank * n, n) for r in range(size)])
    if case.op == "sendrecv":
        return cut(base(case, (rank - 1) % size), 0, n)
    if case.op == "broadcast":
        return cut(base(case, case.root), 0, n)
    if case.op == "scatter":
        return cut(base(case, case.root), rank * n, n)
    return None  # barrier


def _expected_one_sided(case: Case, rank: int) -> Array | None:
    """Return what rank 1 has after rank 0's put, what rank 0 has after its get, and so on."""
    if rank > 1 or (rank == 0 and case.op in ("put", "put_local", "atomic")):
        return None
    if rank == 1 and case.op == "get":
        return None
    if case.op == "atomic":
        return np.ones(1, np.int64)
    return cut(base(case, 1 - rank), 0, case.count)


def wrong_values(case: Case, found: Array, right: Array, size: int) -> int:
    """Return how many elements differ, beyond rounding where a result is rounded."""
    rounded = case.redop in ("avg", "prod") and case.dtype in _ROUNDING
    if not rounded:
        return int(np.count_nonzero(found != right))
    exact = right.astype(np.float64)
    near = np.abs(found.astype(np.float64) - exact) <= size * _ROUNDING[case.dtype] * np.abs(exact)
    return int(found.size - np.count_nonzero(near))


def version(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


# ---- sides --------------------------------------------------------------------------------------


class Side:
    """Who moves the bytes. Buffers are NumPy arrays unless the side says otherwise.

    A side has a method ``_OP(case, half, x, out)`` for each operation that it can do; it returns
    what to call, or ``None`` on a rank that takes no part.
    """

    own_block = True  # whether an in-place reduce_scatter leaves the result in the own block
    memcpy_ops: Sequence[str] = ()  # operations that are compared with a copy by this process
    refusals: tuple[type[Exception], ...] = (RuntimeError, TypeError, ValueError)
    rank = 0
    size = 1

    def about(self) -> dict[str, str]:
        """Return the versions of what is measured."""
        return {}

    def buffer(self, role: str, place: str, count: int, dtype: np.dtype[Any]) -> Any:
        """Make a buffer; all ranks call alike. The role ``"window"`` is what peers can reach."""
        return np.zeros(count, dtype)

    def view(self, buffer: Any) -> Array:
        """Return a buffer of this rank as a NumPy array."""
        array: Array = buffer
        return array

    def call(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        """Return what is timed.

        Raises:
            Lacks: If the side has no such call.
        """
        method = getattr(self, f"_{case.op}", None)
        if method is None:
            raise Lacks(f"no {case.op.removesuffix('_local')}")
        call: Call | None = method(case, half, x, out)
        return call

    def memcpy(self, case: Case, x: Any, out: Any) -> Call:
        """Return the copy that ``memcpy_ops`` are compared with."""
        raise Lacks("no memory of a peer is mapped")

    def barrier(self) -> None:
        """Wait for all ranks; what peers have put is visible then."""

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """Return every rank's values."""
        return [list(values)]

    def close(self) -> None:
        """Leave, all ranks together."""

    def fail(self) -> None:
        """End the other ranks after an error of this one."""
        raise SystemExit(1)


# ---- the loop -----------------------------------------------------------------------------------


class Pool:
    """The buffers of a plan: one for each role, place and element type, as large as is needed."""

    def __init__(self, side: Side, plan: Plan) -> None:
        self._side = side
        self._buffers: dict[tuple[str, str, str], Any] = {}
        for (role, place, name), count in needs(plan, side.size).items():
            with contextlib.suppress(Lacks):
                made = side.buffer(role, place, count, numpy_dtype(name))
                self._buffers[role, place, name] = made

    def pair(self, case: Case, half: str) -> tuple[Any, Any]:
        """Return the source and the result of a case, which overlap where it is in place.

        Raises:
            Lacks: If the element type does not exist here.
        """
        numpy_dtype(case.dtype)
        x_count, out_count = extents(case.op, case.count, self._side.size)
        x = self._buffers["x", case.place, case.dtype]
        if case.op in ONE_SIDED:
            return x[:x_count], self._buffers["window", "heap", case.dtype][:out_count]
        if half == "out":
            return x[:x_count], self._buffers["out", case.place, case.dtype][:out_count]
        whole = x[: max(x_count, out_count)]
        own = self._side.own_block or case.op != "reduce_scatter"
        at = self._side.rank * case.count if own else 0
        part = whole[at : at + case.count]
        if x_count == out_count:
            return whole, whole
        return (part, whole) if x_count < out_count else (whole, part)


def needs(plan: Plan, size: int) -> dict[tuple[str, str, str], int]:
    """Return the largest number of elements by role, place and element type."""
    found: dict[tuple[str, str, str], int] = {}
    for case in plan.cases:
        x_count, out_count = extents(case.op, case.count, size)
        wanted = [("x", case.place, max(x_count, out_count))]
        if case.op in ONE_SIDED:
            wanted.append(("window", "heap", out_count))
        elif "out" in case.halves:
            wanted.append(("out", case.place, out_count))
        for role, place, count in wanted:
            key = (role, place, case.dtype)
            found[key] = max(found.get(key, 0), count)
    return found


def fill(side: Side, case: Case, x: Any, out: Any) -> None:
    """Give both buffers the values from which ``expected`` follows."""
    n, own = side.view(x).size, base(case, side.rank)
    reads = case.op == "get"
    side.view(out)[...] = cut(own, 0, n) if reads else 0
    side.view(x)[...] = 0 if reads else cut(own, 0, n)


def count_wrong(side: Side, plan: Plan, case: Case, call: Call | None, x: Any, out: Any) -> int:
    """Call once and return the number of wrong values on all ranks."""
    side.barrier()
    if call is not None:
        call()
    side.barrier()
    right = expected(case, side.rank, side.size) if plan.check else None
    wrong = 0
    if right is not None:
        found = side.view(x if case.op == "get" else out)
        if plan.corrupt and side.rank == 0 and found.size:
            found[0] = 100
        wrong = wrong_values(case, found, right, side.size)
    return int(sum(row[0] for row in side.gather([wrong])))


def switches() -> int:
    """Return how often this process has been switched out so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_nvcsw + usage.ru_nivcsw


def timed(side: Side, call: Call | None, calls: int) -> tuple[float, float]:
    """Make calls back to back, after a barrier.

    Returns:
        The time of one in seconds, the most over all ranks, and the mean number of context switches
        of one on a rank that calls.
    """
    side.barrier()
    before, start = switches(), time.perf_counter()
    if call is not None:
        for _ in repeat(None, calls):
            call()
    elapsed_s, after = time.perf_counter() - start, switches()
    rows = side.gather([elapsed_s, after - before] if call is not None else [0.0, -1.0])
    switched = statistics.fmean(row[1] for row in rows if row[1] >= 0)
    return max(row[0] for row in rows) / calls, switched / calls


def measure(side: Side, plan: Plan, call: Call | None) -> dict[str, float]:
    """Choose the number of calls where the plan leaves it open, and time them."""
    if call is not None:
        for _ in range(plan.warmup):
            call()
    calls = plan.iters or choose(side, plan, call)
    one_s, switched = timed(side, call, calls)
    return {"time_us": one_s * 1e6, "iters": calls, "switches": switched}


def choose(side: Side, plan: Plan, call: Call | None) -> int:
    """Return how many calls take about as long as the plan says, from a first try or two."""
    calls = 5
    while True:
        one_s = max(timed(side, call, calls)[0], 1e-9)
        if one_s * calls >= _PILOT_S or calls >= _PILOT_CALLS:
            return min(max(5, math.ceil(plan.seconds / one_s)), _MOST_CALLS)
        calls = min(max(2 * calls, math.ceil(2 * _PILOT_S / one_s)), _PILOT_CALLS)


def results_of(side: Side, plan: Plan, pool: Pool, case: Case, half: str) -> dict[str, Any]:
    """Check and time one case, or say what the side lacks for it."""
    refusals: tuple[type[Exception], ...] = (Lacks, *side.refusals)
    try:
        x, out = pool.pair(case, half)
        call = side.call(case, half, x, out)
        fill(side, case, x, out)
        wrong = count_wrong(side, plan, case, call, x, out)
    except refusals as error:
        return {"lacks": " ".join(str(error).split())[:200] or type(error).__name__}
    side.view(out)[...] = 0  # in place, sums would grow beyond all bounds
    side.view(x)[...] = 0
    found: dict[str, Any] = {"wrong": wrong, **measure(side, plan, call)}
    if case.op in side.memcpy_ops:
        copy = side.memcpy(case, x, out) if side.rank == 0 else None
        found["memcpy_us"] = measure(side, plan, copy)["time_us"]
    if case.op == "put_signal":
        found["time_us"] /= 2  # there and back
    return found


def run_plan(side: Side, plan: Plan) -> Iterator[dict[str, Any]]:
    """Measure everything in a plan; every rank runs it and rank 0's results count."""
    ranks = [{"rank": r, "pid": int(row[0])} for r, row in enumerate(side.gather([os.getpid()]))]
    about = {"python": platform.python_version(), "numpy": np.__version__, **side.about()}
    yield {"about": about, "ranks": ranks}
    pool = Pool(side, plan)
    for case in plan.cases:
        for half in case.halves:
            yield {"key": case.key, "half": half, **results_of(side, plan, pool, case, half)}


def read_plan(path: str) -> Plan:
    """Read a plan that ``dataclasses.asdict`` and ``json`` have written."""
    with open(path, encoding="utf-8") as file:
        words = json.load(file)
    return Plan(**{**words, "cases": [Case(**case) for case in words["cases"]]})


def main(make_side: Callable[[Plan], Side], path: str) -> None:
    """Run the plan in the file ``path`` as one rank."""
    plan = read_plan(path)
    faulthandler.dump_traceback_later(plan.limit_s, exit=True)
    side = make_side(plan)
    try:
        for found in run_plan(side, plan):
            if side.rank == 0:
                sys.stdout.write(json.dumps(found) + "\n")
                sys.stdout.flush()
        side.close()
    except Exception:  # noqa: BLE001 - whatever it is, the other ranks must not wait for us
        traceback.print_exc()
        side.fail()
    finally:
        faulthandler.cancel_dump_traceback_later()
