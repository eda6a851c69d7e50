"""Which engine and algorithm carries a call, and why.

On the shm engine the choice is made in ``native/channel.cpp`` from what all ranks publish; this
module says it in words, from the same limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bireme import _core

if TYPE_CHECKING:
    from bireme.world import World

__all__ = ["PATHS", "Route", "Routes"]

PATHS = ("none", "inline", "staged", "direct", "sliced")  # native/channel.h: enum class Path
_FOLDS_WHOLE = ("all_reduce", "reduce")


@dataclass(frozen=True)
class Route:
    """One decision.

    Args:
        engine: Name of the engine.
        path: One of ``PATHS``.
        why: One sentence.
    """

    engine: str
    path: str
    why: str


class Routes:
    """A world's decisions: ``world.routes.explain("all_reduce", nbytes)``."""

    def __init__(self, world: World) -> None:
        self._world = world

    def explain(self, op: str, nbytes: int, *, in_heap: bool = False) -> Route:
        """Say how a collective of host memory would be carried.

        Args:
            op: A collective's name.
            nbytes: Size of one rank's source in bytes.
            in_heap: Whether all sources and results lie in the symmetric heap.
        """
        engine: Any = self._world.collective
        if engine.name == "null":
            return Route("null", "none", "no other rank exists")
        if nbytes == 0 or op == "barrier":
            return Route("shm", "none", "only the announcements are exchanged")
        if nbytes <= _core.INLINE_BYTES:
            why = f"at most {_core.INLINE_BYTES} bytes travel with the announcement"
            return Route("shm", "inline", why)
        if not in_heap:
            why = f"private memory moves in chunks of {_core.CHUNK_BYTES} bytes"
            return Route("shm", "staged", why)
        if op in _FOLDS_WHOLE:
            return Route("shm", "sliced", "each rank folds its slice in the heap, without staging")
        return Route("shm", "direct", "each rank reads the others' sources in the heap")
