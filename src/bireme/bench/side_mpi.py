"""MPI's side of a benchmark, through mpi4py.

Started by path in an environment that has NumPy and mpi4py but not bireme; of bireme's files it
needs ``worker.py`` beside it only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from bireme.bench.worker import Array, Call, Case, Lacks, Plan, Side, main, version
else:
    from worker import Array, Call, Case, Lacks, Plan, Side, main, version

__all__ = ["MpiSide"]


class MpiSide(Side):
    """MPI through mpi4py, with the element type named in each call, as its manual advises."""

    own_block = False

    def __init__(self, plan: Plan) -> None:
        from mpi4py import MPI

        self._mpi: Any = MPI
        self._comm: Any = MPI.COMM_WORLD
        self._windows: dict[np.dtype[Any], Any] = {}
        self.rank, self.size = self._comm.rank, self._comm.size
        names = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
        self._types = {np.dtype(name): getattr(MPI, f"{name}_t".upper()) for name in names}
        self._types |= {np.dtype("float32"): MPI.FLOAT, np.dtype("float64"): MPI.DOUBLE}

    def about(self) -> dict[str, str]:
        """See ``Side.about``."""
        library = str(self._mpi.Get_library_version()).replace("\0", "").strip()
        first = " ".join(library.splitlines()[0].split())
        return {"mpi4py": version("mpi4py"), "mpi": first.split(", package")[0]}

    def buffer(self, role: str, place: str, count: int, dtype: np.dtype[Any]) -> Any:
        """See ``Side.buffer``: MPI allocates windows itself, which makes them shared memory."""
        if role != "window":
            return super().buffer(role, place, count, dtype)
        window = self._mpi.Win.Allocate(count * dtype.itemsize, dtype.itemsize, comm=self._comm)
        window.Lock_all()
        self._windows[dtype] = window
        return np.frombuffer(window.tomemory(), dtype)

    def _spec(self, buffer: Array) -> list[Any]:
        if buffer.dtype not in self._types:
            raise Lacks(f"MPI has no {buffer.dtype.name}")
        return [buffer, self._types[buffer.dtype]]

    def _ends(self, half: str, x: Array, out: Array) -> tuple[Any, Any]:
        return self._mpi.IN_PLACE if half == "in" else self._spec(x), self._spec(out)

    def _redop(self, case: Case) -> Any:
        if case.redop == "avg":
            raise Lacks("MPI has no avg")
        return getattr(self._mpi, case.redop.upper())

    def _all_reduce(self, case: Case, half: str, x: Array, out: Array) -> Call:
        return partial(self._comm.Allreduce, *self._ends(half, x, out), self._redop(case))

    def _reduce(self, case: Case, half: str, x: Array, out: Array) -> Call:
        source, target = self._ends(half, x, out)
        if self.rank != case.root:
            source, target = self._spec(x), None
        return partial(self._comm.Reduce, source, target, self._redop(case), case.root)

    def _broadcast(self, case: Case, half: str, x: Array, out: Array) -> Call:
        return partial(self._comm.Bcast, self._spec(x), case.root)

    def _all_gather(self, case: Case, half: str, x: Array, out: Array) -> Call:
        return partial(self._comm.Allgather, *self._ends(half, x, out))

    def _reduce_scatter(self, case: Case, half: str, x: Array, out: Array) -> Call:
        source, target = self._ends(half, x, x if half == "in" else out)
        return partial(self._comm.Reduce_scatter_block, source, target, self._redop(case))

    def _gather(self, case: Case, half: str, x: Array, out: Array) -> Call:
        source, target = self._ends(half, x, out)
        if self.rank != case.root:
            source, target = self._spec(x), None
        return partial(self._comm.Gather, source, target, case.root)

    def _scatter(self, case: Case, half: str, x: Array, out: Array) -> Call:
        source: Any = self._spec(x)
        target: Any = self._spec(out)
        if self.rank != case.root:
            source = None
        elif half == "in":
            target = self._mpi.IN_PLACE
        return partial(self._comm.Scatter, source, target, case.root)

    def _all_to_all(self, case: Case, half: str, x: Array, out: Array) -> Call:
        return partial(self._comm.Alltoall, *self._ends(half, x, out))

    def _sendrecv(self, case: Case, half: str, x: Array, out: Array) -> Call:
        to, by = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return partial(self._comm.Sendrecv, self._spec(x), to, 0, self._spec(out), by, 0)

    def _barrier(self, case: Case, half: str, x: Array, out: Array) -> Call:
        call: Call = self._comm.Barrier
        return call

    def _put(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        return self._one_sided("Put", "Flush", x, out)

    def _put_local(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        return self._one_sided("Put", "Flush_local", x, out)

    def _get(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        return self._one_sided("Get", "Flush", x, out)

    def _one_sided(self, start: str, end: str, x: Array, out: Array) -> Call | None:
        window, spec = self._windows[out.dtype], self._spec(x)
        move, flush = getattr(window, start), getattr(window, end)

        def call() -> None:
            move(spec, 1)
            flush(1)

        return call if self.rank == 0 else None

    def _atomic(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        window, old = self._windows[out.dtype], self._spec(x)
        one, add = self._spec(np.ones(1, x.dtype)), self._mpi.SUM

        def fetch_add() -> None:
            window.Fetch_and_op(one, old, 1, 0, add)
            window.Flush(1)

        return fetch_add if self.rank == 0 else None

    def _put_signal(self, case: Case, half: str, x: Array, out: Array) -> Call | None:
        there, here = self._spec(x), self._spec(out)
        send, receive = self._comm.Send, self._comm.Recv

        def first() -> None:
            send(there, 1)
            receive(here, 1)

        def second() -> None:
            receive(here, 0)
            send(there, 0)

        return (first, second)[self.rank] if self.rank < 2 else None

    def barrier(self) -> None:
        """See ``Side.barrier``."""
        self._comm.Barrier()
        for window in self._windows.values():
            window.Sync()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """See ``Side.gather``."""
        rows = np.empty((self.size, len(values)))
        self._comm.Allgather(np.array(values, np.float64), rows)
        return [[float(v) for v in row] for row in rows]

    def close(self) -> None:
        """See ``Side.close``."""
        for window in self._windows.values():
            window.Unlock_all()
            window.Free()

    def fail(self) -> None:
        """See ``Side.fail``: without it the launcher would wait for ranks that wait."""
        self._comm.Abort(1)


if __name__ == "__main__":
    main(MpiSide, sys.argv[1])
