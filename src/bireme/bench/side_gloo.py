"""Gloo's side of a benchmark, through torch.distributed, on the loopback device."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bireme import arrays, knobs
from bireme.bench.worker import Array, Call, Case, Lacks, Plan, Side, main, version

__all__ = ["GlooSide"]


class GlooSide(Side):
    """torch.distributed with the backend gloo; tensors lie over the NumPy buffers."""

    def __init__(self, plan: Plan) -> None:
        import torch
        import torch.distributed as dist

        self._torch: Any = torch
        self._dist: Any = dist
        self.rank, self.size = knobs.get("BIREME_RANK"), knobs.get("BIREME_SIZE")
        store = dist.FileStore(plan.store, self.size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size)

    def about(self) -> dict[str, str]:
        """See ``Side.about``."""
        return {"torch": version("torch")}

    def _redop(self, case: Case) -> Any:
        name = "PRODUCT" if case.redop == "prod" else case.redop.upper()
        return getattr(self._dist.ReduceOp, name)

    def _parts(self, buffer: Array) -> list[Any]:
        return list(arrays.torch_view(buffer).chunk(self.size))

    def _apart(self, half: str) -> None:
        if half == "in":
            raise Lacks("out of place only")

    def _in_place(self, half: str) -> None:
        if half == "out":
            raise Lacks("in place only")

    def _all_reduce(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._in_place(half)
        return partial(self._dist.all_reduce, arrays.torch_view(x), self._redop(case))

    def _reduce(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._in_place(half)
        return partial(self._dist.reduce, arrays.torch_view(x), case.root, self._redop(case))

    def _broadcast(self, case: Case, half: str, x: Array, out: Array) -> Call:
        return partial(self._dist.broadcast, arrays.torch_view(x), case.root)

    def _all_gather(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._apart(half)
        views = arrays.torch_view(out), arrays.torch_view(x)
        return partial(self._dist.all_gather_into_tensor, *views)

    def _reduce_scatter(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._apart(half)
        views = arrays.torch_view(out), arrays.torch_view(x)
        return partial(self._dist.reduce_scatter_tensor, *views, self._redop(case))

    def _gather(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._apart(half)
        parts = self._parts(out) if self.rank == case.root else None
        return partial(self._dist.gather, arrays.torch_view(x), parts, dst=case.root)

    def _scatter(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._apart(half)
        parts = self._parts(x) if self.rank == case.root else None
        return partial(self._dist.scatter, arrays.torch_view(out), parts, src=case.root)

    def _all_to_all(self, case: Case, half: str, x: Array, out: Array) -> Call:
        self._apart(half)
        views = arrays.torch_view(out), arrays.torch_view(x)
        return partial(self._dist.all_to_all_single, *views)

    def _sendrecv(self, case: Case, half: str, x: Array, out: Array) -> Call:
        to, by = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        mine, theirs = arrays.torch_view(x), arrays.torch_view(out)

        def both_ways() -> None:
            work = self._dist.isend(mine, to)
            self._dist.recv(theirs, by)
            work.wait()

        return both_ways

    def _barrier(self, case: Case, half: str, x: Array, out: Array) -> Call:
        call: Call = self._dist.barrier
        return call

    def _put_signal(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        mine, theirs = arrays.torch_view(x), arrays.torch_view(out)
        send, receive = self._dist.send, self._dist.recv

        def first() -> None:
            send(mine, 1)
            receive(theirs, 1)

        def second() -> None:
            receive(theirs, 0)
            send(mine, 0)

        return (first, second)[self.rank] if self.rank < 2 else None

    def barrier(self) -> None:
        """See ``Side.barrier``."""
        self._dist.barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """See ``Side.gather``."""
        mine = self._torch.from_numpy(np.array(values, np.float64))
        rows = self._torch.empty(self.size * len(values), dtype=self._torch.float64)
        self._dist.all_gather_into_tensor(rows, mine)
        return [[float(v) for v in row] for row in rows.reshape(self.size, -1)]

    def close(self) -> None:
        """See ``Side.close``."""
        self._dist.destroy_process_group()


if __name__ == "__main__":
    main(GlooSide, sys.argv[1])
