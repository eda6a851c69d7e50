"""What a world's calls wait for: streams, works in flight, and buffers that are read later."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from bireme import _core
from bireme.streams import Stream, Work

if TYPE_CHECKING:
    from bireme.host import Host

__all__ = ["Agenda"]

_SHOWN = 8  # calls named in the report about works without a wait
log = logging.getLogger("bireme")


class Agenda:
    """One for each world: ``world.agenda``, for the faces."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._default = Stream(host.control)
        self.streams = [self._default]
        self._thread = threading.local()
        self._works: list[Work] = []
        self._sources: list[Any] = []
        self._forgotten: list[str] = []
        self._forgotten_calls = 0

    def stream(self) -> Stream:
        """Make a stream."""
        self.streams.append(Stream(self._host.control))
        return self.streams[-1]

    @contextlib.contextmanager
    def use(self, stream: Stream) -> Iterator[Stream]:
        """Make ``stream`` the current one of this thread inside the block."""
        before = getattr(self._thread, "stream", None)
        self._thread.stream = stream
        try:
            yield stream
        finally:
            self._thread.stream = before

    def settle(self, stream: Stream | None, *, async_op: bool = False) -> Any:
        """Return the native stream to queue on, or wait for it and return ``None``."""
        chosen = stream or getattr(self._thread, "stream", None) or self._default
        if async_op:
            return chosen.native
        if chosen.native is not None and chosen.native.pending():
            chosen.drain()
        return None

    def work(self, op: str, native: Any, result: Any, keep: tuple[Any, ...]) -> Work:
        """Return a handle on queued work; it and its buffers are kept until the work is done."""
        control = self._host.control
        call = f"{op} at {_core.here(control)}" if control is not None else op
        work = Work(native, result, keep, lambda end: self._forget(f"{call}, which {end}"))
        self._works = [w for w in self._works if not w.done()]
        self._works.append(work)
        return work

    def _forget(self, call: str) -> None:
        self._forgotten_calls += 1
        if len(self._forgotten) < _SHOWN:
            self._forgotten.append(call)

    def keep_until_quiet(self, source: Any) -> None:
        """Keep what a ``put_nbi`` reads later."""
        if self._host.one_sided.defers:
            self._sources.append(source)

    def quiet(self) -> None:
        """Let go of what earlier ``put_nbi`` calls have read."""
        self._sources.clear()

    def report(self, rank: int) -> None:
        """Tell of asynchronous calls whose work was dropped without a wait."""
        self._works = [w for w in self._works if not w.done()]
        if self._forgotten_calls:
            log.warning(
                "rank %d: %d asynchronous calls were never waited for: %s",
                rank, self._forgotten_calls, "; ".join(self._forgotten),
            )  # fmt: skip
