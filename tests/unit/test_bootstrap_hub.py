"""The hub: whatever one rank does, the others get an answer."""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
from typing import Any

import pytest
from bootstrap_tools import memfd, pair, pairs, ranks, raw, raw_hub, take_text, together

from bireme.bootstrap import Hub, messages
from bireme.bootstrap.rendezvous import Rendezvous
from bireme.errors import PeerLost, UsageError

LIMIT_S = 10.0


def gather(rank: int, tag: str = "t", **more: Any) -> dict[str, Any]:
    return {"kind": "gather", "tag": tag, "rank": rank, "value": {"n": rank}, **more}


def receive(sock: socket.socket) -> dict[str, Any]:
    value, fds = messages.receive(sock, LIMIT_S)
    messages.close_all(fds)
    return value


def failure(sock: socket.socket) -> tuple[int, str]:
    answer = receive(sock)
    assert answer["kind"] == "failed"
    return answer["rank"], answer["error"]


def test_the_wire_format() -> None:
    with raw(2) as socks:
        for rank, sock in enumerate(socks):
            messages.send(sock, gather(rank))
        for sock in socks:
            assert [receive(sock) for _ in socks] == [
                {**gather(0), "ticket": ""},
                {**gather(1), "ticket": ""},
            ]


def test_the_observer_sees_the_descriptors_before_they_are_closed() -> None:
    seen: list[tuple[str, list[tuple[dict[str, Any], bytes]]]] = []

    def observe(tag: str, parts: list[tuple[dict[str, Any], list[int]]]) -> None:
        seen.append((tag, [(part, os.pread(fds[0], 9, 0)) for part, fds in parts]))

    with raw(2, observe) as socks:
        for rank, sock in enumerate(socks):
            with memfd(b"of %d" % rank) as fd:
                messages.send(sock, gather(rank, "control"), [fd])
        for sock in socks:
            received = [messages.receive(sock, LIMIT_S)[1][0] for _ in socks]
            assert [take_text(fd) for fd in received] == [b"of 0", b"of 1"]
    assert seen == [("control", [(gather(0, "control"), b"of 0"), (gather(1, "control"), b"of 1")])]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"garbage", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"{}" + b" " * messages.MAX_BYTES, "more than 65536 bytes"),
        (b'{"kind":"hello"}', "unknown kind 'hello'"),
        (b'{"kind":"gather","tag":"t","rank":0,"value":{}}', "spoke for rank 0"),
    ],
)
def test_a_rank_that_talks_nonsense_is_dropped(data: bytes, reason: str) -> None:
    with raw(3) as socks:
        messages.send(socks[0], gather(0))
        socks[1].send(data)
        rank, error = failure(socks[0])
        assert rank == 1
        assert reason in error
        with pytest.raises(PeerLost):
            receive(socks[1])
        messages.send(socks[2], gather(2))
        assert failure(socks[2]) == (1, error)


def test_a_second_question_drops_the_rank_and_its_descriptors() -> None:
    with raw(2) as socks, memfd(b"") as fd:
        messages.send(socks[0], gather(0), [fd])
        messages.send(socks[0], gather(0), [fd])
        with pytest.raises(PeerLost):
            receive(socks[0])
        messages.send(socks[1], gather(1))
        assert failure(socks[1])[0] == 0


def test_a_disconnect_fails_those_who_wait_and_those_who_come() -> None:
    with raw(3) as socks:
        messages.send(socks[0], gather(0))
        socks[1].close()
        assert failure(socks[0])[0] == 1
        messages.send(socks[2], gather(2))
        assert failure(socks[2])[0] == 1
        messages.send(socks[0], gather(0))
        assert failure(socks[0])[0] == 1


def test_what_a_lost_rank_said_last_counts_first() -> None:
    hub, socks = raw_hub(2)
    messages.send(socks[0], gather(0))
    messages.send(socks[1], {"kind": "failed", "error": "no memory"})
    hub.lost(1, "exit code 1")
    assert failure(socks[0]) == (1, "no memory")
    messages.send(socks[0], gather(0))
    assert failure(socks[0]) == (1, "exit code 1")
    hub.lost(1, "it was a signal after all")
    hub.lost(0, "exit code 2")
    with pytest.raises(PeerLost):
        receive(socks[0])
    hub.stop()
    hub.lost(0, "nobody listens")
    for sock in socks:
        sock.close()


def test_a_lost_rank_that_closed_has_the_reason_of_its_parent() -> None:
    hub = Hub(2)
    (one, hubs_one), (two, hubs_two) = pair(), pair()
    hub.add(0, hubs_one)
    hub.add(1, hubs_two)
    messages.send(one, gather(0))
    two.close()
    hub.lost(1, "exit code 3")
    hub.start()
    assert failure(one) == (1, "exit code 3")
    one.close()
    hub.stop()


def test_a_slow_rank_keeps_nobody_waiting() -> None:
    size = 3
    big = {"text": "x" * 60000}
    with raw(size) as socks:
        for _ in range(4):  # more than a socket holds
            for rank, sock in enumerate(socks):
                messages.send(sock, {**gather(rank), "value": big})
            for sock in socks[1:]:
                assert [receive(sock)["rank"] for _ in socks] == [0, 1, 2]
        got = [receive(socks[0])["rank"] for _ in range(4 * size)]
        assert got == [0, 1, 2] * 4


