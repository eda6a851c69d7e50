"""The facts of the machine that a report of a benchmark needs."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

__all__ = ["cpu_model", "machine"]


def machine() -> dict[str, str | int | float]:
    """Return what the figures depend on; neither names nor addresses."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "load": round(os.getloadavg()[0], 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def cpu_model(path: str = "/proc/cpuinfo") -> str:
    """Return the processor's name."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
