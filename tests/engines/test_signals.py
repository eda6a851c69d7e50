"""Signals: set, add, wait and test, and what a put's signal says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from contract import contract

import bireme as bm
from reference import until

TOP = 2**64 - 1
COMPARISONS = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
}


def neighbours(world: bm.World) -> tuple[int, int]:
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


def set_and_add(world: bm.World) -> None:
    _left, right = neighbours(world)
    signal = world.symmetric.signal()
    assert signal.value == 0
    world.barrier()
    signal.set(5, right)
    assert signal.wait(5) == 5
    world.barrier()
    signal.add(2, right)
    assert signal.wait(6, ">=") == 7
    world.barrier()
    signal.set(TOP, right)
    signal.wait(TOP)
    world.barrier()
    signal.add(3, right)
    assert signal.wait(TOP, "!=") == 2, "an unsigned word wraps"
    world.barrier()
    signal.reset()
    assert signal.value == 0
    signal.reset(9)
    assert signal.value == 9


def every_rank_adds(world: bm.World) -> None:
    signal = world.symmetric.signal()
    for _ in range(100):
        for peer in range(world.size):
            signal.add(1, peer)
    assert signal.wait(100 * world.size) == 100 * world.size


def comparisons(world: bm.World) -> None:
    signal = world.symmetric.signal()
    for value in (0, 1, 7, 2**63, TOP):
        signal.reset(value)
        for other in (0, 1, 7, 8, 2**63 - 1, 2**63, TOP):
            for name, compare in COMPARISONS.items():
                holds = compare(value, other)
                assert signal.test(other, name) == holds, (value, name, other)
                if holds:
                    assert signal.wait(other, name) == value


def waits_until_each_comparison_holds(world: bm.World) -> None:
    _left, right = neighbours(world)
    signal = world.symmetric.signal()
    # What it starts from, what it is set to, and the wait between.
    for before, after, value, name in (
        (0, 3, 3, "=="),
        (0, 3, 0, "!="),
        (5, 6, 5, ">"),
        (5, 6, 6, ">="),
        (5, 4, 5, "<"),
        (5, 4, 4, "<="),
    ):
        signal.reset(before)
        world.barrier()
        signal.set(after, right)
        assert signal.wait(value, name) == after, name
        world.barrier()


def several_signals(world: bm.World) -> None:
    _left, right = neighbours(world)
    signals = world.symmetric.signals(5)
    assert len(signals) == 5
    for number, signal in enumerate(signals):
        signal.set(number + 1, right)
    for number in range(5):
        assert signals[number].wait(number + 1) == number + 1
    assert signals[-1].value == 5
    assert [signal.value for signal in signals[1:4]] == [2, 3, 4]
    assert [signal.value for signal in signals[::-2]] == [5, 3, 1]
    assert [signal.value for signal in reversed(signals)] == [5, 4, 3, 2, 1]
    with pytest.raises(IndexError):
        signals[5]
    assert len(world.symmetric.signals(0)) == 0
    assert "Signal(offset_bytes=" in repr(signals[0])


def put_with_signal(world: bm.World) -> None:
    left, right = neighbours(world)
    x, ready = world.symmetric.zeros(5000, "int64"), world.symmetric.signal()
    source = np.zeros(5000, np.int64)
    for turn in range(1, 30):
        source[:] = 1000 * turn + world.rank
        put = x.put_nbi if turn % 2 else x.put
        put(source, right, signal=ready, signal_value=turn)
        ready.wait(turn, ">=")
        assert (x.local == 1000 * turn + left).all(), turn
        world.barrier()


def put_adds_to_a_signal(world: bm.World) -> None:
    x, arrived = world.symmetric.zeros((world.size, 10)), world.symmetric.signal()
    for peer in range(world.size):
        data = np.full(10, world.rank + 1, np.float32)
        x[world.rank].put(data, peer, signal=arrived, signal_value=10, signal_op="add")
    assert arrived.wait(10 * world.size) == 10 * world.size
    assert (x.local == np.arange(1, world.size + 1)[:, None]).all()


def an_empty_put_signals(world: bm.World) -> None:
    _left, right = neighbours(world)
    x, ready = world.symmetric.zeros((0, 3)), world.symmetric.signal()
    x.put(np.empty((0, 3), np.float32), right, signal=ready)
    assert ready.wait(1) == 1


def ping_pong(world: bm.World) -> None:
    if world.size == 1:
        return
    ball, ready = world.symmetric.zeros(1, "int64"), world.symmetric.signal()
    for turn in range(1, 101):
        if world.rank == turn % 2:
            ball.put(np.array([turn]), 1 - world.rank, signal=ready, signal_value=turn)
        elif world.rank == 1 - turn % 2:
            ready.wait(turn)
            assert ball.local[0] == turn


def wrong_signals(world: bm.World) -> None:
    signal, other = world.symmetric.signal(), world.symmetric.signal()
    alone = world.split(world.rank, heap_bytes=4096)
    theirs = alone.symmetric.signal()
    x = world.symmetric.zeros(2)
    data = np.ones(2, np.float32)
    world.barrier()
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, "signal set: peer: expected a rank", lambda: signal.set(1, world.size)),
        (TypeError, "signal add: peer: expected a rank", lambda: signal.add(1, "0")),
        (ValueError, "-1 does not fit uint64", lambda: signal.set(-1, 0)),
        (ValueError, "does not fit uint64", lambda: signal.add(2**64, 0)),
        (TypeError, "expected an integer, found 1.0", lambda: signal.set(1.0, 0)),
        (TypeError, "expected an integer, found True", lambda: signal.set(True, 0)),
        (
            ValueError,
            "cmp: expected one of == != > >= < <=, found '=>'",
            lambda: signal.wait(1, "=>"),
        ),
        (ValueError, "cmp: expected one of", lambda: signal.test(0, "is")),
        (TypeError, "signal wait: expected an integer", lambda: signal.wait("1")),
        (ValueError, "does not fit uint64", lambda: signal.test(-1)),
        (
            ValueError,
            "signal_op: expected one of",
            lambda: x.put(data, 0, signal=signal, signal_op="or"),
        ),
        (ValueError, "does not fit", lambda: x.put(data, 0, signal=signal, signal_value=-1)),
        (ValueError, "signal of the array's own group", lambda: x.put(data, 0, signal=theirs)),
    ]
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    world.barrier()
    assert (signal.value, other.value, theirs.value) == (0, 0, 0)
    assert not x.local.any()


test_eager, test_lazy, test_null = contract(
    set_and_add,
    every_rank_adds,
    comparisons,
    waits_until_each_comparison_holds,
    several_signals,
    put_with_signal,
    put_adds_to_a_signal,
    an_empty_put_signals,
    ping_pong,
    wrong_signals,
    lazy=(1, 2, 3, 4),
)


@pytest.mark.ranks(2, 3)
def test_test_does_not_wait(world: bm.World) -> None:
    signal = world.symmetric.signal()
    assert not signal.test(1)
    world.barrier()
    if world.rank == 0:
        signal.set(1, 1)
    elif world.rank == 1:
        until(lambda: signal.test(1), "rank 0's signal")
