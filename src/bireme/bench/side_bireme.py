"""bireme's side of a benchmark."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from bireme import host, knobs
from bireme.bench.worker import (
    Array,
    Call,
    Case,
    Lacks,
    Plan,
    Side,
    main,
    needs,
    numpy_dtype,
    version,
)

__all__ = ["BiremeSide"]

_BUFFERED_BYTES = 64 << 10  # a send of so many bytes returns before its recv
_HEAP_SPARE_BYTES = 1 << 20


class BiremeSide(Side):
    """bireme."""

    memcpy_ops = ("put", "get")
    refusals = ()

    def __init__(self, plan: Plan) -> None:
        size = max(1, int(knobs.get("BIREME_SIZE")))
        self.world = host.init(heap_bytes=heap_bytes(plan, size))
        self.rank, self.size = self.world.rank, self.world.size
        self._signal = self.world.symmetric.signal()
        self._turn = 0

    def about(self) -> dict[str, str]:
        """See ``Side.about``."""
        names = {name: version(name) for name in ("bireme", "torch")}
        return {**names, "engine": self.world.collective.name}

    def buffer(self, role: str, place: str, count: int, dtype: np.dtype[Any]) -> Any:
        """See ``Side.buffer``."""
        if role == "window" or place == "heap":
            return self.world.symmetric.zeros(count, dtype)
        return super().buffer(role, place, count, dtype)

    def view(self, buffer: Any) -> Array:
        """See ``Side.view``."""
        return buffer if isinstance(buffer, np.ndarray) else buffer.numpy()

    def _all_reduce(self, case: Case, half: str, x: Any, out: Any) -> Call:
        if half == "in":
            return partial(self.world.all_reduce, x, _literal(case.redop))
        return partial(self.world.all_reduce, x, _literal(case.redop), out=out)

    def _reduce(self, case: Case, half: str, x: Any, out: Any) -> Call:
        out = None if half == "in" else out
        return partial(self.world.reduce, x, case.root, _literal(case.redop), out=out)

    def _broadcast(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.broadcast, x, case.root)

    def _all_gather(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.all_gather, x, out=out)

    def _reduce_scatter(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.reduce_scatter, x, _literal(case.redop), out=out)

    def _gather(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.gather, x, case.root, out=out)

    def _scatter(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.scatter, x, case.root, out=out)

    def _all_to_all(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return partial(self.world.all_to_all, x, out=out)

    def _sendrecv(self, case: Case, half: str, x: Any, out: Any) -> Call:
        to, by = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        large = self.view(x).nbytes > _BUFFERED_BYTES
        stream = self.world.stream() if large else None

        def ring() -> None:
            work = self.world.send(x, to, async_op=large, stream=stream)
            self.world.recv(out, by)
            if work is not None:
                work.wait()

        return ring

    def _barrier(self, case: Case, half: str, x: Any, out: Any) -> Call:
        return self.world.barrier

    def _source(self, case: Case, x: Any) -> Any:
        if case.source == "numpy":
            return x
        try:
            import torch
        except ModuleNotFoundError:
            raise Lacks("torch is not installed") from None
        return torch.from_numpy(x)

    def _put(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        source, quiet = self._source(case, x), self.world.quiet

        def put() -> None:
            out.put(source, 1)
            quiet()

        return put if self.rank == 0 else None

    def _put_local(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        return partial(out.put, self._source(case, x), 1) if self.rank == 0 else None

    def _get(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        return partial(out.get, x, peer=1) if self.rank == 0 else None

    def _atomic(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        return partial(out[0].atomic_fetch_add, 1, 1) if self.rank == 0 else None

    def _put_signal(self, case: Case, half: str, x: Any, out: Any) -> Call | None:
        signal = self._signal

        def first() -> None:
            self._turn += 1
            out.put(x, 1, signal=signal, signal_value=self._turn)
            signal.wait(self._turn)

        def second() -> None:
            self._turn += 1
            signal.wait(self._turn)
            out.put(x, 0, signal=signal, signal_value=self._turn)

        return (first, second)[self.rank] if self.rank < 2 else None

    def memcpy(self, case: Case, x: Any, out: Any) -> Call:
        """See ``Side.memcpy``: NumPy's copy between the same two mapped buffers."""
        mine, theirs = self.view(x), out.on(1)
        return partial(np.copyto, *((theirs, mine) if case.op == "put" else (mine, theirs)))

    def barrier(self) -> None:
        """See ``Side.barrier``."""
        self.world.barrier()

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """See ``Side.gather``."""
        rows = self.world.all_gather(np.array(values, np.float64))
        return [[float(v) for v in row] for row in rows.reshape(self.size, -1)]

    def close(self) -> None:
        """See ``Side.close``."""
        self.world.close()


def _literal(text: str) -> str:
    """Return the text as the one object that a literal in a program is."""
    return sys.intern(text)


def heap_bytes(plan: Plan, size: int) -> int:
    """Return how large the symmetric heap must be for a plan."""
    return _HEAP_SPARE_BYTES + sum(
        count * numpy_dtype(dtype).itemsize
        for (_, place, dtype), count in needs(plan, size).items()
        if place == "heap"
    )


if __name__ == "__main__":
    main(BiremeSide, sys.argv[1])
