"""The rule of the bootstrap's all-gather, without any input or output.

Every rank takes part in numbered rounds. A round ends well when all ranks have asked with the same
tag, and badly for all of them when one rank fails, goes away or asks with another tag. A rank that
comes late to a failed round hears of the failure then, so the n-th round of one rank always meets
the n-th round of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bireme.bootstrap.messages import Message, close_all, encode
from bireme.errors import EngineError

__all__ = ["Descriptors", "Observer", "Rounds"]

_TICKET_LENGTH = 32

Observer = Callable[[str, list[tuple[Message, list[int]]]], None]


class Descriptors:
    """Open descriptors with several holders; the last one to let go closes them."""

    def __init__(self, fds: list[int]) -> None:
        self.fds = fds
        self._holders = 1

    def hold(self) -> Descriptors:
        """Add a holder."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder; the last one closes."""
        self._holders -= 1
        if self._holders == 0:
            close_all(self.fds)


@dataclass
class _Ask:
    """What a waiting rank has sent."""

    tag: str
    value: Message
    ticket: str
    fds: Descriptors


class Rounds:
    """Who waits in which round.

    Args:
        size: Number of ranks.
        deliver: Called with (rank, message, descriptors) to send a message; it must not call back.
        observer: Called with (tag, messages with their descriptors) when a round has ended well.
    """

    def __init__(
        self,
        size: int,
        deliver: Callable[[int, Message, Descriptors | None], None],
        observer: Observer | None = None,
    ) -> None:
        self.size = size
        self._deliver = deliver
        self._observer = observer
        self._at = dict.fromkeys(range(size), 0)  # the round that a rank is in, until it leaves
        self._asks: dict[int, _Ask] = {}
        self._failures: dict[int, Message] = {}  # by round, while a rank has yet to hear of it
        self._gone: dict[int, str] = {}

    def enter(self, rank: int) -> None:
        """Take in a rank that has connected."""
        self._at.setdefault(rank, max(self._at.values(), default=0))
        self._gone.pop(rank, None)

    def leave(self, rank: int, error: str) -> None:
        """Note that a rank's connection has gone; waiting ranks hear of it."""
        self._at.pop(rank, None)
        self._gone[rank] = error
        if rank in self._asks:
            self._asks.pop(rank).fds.release()
        if self._asks:
            number = self._at[next(iter(self._asks))]  # all that wait are in one round
            self._break(number, _failure(rank, error))

    def ask(self, rank: int, message: Message, fds: Descriptors) -> None:
        """Take a rank's part of a round; the descriptors become ours, also on an error.

        Raises:
            EngineError: If the message is not a gather of this rank, or the rank waits already.
        """
        try:
            ask = _read(rank, message, fds)
            if rank in self._asks:
                raise EngineError("asked for a second all-gather while the first one is open")
        except EngineError:
            fds.release()
            raise
        self._asks[rank] = ask
        number = self._at[rank]
        failure = self._failures.get(number) or self._absent() or self._mismatch(rank)
        if failure:
            self._break(number, failure)
        elif len(self._asks) == self.size:
            self._complete()

    def fail(self, rank: int, error: str) -> None:
        """End the round that a rank is in, for all ranks, with its error."""
        if rank in self._asks:
            ask = self._asks.pop(rank)
            ask.fds.release()
            missing = sorted(set(range(self.size)) - set(self._asks) - {rank})
            self._deliver(rank, {"kind": "missing", "ranks": missing, "ticket": ask.ticket}, None)
        number = self._at[rank]
        self._at[rank] += 1
        self._break(number, _failure(rank, error))

    def close(self) -> None:
        """Let go of every descriptor."""
        for ask in self._asks.values():
            ask.fds.release()
        self._asks.clear()

    def _absent(self) -> Message | None:
        for rank, error in sorted(self._gone.items()):
            return _failure(rank, error)
        return None

    def _mismatch(self, rank: int) -> Message | None:
        tag = self._asks[rank].tag
        for other, ask in sorted(self._asks.items()):
            if ask.tag != tag:
                error = (
                    f"rank {rank} is at {tag!r} while rank {other} is at {ask.tag!r}: "
                    "all ranks must take the same steps"
                )
                return {**_failure(rank, error), "mismatch": True}
        return None

    def _break(self, number: int, failure: Message) -> None:
        """Fail a round: now for the ranks that wait in it, later for those that come to it."""
        failure = self._failures.setdefault(number, failure)
        for rank in [rank for rank in self._asks if self._at[rank] == number]:
            ask = self._asks.pop(rank)
            ask.fds.release()
            self._at[rank] += 1
            self._deliver(rank, {**failure, "ticket": ask.ticket}, None)
        self._forget()

    def _forget(self) -> None:
        oldest = min(self._at.values(), default=0)
        self._failures = {n: f for n, f in self._failures.items() if n >= oldest}

    def _complete(self) -> None:
        asks = [self._asks.pop(rank) for rank in range(self.size)]
        parts = [_part(rank, ask) for rank, ask in enumerate(asks)]
        try:
            if self._observer:
                pairs = zip(parts, asks, strict=True)
                self._observer(asks[0].tag, [(part, list(ask.fds.fds)) for part, ask in pairs])
            for target, ask in enumerate(asks):
                self._at[target] += 1
                for part, source in zip(parts, asks, strict=True):
                    self._deliver(target, {**part, "ticket": ask.ticket}, source.fds)
        finally:
            for ask in asks:
                ask.fds.release()


def _part(rank: int, ask: _Ask) -> Message:
    return {"kind": "gather", "tag": ask.tag, "rank": rank, "value": ask.value}


def _failure(rank: int, error: str) -> Message:
    return {"kind": "failed", "rank": rank, "error": error[:4096]}


def _read(rank: int, message: Message, fds: Descriptors) -> _Ask:
    """Check the fields of a gather that a rank has sent."""
    ask = _Ask(message.get("tag", ""), message.get("value", {}), message.get("ticket", ""), fds)
    if not (isinstance(ask.tag, str) and isinstance(ask.value, dict)):
        raise EngineError("sent a gather without a text as tag and an object as value")
    if not (isinstance(ask.ticket, str) and len(ask.ticket) <= _TICKET_LENGTH):
        raise EngineError("sent a gather whose ticket is not a text of at most 32 characters")
    if message.get("rank") != rank:
        raise EngineError(f"spoke for rank {message.get('rank')!r} on the socket of rank {rank}")
    try:
        encode({**_part(rank, ask), "ticket": "-" * _TICKET_LENGTH})
    except ValueError as error:
        raise EngineError(f"sent a gather that is too long to pass on: {error}") from None
    return ask
