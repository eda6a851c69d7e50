"""Ranks are ended at random moments: the others raise, nothing hangs, nothing is left.

python -m pytest -q -s tests/chaos --trials 300
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import storm

TRIALS_AT_ONCE = 10


def trials(config: pytest.Config) -> int:
    return int(config.getoption("--trials"))


def check(done: storm.Trial, seed: int) -> None:
    where = f"seed {seed}: {done}"
    assert len(done.reports) == done.size - 1, f"a survivor hung or died silently; {where}"
    assert not done.left, where
    # While the ranks meet, the first to give up names the victim and the others may name that rank.
    named = [f"rank {done.victim}" in report.text for report in done.reports]
    met = not any("bootstrap step" in report.text for report in done.reports)
    assert all(named) if met else any(named), where


def test_kills(request: pytest.FixtureRequest) -> None:
    times: list[float] = []
    for seed in range(trials(request.config)):
        done = storm.trial(seed)
        check(done, seed)
        for report in done.reports:
            assert report.error == "PeerLost", f"seed {seed}: {done}"
        times += [report.after_s for report in done.reports]
    assert max(times) < storm.DEADLINE_S
    print(
        f"\n{trials(request.config)} kills, {len(times)} survivors: all raised PeerLost, after "
        f"{statistics.median(times) * 1e3:.1f} ms (median), {max(times) * 1e3:.0f} ms (longest)"
    )


def test_stops(request: pytest.FixtureRequest) -> None:
    count = max(trials(request.config) // 20, 2)
    for seed in range(1000, 1000 + count):
        done = storm.trial(seed, "stop")
        check(done, seed)
        # The first to give up raises Timeout; the others may hear of its end before their own
        # deadline.
        errors = {report.error for report in done.reports}
        assert "Timeout" in errors, f"seed {seed}: {done}"
        assert errors <= {"Timeout", "PeerLost"}, f"seed {seed}: {done}"
    print(f"\n{count} stopped ranks: the others raised Timeout, or PeerLost with that text")
