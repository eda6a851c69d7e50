"""The pytest plugin: ranks that die or hang, and what a test leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from inner import HEAD, PLUGIN, Session

from bireme.testing import leaks

LEAKS = """
import pytest

@pytest.fixture(autouse=True)
def no_leaks(leak_check):
    pass
"""


def test_ranks_that_end_or_hang(session: Session) -> None:
    result = session(
        """
        pytestmark = pytest.mark.ranks(2, timeout=2)

        def test_exit(world):
            if world.rank == 1:
                sys.exit(3)
            world.barrier()

        def test_death(world):
            print("last words of", world.rank)
            if world.rank == 1:
                os._exit(3)
            world.barrier()

        def test_signal(world):
            if world.rank == 0:
                os.kill(os.getpid(), 9)
            world.barrier()

        def test_session_ends():
            if RANK == 0:
                pytest.exit("enough")

        def test_hang(world):
            print("waiting is", world.rank)
            if world.rank == 0:
                time.sleep(100)
            world.barrier()

        def test_afterwards(world):
            world.barrier()
        """
    )
    result.assert_outcomes(failed=5, passed=1)
    result.stdout.fnmatch_lines(
        [
            "E * SystemExit: 3",
            "*_ test_death*",
            "rank 0:",
            "E *PeerLost*",
            "rank 1:",
            "this rank ended with exit code 3 in the middle of the test",
            "*Captured stdout call (rank 1)*",
            "last words of 1",
            "*_ test_signal*",
            "this rank was ended by signal 9 (SIGKILL) in the middle of the test",
            "*_ test_session_ends*",
            "the test ended this rank's session: Exit: enough",
            "*_ test_hang*",
            "rank 0:",
            "did not finish within 2 s",
            "*File *test_inner.py*, line * in test_hang",
            "rank 1:",
            "did not finish within 2 s",
            "*File *test_inner.py*, line * in test_hang",
            "*Captured stdout call (rank 0)*",
            "waiting is 0",
            "*Captured stdout call (rank 1)*",
            "waiting is 1",
        ]
    )
    result.stdout.fnmatch_lines(["FAILED *test_death* - rank 1: this rank ended with*"])


def test_workers_that_end_between_two_tests(session: Session) -> None:
    result = session(
        """
        import signal

        @pytest.mark.ranks(2)
        def test_before():
            if RANK == 1:
                signal.setitimer(signal.ITIMER_REAL, 0.3)  # SIGALRM ends the process

        def test_between():
            time.sleep(1)

        @pytest.mark.ranks(2)
        def test_after(world):
            world.barrier()
        """
    )
    result.assert_outcomes(passed=3)


def test_workers_that_do_not_start(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bireme.testing.workers._START_S", 0.0)
    result = session("@pytest.mark.ranks(2)\ndef test_one(): pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 0, rank 1:", "did not start within 0 s"])


def test_leaks_are_failures(session: Session) -> None:
    result = session(
        """
        import importlib.util
        import subprocess
        import threading

        kept = []

        def leak(kind):
            if kind == "environment":
                os.environ["LEFT_BEHIND"] = "1"
            elif kind == "thread":
                idle = threading.Thread(target=time.sleep, args=(60,), daemon=True, name="idle")
                idle.start()
            elif kind == "process":
                kept.append(subprocess.Popen(["sleep", "60"]))
            elif kind == "descriptor":
                kept.append(open(os.devnull))
            elif kind == "shm":
                open(f"/dev/shm/bireme-test-{os.getpid()}", "w").close()

        KINDS = ["environment", "thread", "process", "descriptor", "shm"]

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("kind", KINDS)
        def test_leak(kind, world):
            if world.rank == 1:
                leak(kind)

        @pytest.mark.ranks(2)
        @pytest.mark.may_leak("descriptor", reason="shows that a kind can be allowed")
        def test_allowed(world):
            leak("descriptor")

        @pytest.mark.may_leak(reason="shows that all kinds can be")
        @pytest.mark.parametrize("kind", ["environment", "descriptor"])
        def test_all_allowed(kind):
            leak(kind)

        @pytest.mark.may_leak("descriptor")
        def test_no_reason():
            pass

        @pytest.mark.ranks(2)
        def test_clean(world):
            if importlib.util.find_spec("torch"):
                import torch
                torch.ones(10**6).sum()
            with open(os.devnull):
                world.barrier()

        def test_tidy():
            for entry in kept:
                if hasattr(entry, "kill"):
                    entry.kill()
                    entry.wait()
            for name in os.listdir("/dev/shm"):
                if name.startswith("bireme-test-"):
                    os.unlink(f"/dev/shm/{name}")
            os.environ.pop("LEFT_BEHIND", None)
            kept.clear()

        test_tidy = pytest.mark.may_leak(reason="cleans up")(test_tidy)
        """,
        conftest=LEAKS,
    )
    result.assert_outcomes(passed=10, errors=6)
    result.stdout.fnmatch_lines(
        [
            "rank 1:",
            "the test leaks",
            "  environment: LEFT_BEHIND was set",
            "  thread: idle",
            "  process: * sleep 60",
            "  descriptor: * -> /dev/null",
            "  shm: /dev/shm/bireme-test-*",
            "expected @pytest.mark.may_leak(*kinds, reason=...)*",
        ]
    )


def test_shared_memory_of_others_is_no_leak() -> None:
    before = leaks.take()
    name = f"/dev/shm/bireme-test-{os.getpid()}"
    # A grandchild stands for a program of the same user that has nothing to do with the test.
    program = (
        "import mmap, sys, time; file = open(sys.argv[1], 'w+b'); file.truncate(10); "
        "memory = mmap.mmap(file.fileno(), 10); print('ready', flush=True); sys.stdin.read()"
    )
    shell = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", program, name]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        try:
            assert leaks.settled(before, ["process", "descriptor"]) == []
        finally:
            other.communicate()
            found = leaks.settled(before)
            os.unlink(name)
    assert found == [f"shm: {name}"]
    assert leaks.settled(before) == []


def test_no_worker_outlives_its_parent(pytester: pytest.Pytester) -> None:
    body = """
        @pytest.mark.ranks(2)
        def test_long():
            with open(f"pid{RANK}", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"pid{RANK}", f"rank{RANK}")
            time.sleep(60)
    """
    pytester.makepyfile(test_inner=HEAD + textwrap.dedent(body))
    for number in (signal.SIGINT, signal.SIGKILL):
        names = [pytester.path / f"rank{rank}" for rank in range(2)]
        for name in names:
            name.unlink(missing_ok=True)
        parent = pytester.popen(
            [sys.executable, "-m", "pytest", *PLUGIN],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _wait_for(lambda names=names: all(name.exists() for name in names))
        pids = [int(name.read_text()) for name in names]
        parent.send_signal(number)
        assert parent.wait(20) != 0
        _wait_for(lambda pids=pids: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
