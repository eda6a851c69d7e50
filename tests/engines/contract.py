"""The one list that every engine passes: each theme's bodies, run on each engine.

A body takes an open world of any size. What an engine lacks a body checks by its refusal, see
``refused``. A new engine adds its test to what ``contract`` makes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import bireme as bm

Body = Callable[[bm.World], None]
Test = Callable[..., None]


def contract(
    *bodies: Body, ranks: tuple[int, ...] = (1, 2, 3, 4), lazy: tuple[int, ...] = (3,)
) -> tuple[Test, Test, Test]:
    """Make the tests of one theme: on shm with eager and with lazy delivery, and on null.

    Args:
        bodies: Functions of a world.
        ranks: Numbers of ranks with eager delivery.
        lazy: Numbers of ranks with lazy delivery.
    """
    each = pytest.mark.parametrize("body", bodies, ids=[body.__name__ for body in bodies])

    @pytest.mark.ranks(*ranks)
    @each
    def test_eager(world: bm.World, body: Body) -> None:
        assert (world.collective.name, world.one_sided.defers) == ("shm", False)
        body(world)

    @pytest.mark.ranks(*lazy)
    @pytest.mark.world(delivery="lazy")
    @each
    def test_lazy(world: bm.World, body: Body) -> None:
        assert (world.collective.name, world.one_sided.defers) == ("shm", True)
        body(world)

    @pytest.mark.world(engine="null")
    @each
    def test_null(world: bm.World, body: Body) -> None:
        assert world.collective.name == "null"
        body(world)

    return test_eager, test_lazy, test_null


def refused(world: bm.World, feature: str, call: Callable[[], Any]) -> bool:
    """Whether the engine lacks a feature; then the call must be refused with the reason."""
    why = world.collective.lacks.get(feature)
    if why is None:
        return False
    with pytest.raises(bm.EngineError, match=f"lacks {feature}: ") as caught:
        call()
    assert why in str(caught.value)
    return True
