"""Which cores each rank is bound to."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby

__all__ = ["describe", "shares"]


def shares(cores: Collection[int], size: int) -> list[list[int]]:
    """Divide cores among ranks: contiguous, as equal as possible; one each, in turn, if too few.

    Args:
        cores: The numbers of the cores that may be used, at least one.
        size: Number of ranks.
    """
    ordered = sorted(cores)
    if size > len(ordered):
        return [[ordered[rank % len(ordered)]] for rank in range(size)]
    starts = [len(ordered) * rank // size for rank in range(size + 1)]
    return [ordered[starts[rank] : starts[rank + 1]] for rank in range(size)]


def describe(bound: Sequence[Sequence[int]]) -> str:
    """Return "rank 0 on 0-3, rank 1 on 4-7" for the cores of each rank."""
    return ", ".join(f"rank {rank} on {_ranges(cores)}" for rank, cores in enumerate(bound))


def _ranges(cores: Sequence[int]) -> str:
    """Return "0-3+8" for the cores 0, 1, 2, 3 and 8, in order."""
    runs = [
        [core for _, core in run]
        for _, run in groupby(enumerate(cores), lambda pair: pair[1] - pair[0])
    ]
    return "+".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
