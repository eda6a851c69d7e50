"""What all rounds have found, and the medians over them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bireme.bench.peers import Outcome

__all__ = ["Tally"]


class Tally:
    """The results of all sides in all rounds.

    Args:
        sides: Names, bireme's first.
        checked: Whether the values were compared with NumPy's.
    """

    def __init__(self, sides: Sequence[str], *, checked: bool) -> None:
        self.sides = list(sides)
        self.checked = checked
        self.missing: dict[str, str] = {}
        self.about: dict[str, dict[str, str]] = {}
        self.ranks: list[dict[str, int]] = []
        self.rounds: list[dict[str, Any]] = []
        self._found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}

    def add(self, number: int, side: str, outcome: Outcome) -> None:
        """Take in what a side has found in round ``number``."""
        self.about[side] = outcome.about
        if side == self.sides[0] and not self.ranks:
            self.ranks = outcome.ranks
        self.rounds.append({"round": number, "side": side, "results": outcome.results})
        for found in outcome.results:
            self._found.setdefault((side, found["key"], found["half"]), []).append(found)

    def drop(self, side: str, why: str) -> None:
        """Go on without a side; what it has found so far does not count."""
        self.missing[side] = why
        self.sides.remove(side)

    def median(self, side: str, key: str, half: str, field: str = "time_us") -> float | None:
        """Return the median of a field over the rounds, ``None`` where it was not measured."""
        rows = self._found.get((side, key, half), [])
        values = [row[field] for row in rows if field in row]
        return float(statistics.median(values)) if values else None

    def wrong(self, side: str, key: str, half: str) -> int | None:
        """Return the most wrong values of a round, ``None`` where none were looked for."""
        rows = self._found.get((side, key, half), [])
        values = [row["wrong"] for row in rows if "wrong" in row]
        return max(values) if values and self.checked else None

    def all_wrong(self, side: str) -> int:
        """Return the number of wrong values of a side in all."""
        keys = [(key, half) for name, key, half in self._found if name == side]
        return sum(self.wrong(side, key, half) or 0 for key, half in keys)

    def lacks(self) -> list[str]:
        """Return what the sides said they lack, each reason once."""
        found = (
            f"{side} ({key.split(' ')[0]}, {half}): {row['lacks']}"
            for (side, key, half), rows in self._found.items()
            for row in rows
            if side in self.sides and "lacks" in row
        )
        return list(dict.fromkeys(found))
