"""Says which rank failed first and how the others ended."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["End", "describe", "exit_code", "first_failure", "last_words", "lines", "traceback"]

_HEADER = re.compile(r"Traceback \(most recent call last\):|^Fatal Python error: ")
_CHAINED = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_VICTIM = re.compile(r"(?:[A-Za-z_][\w.]*\.)?(?:PeerLost|Aborted)(?::|$)")
_LONGEST_WORDS = 160

Tail = Callable[[int], list[str]]


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Args:
        rank: The rank.
        code: Its exit code, or the negative number of the signal that killed it.
        batch: Ranks whose ends were seen at the same moment have the same number.
        told: The signal with which the launcher had told it to end, if it had.
    """

    rank: int
    code: int
    batch: int
    told: signal.Signals | None = None


def describe(code: int) -> str:
    """Return "exit code 3" or "killed by signal 9 (SIGKILL)"."""
    if code >= 0:
        return f"exit code {code}"
    names = {int(number): number.name for number in signal.Signals}
    name = names.get(-code)
    return f"killed by signal {-code}" + (f" ({name})" if name else "")


def exit_code(code: int) -> int:
    """Return what a shell would: a signal n is 128 + n."""
    return code if code >= 0 else 128 - code


def first_failure(ends: Sequence[End], tail: Tail) -> End | None:
    """Return the end that explains the others, or None if nobody failed by itself.

    The first one seen, but a rank whose traceback ends in PeerLost or Aborted is the victim of
    another, which may have taken longer to exit.
    """
    failures = [end for end in ends if end.code != 0 and end.told is None]
    failures.sort(key=lambda end: (_is_victim(tail(end.rank)), end.batch, end.rank))
    return failures[0] if failures else None


def traceback(tail: Sequence[str]) -> list[str]:
    """Return the last Python traceback in some lines, with those it is chained to."""
    starts = [index for index, line in enumerate(tail) if _HEADER.search(line)]
    if not starts:
        return []
    first = starts.pop()
    while starts and any(line in _CHAINED for line in tail[starts[-1] : first]):
        first = starts.pop()
    return list(tail[first:])


def last_words(tail: Sequence[str]) -> str:
    """Return the line with the exception that a traceback ends in, or ""."""
    found = [index for index, line in enumerate(tail) if _HEADER.search(line)]
    rest = tail[found[-1] + 1 :] if found else []
    words = (line for line in rest if line and not line.startswith((" ", "Traceback")))
    return next(words, "")[:_LONGEST_WORDS]


def lines(ends: Sequence[End], first: End | None, headline: str, tail: Tail) -> list[str]:
    """Return the report: what happened, the first failure's traceback, then each other rank.

    Args:
        ends: All ranks' ends.
        first: The end to put on top, if any.
        headline: What to say instead where the launcher ended the job.
        tail: Returns the last lines of a rank's stderr.
    """
    others = sorted(ends, key=lambda end: end.rank)
    report = [f"bireme run: {headline}"]
    if first and not headline:
        report = [f"bireme run: rank {first.rank} failed first: {describe(first.code)}"]
        report += [f"  {line}" for line in traceback(tail(first.rank))]
        others.remove(first)
    return report + [
        f"bireme run: rank {end.rank}: {_story(end, tail(end.rank))}" for end in others
    ]


def _story(end: End, tail: Sequence[str]) -> str:
    story = describe(end.code)
    if end.told is not None:
        return f"{story}, told to end with {end.told.name}"
    words = last_words(tail) if end.code else ""
    return f"{story}, {words}" if words else story


def _is_victim(tail: Sequence[str]) -> bool:
    return bool(_VICTIM.match(last_words(tail)))
