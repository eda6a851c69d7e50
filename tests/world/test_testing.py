"""The pytest plugin: one test on n ranks, its report, its end, and what it leaves behind."""

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

Session = Callable[..., pytest.RunResult]
PLUGIN = ("-p", "bireme.testing.plugin")
HEAD = """
import os, sys, time, warnings
import numpy as np
import pytest
import bireme
from bireme import knobs

RANK = knobs.get("BIREME_RANK")
"""
LEAKS = """
import pytest

@pytest.fixture(autouse=True)
def no_leaks(leak_check):
    pass
"""


@pytest.fixture
def session(pytester: pytest.Pytester) -> Session:
    """Run pytest on one file of tests."""

    def run(body: str, *options: str, conftest: str = "") -> pytest.RunResult:
        pytester.makepyfile(test_inner=HEAD + textwrap.dedent(body))
        if conftest:
            pytester.makeconftest(conftest)
        return pytester.runpytest_inprocess(*PLUGIN, "-ra", *options)

    return run


def text(result: pytest.RunResult) -> str:
    return result.stdout.str()


def test_passes_on_every_number_of_ranks(session: Session) -> None:
    result = session(
        """
        @pytest.mark.ranks(1, 2, 3)
        @pytest.mark.parametrize("length", [0, 5])
        def test_sum(world, length, tmp_path):
            assert os.listdir(tmp_path) == []
            total = world.all_reduce(np.ones(length))
            assert total.tolist() == [world.size] * length

        @pytest.mark.ranks(2)
        class TestClass:
            def test_method(self, world):
                assert world.rank == RANK

            @pytest.mark.ranks(1)
            def test_nearest_marker_wins(self, world):
                assert world.size == 1

        def test_alone(world):
            assert (world.size, RANK) == (1, -1)
        """,
        "-v",
    )
    result.assert_outcomes(passed=9)
    for name in ("ranks1-0", "ranks2-0", "ranks3-0", "ranks1-5", "ranks2-5", "ranks3-5"):
        result.stdout.fnmatch_lines([f"*::test_sum?{name}? PASSED*"])
    result.stdout.fnmatch_lines(["*::TestClass::test_method?ranks2? PASSED*"])


