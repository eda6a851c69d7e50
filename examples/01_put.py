"""A symmetric array, a put from rank 0 to rank 1, a signal: bireme run -n 2 examples/01_put.py"""

import numpy as np

import bireme as bm

with bm.init() as world:
    x = world.symmetric.zeros(4, "float32")  # the same array on every rank
    ready = world.symmetric.signal()
    if world.rank == 0:
        x.put(np.arange(4, dtype="float32"), peer=1, signal=ready)  # rank 1 takes no part
    elif world.rank == 1:
        ready.wait(1)  # the signal says that the data has arrived
        print("rank 1 received", x.local)
    world.all_reduce(x)  # and the other face, on the same memory
    print(f"rank {world.rank} has the sum {x.local}")
