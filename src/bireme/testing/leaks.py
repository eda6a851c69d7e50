"""What a test must leave as it found it: environment, threads, processes, descriptors, /dev/shm."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from bireme import knobs

__all__ = ["KINDS", "Snapshot", "differences", "settled", "take"]

KINDS = ("environment", "thread", "process", "descriptor", "shm")

_SHM = "/dev/shm"  # noqa: S108 - only listed
# Ends of threads and processes are seen a little after the call that ends them.
_SETTLE_S = 1.0
# pytest's own, which changes in every phase.
_ENVIRONMENT_OF_PYTEST = {"PYTEST_CURRENT_TEST"}
# Python starts one for the life of the process at the first shared semaphore or memory block.
_SERVANTS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
# Files that a desktop's programs of the same user make and remove at any time.
_SHM_OF_OTHERS = (".com.google.", ".org.chromium.", "pulse-shm-")


@dataclass(frozen=True)
class Snapshot:
    """What a process holds at one moment; each kind maps an identity to its description."""

    environment: dict[str, str]
    thread: dict[str, str]
    process: dict[str, str]
    descriptor: dict[str, str]
    shm: dict[str, str]


def take() -> Snapshot:
    """Look at this process now."""
    return Snapshot(
        environment=dict(_environment()),
        thread=dict(_threads()),
        process=dict(_processes()),
        descriptor=dict(_descriptors()),
        shm=dict(_shm()),
    )


def differences(before: Snapshot, after: Snapshot, ignore: Collection[str] = ()) -> list[str]:
    """Say what changed between two snapshots, one line each.

    Args:
        before: The earlier snapshot.
        after: The later one.
        ignore: Kinds that may differ, of ``KINDS``.
    """
    found = []
    for kind in KINDS:
        if kind in ignore:
            continue
        old, new = getattr(before, kind), getattr(after, kind)
        if kind == "environment":
            found += _changed_environment(old, new)
        elif kind != "descriptor" or len(new) > len(old):
            # A descriptor that was closed and opened anew is no leak; one more is.
            found += [f"{kind}: {new[key]}" for key in new if key not in old]
    return found


def settled(before: Snapshot, ignore: Collection[str] = ()) -> list[str]:
    """Return the differences that remain after garbage collection and a short wait."""
    found = differences(before, take(), ignore)
    if found:
        gc.collect()
    deadline = time.monotonic() + _SETTLE_S
    while found and time.monotonic() < deadline:
        time.sleep(0.02)
        found = differences(before, take(), ignore)
    return found


def _changed_environment(old: dict[str, str], new: dict[str, str]) -> list[str]:
    found = [f"environment: {name} was set" for name in new if name not in old]
    found += [f"environment: {name} was removed" for name in old if name not in new]
    both = [name for name in new if name in old]
    return found + [f"environment: {name} was changed" for name in both if old[name] != new[name]]


def _environment() -> Iterator[tuple[str, str]]:
    for name, value in knobs.child_environment({}).items():
        if name not in _ENVIRONMENT_OF_PYTEST:
            yield name, value


def _threads() -> Iterator[tuple[str, str]]:
    for thread in threading.enumerate():
        # A dummy stands for a native thread that ran Python once, such as one of torch's pool.
        if not isinstance(thread, threading._DummyThread):
            yield f"{thread.ident} {thread.name}", thread.name
    # Native threads are counted only where bireme named them: pools of torch and of OpenMP start
    # at their first use and stay.
    for task in _listed("/proc/self/task"):
        name = _text(f"/proc/self/task/{task}/comm").strip()
        if name.startswith("bireme"):
            yield f"native {task}", f"{name} (native)"


def _processes() -> Iterator[tuple[str, str]]:
    for task in _listed("/proc/self/task"):
        for pid in _text(f"/proc/self/task/{task}/children").split():
            command = _text(f"/proc/{pid}/cmdline").replace("\0", " ").strip()
            if not any(servant in command for servant in _SERVANTS):
                yield pid, f"{pid} {command or '(ended, not waited for)'}"


def _descriptors() -> Iterator[tuple[str, str]]:
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    tracked = getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)
    for name in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if name != str(tracked):
                yield f"{name} {target}", f"{name} -> {target}"


def _shm() -> Iterator[tuple[str, str]]:
    for name in _listed(_SHM):
        with contextlib.suppress(OSError):
            ours = os.lstat(f"{_SHM}/{name}").st_uid == os.geteuid()
            if ours and not name.startswith(_SHM_OF_OTHERS):
                yield name, f"{_SHM}/{name}"


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
