"""The report: the rank that failed by itself on top, not its victims."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from bireme.launch import report
from bireme.launch.report import End

OWN = ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: 3", "  more"]
VICTIM = ["noise", "Traceback (most recent call last):", "  x", "bireme.errors.PeerLost: rank 1"]


@pytest.mark.parametrize(
    ("code", "text", "status"),
    [
        (3, "exit code 3", 3),
        (-9, "killed by signal 9 (SIGKILL)", 137),
        (-50, "killed by signal 50", 178),
    ],
)
def test_how_a_rank_ended(code: int, text: str, status: int) -> None:
    assert report.describe(code) == text
    assert report.exit_code(code) == status


@pytest.mark.parametrize(
    ("ends", "tails", "first"),
    [
        ([End(0, 0, 0), End(1, 0, 1)], [[], []], None),
        ([End(0, 0, 0), End(1, 5, 1)], [[], []], 1),
        ([End(1, 5, 0), End(0, 5, 1)], [[], []], 1),
        ([End(1, 5, 0), End(0, 5, 0)], [[], []], 0),
        ([End(0, 1, 0), End(1, 1, 0)], [VICTIM, OWN], 1),
        ([End(0, 1, 0), End(1, 1, 3)], [VICTIM, OWN], 1),
        ([End(0, 1, 1), End(1, 1, 0)], [VICTIM, VICTIM], 1),
        ([End(0, 1, 0), End(1, -11, 1)], [VICTIM, []], 1),
        ([End(0, 1, 0), End(1, -15, 1, signal.SIGTERM)], [VICTIM, []], 0),
        ([End(0, -15, 0, signal.SIGTERM)], [[]], None),
    ],
)
def test_who_failed_first(ends: list[End], tails: list[list[str]], first: int | None) -> None:
    found = report.first_failure(ends, lambda rank: tails[rank])
    assert (found.rank if found else None) == first


@pytest.mark.parametrize(
    ("words", "victim"),
    [
        ("PeerLost: rank 1", True),
        ("bireme.errors.Aborted: rank 1", True),
        ("bireme.errors.Aborted", True),
        ("ValueError: PeerLost: rank 1", False),
        ("PeerLostAndFound: rank 1", False),
        ("bireme.errors.Timeout: rank 1", False),
    ],
)
def test_who_is_a_victim(words: str, victim: bool) -> None:
    tail = ["Traceback (most recent call last):", "  x", words]
    assert report._is_victim(tail) is victim


def test_the_traceback_is_the_last_one_with_its_causes() -> None:
    code = (
        "import sys, traceback\n"
        "try:\n    1 / 0\nexcept Exception:\n    traceback.print_exc()\n"
        "print('noise', file=sys.stderr)\n"
        "try:\n    try:\n        [][0]\n    except IndexError:\n        {}['key']\n"
        "except KeyError as error:\n    raise ValueError('top\\nsecond line') from error\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    tail = ended.stderr.splitlines()
    found = report.traceback(tail)
    assert found == tail[tail.index("noise") + 1 :]
    assert "IndexError: list index out of range" in found
    assert "KeyError: 'key'" in found
    assert found[-2:] == ["ValueError: top", "second line"]
    assert report.last_words(tail) == "ValueError: top"


def test_a_crash_counts_as_a_traceback() -> None:
    tail = ["noise", "Fatal Python error: Segmentation fault", "", "Current thread 0x1 (most rec"]
    assert report.traceback(tail) == tail[1:]


def test_no_traceback() -> None:
    assert report.traceback(["just", "words"]) == []
    assert report.last_words(["just", "words"]) == ""


def test_the_lines_of_a_failure() -> None:
    ends = [End(1, 1, 0), End(2, 0, 1), End(0, 1, 2), End(3, -15, 3, signal.SIGTERM)]
    tails = [VICTIM, OWN, [], []]
    first = report.first_failure(ends, lambda rank: tails[rank])
    assert report.lines(ends, first, "", lambda rank: tails[rank]) == [
        "bireme run: rank 1 failed first: exit code 1",
        *(f"  {line}" for line in OWN),
        "bireme run: rank 0: exit code 1, bireme.errors.PeerLost: rank 1",
        "bireme run: rank 2: exit code 0",
        "bireme run: rank 3: killed by signal 15 (SIGTERM), told to end with SIGTERM",
    ]


def test_the_lines_of_an_end_from_outside() -> None:
    ends = [End(1, -2, 0), End(0, 0, 1)]
    assert report.lines(ends, ends[0], "stopped by SIGINT", lambda _: []) == [
        "bireme run: stopped by SIGINT",
        "bireme run: rank 0: exit code 0",
        "bireme run: rank 1: killed by signal 2 (SIGINT)",
    ]
