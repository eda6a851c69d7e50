"""The process that started the ranks of a job, found from one of them in /proc.

A launcher that gives its job no name is itself one: its process id and when it started. A rank is
not always its child: a shell or another wrapper may stand between. Such a process carries the
rank's variables in its environment, the launcher does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["starter"]

_PARENT = 1  # fields of /proc/<pid>/stat behind the name of the program
_START_TIME = 19


def starter(variables: Mapping[str, str]) -> tuple[str, str]:
    """Return the process id and the start time of the process that started this rank.

    Args:
        variables: Variables that only the processes of this rank have, with their values.
    """
    pid = os.getppid()
    while pid > 1 and _has(pid, variables):
        pid = int(_stat(pid, _PARENT) or 0)
    return str(pid), _stat(pid, _START_TIME)


def _has(pid: int, variables: Mapping[str, str]) -> bool:
    """Return whether a process was started with these variables; no if we may not know."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            entries = set(file.read().split(b"\0"))
    except OSError:
        return False
    return entries.issuperset(os.fsencode(f"{name}={text}") for name, text in variables.items())


def _stat(pid: int, field: int) -> str:
    """Return a field of a process's status, or "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(") ")[2].split()[field]
    except OSError:
        return ""
