"""A rank's end of the bootstrap: an all-gather of small values and descriptors."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Literal

from bireme import knobs
from bireme.bootstrap import messages
from bireme.bootstrap.hub import Hub
from bireme.bootstrap.messages import Message
from bireme.errors import EngineError, PeerLost, Timeout, UsageError

__all__ = ["Origin", "Rendezvous"]

Origin = Literal["launcher", "torchrun", "openmpi", "mpich", "slurm", "alone"]

_MISSING_S = 1.0
_FAIL_S = 1.0


class Rendezvous:
    """Where one rank meets the others of its host; one thread at a time may use it.

    Args:
        rank: This process's rank.
        size: Number of ranks.
        sock: The connection to the hub; none when alone. It becomes ours to close.
        local_rank: Rank on this host; default ``rank``.
        local_size: Ranks on this host; default ``size``.
        origin: What started the ranks.
        hub: A hub that runs in this process and ends with ``close``.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        sock: socket.socket | None = None,
        *,
        local_rank: int | None = None,
        local_size: int | None = None,
        origin: Origin = "alone",
        hub: Hub | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = rank if local_rank is None else local_rank
        self.local_size = size if local_size is None else local_size
        self.origin: Origin = origin
        self._sock = sock
        self._hub = hub
        self._closed = False
        self._failed = False

    def all_gather(
        self, tag: str, value: Message, fds: Sequence[int] = (), timeout_s: float | None = None
    ) -> list[tuple[Message, list[int]]]:
        """Exchange one small value, with descriptors, among all ranks; every rank must call it.

        Args:
            tag: Names the step; the same on every rank.
            value: A JSON object; with its tag at most 64 KiB of JSON text.
            fds: Descriptors to share, at most 16; the caller keeps its own.
            timeout_s: Deadline in seconds; default ``BIREME_TIMEOUT_S``.

        Returns:
            Every rank's value and descriptors, in rank order. The descriptors are the caller's to
            close, also those of its own rank, which are duplicates.

        Raises:
            TypeError: If the value is not a dict of JSON values.
            ValueError: If the value is too large, or there are too many descriptors.
            PeerLost: If a rank failed or ended; the message names it and has its error.
            Timeout: If a rank did not come in time; the message names it.
            UsageError: If another rank is at another tag, or the rendezvous is closed.
        """
        if self._closed:
            raise UsageError(f"rank {self.rank}: all_gather {tag!r} after close: join again")
        limit_s = float(knobs.get("BIREME_TIMEOUT_S")) if timeout_s is None else timeout_s
        ticket = secrets.token_hex(16)
        request = {"kind": "gather", "tag": tag, "rank": self.rank, "value": value}
        request["ticket"] = ticket
        data = messages.encode(request)
        messages.check_fds(fds)
        if self._sock is None:
            return [(json.loads(data)["value"], [os.dup(fd) for fd in fds])]
        return self._exchange(self._sock, request, fds, limit_s)

    def fail(self, error: str) -> None:
        """Make the other ranks' present or next all-gather raise PeerLost with our error.

        After an all-gather that raised, the others know already, and nothing is sent.

        Args:
            error: What went wrong here, for the other ranks' error texts.
        """
        if self._sock is not None and not self._closed and not self._failed:
            self._failed = True
            with contextlib.suppress(PeerLost, Timeout, OSError):
                message = {"kind": "failed", "error": error[:4096]}
                messages.send(self._sock, message, timeout_s=_FAIL_S)

    def close(self) -> None:
        """Close the connection, and the hub if it runs in this process; twice is fine."""
        self._closed = True
        if self._sock is not None:
            self._sock.close()
        if self._hub is not None:
            self._hub.stop()

    def _exchange(
        self, sock: socket.socket, request: Message, fds: Sequence[int], timeout_s: float
    ) -> list[tuple[Message, list[int]]]:
        self._failed = False
        deadline = time.monotonic() + timeout_s
        parts: list[tuple[Message, list[int]]] = []
        step = f"bootstrap step {request['tag']!r}"
        try:
            messages.send(sock, request, fds, timeout_s)
            while len(parts) < self.size:
                parts.append(self._next(sock, request, deadline))
        except Timeout:
            self.fail(f"it waited in {step} for {timeout_s:g} s")
            raise self._timeout(sock, request, timeout_s) from None
        except PeerLost as error:
            raise (error if self._failed else self._cut_off(step)) from None
        except BaseException as error:
            self.fail(f"it left {step}: {type(error).__name__}: {error}")
            raise
        finally:
            if len(parts) < self.size:
                for _, received in parts:
                    messages.close_all(received)
        return parts

    def _next(
        self, sock: socket.socket, request: Message, deadline: float
    ) -> tuple[Message, list[int]]:
        """Return the next part of the answer to a request."""
        answer, fds = self._answer(sock, request, deadline)
        if answer.get("kind") == "gather" and isinstance(answer.get("value"), dict):
            return answer["value"], fds
        messages.close_all(fds)
        if answer.get("kind") != "failed":
            raise EngineError(f"rank {self.rank}: the hub sent {answer.get('kind')!r}")
        self._failed = True
        place = f"rank {self.rank} in bootstrap step {request['tag']!r}"
        if answer.get("mismatch"):
            raise UsageError(f"{place}: {answer.get('error')}")
        lost = f"rank {answer.get('rank')} has failed: {answer.get('error')}"
        raise PeerLost(f"{place}: {lost}. Look at the output of rank {answer.get('rank')} first.")

    def _answer(
        self, sock: socket.socket, request: Message, deadline: float
    ) -> tuple[Message, list[int]]:
        """Return the next message for a request; answers to older requests are dropped."""
        while True:
            answer, fds = messages.receive(sock, deadline - time.monotonic())
            if answer.get("ticket") == request["ticket"]:
                return answer, fds
            messages.close_all(fds)

    def _cut_off(self, step: str) -> PeerLost:
        host = "the launcher" if self.origin == "launcher" else "rank 0"
        return PeerLost(
            f"rank {self.rank} in {step}: the connection to {host} has closed, because {host} has "
            "ended or closed it. Look at its output first."
        )

    def _timeout(self, sock: socket.socket, request: Message, timeout_s: float) -> Timeout:
        """Ask the hub who was missing, and say so."""
        missing = "some ranks"
        deadline = time.monotonic() + _MISSING_S
        with contextlib.suppress(PeerLost, Timeout, EngineError):
            kind = ""
            while kind != "missing":
                answer, fds = self._answer(sock, request, deadline)
                messages.close_all(fds)
                kind = str(answer.get("kind"))
            missing = "rank " + ", ".join(str(rank) for rank in answer.get("ranks", []))
        return Timeout(
            f"rank {self.rank} waited {timeout_s:g} s in bootstrap step {request['tag']!r}: "
            f"{missing} did not come. See what they do, or raise BIREME_TIMEOUT_S."
        )
