"""bireme: collectives and one-sided communication for distributed training, in one world.

import bireme as bm

with bm.init() as world:
world.all_reduce(grads, op="avg")               # the collective face
x = world.symmetric.zeros(1024, "float32")      # the one-sided face
ready = world.symmetric.signal()
if world.rank == 0:
x.put(src, peer=1, signal=ready)
elif world.rank == 1:
ready.wait(1)
"""

from bireme.errors import (
    Aborted,
    BiremeError,
    EngineError,
    MismatchError,
    PeerLost,
    Timeout,
    UsageError,
)
from bireme.host import current, init
from bireme.signals import Signal, Signals
from bireme.streams import Stream, Work
from bireme.symmetric import SymmetricArray
from bireme.world import Group, World

__all__ = [
    "Aborted",
    "BiremeError",
    "EngineError",
    "Group",
    "MismatchError",
    "PeerLost",
    "Signal",
    "Signals",
    "Stream",
    "SymmetricArray",
    "Timeout",
    "UsageError",
    "Work",
    "World",
    "current",
    "init",
]
