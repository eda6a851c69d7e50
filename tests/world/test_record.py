"""The record of calls: what every rank did, where in the program, and where its time went."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import bireme as bm
from bireme.observe.record import Call, Flow, flow_table
from reference import until

RING = 4096


def ones(count: int = 3) -> Any:
    return np.ones(count, np.float32)


def here() -> str:
    """The line of the caller."""
    return f"test_record.py:{sys._getframe(1).f_lineno}"


def last_call(world: bm.World) -> Call:
    return world.record.calls(world.rank, 1)[0]


# ---- calls ------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_every_call_is_recorded(world: bm.World) -> None:
    x, s = world.symmetric.zeros(4), world.symmetric.signal()
    peer, n = (world.rank + 1) % world.size, world.size
    out = np.zeros(4, np.float32)
    # The call, its name, dtype, elements and other side.
    todo: list[tuple[Any, str, str, int, int]] = [
        (lambda: world.all_reduce(ones()), "all_reduce", "float32", 3, -1),
        (lambda: world.reduce(ones(), n - 1), "reduce", "float32", 3, n - 1),
        (lambda: world.broadcast(np.ones(2), n - 1), "broadcast", "float64", 2, n - 1),
        (lambda: world.all_gather(ones(5)), "all_gather", "float32", 5, -1),
        (lambda: world.gather(ones(5), 0), "gather", "float32", 5, 0),
        (lambda: world.reduce_scatter(ones(2 * n)), "reduce_scatter", "float32", 2, -1),
        (lambda: world.scatter(ones(2 * n), 0), "scatter", "float32", 2, 0),
        (lambda: world.all_to_all(ones(2 * n)), "all_to_all", "float32", 2, -1),
        (lambda: world.barrier(), "barrier", "int64", 0, -1),
        (lambda: x.put(ones(4), peer), "put", "float32", 4, peer),
        (lambda: x[1:3].put_nbi(ones(2), peer), "put", "float32", 2, peer),
        (lambda: x.get(out, peer=peer), "get", "float32", 4, peer),
        (lambda: x.get_nbi(out, peer=peer), "get", "float32", 4, peer),
        (lambda: x[0].atomic_add(1, peer), "atomic", "float32", 1, peer),
        (lambda: s.add(1, peer), "signal", "uint64", 1, peer),
        (lambda: s.wait(1), "signal.wait", "uint64", 0, -1),
        (lambda: world.quiet(), "quiet", "uint8", 0, -1),
        (lambda: world.fence(), "fence", "uint8", 0, -1),
    ]
    items = {"float32": 4, "float64": 8, "int64": 8, "uint64": 8, "uint8": 1}
    for call, op, dtype, count, side in todo:
        line = call.__code__.co_firstlineno
        call()
        found = last_call(world)
        wanted = (op, "done", dtype, count, count * items[dtype], side)
        seen = (found.op, found.state, found.dtype, found.count, found.bytes, found.peer)
        assert seen == wanted, found
        assert found.site == f"test_record.py:{line}", found
        assert 0 <= found.wait_s <= found.time_s


@pytest.mark.ranks(2)
def test_send_and_recv(world: bm.World) -> None:
    if world.rank == 0:
        world.send(ones(7), 1)
    else:
        world.recv(ones(7), 0)
    found = last_call(world)
    assert (found.op, found.count, found.bytes) == (("send", "recv")[world.rank], 7, 28)
    assert found.peer == 1 - world.rank


@pytest.mark.ranks(1, 2)
def test_sites_are_the_users_lines(world: bm.World) -> None:
    def helper() -> None:
        world.all_reduce(ones())

    helper()
    assert last_call(world).site == f"test_record.py:{helper.__code__.co_firstlineno + 1}"
    world.symmetric.zeros(3)
    site = f"test_record.py:{sys._getframe().f_lineno - 1}"
    calls = [call for call in world.record.calls(world.rank, 9) if call.site == site]
    assert calls[0].op == "allocate"
    assert [call.op for call in calls][-2:] == ["agree", "barrier"], (
        "what a call does inside counts as its own"
    )
    exec(compile("world.barrier()", "/some/where/made_up.py", "exec"), {"world": world})
    assert last_call(world).site == "made_up.py:1"
    world.all_reduce(ones(), async_op=True).wait()
    assert last_call(world).site == f"test_record.py:{sys._getframe().f_lineno - 1}"


@pytest.mark.ranks(2, 3)
def test_sites_of_splits_and_groups(world: bm.World) -> None:
    group, site = world.split(0, heap_bytes=4096), here()
    sites = {call.site for call in world.record.calls(world.rank, 3)}
    assert sites == {site}
    group.symmetric.zeros(3).free()
    assert last_call(world).site == f"test_record.py:{sys._getframe().f_lineno - 1}"


@pytest.mark.ranks(2, 3)
def test_everybodys_calls_are_seen(world: bm.World) -> None:
    for _ in range(3 + world.rank):
        world.symmetric  # noqa: B018 - no call
        world.fence()
    world.barrier()
    for rank in range(world.size):
        fences = [call for call in world.record.calls(rank) if call.op == "fence"]
        assert len(fences) == 3 + rank
        assert all(call.site.startswith("test_record.py:") for call in fences)
    world.barrier()


@pytest.mark.ranks(2, 3)
def test_a_running_call_is_seen_from_outside(world: bm.World) -> None:
    if world.rank == 0:

        def waits() -> bool:
            calls = world.record.calls(1, 1)
            return bool(calls) and calls[0].state == "running" and calls[0].op == "all_reduce"

        until(waits, "rank 1 is in its call")
    world.all_reduce(ones())
    assert last_call(world).state == "done"


@pytest.mark.ranks(2, 3)
def test_failed_calls_say_so(world: bm.World) -> None:
    if world.rank == 0:
        with pytest.raises(ValueError, match="expected one of"):
            world.all_reduce(ones(), "no")
    else:
        with pytest.raises(bm.MismatchError):
            world.all_reduce(ones())
    assert last_call(world).state == "failed"
    world.barrier()
    assert last_call(world).state == "done"


@pytest.mark.ranks(1, 2)
def test_the_ring_holds_the_latest(world: bm.World) -> None:
    start = last_call(world).seq
    for _ in range(RING + 500):
        world.fence()
    calls = world.record.calls(world.rank, 10 * RING)
    assert len(calls) == RING
    numbers = [call.seq for call in calls]
    assert numbers == list(range(start + 501, start + 501 + RING)), "oldest first, none missing"
    assert len(world.record.calls(world.rank)) == 100
    assert [call.seq for call in world.record.calls(world.rank, 2)] == numbers[-2:]
    assert world.record.calls(world.rank, 0) == []
    starts = [call.start_s for call in calls]
    assert starts == sorted(starts)


@pytest.mark.ranks(1, 2)
def test_there_are_only_so_many_ranks(world: bm.World) -> None:
    for rank in (-1, world.size):
        with pytest.raises(ValueError, match=f"rank: expected 0 to {world.size - 1}, found {rank}"):
            world.record.calls(rank)


@pytest.mark.ranks(1, 2)
def test_many_sites_and_labels_do_no_harm(world: bm.World) -> None:
    # More text than the record has room for: what comes later has no name, and goes on.
    for number in range(3000):
        with world.flow(f"a label that takes some room, number {number}"):
            world.fence()
    assert last_call(world).flow in ("", f"a label that takes some room, number {number}")
    assert world.all_reduce(ones())[0] == world.size
    assert sum(flow.calls for flow in world.record.flows()) >= 1


# ---- flows ------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 3)
def test_labels_nest(world: bm.World) -> None:
    labels = []

    def note() -> None:
        world.fence()
        labels.append(last_call(world).flow)

    def note_and_raise() -> None:
        note()
        raise KeyError

    note()
    with world.flow("outer"):
        note()
        with world.flow("inner"):
            note()
        note()
        with pytest.raises(KeyError), world.flow("broken"):
            note_and_raise()
        note()
    note()
    assert labels == ["", "outer", "inner", "outer", "broken", "outer", ""]


@pytest.mark.ranks(1, 2)
def test_labels_belong_to_a_thread(world: bm.World) -> None:
    seen = []

    def other() -> None:
        world.fence()
        seen.append(last_call(world).flow)
        with world.flow("theirs"):
            world.fence()
            seen.append(last_call(world).flow)

    with world.flow("ours"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        world.fence()
        seen.append(last_call(world).flow)
        world.all_reduce(ones(), async_op=True).wait()
        seen.append(last_call(world).flow)
    assert seen == ["", "theirs", "ours", "ours"], "asynchronous work keeps its caller's label"


@pytest.mark.ranks(1, 2, 3)
def test_totals_by_flow_and_face(world: bm.World) -> None:
    x = world.symmetric.zeros(100)
    with world.flow("gradients"):
        for _ in range(5):
            world.all_reduce(ones(1000))
        world.all_gather(ones(10))
        world.barrier()
    with world.flow("tokens"):
        for _ in range(7):
            x.put(ones(100), world.rank)
        x[:50].get(peer=world.rank)
        world.quiet()
    with world.flow("nothing"):
        world.barrier()
    found = {(flow.flow, flow.face): flow for flow in world.record.flows()}
    gradients = found["gradients", "collective"]
    assert (gradients.calls, gradients.bytes) == (6, 5 * 4000 + 40)
    assert gradients.ops == ("all_reduce", "all_gather"), "most bytes first"
    assert gradients.engine == "shm"
    assert gradients.time_s > 0
    assert gradients.gb_per_s == pytest.approx(gradients.bytes / gradients.time_s / 1e9)
    tokens = found["tokens", "one-sided"]
    assert (tokens.calls, tokens.bytes, tokens.ops) == (8, 7 * 400 + 200, ("put", "get"))
    nothing = found["nothing", "collective"]
    assert (nothing.calls, nothing.bytes, nothing.ops, nothing.gb_per_s) == (0, 0, (), 0.0)


@pytest.mark.ranks(2, 3)
def test_waits_are_counted(world: bm.World) -> None:
    ready = world.symmetric.signal()
    world.barrier()
    before, times = world.record.wait_s, world.record.time_s
    with world.flow("late"):
        if world.rank == 0:
            all_others_wait_in(world, "all_reduce")
        world.all_reduce(ones())
        if world.rank == 0:
            all_others_wait_in(world, "signal.wait")
            for peer in range(1, world.size):
                ready.set(1, peer)
        else:
            ready.wait(1)
    waited, inside = world.record.wait_s - before, world.record.time_s - times
    assert inside >= waited
    flows = {flow.face: flow for flow in world.record.flows() if flow.flow == "late"}
    assert flows["collective"].wait_s + flows["one-sided"].wait_s == pytest.approx(waited)
    if world.rank:  # rank 0 was late twice, by 0.1 s at least
        assert flows["collective"].wait_s > 0.05
        assert flows["one-sided"].wait_s > 0.05
        assert flows["one-sided"].ops == (), "a wait moves nothing"


def all_others_wait_in(world: bm.World, op: str) -> None:
    def waiting() -> bool:
        last = [world.record.calls(rank, 1)[0] for rank in range(1, world.size)]
        return all((call.op, call.state) == (op, "running") for call in last)

    until(waiting, f"the others are in {op}")
    time.sleep(0.1)


@pytest.mark.ranks(1, 2, 3)
def test_flows_of_all_ranks(world: bm.World) -> None:
    with world.flow("gradients"):
        world.all_reduce(ones(1000))
    if world.rank == 0:
        with world.flow("only here"):
            x = np.ones(5)
            world.fence()
    flows = world.record.flows_of_all(world)
    found = {(flow.flow, flow.face): flow for flow in flows}
    assert found["gradients", "collective"].bytes == 4000 * world.size
    assert found["gradients", "collective"].calls == world.size
    assert ("only here", "one-sided") in found
    text = json.dumps([flow.as_dict() for flow in flows]).encode()
    size = world.broadcast(np.array([len(text)]))[0]
    assert size == len(text)
    x = np.frombuffer(text, np.uint8)
    told = world.broadcast(x.copy())
    assert told.tobytes() == text, "the same on all ranks"


@pytest.mark.ranks(1, 2)
def test_the_table(world: bm.World) -> None:
    from rich.console import Console

    with world.flow("gradients"):
        world.all_reduce(ones(1_000_000))
    flows = [Flow("", "one-sided", "shm", ("put", "get"), 3, 2_500_000, 0.5, 0.25)]
    flows += [flow for flow in world.record.flows() if flow.flow == "gradients"]
    out = io.StringIO()
    Console(file=out, width=120).print(flow_table(flows, "what moved"))
    text = out.getvalue()
    assert "what moved" in text
    head = next(line for line in text.splitlines() if "engine" in line)
    for word in ("flow", "face", "engine", "ops", "calls", "MB", "time s", "wait s", "GB/s"):
        assert word in head, text
    rows = [line for line in text.splitlines() if "shm" in line]
    assert len(rows) == 2
    for word in ("-", "one-sided", "put, get", "3", "2.5", "0.500", "0.250", "0.01"):
        assert word in rows[0], text
    for word in ("gradients", "collective", "all_reduce", "4.0"):
        assert word in rows[1], text


@pytest.mark.world(engine="null")
def test_null_records_nothing(world: bm.World) -> None:
    with world.flow("gradients"):
        world.all_reduce(ones())
    assert world.record.calls(0) == []
    assert world.record.flows() == []
    assert (world.record.time_s, world.record.wait_s) == (0, 0)
    with pytest.raises(ValueError, match="expected 0 to 0, found 1"):
        world.record.calls(1)