def test_a_failure_on_one_rank(session: Session) -> None:
    result = session(
        """
        @pytest.mark.ranks(3)
        def test_one(world):
            print("printed by", world.rank)
            print("told by", world.rank, file=sys.stderr)
            assert world.rank != 1, "not you"
            world.barrier()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1:",
            "E * AssertionError: not you",
            "*Captured stdout call (rank 0)*",
            "printed by 0",
            "*Captured stderr call (rank 0)*",
            "told by 0",
            "*Captured stdout call (rank 2)*",
            "printed by 2",
            "FAILED *test_one?ranks3? - AssertionError: not you*",
        ]
    )
    # The others wait in the barrier and hear of it at once.
    result.stdout.fnmatch_lines(["E *Aborted: rank 1 aborted the world: *test_one*not you*"])


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="subtests came with pytest 9")
def test_failures_of_subtests_are_shown(session: Session) -> None:
    result = session(
        """
        @pytest.mark.ranks(2)
        def test_parts(world, subtests):
            for part in range(3):
                with subtests.test(part=part):
                    assert (part, world.rank) not in [(0, 1), (1, 1)]
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1:", "E *assert (0, 1) not in *", "rank 1:"])
    result.stdout.fnmatch_lines(["E *assert (1, 1) not in *"])


def test_the_same_failure_on_all_ranks_is_shown_once(session: Session) -> None:
    result = session(
        """
        @pytest.mark.ranks(3)
        def test_all():
            raise KeyError("gone")
        """
    )
    result.assert_outcomes(failed=1)
    assert text(result).count("E       KeyError: 'gone'") == 1
    result.stdout.fnmatch_lines(["rank 0, rank 1, rank 2:"])


def test_skips_and_expected_failures(session: Session) -> None:
    result = session(
        """
        pytestmark = pytest.mark.ranks(2)

        def test_skip():
            pytest.skip("not here")

        @pytest.mark.skipif(True, reason="never")
        def test_skipif(world):
            pass

        def test_skip_on_one_rank():
            if RANK == 1:
                pytest.skip("not me")

        @pytest.mark.xfail(reason="known")
        def test_xfail_on_one_rank(world):
            assert world.rank == 0

        @pytest.mark.xfail(reason="gone", strict=True)
        def test_strict(world):
            pass

        @pytest.mark.xfail(reason="gone")
        def test_xpass(world):
            pass
        """
    )
    result.assert_outcomes(skipped=2, failed=2, xfailed=1, xpassed=1)
    result.stdout.fnmatch_lines(["SKIPPED *not here", "SKIPPED *never"])
    result.stdout.fnmatch_lines(["the ranks disagree: this one skipped: Skipped: not me"])
    result.stdout.fnmatch_lines(["*XPASS(strict)* gone"])


def test_fixtures_of_every_scope_live_in_the_ranks(session: Session) -> None:
    result = session(
        """
        made = []

        @pytest.fixture(scope="module")
        def shared():
            made.append(RANK)
            yield RANK
            print("ended on", RANK)

        def test_here(shared):
            assert made == [-1]

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("turn", [0, 1])
        def test_there(shared, turn):
            assert shared == RANK
            assert made == [RANK]

        def test_here_again(shared):
            assert made == [-1]

        @pytest.mark.ranks(2)
        def test_fixture_fails(request):
            request.getfixturevalue("absent")

        @pytest.fixture
        def broken():
            raise OSError("broken")

        @pytest.mark.ranks(2)
        def test_setup_fails(broken):
            pass

        @pytest.fixture
        def brittle():
            yield
            raise OSError("brittle")

        @pytest.mark.ranks(2)
        def test_teardown_fails(brittle):
            pass
        """
    )
    result.assert_outcomes(passed=5, failed=1, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at setup of test_setup_fails*", "rank 0, rank 1:"])
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_teardown_fails*", "rank 0, rank 1:"])


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


def test_settings_of_the_world(session: Session) -> None:
    result = session(
        """
        @pytest.mark.ranks(2)
        @pytest.mark.world(heap_bytes="1M", delivery="lazy")
        def test_heap(world):
            assert world.arena.nbytes == 1 << 20

        @pytest.mark.world(heap_bytes="2M")
        def test_heap_alone(world):
            assert world.arena.nbytes == 2 << 20

        @pytest.mark.ranks(2)
        def test_a_world_that_was_broken_is_closed(world):
            with pytest.raises(bireme.MismatchError):
                world.all_reduce(np.ones(3 + world.rank))
            world.close()

        @pytest.mark.ranks(2)
        def test_the_next_one_is_fresh(world):
            world.barrier()
        """
    )
    result.assert_outcomes(passed=4)


def test_markers_that_make_no_sense_are_refused(session: Session) -> None:
    result = session(
        """
        import unittest

        @pytest.mark.ranks(2)
        class TestOld(unittest.TestCase):
            def test_old(self):
                pass
        """
    )
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*the marker `ranks` needs a test function or a plain class*"])
    for arguments in ("", "0", "True", "'2'", "2, timeot=3"):
        result = session(f"@pytest.mark.ranks({arguments})\ndef test_no(): pass")
        result.assert_outcomes(errors=1)
        result.stdout.fnmatch_lines(["expected @pytest.mark.ranks(n, ..., timeout=seconds) *"])


def test_options_of_the_command_line(session: Session, pytester: pytest.Pytester) -> None:
    body = """
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("turn", [0, 1])
        def test_turn(turn):
            warnings.warn("mind the gap")
            os.write(1, b"straight to the descriptor")
            assert turn == 0

        def test_other():
            pass
    """
    result = session(body, "-k", "turn", "--junitxml=report.xml", "--tb=short", "-p", "no:timeout")
    result.assert_outcomes(passed=1, failed=1, deselected=1)
    result.stdout.fnmatch_lines(["*UserWarning: mind the gap"])
    assert "rank 0, rank 1:" in (pytester.path / "report.xml").read_text()
    result = session(body, "--lf", "-x", "--setup-show", "--capture=no")
    result.assert_outcomes(failed=1)
    assert text(result).count("test session starts") == 1
    result = session(body, "--setup-plan")
    result.assert_outcomes()
    result = session(body, "--collect-only", "-q")
    result.stdout.fnmatch_lines(["test_inner.py::test_turn?ranks2-0?"])


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


def test_a_rank_reports_what_it_does_not_find(session: Session) -> None:
    result = session(
        """
        if RANK == 1:
            raise ImportError("not on this rank")

        @pytest.mark.ranks(2)
        def test_one(): pass
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 1:", "could not collect *", "E *not on this rank"])
    assert os.environ.get("BIREME_RANK") is None
