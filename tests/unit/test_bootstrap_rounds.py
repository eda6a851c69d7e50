"""The rule of the rounds, without sockets: every question is answered once, in step."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.bootstrap.rounds import Descriptors, Rounds
from bireme.errors import EngineError

Answers = dict[int, list[dict[str, Any]]]


def make(size: int) -> tuple[Rounds, Answers]:
    answers: Answers = defaultdict(list)
    rounds = Rounds(size, lambda rank, message, _: answers[rank].append(message))
    return rounds, answers


def ask(rounds: Rounds, rank: int, tag: str = "t", **more: Any) -> None:
    message = {"tag": tag, "rank": rank, "value": {"from": rank}, **more}
    rounds.ask(rank, message, Descriptors([]))


def test_a_round() -> None:
    rounds, answers = make(3)
    for rank in (2, 0, 1):
        ask(rounds, rank, ticket=f"ticket {rank}")
    for rank in range(3):
        assert [answer["value"]["from"] for answer in answers[rank]] == [0, 1, 2]
        assert {answer["ticket"] for answer in answers[rank]} == {f"ticket {rank}"}


def test_a_failure_reaches_each_rank_once() -> None:
    rounds, answers = make(3)
    ask(rounds, 1)
    rounds.fail(0, "no memory")
    assert answers[1] == [{"kind": "failed", "rank": 0, "error": "no memory", "ticket": ""}]
    rounds.fail(2, "mine too")  # of the same round: rank 0's stays the reason
    for rank in range(3):
        ask(rounds, rank)
    assert [len(answers[rank]) for rank in range(3)] == [3, 4, 3]


def test_a_rank_that_comes_late_hears_of_the_failure() -> None:
    rounds, answers = make(2)
    rounds.fail(0, "no memory")
    ask(rounds, 0)  # its next round
    ask(rounds, 1)
    assert answers[1][0]["error"] == "no memory"
    assert not answers[0]
    ask(rounds, 1)
    assert len(answers[0]) == 2


def test_giving_up_says_who_is_missing() -> None:
    rounds, answers = make(4)
    ask(rounds, 1, ticket="mine")
    ask(rounds, 3)
    rounds.fail(1, "waited too long")
    assert answers[1] == [{"kind": "missing", "ranks": [0, 2], "ticket": "mine"}]
    assert answers[3][0]["error"] == "waited too long"


def test_different_tags() -> None:
    rounds, answers = make(3)
    ask(rounds, 0, "init")
    ask(rounds, 1, "close")
    for rank in (0, 1):
        assert answers[rank][0]["mismatch"]
        assert "rank 1 is at 'close' while rank 0 is at 'init'" in answers[rank][0]["error"]
    ask(rounds, 2, "init")
    assert answers[2][0]["mismatch"]


def test_a_rank_that_is_gone_fails_rounds_until_it_is_back() -> None:
    rounds, answers = make(2)
    ask(rounds, 0)
    rounds.leave(1, "it died")
    ask(rounds, 0)
    assert [answer["error"] for answer in answers[0]] == ["it died"] * 2
    rounds.enter(1)
    ask(rounds, 0)
    ask(rounds, 1)
    assert len(answers[0]) == 4
    assert len(answers[1]) == 2


def test_a_rank_that_goes_while_it_waits() -> None:
    rounds, answers = make(2)
    ask(rounds, 0)
    rounds.leave(0, "it died")
    ask(rounds, 1)
    assert answers[1][0]["rank"] == 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"tag": 3, "rank": 0, "value": {}}, "without a text as tag"),
        ({"tag": "t", "rank": 0, "value": [1]}, "an object as value"),
        ({"tag": "t", "rank": 0, "value": {}, "ticket": "x" * 33}, "at most 32 characters"),
        ({"tag": "t", "rank": 1, "value": {}}, "spoke for rank 1 on the socket of rank 0"),
        ({"tag": "t", "rank": 0, "value": {"x": "y" * 65500}}, "too long to pass on"),
    ],
)
def test_malformed_questions(message: dict[str, Any], reason: str) -> None:
    rounds, _ = make(2)
    with pytest.raises(EngineError, match=reason):
        rounds.ask(0, message, Descriptors([]))


def test_one_question_at_a_time() -> None:
    rounds, _ = make(2)
    ask(rounds, 0)
    with pytest.raises(EngineError, match="second all-gather while the first one is open"):
        ask(rounds, 0)
    rounds.close()


@given(size=st.integers(1, 4), seed=st.randoms(use_true_random=False))
def test_ranks_stay_in_step_in_any_order(size: int, seed: Any) -> None:
    """Each rank tries 6 steps, some of which it fails; a step ends the same way for all."""
    rounds, answers = make(size)
    steps = [[seed.random() < 0.2 for _ in range(6)] for _ in range(size)]
    at = [0] * size
    ends: list[list[str]] = [[] for _ in range(size)]
    waiting: set[int] = set()
    while any(step < 6 for step in at):
        rank = seed.choice([r for r in range(size) if at[r] < 6 and r not in waiting])
        if steps[rank][at[rank]]:
            rounds.fail(rank, f"step {at[rank]}")
            ends[rank].append("failed")
            at[rank] += 1
        else:
            waiting.add(rank)
            ask(rounds, rank, f"step {at[rank]}")
        for other in sorted(waiting):
            if answers[other]:
                ends[other].append(answers[other][0]["kind"])
                answers[other].clear()
                waiting.discard(other)
                at[other] += 1
    expected = ["failed" if any(own[n] for own in steps) else "gather" for n in range(6)]
    assert ends == [expected] * size
