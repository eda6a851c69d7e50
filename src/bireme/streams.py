"""Streams and work: order without waiting.

A stream is an ordered queue of asynchronous calls, run by a progress thread. A call that is not
asynchronous waits for its stream first, so order within a stream always holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bireme import _core
from bireme.errors import BiremeError

__all__ = ["Stream", "Work"]


class Work:
    """A handle on an asynchronous call; it keeps the call's buffers alive."""

    def __init__(
        self, native: Any, result: Any, keep: tuple[Any, ...], forgotten: Callable[[str], None]
    ) -> None:
        self._native = native
        self._result = result
        self._keep = keep
        self._forgotten = forgotten
        self._waited = native is None

    def __del__(self) -> None:
        if not self._waited:
            self._forgotten("failed" if self._native.failed() else "went well")

    def done(self) -> bool:
        """Return whether the call has finished, well or not."""
        return self._native is None or bool(self._native.done())

    def wait(self, timeout_s: float | None = None) -> Any:
        """Block until the call has finished; the buffers may be reused then.

        Args:
            timeout_s: How long to wait at most, in seconds; ``None`` waits for the call's own
                deadline.

        Returns:
            The call's result array.

        Raises:
            TimeoutError: If ``timeout_s`` passed first; the call goes on.
            BiremeError: What the call itself raised.
        """
        if self._native is not None:
            limit = -1.0 if timeout_s is None else float(timeout_s)
            self._waited = True
            if not self._native.wait(limit):
                self._waited = False
                raise TimeoutError(f"the call has not finished within {timeout_s} s; it goes on")
            self._keep = ()
        return self._result

    result = wait

    def exception(self, timeout_s: float | None = None) -> BiremeError | None:
        """Wait as ``wait`` does and return the call's error, or ``None`` where it went well."""
        try:
            self.wait(timeout_s)
        except BiremeError as error:
            return error
        return None


class Stream:
    """An ordered queue of asynchronous calls on the host. Make one with ``world.stream()``."""

    def __init__(self, control: Any) -> None:
        self.native = _core.Stream(control) if control is not None else None

    def synchronize(self) -> None:
        """Block until all calls queued so far have finished.

        Raises:
            BiremeError: What the last queued call raised.
        """
        last = self.native.last() if self.native is not None else None
        if last is not None:
            last.wait(-1.0)

    def drain(self) -> None:
        """As ``synchronize``, but errors stay with the works of the calls that raised them."""
        last = self.native.last() if self.native is not None else None
        if last is not None:
            last.wait_done()

    def stop(self) -> None:
        """Finish the queue and end the progress thread."""
        if self.native is not None:
            self.native.stop()
