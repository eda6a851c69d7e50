"""A rank dies: the others raise PeerLost with its name and its fate, wherever they wait."""

from __future__ import annotations

from pathlib import Path

import pytest
from programs import launch

# How a rank ends, the job's exit code, and the words in the others' error.
DEATHS = {
    "raise": ("raise RuntimeError('boom')", 1, "rank 3 failed: RuntimeError: boom"),
    "raise in with": (
        "with world:\n        raise KeyError('lost')",
        1,
        "rank 3 failed: KeyError: 'lost'",
    ),
    "sys.exit": ("sys.exit(3)", 3, "finished with exit code 3 without closing its world"),
    "sys.exit in with": ("with world:\n        sys.exit(3)", 3, "rank 3 failed: SystemExit: 3"),
    "sys.exit text": ("sys.exit('words')", 1, "finished with exit code 1 without closing"),
    "os._exit": ("os._exit(3)", 3, "ended with exit code 3"),
    "os._exit 0": ("os._exit(0)", 0, "ended with exit code 0"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", 137, "was killed by signal 9 (Killed)"),
    "abort": ("os.abort()", 134, "was killed by signal 6 (Aborted)"),
    "finish": ("sys.exit()", 0, "finished with exit code 0 without closing its world"),
}

# What the others wait in; each needs rank 3, the last.
WAITS = {
    "all_reduce": "world.all_reduce(ones())",
    "large all_reduce": "world.all_reduce(ones(300_000))",
    "barrier": "world.barrier()",
    "signal wait": "ready.wait(1)",
    "recv": "world.recv(ones(), world.size - 1)",
    "full pipe": "[world.send(ones(9000), world.size - 1) for _ in range(9)]",
    "async": "world.all_reduce(ones(), async_op=True).wait()",
    "allocation": "world.symmetric.zeros(3)",
    "free": "x.free()",
    "split": "world.split(0)",
    "group": "group.barrier()",
    "close": "world.close()",
}

PROGRAM = """
world = bm.init(timeout_s=15)
ready, x, group = world.symmetric.signal(), world.symmetric.zeros(3), world.split(0)
world.barrier()
if world.rank == world.size - 1:
    time.sleep(0.2)
    {death}
waits = [{waits}]
caught(waits[world.rank % len(waits)])
if world.size > 2:
    caught(world.barrier)  # whatever a rank waited in, the world is over
os._exit(0)
"""


def program(death: str, *waits: str) -> str:
    calls = ", ".join(f"lambda: {wait}" for wait in waits)
    return PROGRAM.replace("{death}", death).replace("{waits}", calls)


@pytest.mark.parametrize("name", DEATHS)
def test_every_death_ends_every_wait(tmp_path: Path, name: str) -> None:
    death, code, words = DEATHS[name]
    ran = launch(tmp_path, 4, program(death, WAITS["signal wait"], WAITS["recv"], WAITS["barrier"]))
    assert [len(told) for told in ran.told] == [2, 2, 2, 0], ran
    for rank in range(3):
        for kind, text in ran.told[rank]:
            assert kind == "PeerLost", (rank, ran.told)
            assert words in text, (rank, text)
            assert "rank 3" in text, text
    assert ran.code == code, ran.stderr


@pytest.mark.parametrize("name", WAITS)
def test_every_wait_is_ended(tmp_path: Path, name: str) -> None:
    ran = launch(tmp_path, 2, program(DEATHS["kill"][0], WAITS[name]))
    kind, text = ran.told[0][-1]
    assert kind == "PeerLost", (ran.told, ran.stderr)
    assert "rank 1 (pid " in text, text
    assert "was killed by signal 9 (Killed)" in text, text


def test_a_death_outside_the_group_counts_too(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        world = bm.init(timeout_s=15)
        group = world.group([0, 1])
        world.barrier()
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            time.sleep(1.5)  # rank 0 waits for rank 1, which lives
        caught(group.barrier)
        """,
    )
    assert [kind for kind, _ in ran.told[0]] == ["PeerLost"], ran
    assert "rank 2" in ran.told[0][0][1]


def test_a_rank_that_has_finished_is_missed_only_where_it_is_needed(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        world = bm.init(timeout_s=15)
        group = world.group([0, 1])
        world.barrier()
        if world.rank == 2:
            sys.exit()
        if world.rank == 1:
            time.sleep(0.7)
        caught(group.barrier)
        caught(world.barrier)
        """,
    )
    for told in ran.told[:2]:
        assert [kind for kind, _ in told] == ["nothing", "PeerLost"], ran
        assert "finished with exit code 0 without closing its world" in told[1][1]


def test_a_rank_that_has_closed_is_missed_by_nobody(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        """
        world = bm.init(timeout_s=15)
        x = world.symmetric.full(3, world.rank, "int64")
        view = x.on(1 - world.rank)
        world.close()
        if world.rank == 1:
            os._exit(0)
        time.sleep(0.5)
        tell(view.tolist())
        """,
    )
    assert ran.code == 0, ran.stderr
    assert ran.told[0] == [[1, 1, 1]], "the memory of a rank that is gone stays readable"


def test_peers_are_watched_without_pidfds_too(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        "def refuse(*_): raise OSError('no pidfd here')\nos.pidfd_open = refuse\n"
        + program(DEATHS["kill"][0], WAITS["barrier"]),
        BIREME_LOG="info",
    )
    kind, text = ran.told[0][-1]
    assert kind == "PeerLost", ran
    assert "was killed by signal 9" in text
    assert "peers are watched by their process id" in ran.stderr


def test_the_first_failure_counts(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        world = bm.init(timeout_s=15)
        world.barrier()
        if world.rank == 2:
            raise ValueError("the cause")
        world.barrier()
        """,
    )
    assert ran.code == 1
    assert "rank 2 failed first: exit code 1" in ran.stderr
    for rank in (0, 1):
        assert (
            f"rank {rank}: exit code 1, bireme.errors.PeerLost: rank 2 failed: ValueError"
            in ran.stderr
        )


def test_abort(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        world = bm.init(timeout_s=15)
        world.barrier()
        if world.rank == 1:
            time.sleep(0.2)
            world.abort("enough of this")
        caught(world.barrier)
        caught(world.close)
        """,
    )
    for told in ran.told:
        assert [kind for kind, _ in told] == ["Aborted", "nothing"], ran
        assert told[0][1] == "rank 1 aborted the world: enough of this"


def test_nothing_has_a_name(tmp_path: Path) -> None:
    # What has no name cannot be left behind, however the ranks end.
    ran = launch(
        tmp_path,
        2,
        """
        world = bm.init(timeout_s=15)
        world.symmetric.full(100_000, 1)
        world.split(0).barrier()
        maps = open("/proc/self/maps").read().splitlines()
        links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        files = [os.readlink(link) for link in links if os.path.islink(link)]
        shared = [line.split(None, 5)[-1] for line in maps if line.split()[1].endswith("s")]
        tell(sorted({name for name in [*shared, *files] if "bireme" in name or "/shm/" in name}))
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    wanted = ["/memfd:bireme-control (deleted)", "/memfd:bireme-heap (deleted)"]
    assert ran.told == [[wanted]] * 2, ran


def test_buffers_on_the_way_do_no_harm(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        """
        world = bm.init(timeout_s=15)
        streams = [world.stream() for _ in range(3)]
        world.barrier()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        works = []
        for turn in range(30):
            works.append(world.all_reduce(ones(10_000), async_op=True, stream=streams[turn % 3]))
        found = {type(work.exception()).__name__ for work in works}
        tell(sorted(found))
        world.close()
        """,
    )
    assert ran.told[0] == [["PeerLost"]], ran


# ---- while the ranks meet ---------------------------------------------------------------------


def test_a_rank_dies_before_it_joins(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        if RANK == 1:
            os._exit(5)
        caught(lambda: bm.init(timeout_s=15))
        """,
    )
    assert [rank for rank, _ in ran.errors("PeerLost")] == [0, 2], ran
    assert all("rank 1" in text for _, text in ran.errors("PeerLost")), ran.told
    assert ran.code == 5


def test_a_rank_does_not_come(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        """
        if RANK == 1:
            time.sleep(2.5)
            sys.exit(0)
        caught(lambda: bm.init(timeout_s=1))
        """,
    )
    assert [rank for rank, _ in ran.errors("Timeout")] == [0], ran
    assert "rank 1" in ran.told[0][0][1], ran.told


def test_a_rank_cannot_join(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        3,
        """
        import resource
        if RANK == 1:
            pages = int(open("/proc/self/statm").read().split()[0])
            limit = pages * 4096 + (100 << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        caught(lambda: bm.init(timeout_s=15, heap_bytes="256M"))
        """,
    )
    kind, text = ran.told[1][0]
    assert kind == "EngineError", ran
    assert "cannot map 268435456 bytes of shared memory" in text
    for rank in (0, 2):
        _, text = ran.told[rank][0]
        assert "rank 1" in text, "the others hear who could not"
        assert "cannot map 268435456 bytes" in text, "and why"
    assert ran.code == 0, ran.stderr


@pytest.mark.parametrize(
    ("setting", "values", "words"),
    [
        (
            "heap_bytes",
            ("1M", "2M", "1M"),
            "one heap_bytes on all ranks, found [1048576, 2097152, 1048576]",
        ),
        ("delivery", ("eager", "eager", "lazy"), "on all ranks, found ['eager', 'eager', 'lazy']"),
    ],
)
def test_different_settings(
    tmp_path: Path, setting: str, values: tuple[str, ...], words: str
) -> None:
    ran = launch(
        tmp_path,
        3,
        f"""
        descriptors = len(os.listdir("/proc/self/fd"))
        caught(lambda: bm.init(timeout_s=15, {setting}={values}[RANK]))
        assert bm.current() is None
        tell(["descriptors", len(os.listdir("/proc/self/fd")) - descriptors])
        """,
    )
    for told in ran.told:
        assert told[0][0] == "MismatchError", ran
        assert words in told[0][1], told
        assert told[1] == ["descriptors", 0] or told[1][1] < 0, "what was opened is closed"
    assert (ran.code, ran.stderr) == (0, ""), "all ranks have ended well"


def test_a_second_world_after_the_first(tmp_path: Path) -> None:
    ran = launch(
        tmp_path,
        2,
        """
        for turn in range(5):
            with bm.init(timeout_s=15) as world:
                tell(world.all_reduce(ones(1)).tolist())
        """,
    )
    assert ran.told == [[[2.0]] * 5] * 2, ran
    assert ran.code == 0


def test_the_engine_is_logged(tmp_path: Path) -> None:
    ran = launch(tmp_path, 2, "bm.init().close()", BIREME_LOG="info")
    assert ran.stderr.count("bireme: engine shm on 2 ranks, folds with ") == 1, ran.stderr
    quiet = launch(tmp_path, 2, "bm.init().close()")
    assert "engine shm" not in quiet.stderr
