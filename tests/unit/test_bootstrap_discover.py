"""Who started us: our launcher, torchrun, nobody; and who is let in."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bootstrap_tools import memfd, pair, pairs, take_text, together
from test_bootstrap_place import NOBODY, as_root, exit_code, in_child

from bireme import knobs
from bireme.bootstrap import Hub, Rendezvous, discover, join, launchers, messages, place
from bireme.bootstrap.door import Door
from bireme.errors import EngineError, PeerLost, Timeout, UsageError

LIMIT_S = 10.0
NAMES = (*discover._OURS, *launchers.VARIABLES, "XDG_RUNTIME_DIR")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(discover, "_generations", itertools.repeat(0))
    with knobs.override(BIREME_RUN_DIR=str(tmp_path)):
        yield


def variables(rank: int, size: int, **more: str) -> dict[str, str]:
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**{name: str(number) for name, number in numbers.items()}, **more}


def torchrun(rank: int, size: int, timeout_s: float = LIMIT_S, run: str = "run") -> Rendezvous:
    job = launchers.find(variables(rank, size, TORCHELASTIC_RUN_ID=run))
    assert job is not None
    return discover._meet(job, timeout_s)


def job_of(rank: int, size: int) -> launchers.Job:
    return launchers.Job("torchrun", ("",), rank, size, rank, size)


def guest(rank: int, size: int, timeout_s: float = LIMIT_S) -> socket.socket:
    return discover._as_guest(job_of(rank, size), place.folder(("",), 0), timeout_s)


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- alone


def test_alone() -> None:
    end = join(1.0)
    assert (end.rank, end.size, end.origin) == (0, 1, "alone")


# ---- our launcher


@contextlib.contextmanager
def launched(rank: object, size: object, fd: object) -> Iterator[None]:
    with knobs.override(BIREME_RANK=rank, BIREME_SIZE=size, BIREME_BOOTSTRAP_FD=fd):
        yield


def test_the_launchers_socket_serves_again_and_again() -> None:
    ours, theirs = pair()
    os.set_inheritable(ours.fileno(), True)
    hub = Hub(1)
    hub.add(0, theirs)
    hub.start()
    with launched(0, 1, ours.fileno()):
        for _ in range(3):
            end = join(1.0)
            assert (end.rank, end.size, end.local_size, end.origin) == (0, 1, 1, "launcher")
            assert end.all_gather("t", {"a": 1}, timeout_s=LIMIT_S) == [({"a": 1}, [])]
            end.close()
    assert not os.get_inheritable(ours.fileno())
    hub.stop()
    ours.close()


def test_a_descriptor_that_is_not_the_launchers_socket() -> None:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with memfd(b"") as file, stream:
        for fd in (file, stream.fileno(), 10**6):
            with launched(1, 2, fd), pytest.raises(UsageError, match=f"rank 1: .*descriptor {fd}"):
                join(1.0)


@pytest.mark.parametrize("numbers", [(0, 2, -1), (2, 2, 5), (-1, 2, 5), (0, -1, 5)])
def test_launcher_variables_that_contradict_each_other(numbers: tuple[int, int, int]) -> None:
    with launched(*numbers), pytest.raises(UsageError, match=r"found BIREME_RANK=.*bireme run"):
        join(1.0)


def test_launcher_variables_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_RANK", "first")
    with pytest.raises(UsageError, match=r"BIREME_RANK: .*'first'.*bireme run"):
        join(1.0)


# ---- torchrun


@pytest.mark.parametrize("size", [1, 2, 4])
def test_torchruns_ranks_meet(size: int, tmp_path: Path) -> None:
    met = threading.Barrier(size)

    def rank_body(rank: int) -> list[tuple[dict[str, Any], list[bytes]]]:
        end = torchrun(rank, size)
        assert (end.rank, end.size, end.local_rank, end.origin) == (rank, size, rank, "torchrun")
        with memfd(b"of %d" % rank) as fd:
            parts = end.all_gather("t", {"rank": rank}, [fd], LIMIT_S)
        met.wait(LIMIT_S)
        end.close()
        return [(value, [take_text(fd) for fd in fds]) for value, fds in parts]

    expected = [({"rank": rank}, [b"of %d" % rank]) for rank in range(size)]
    assert together(size, rank_body) == [expected] * size
    assert list(tmp_path.iterdir()) == []


def test_torchruns_ranks_meet_as_processes(tmp_path: Path) -> None:
    code = (
        "from bireme.bootstrap import join\n"
        "for step in range(2):\n"
        "    end = join(20.0)\n"
        "    told = end.all_gather('t', {'rank': end.rank}, timeout_s=20.0)\n"
        "    print(step, end.rank, [value['rank'] for value, _ in told])\n"
        "    end.all_gather('bye', {}, timeout_s=20.0)\n"
        "    end.close()\n"
    )
    more = {"BIREME_RUN_DIR": str(tmp_path), "MASTER_PORT": "29511"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **variables(rank, 2, **more)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(processes):
        out, _ = process.communicate(timeout=40)
        assert out.decode() == f"0 {rank} [0, 1]\n1 {rank} [0, 1]\n"
        assert process.returncode == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"RANK": "0"}, "expected all or none of RANK, WORLD_SIZE, .*, found RANK=0: set"),
        ({"LOCAL_RANK": "0"}, "found LOCAL_RANK=0: set the others too"),
        (variables(0, 2, RANK="one"), "expected integers, found RANK=one, WORLD_SIZE=2"),
        (variables(2, 2), "expected ranks below their sizes, found RANK=2"),
        (variables(-1, 2), "expected ranks below their sizes"),
        (variables(0, 2, LOCAL_WORLD_SIZE="3"), "expected ranks below their sizes"),
    ],
)
def test_torchrun_variables_that_contradict_each_other(
    given: dict[str, str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(UsageError, match=reason):
        join(1.0)


def test_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in variables(3, 4, LOCAL_RANK="1", LOCAL_WORLD_SIZE="2").items():
        monkeypatch.setenv(name, text)
    with pytest.raises(EngineError, match="rank 3: expected all ranks on one host"):
        join(1.0)


def test_rank_0_does_not_come(tmp_path: Path) -> None:
    with pytest.raises(Timeout, match=rf"rank 1 found no rank 0 in {tmp_path}.* within 0.05 s"):
        torchrun(1, 2, timeout_s=0.05)


def test_rank_0_does_not_answer() -> None:
    spot = place.Place(place.folder(("",), 0), 1.0)
    with pytest.raises(Timeout, match="rank 1 found no rank 0"):
        guest(1, 2, timeout_s=0.1)
    spot.listener.close()
    spot.remove()


def test_a_rank_that_does_not_come_is_named_and_the_folder_goes(tmp_path: Path) -> None:
    end = torchrun(0, 3)
    with pytest.raises(Timeout, match="rank 1, 2 did not come"):
        end.all_gather("t", {}, timeout_s=0.05)
    assert len(list(tmp_path.iterdir())) == 1
    end.close()
    assert list(tmp_path.iterdir()) == []


def test_a_hub_that_was_just_ending_is_tried_again() -> None:
    spot = place.Place(place.folder(("",), 0), 1.0)

    def serve() -> None:
        spot.listener.accept()[0].close()
        sock, _ = spot.listener.accept()
        with sock:
            assert messages.receive(sock, LIMIT_S)[0] == {"kind": "join", "rank": 1, "size": 2}
            messages.send(sock, {"kind": "joined", "size": 2})

    server = threading.Thread(target=serve)
    server.start()
    guest(1, 2).close()
    server.join(LIMIT_S)
    spot.listener.close()
    spot.remove()


def test_two_jobs_at_once_do_not_meet() -> None:
    def rank_body(index: int) -> list[Any]:
        end = torchrun(index % 2, 2, run=f"job {index // 2}")
        try:
            told = end.all_gather("t", {"job": index // 2}, timeout_s=LIMIT_S)
            end.all_gather("bye", {}, timeout_s=LIMIT_S)
            return [value["job"] for value, _ in told]
        finally:
            end.close()

    assert together(4, rank_body) == [[0, 0], [0, 0], [1, 1], [1, 1]]


def test_rank_0_cannot_use_the_folder(tmp_path: Path) -> None:
    job = job_of(0, 2)
    with pytest.raises(EngineError, match=r"rank 0 cannot meet the others in .*No such file"):
        discover._as_host(job, str(tmp_path / "none" / "spot"), 1.0)
    spot = place.Place(str(tmp_path / "spot"), 1.0)
    with pytest.raises(Timeout, match="another live process"):
        discover._as_host(job, str(tmp_path / "spot"), 0.05)
    spot.listener.close()
    spot.remove()


# ---- the door


@contextlib.contextmanager
def door(size: int) -> Iterator[tuple[Hub, str, list[str]]]:
    """A hub that listens on an abstract socket, which needs no folder."""
    name = f"\0bireme-test-{os.getpid()}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(name)
    listener.listen()
    events: list[str] = []
    hub = Hub(size)
    hub.listen(listener, lambda: events.append("closed"))
    hub.start()
    try:
        yield hub, name, events
    finally:
        hub.stop()
    assert events == ["closed"]


def knock(name: str, first: bytes = b"", **hello: object) -> tuple[socket.socket, dict[str, Any]]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(name)
    sock.send(first or messages.encode({"kind": "join", **hello}))
    return sock, messages.receive(sock, LIMIT_S)[0]


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        ({"rank": 0}, "rank 0 has joined already"),
        ({"rank": 2}, "this job has 2 ranks, you are rank 2 of 2"),
        ({"rank": -1}, "you are rank -1"),
        ({"rank": 1, "size": 3}, "you are rank 1 of 3"),
        ({"rank": True}, "expected"),
        ({"rank": "1"}, "expected"),
        ({"kind": "gather", "rank": 1}, "expected"),
        ({"first": b"garbage"}, "not JSON"),
    ],
)
def test_who_is_turned_away_and_the_job_goes_on(hello: dict[str, Any], reason: str) -> None:
    with door(2) as (_, name, events):
        zero, answer = knock(name, rank=0, size=2)
        assert answer == {"kind": "joined", "size": 2}
        refused, answer = knock(name, **hello)
        assert answer["kind"] == "refused"
        assert reason in answer["error"]
        with pytest.raises(PeerLost):
            messages.receive(refused, LIMIT_S)
        refused.close()
        assert not events
        one, answer = knock(name, rank=1)
        assert answer["kind"] == "joined"
        until(lambda: events)
        ends = [Rendezvous(0, 2, zero), Rendezvous(1, 2, one)]
        results = together(2, lambda rank: ends[rank].all_gather("t", {}, (), LIMIT_S))
        assert [len(result) for result in results] == [2, 2]
        for end in ends:
            end.close()


def test_a_duplicate_rank_is_refused_with_a_clear_error(tmp_path: Path) -> None:
    end = discover._as_host(job_of(0, 3), place.folder(("",), 0), 1.0)
    first = guest(1, 3)
    with pytest.raises(UsageError, match="rank 1 was refused by rank 0: rank 1 has joined already"):
        guest(1, 3)
    first.close()
    end.close()
    assert list(tmp_path.iterdir()) == []


def test_a_rank_may_come_back_while_others_are_missing() -> None:
    with door(2) as (hub, name, _):
        sock, _ = knock(name, rank=0)
        sock.close()
        until(lambda: not hub._ends)
        again, answer = knock(name, rank=0)
        assert answer["kind"] == "joined"
        again.close()


def test_descriptors_that_come_with_a_join_are_closed() -> None:
    with door(2) as (_, name, _), memfd(b"") as fd:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(name)
        messages.send(sock, {"kind": "join", "rank": 0}, [fd])
        assert messages.receive(sock, LIMIT_S)[0]["kind"] == "joined"
        sock.close()


def test_all_seats_are_taken_before_the_door_opens() -> None:
    hub = Hub(1)
    with pairs() as (_, theirs):
        hub.add(0, theirs)
        events: list[str] = []
        hub.listen(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), lambda: events.append("x"))
        hub.start()
        until(lambda: events)
        hub.stop()


def test_a_silent_stranger_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Door.__init__, "__defaults__", (0.05,))
    with door(1) as (_, name, _):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(name)
        answer, _ = messages.receive(sock, LIMIT_S)
        assert answer == {"kind": "refused", "error": "no join message within 0.05 s"}
        sock.close()


def test_strangers_in_the_hall_when_the_door_closes() -> None:
    with door(2) as (hub, name, _):
        silent = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        silent.connect(name)
        gone = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        gone.connect(name)
        gone.close()
        until(lambda: hub._door and len(hub._door._strangers) == 1)
        ends = [knock(name, rank=rank)[0] for rank in range(2)]
        with pytest.raises(PeerLost):
            messages.receive(silent, LIMIT_S)
        for sock in (silent, *ends):
            sock.close()


def test_a_stranger_that_is_gone_and_an_accept_that_fails() -> None:
    with door(1) as (hub, name, _):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.connect(name)
        until(lambda: hub._door and hub._door._strangers)
        assert hub._door is not None
        hub._door._accept(0)  # nobody waits there
        with pairs() as (other, _):
            hub._door._hear(other, 0)
        sock.close()


@as_root
def test_another_user_is_turned_away() -> None:
    with door(2) as (_, name, _):

        def intrude() -> bool:
            os.setuid(NOBODY)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(name)
            answer, _ = messages.receive(sock, LIMIT_S)
            return answer["kind"] == "refused" and "you are user 65534" in answer["error"]

        assert exit_code(in_child(intrude)) == 0
        sock, answer = knock(name, rank=0)
        assert answer["kind"] == "joined"
        sock.close()
