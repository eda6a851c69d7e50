"""The ranks' ends: all-gathers with descriptors, and what each rank hears when one goes wrong."""

from __future__ import annotations

import os
import signal
import socket
import threading
from typing import Any

import pytest
from bootstrap_tools import memfd, open_fds, pair, ranks, settles_at, take_text, together
from hypothesis import given, settings
from hypothesis import strategies as st

from bireme import knobs
from bireme.bootstrap import Hub, Rendezvous, messages
from bireme.errors import EngineError, PeerLost, Timeout, UsageError

LIMIT_S = 10.0


@settings(max_examples=15)
@given(size=st.integers(1, 4), counts=st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_everybody_gets_everything_in_rank_order(size: int, counts: list[int]) -> None:
    def rank_body(rank: int) -> list[tuple[dict[str, Any], list[bytes]]]:
        with memfd(b"of rank %d" % rank) as fd:
            parts = ends[rank].all_gather("t", {"rank": rank}, [fd] * counts[rank], LIMIT_S)
        return [(value, [take_text(fd) for fd in fds]) for value, fds in parts]

    with ranks(size) as ends:
        before = open_fds()
        results = together(size, rank_body)
        assert settles_at(before)
    expected = [({"rank": r}, [b"of rank %d" % r] * counts[r]) for r in range(size)]
    assert results == [expected] * size


@pytest.mark.parametrize("size", [1, 2, 4])
def test_many_rounds_on_one_connection(size: int) -> None:
    rounds = 40

    def rank_body(rank: int) -> list[Any]:
        told = [ends[rank].all_gather(f"t{n}", {"n": n * rank}, (), LIMIT_S) for n in range(rounds)]
        return [[value["n"] for value, _ in parts] for parts in told]

    with ranks(size) as ends:
        assert (
            together(size, rank_body)
            == [[[n * rank for rank in range(size)] for n in range(rounds)]] * size
        )


def test_what_a_rank_knows_of_itself() -> None:
    alone = Rendezvous()
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.origin == "alone"
    end = Rendezvous(3, 4, local_rank=1, local_size=2, origin="torchrun")
    assert (end.rank, end.size, end.local_rank, end.local_size) == (3, 4, 1, 2)
    assert end.origin == "torchrun"


def test_a_failure_names_the_rank_and_its_error_and_the_next_round_works() -> None:
    def rank_body(rank: int) -> Any:
        if rank == 1:
            ends[1].fail("ValueError: no memory")
            ends[1].fail("said twice, sent once")
        else:
            with pytest.raises(PeerLost, match=r"in bootstrap step 'heap': rank 1 has failed: Val"):
                ends[rank].all_gather("heap", {}, timeout_s=LIMIT_S)
            ends[rank].fail("as a consequence: not sent")
        return len(ends[rank].all_gather("again", {}, timeout_s=LIMIT_S))

    with ranks(3) as ends:
        assert together(3, rank_body) == [3] * 3


def test_a_failure_closes_the_descriptors_of_the_round() -> None:
    with ranks(3) as ends, memfd(b"") as fd:
        before = open_fds()

        def rank_body(rank: int) -> None:
            if rank == 2:
                ends[2].close()
            else:
                ends[rank].all_gather("t", {}, [fd], LIMIT_S)

        results = together(3, rank_body)
        assert [type(result) for result in results] == [PeerLost, PeerLost, type(None)]
        assert settles_at(before - 2)  # both ends of rank 2's connection


def test_a_deadline_names_the_step_and_who_is_missing() -> None:
    with ranks(4) as ends:
        with pytest.raises(Timeout, match=r"rank 1 waited 0.05 s in .* 'heap': rank 0, 2, 3 did"):
            ends[1].all_gather("heap", {}, timeout_s=0.05)
        with pytest.raises(PeerLost, match=r"rank 1 has failed: it waited in .* 'heap' for 0.05 s"):
            ends[0].all_gather("heap", {}, timeout_s=LIMIT_S)


def test_after_a_deadline_the_next_round_works() -> None:
    with ranks(2) as ends:
        with pytest.raises(Timeout):
            ends[0].all_gather("first", {}, timeout_s=0.01)
        with pytest.raises(PeerLost):
            ends[1].all_gather("first", {}, timeout_s=LIMIT_S)
        results = together(2, lambda rank: ends[rank].all_gather("second", {}, (), LIMIT_S))
        assert [len(result) for result in results] == [2, 2]


def test_the_default_deadline_is_the_knob() -> None:
    with (
        ranks(2) as ends,
        knobs.override(BIREME_TIMEOUT_S=0.03),
        pytest.raises(Timeout, match=r"0\.03 s"),
    ):
        ends[0].all_gather("t", {})


def test_a_deadline_that_nobody_explains() -> None:
    """The answer comes at the very moment of giving up: it is dropped with its descriptors."""
    ours, hub = pair()
    end = Rendezvous(0, 2, ours)
    before = open_fds()

    def serve() -> None:
        request, _ = messages.receive(hub, LIMIT_S)
        given_up, _ = messages.receive(hub, LIMIT_S)
        assert given_up["kind"] == "failed"
        with memfd(b"") as fd:
            answer = {**request, "rank": 0}
            messages.send(hub, {**answer, "ticket": "of an older request"}, [fd])
            messages.send(hub, answer, [fd])
        hub.close()

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(Timeout, match="some ranks did not come"):
        end.all_gather("t", {}, timeout_s=0.05)
    server.join(LIMIT_S)
    assert settles_at(before - 1)
    end.close()


def test_different_steps_are_a_usage_error_on_every_rank() -> None:
    with ranks(3) as ends:
        results = together(3, lambda r: ends[r].all_gather(f"step {r // 2}", {}, (), LIMIT_S))
    assert [type(result) for result in results] == [UsageError] * 3
    assert all("all ranks must take the same steps" in str(result) for result in results)


@pytest.mark.parametrize(("origin", "host"), [("launcher", "the launcher"), ("torchrun", "rank 0")])
def test_the_hub_has_ended(origin: Any, host: str) -> None:
    ours, hub = pair()
    hub.close()
    end = Rendezvous(1, 2, ours, origin=origin)
    with pytest.raises(PeerLost, match=f"rank 1 in .* the connection to {host} has closed"):
        end.all_gather("t", {})
    end.fail("nobody hears it")
    end.close()


def test_the_hub_ends_half_way_through_its_answer() -> None:
    ours, hub = pair()
    end = Rendezvous(0, 2, ours)
    before = open_fds()

    def serve() -> None:
        request, _ = messages.receive(hub, LIMIT_S)
        with memfd(b"") as fd:
            messages.send(hub, request, [fd])
        hub.close()

    server = threading.Thread(target=serve)
    server.start()
    with pytest.raises(PeerLost, match="the connection to rank 0 has closed"):
        end.all_gather("t", {}, timeout_s=LIMIT_S)
    server.join(LIMIT_S)
    assert settles_at(before - 1)
    end.close()


def test_an_answer_of_an_unknown_kind() -> None:
    ours, hub = pair()
    end = Rendezvous(0, 2, ours)

    def serve() -> None:
        request, _ = messages.receive(hub, LIMIT_S)
        with memfd(b"") as fd:
            messages.send(hub, {**request, "kind": "?"}, [fd])

    server = threading.Thread(target=serve)
    server.start()
    before = open_fds()
    with pytest.raises(EngineError, match=r"rank 0: the hub sent '\?'"):
        end.all_gather("t", {}, timeout_s=LIMIT_S)
    server.join(LIMIT_S)
    assert settles_at(before)
    assert messages.receive(hub, LIMIT_S)[0]["error"].startswith("it left bootstrap step 't'")
    end.close()
    hub.close()


def test_arguments_are_checked_before_anything_is_sent() -> None:
    with ranks(1) as [end]:
        with pytest.raises(TypeError, match="not JSON serializable"):
            end.all_gather("t", {"set": {1}})
        with pytest.raises(ValueError, match="at most 65536 bytes"):
            end.all_gather("t", {"text": "x" * 65536})
        with pytest.raises(ValueError, match="at most 16 descriptors"):
            end.all_gather("t", {}, [0] * 17)
        with pytest.raises(OSError, match="Bad file descriptor"):
            end.all_gather("t", {}, [10**6], LIMIT_S)
        assert end.all_gather("t", {}, timeout_s=LIMIT_S) == [({}, [])]
        end.close()
        with pytest.raises(UsageError, match="rank 0: all_gather 't' after close"):
            end.all_gather("t", {})
        end.fail("nobody hears it")


def test_an_interrupt_withdraws_the_request() -> None:
    with ranks(2) as ends:
        before = open_fds()
        handler = signal.signal(signal.SIGUSR2, signal.default_int_handler)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR2))
        timer.start()
        try:
            with memfd(b"") as fd, pytest.raises(KeyboardInterrupt):
                ends[0].all_gather("t", {}, [fd], LIMIT_S)
        finally:
            signal.signal(signal.SIGUSR2, handler)
            timer.join()
        with pytest.raises(PeerLost, match="rank 0 has failed: it left bootstrap step 't': Keyb"):
            ends[1].all_gather("t", {}, timeout_s=LIMIT_S)
        assert settles_at(before)


def test_close_ends_a_hub_of_this_process() -> None:
    threads = threading.active_count()
    hub = Hub(1)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub.add(0, theirs)
    hub.start()
    end = Rendezvous(0, 1, ours, origin="torchrun", hub=hub)
    end.all_gather("t", {"pid": os.getpid()})
    end.close()
    end.close()
    assert threading.active_count() == threads
