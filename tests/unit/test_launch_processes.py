"""Starting ranks: what they inherit, and that nothing of them outlives its time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from bootstrap_tools import memfd

from bireme.bootstrap import Hub
from bireme.errors import EngineError, UsageError
from bireme.launch import spawn
from bireme.launch.fates import Fates
from bireme.launch.watchdog import Watchdog

LIMIT_S = 20.0

SHOW = (
    "import json, os; names = ('BIREME_RANK', 'BIREME_SIZE', 'OMP_NUM_THREADS', 'RANK', 'MINE',"
    " 'PYTHONUNBUFFERED', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE');"
    "stat = os.fstat(int(os.environ['BIREME_BOOTSTRAP_FD']));"
    "print(json.dumps({**{n: os.environ.get(n) for n in names}, 'fds': sorted(map(int, os.listdir("
    "'/proc/self/fd')))[3:-1], 'group': os.getpgid(0) == os.getsid(0) == os.getpid()}))"
)


@contextlib.contextmanager
def spawned(argv: Sequence[str], size: int, **options: Any) -> Iterator[list[Any]]:
    hub = Hub(size)
    processes = spawn(argv, size, hub, **options)
    hub.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        hub.stop()


def shown(size: int, **options: Any) -> list[dict[str, Any]]:
    argv = [sys.executable, "-I", "-S", "-c", SHOW]
    with spawned(argv, size, stdout=subprocess.PIPE, **options) as processes:
        found = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
        assert [process.returncode for process in processes] == [0] * size
        return found


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(") ")[2].startswith("Z")
    except OSError:
        return True


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_rank_inherits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    cores = len(os.sched_getaffinity(0))
    for rank, found in enumerate(shown(2, env={"MINE": "x"})):
        assert len(found.pop("fds")) == 1
        assert found == {
            "BIREME_RANK": str(rank),
            "BIREME_SIZE": "2",
            "OMP_NUM_THREADS": str(max(1, cores // 2)),
            "PYTHONUNBUFFERED": "1",
            "MINE": "x",
            **dict.fromkeys(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")),
            "group": True,
        }


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    [found] = shown(1, env={"PYTHONUNBUFFERED": ""})
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["PYTHONUNBUFFERED"] == ""


def test_descriptors_for_each_rank() -> None:
    with memfd(b"") as one, memfd(b"") as two:
        found = [rank["fds"] for rank in shown(2, pass_fds=[(one,), (one, two)])]
    assert [len(fds) for fds in found] == [2, 3]
    assert one in found[0]
    assert two not in found[0]
    assert {one, two} <= set(found[1])
    hub = Hub(2)
    with pytest.raises(ValueError, match="expected pass_fds for 2 ranks, found 1"):
        spawn(["true"], 2, hub, pass_fds=[()])
    hub.stop()


def test_cores_for_each_rank() -> None:
    cores = sorted(os.sched_getaffinity(0))
    show = "import json, os; print(json.dumps(sorted(os.sched_getaffinity(0))))"
    argv = [sys.executable, "-I", "-S", "-c", show]
    bound = [cores[:1], cores[-1:], cores]
    with spawned(argv, 3, stdout=subprocess.PIPE, cores=bound) as processes:
        found = [json.loads(process.communicate(timeout=LIMIT_S)[0]) for process in processes]
    assert found == bound
    assert sorted(os.sched_getaffinity(0)) == cores


def test_cores_that_cannot_be_had() -> None:
    hub = Hub(2)
    with pytest.raises(ValueError, match="expected cores for 2 ranks, found 1"):
        spawn(["true"], 2, hub, cores=[[0]])
    hub.stop()
    hub = Hub(2)
    cores = [list(os.sched_getaffinity(0)), [1 << 20]]
    with pytest.raises(EngineError, match="cannot bind rank 1 to cores 1048576: use --bind none"):
        spawn(["sleep", "60"], 2, hub, cores=cores)
    hub.stop()


def test_rank_0_alone_reads_our_input() -> None:
    with spawned(["cat"], 2, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as processes:
        assert processes[0].communicate(b"hello", timeout=LIMIT_S)[0] == b"hello"
        assert processes[1].communicate(timeout=LIMIT_S)[0] == b""


def test_a_program_that_cannot_be_started() -> None:
    hub = Hub(2)
    with pytest.raises(UsageError, match=r"cannot start './no-such-program': No such file"):
        spawn(["./no-such-program"], 2, hub, stdout=subprocess.PIPE)
    hub.stop()


def test_a_start_that_fails_half_way_leaves_nothing() -> None:
    hub = Hub(2)
    with pytest.raises(ValueError, match="invalid literal"), memfd(b"") as fd:
        spawn(["sleep", "60"], 2, hub, stdout=subprocess.PIPE, pass_fds=[(fd,), ("x",)])  # type: ignore[list-item]
    hub.stop()


def test_a_rank_dies_with_the_thread_that_started_it() -> None:
    hub = Hub(1)
    started: list[Any] = []
    thread = threading.Thread(target=lambda: started.extend(spawn(["sleep", "60"], 1, hub)))
    thread.start()
    thread.join(LIMIT_S)
    assert started[0].wait(LIMIT_S) == -signal.SIGKILL
    hub.stop()


def test_a_rank_whose_parent_has_ended_already_does_not_start() -> None:
    from bireme.launch import processes

    child = subprocess.Popen(["sleep", "60"], preexec_fn=processes._prepare(os.getpid() + 1, ()))
    assert child.wait(LIMIT_S) == 1


def test_what_a_rank_leaves_in_its_group_ends_with_it() -> None:
    argv = ["sh", "-c", "sleep 60 >/dev/null & echo $!"]
    with spawned(argv, 2, stdout=subprocess.PIPE) as processes:
        pids = [int(process.stdout.readline()) for process in processes]
        processes[0].wait(LIMIT_S)
        until(lambda: gone(pids[0]))
        processes[1].wait(LIMIT_S)  # the last one: now nothing is left
        assert gone(pids[1])


def test_the_watchdog_may_be_killed() -> None:
    with spawned(["sleep", "60"], 1) as processes:
        guard = processes[0]._guard
        guard._watchdog.kill()
        guard._watchdog.wait()
        guard.watch(processes[0].pid)


# ---- the watchdog by itself


def sleeper(code: str = "sleep 60") -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sh", "-c", code], start_new_session=True, stdout=subprocess.PIPE)


@contextlib.contextmanager
def watchdog() -> Iterator[int]:
    """Run a watchdog in a thread; give the end of the pipe to write to."""
    reading, writing = os.pipe()
    thread = threading.Thread(target=Watchdog(reading).run)
    thread.start()
    try:
        yield writing
    finally:
        thread.join(LIMIT_S)
        os.close(reading)
        assert not thread.is_alive()


def test_the_end_of_the_launcher_ends_all_groups() -> None:
    stubborn = sleeper("trap '' TERM; sleep 60 & echo $!; wait")
    assert stubborn.stdout is not None
    child = int(stubborn.stdout.readline())
    plain = sleeper()
    with watchdog() as pipe:
        text = b"%d\n%d\n" % (stubborn.pid, plain.pid)
        os.write(pipe, text[:3])
        os.write(pipe, text[3:])
        os.close(pipe)
    assert stubborn.wait(LIMIT_S) == plain.wait(LIMIT_S) == -signal.SIGKILL
    until(lambda: gone(child))
    for process in (stubborn, plain):
        assert process.stdout is not None
        process.stdout.close()


def test_a_process_that_has_ended_already() -> None:
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    with watchdog() as pipe:
        os.write(pipe, b"%d\n" % ended.pid)
        os.close(pipe)


def test_what_finishes_in_time_is_not_killed(tmp_path: Any) -> None:
    mark = tmp_path / "mark"
    process = sleeper(f"(sleep 0.1; echo done > {mark}) & true")
    with watchdog() as pipe:
        os.write(pipe, b"%d\n" % process.pid)
        process.wait(LIMIT_S)
        os.close(pipe)
    assert mark.read_text() == "done\n"
    assert process.stdout is not None
    process.stdout.close()


# ---- fates


class _Core:
    """Stands in for the native module."""

    def __init__(self) -> None:
        self.notes: list[tuple[int, int, int]] = []

    def note_exit(self, fd: int, rank: int, kind: int, value: int) -> None:
        if not os.pread(fd, 1, 0):
            raise ValueError("not a control segment")
        self.notes.append((rank, kind, value))


def test_fates_are_written_where_the_ranks_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    core = _Core()
    monkeypatch.setitem(sys.modules, "bireme._core", core)
    fates = Fates()
    fates.note(2, 0)
    assert core.notes == []
    with memfd(b"control") as fd, memfd(b"") as other:
        fates.observe("ranks", [({}, [other])])
        fates.observe("control", [({}, [])])
        fates.note(0, 3)
        assert core.notes == []
        fates.observe("control", [({}, [fd]), ({}, [])])
        assert core.notes == [(2, 1, 0), (0, 1, 3)]
        fates.observe("control", [({}, [other])])  # a later world's, which it does not like
        fates.observe("control", [({}, [fd])])
    core.notes.clear()
    fates.note(1, -9)
    assert core.notes == [(1, 2, 9)]
    fates.close()
    fates.note(3, 1)
    assert core.notes == [(1, 2, 9)]
