"""How much memory the system will still give, asked before a heap grows.

Memory that a control group does not allow ends the process instead of failing the call, so the
limit is compared first and a margin is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Budget", "available_bytes", "total_bytes"]

MARGIN_BYTES = 64 << 20
_FRESH_S = 0.5  # how long an answer of the system is believed
_CGROUP_FILES = (  # limit, usage, and the statistic of what can be reclaimed: version 2, then 1
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def _meminfo(root: Path, name: str) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    return 0


def total_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes."""
    return _meminfo(root, "MemTotal")


def available_bytes(root: Path = Path("/")) -> tuple[int, str]:
    """Return how many bytes may still be taken, and what sets the limit.

    Args:
        root: Where ``proc`` and ``sys`` lie; another folder in tests.
    """
    rooms = [(_meminfo(root, "MemAvailable"), "MemAvailable"), *_cgroup_rooms(root)]
    room, limit = min(rooms)
    return max(room - MARGIN_BYTES, 0), limit


class Budget:
    """What may still be taken, asked anew when much of the last answer is spent or it is old."""

    def __init__(self) -> None:
        self.room = 0
        self._left = 0
        self._until = 0.0

    def spend(self, nbytes: int) -> bool:
        """Take ``nbytes`` off the budget; False where the system has not that much."""
        if nbytes > self._left or time.monotonic() > self._until:
            self.room, _ = available_bytes()
            self._left = self.room // 8
            self._until = time.monotonic() + _FRESH_S
            return nbytes <= self.room
        self._left -= nbytes
        return True


def _cgroup_rooms(root: Path) -> Iterator[tuple[int, str]]:
    for folder in _cgroup_folders(root):
        for limit, usage, reclaimable in _CGROUP_FILES:
            most = _number(folder / limit)
            used = _number(folder / usage)
            if most is not None and used is not None:
                yield most - used + _statistic(folder / "memory.stat", reclaimable), str(folder)


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Every control group that this process is in, with its parents, as far as they are visible."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        folder = base / path.lstrip("/")
        while True:
            yield folder
            if folder == base:
                break
            folder = folder.parent


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # not there, or "max"
        return None


def _statistic(file: Path, name: str) -> int:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(v) for k, _, v in (line.partition(" ") for line in lines) if k == name), 0)