def test_stop_delivers_what_is_under_way() -> None:
    hub, socks = raw_hub(2)
    rounds = 8
    for _ in range(rounds):
        for rank, sock in enumerate(socks):
            messages.send(sock, {**gather(rank), "value": {"text": "x" * 60000}})
        assert [receive(socks[0])["rank"] for _ in socks] == [0, 1]
    stopper = threading.Thread(target=hub.stop)
    stopper.start()
    assert [receive(socks[1])["rank"] for _ in range(2 * rounds)] == [0, 1] * rounds
    stopper.join(LIMIT_S)
    for sock in socks:
        with pytest.raises(PeerLost):
            receive(sock)
        sock.close()


def test_a_rank_that_dies_with_mail_waiting_is_no_trouble() -> None:
    with raw(2) as socks:
        for _ in range(8):
            for rank, sock in enumerate(socks):
                messages.send(sock, {**gather(rank), "value": {"text": "x" * 60000}})
            assert [receive(socks[0])["rank"] for _ in socks] == [0, 1]
        socks[1].close()
        messages.send(socks[0], gather(0))
        assert failure(socks[0])[0] == 1


def test_a_rank_that_closes_as_its_mail_goes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = messages.send_now
    leaving: list[socket.socket] = []

    def send_now(sock: socket.socket, data: bytes, fds: Any = ()) -> None:
        while leaving and threading.current_thread().name == "bireme-hub":
            leaving.pop().close()
        real(sock, data, fds)

    monkeypatch.setattr(messages, "send_now", send_now)
    with raw(2) as socks, memfd(b"") as fd:
        for rank, sock in enumerate(socks):
            if rank == 1:
                leaving.append(socks[1])
            real(sock, messages.encode(gather(rank)), [fd])
        assert [receive(socks[0])["rank"] for _ in socks] == [0, 1]
        messages.send(socks[0], gather(0))
        assert failure(socks[0])[0] == 1


def test_too_many_descriptors_under_way_only_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    real = messages.send_now
    crowded = iter([True, True, False, True])

    def send_now(sock: socket.socket, data: bytes, fds: Any = ()) -> None:
        if threading.current_thread().name == "bireme-hub" and next(crowded, False):
            raise BlockingIOError(errno.ETOOMANYREFS, "too many references")
        real(sock, data, fds)

    monkeypatch.setattr(messages, "send_now", send_now)
    with ranks(1) as [end]:
        assert end.all_gather("t", {"a": 1}, timeout_s=LIMIT_S) == [({"a": 1}, [])]


def test_stop_is_for_all_states() -> None:
    with pairs() as (ours, _):
        hub = Hub(2)
        theirs = pair()
        hub.add(0, theirs[0])
        hub.stop()
        hub.stop()
        with pytest.raises(PeerLost):
            receive(theirs[1])
        theirs[1].close()
        with pytest.raises(UsageError, match="a hub starts once"):
            hub.start()
        with pytest.raises(UsageError, match="this hub has stopped"):
            hub.add(1, ours)


def test_what_a_hub_refuses() -> None:
    with pytest.raises(ValueError, match="size of at least 1, found 0"):
        Hub(0)
    hub, socks = raw_hub(1)
    with pairs() as (ours, _):
        with pytest.raises(UsageError, match="a hub starts once"):
            hub.start()
        with pytest.raises(ValueError, match="expected a rank from 0 to 0, found 1"):
            hub.add(1, ours)
        with pytest.raises(UsageError, match="rank 0 has been added"):
            hub.add(0, ours)
    hub.stop()
    socks[0].close()


def test_an_event_of_a_dropped_rank_is_ignored() -> None:
    hub, socks = raw_hub(1)
    messages.send(socks[0], gather(0))
    assert receive(socks[0])["rank"] == 0
    end = hub._ends[0]
    messages.send(socks[0], {"kind": "nonsense"})
    with pytest.raises(PeerLost):
        receive(socks[0])
    hub._ready(end, selectors.EVENT_READ)
    hub.stop()
    socks[0].close()


def test_the_hub_closes_its_sockets_when_its_observer_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caught: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: caught.append(str(args.exc_value)))

    def observe(*_: object) -> None:
        raise RuntimeError("a bug in the observer")

    with ranks(2, observe) as ends, memfd(b"") as fd:
        results = together(2, lambda rank: ends[rank].all_gather("t", {}, [fd], LIMIT_S))
        assert [type(result) for result in results] == [PeerLost] * 2
        assert "the connection to the launcher has closed" in str(results[0])
    assert caught == ["a bug in the observer"]


def test_alone_needs_no_hub() -> None:
    end = Rendezvous()
    with memfd(b"mine") as fd:
        [(value, [copy])] = end.all_gather("t", {"a": (1, 2)}, [fd])
    assert value == {"a": [1, 2]}
    assert not os.get_inheritable(copy)
    assert take_text(copy) == b"mine"
    end.fail("nobody hears it")
    end.close()
    end.close()
