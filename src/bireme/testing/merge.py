"""Make one pytest report out of the reports of n ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest

__all__ = ["Outcome", "RankReprs", "merge"]

Phase = Literal["setup", "call", "teardown"]
# Errors that a rank raises because another one failed: that one's traceback is the headline.
_ECHOES = ("Aborted", "PeerLost", "bireme.errors.Aborted", "bireme.errors.PeerLost")


@dataclass
class Outcome:
    """What became of one test on one rank.

    Args:
        rank: The rank.
        reports: Its last report of each phase.
        earlier: Failed reports before the last one of a phase: of subtests.
        trouble: Why it could not report: it hung, died, or did not know the test.
        sections: Titled text that belongs to the trouble, such as stacks.
    """

    rank: int
    reports: dict[str, pytest.TestReport] = field(default_factory=dict)
    earlier: list[pytest.TestReport] = field(default_factory=list)
    trouble: str | None = None
    sections: list[tuple[str, str]] = field(default_factory=list)

    def add(self, report: pytest.TestReport) -> None:
        """Take the next report of this rank."""
        before = self.reports.get(report.when or "call")
        if before is not None and before.failed:
            self.earlier.append(before)
        self.reports[report.when or "call"] = report


class RankReprs:
    """The failures of several ranks, each under its heading, as pytest prints a failure.

    Args:
        parts: The heading and the representation of each failure.
    """

    def __init__(self, parts: Sequence[tuple[str, Any]]) -> None:
        self.parts = parts
        crashes = [_crash(heading, shown) for heading, shown in parts]
        first = [crash for crash in crashes if not crash.message.startswith(_ECHOES)]
        # The line of pytest's short summary comes from here.
        self.reprcrash = (first or crashes)[0]

    def toterminal(self, out: Any) -> None:
        """Print each failure under its heading."""
        for index, (heading, shown) in enumerate(self.parts):
            if index:
                out.line("")
            out.line(heading, bold=True, red=True)
            if hasattr(shown, "toterminal"):
                shown.toterminal(out)
            else:
                out.line(str(shown))

    def __str__(self) -> str:
        return "\n".join(f"{heading}\n{shown}" for heading, shown in self.parts)


def _crash(heading: str, shown: Any) -> Any:
    """What ``reprcrash`` is to pytest: something with a message of one line."""
    crash = getattr(shown, "reprcrash", None)
    return crash or SimpleNamespace(message=f"{heading} {shown}".splitlines()[0])


def merge(item: pytest.Item, outcomes: Sequence[Outcome]) -> list[pytest.TestReport]:
    """Return one report for each phase that pytest expects of a test.

    The test passed when it passed on every rank, is skipped when every rank skipped it for the
    same reason, and failed otherwise. A failed set-up takes the failures of the ranks that went
    on to the call with it, since pytest knows no call after a failed set-up.
    """
    troubled = [outcome for outcome in outcomes if outcome.trouble]
    setups, calls = _phase(outcomes, "setup"), _phase(outcomes, "call")
    passed = {rank: report for rank, report in setups.items() if report.passed}
    reached = {**setups, **calls}
    called = bool(calls or troubled) and not any(report.failed for report in setups.values())
    failed = [(outcome.rank, report.longrepr) for outcome in outcomes for report in outcome.earlier]
    failed += [(outcome.rank, outcome.trouble) for outcome in troubled]
    sections = [
        (f"{title} (rank {outcome.rank})", text)
        for outcome in troubled
        for title, text in outcome.sections
    ]
    reports = [_merged(item, "setup", passed)] if called else []
    reports.append(_merged(item, "call" if called else "setup", reached, failed, sections))
    reports.append(_merged(item, "teardown", _phase(outcomes, "teardown")))
    return reports


def _phase(outcomes: Iterable[Outcome], when: Phase) -> dict[int, pytest.TestReport]:
    return {o.rank: o.reports[when] for o in outcomes if when in o.reports}


def _merged(
    item: pytest.Item,
    when: Phase,
    reports: dict[int, pytest.TestReport],
    failed: Sequence[tuple[int, Any]] = (),
    sections: Sequence[tuple[str, str]] = (),
) -> pytest.TestReport:
    verdict, longrepr, extra = _verdict(reports, failed)
    told = [
        (f"{title} (rank {rank})", text)
        for rank, report in sorted(reports.items())
        for title, text in report.sections
    ]
    now = time.time()
    start = min((report.start for report in reports.values()), default=now)
    stop = max((report.stop for report in reports.values()), default=now)
    properties: list[tuple[str, object]] = []
    for name, value in (pair for report in reports.values() for pair in report.user_properties):
        if (name, value) not in properties:
            properties.append((name, value))
    merged = pytest.TestReport(
        nodeid=item.nodeid,
        location=item.location,
        keywords=dict.fromkeys(item.keywords, 1),
        outcome=verdict,
        longrepr=longrepr,
        when=when,
        sections=[*told, *sections],
        duration=stop - start,
        start=start,
        stop=stop,
        user_properties=properties,
    )
    merged.__dict__.update(extra)
    return merged


Verdict = tuple[Literal["passed", "failed", "skipped"], Any, dict[str, Any]]


def _verdict(reports: dict[int, pytest.TestReport], failed: Sequence[tuple[int, Any]]) -> Verdict:
    """Decide the outcome, what is shown of it, and the mark of an expected failure."""
    if not failed and (expected := _expected_failure(list(reports.values()))):
        return expected
    shown = [(rank, report.longrepr) for rank, report in reports.items() if report.failed]
    if shown or failed:
        return "failed", RankReprs(_grouped([*failed, *shown])), {}
    skipped = {rank: report.longrepr for rank, report in reports.items() if report.skipped}
    if not skipped:
        return "passed", None, {}
    reasons = {_reason(report.longrepr) for report in reports.values() if report.skipped}
    if len(skipped) == len(reports) and len(reasons) == 1:
        return "skipped", next(iter(skipped.values())), {}
    told = [
        (rank, f"skipped: {_reason(report.longrepr)}" if report.skipped else "passed")
        for rank, report in reports.items()
    ]
    disagreed = [(rank, f"the ranks disagree: this one {text}") for rank, text in told]
    return "failed", RankReprs(_grouped(disagreed)), {}


def _expected_failure(reports: Sequence[pytest.TestReport]) -> Verdict | None:
    """An `xfail` test failed as expected when it did so on at least one rank."""
    met = [report for report in reports if report.skipped and hasattr(report, "wasxfail")]
    unmet = [report for report in reports if report.passed and hasattr(report, "wasxfail")]
    strict = [report for report in reports if str(report.longrepr).startswith("[XPASS(strict)]")]
    if met and len(met) + len(unmet) + len(strict) == len(reports):
        return "skipped", met[0].longrepr, {"wasxfail": met[0].wasxfail}
    if unmet and len(unmet) == len(reports):
        return "passed", None, {"wasxfail": unmet[0].wasxfail}
    return None


def _reason(longrepr: Any) -> str:
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)


def _grouped(shown: Sequence[tuple[int, Any]]) -> list[tuple[str, Any]]:
    """Put ranks with the same text under one heading."""
    groups: dict[str, tuple[list[int], Any]] = {}
    for rank, text in sorted(shown, key=lambda pair: pair[0]):
        groups.setdefault(str(text), ([], text))[0].append(rank)
    return [
        (", ".join(f"rank {rank}" for rank in ranks) + ":", text) for ranks, text in groups.values()
    ]
