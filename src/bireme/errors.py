"""What can go wrong, sorted by what a user can do about it."""

from __future__ import annotations

__all__ = [
    "Aborted",
    "BiremeError",
    "EngineError",
    "MismatchError",
    "PeerLost",
    "Timeout",
    "UsageError",
]


class BiremeError(Exception):
    """Base of every error that bireme raises for communication."""


class UsageError(BiremeError):
    """The program uses the library in a way it does not allow: fix the program."""


class MismatchError(BiremeError):
    """Ranks made different calls where all must make the same: compare the two call sites."""


class PeerLost(BiremeError, ConnectionError):
    """A rank that this call needs has ended: look at that rank's own output first."""


class Timeout(BiremeError, TimeoutError):
    """A deadline passed while waiting: the message says where every rank was."""


class Aborted(BiremeError):
    """Another rank ended the world on purpose, after an error of its own or an interrupt."""


class EngineError(BiremeError):
    """The engine cannot do what was asked, or the system below it failed."""
