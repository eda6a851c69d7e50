"""Passes the ranks' output on, line by line, with the rank in front."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, TextIO

from bireme.launch.logs import Logs

__all__ = ["LineSplitter", "Output", "write"]

_LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")
_LONGEST_LINE = 1 << 20
_CHUNK = 1 << 16
_TAIL_LINES = 200
_TAIL_WIDTH = 4096


class LineSplitter:
    """Cuts a byte stream into lines that end in LF, CR LF, or CR (a progress bar's)."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the lines that are complete, with their ends.

        A line of more than 1 MiB is cut into pieces.
        """
        self._rest += data
        ends = [match.end() for match in _LINE_END.finditer(self._rest)]
        starts = [0, *ends]
        lines = [bytes(self._rest[a:b]) for a, b in zip(starts, ends, strict=False)]
        del self._rest[: starts[-1]]
        while len(self._rest) > _LONGEST_LINE:
            lines.append(bytes(self._rest[:_LONGEST_LINE]) + b"\n")
            del self._rest[:_LONGEST_LINE]
        return lines

    def end(self) -> list[bytes]:
        """Return the last line if it has no end, with one added."""
        rest = bytes(self._rest)
        self._rest.clear()
        return [rest.removesuffix(b"\r") + b"\n"] if rest else []


class _Source:
    """One pipe from a rank."""

    def __init__(self, rank: int, pipe: IO[bytes], target: TextIO, tail: deque[str] | None) -> None:
        self.rank = rank
        self.pipe = pipe
        self.target = target
        self._prefix = b"[%d] " % rank
        self._tail = tail
        self._splitter = LineSplitter()

    def read(self) -> tuple[list[bytes], bool]:
        """Return the lines to write now, and whether the pipe has ended."""
        data = os.read(self.pipe.fileno(), _CHUNK)
        return self._splitter.feed(data) if data else self._splitter.end(), not data

    def end(self) -> list[bytes]:
        """Close the pipe; return the lines that are left in it, 1 MiB at most."""
        lines: list[bytes] = []
        with contextlib.suppress(BlockingIOError):
            for _ in range(_LONGEST_LINE // _CHUNK):
                lines += self._splitter.feed(os.read(self.pipe.fileno(), _CHUNK))
        self.pipe.close()
        return lines + self._splitter.end()

    def label(self, lines: Sequence[bytes]) -> bytes:
        """Return lines with the rank in front; the tail takes note of them."""
        if self._tail is not None:
            whole = (line for line in lines if line.endswith(b"\n"))
            self._tail.extend(_text(line) for line in whole)
        return b"".join(self._prefix + line for line in lines if line != b"\r")


class Output:
    """A thread that reads the ranks' pipes and writes to our stdout and stderr.

    Args:
        processes: The ranks, in order, with pipes as stdout and stderr.
        logs: Files that get the same lines without the rank; to be closed after ``finish``.
    """

    def __init__(
        self, processes: Sequence[subprocess.Popen[bytes]], logs: Logs | None = None
    ) -> None:
        self._logs = logs
        self._tails = [deque[str](maxlen=_TAIL_LINES) for _ in processes]
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._end_by: float | None = None
        self._sources: set[_Source] = set()
        for rank, process in enumerate(processes):
            self._add(rank, process.stdout, sys.stdout, None)
            self._add(rank, process.stderr, sys.stderr, self._tails[rank])
        self._thread = threading.Thread(target=self._pump, name="bireme-output", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._thread.start()

    def finish(self, grace_s: float = 1.0) -> None:
        """Write what is left, and end the thread.

        Args:
            grace_s: How long to read on from pipes that something still holds open, in seconds.
        """
        self._end_by = time.monotonic() + grace_s
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def tail(self, rank: int) -> list[str]:
        """Return the last lines (200 at most) of a rank's stderr."""
        return list(self._tails[rank])

    def _add(
        self, rank: int, pipe: IO[bytes] | None, target: TextIO, tail: deque[str] | None
    ) -> None:
        if pipe is not None:
            os.set_blocking(pipe.fileno(), False)
            source = _Source(rank, pipe, target, tail)
            self._sources.add(source)
            self._selector.register(pipe, selectors.EVENT_READ, source)

    def _pump(self) -> None:
        while self._sources and (pause_s := self._pause_s()) != 0.0:
            for key, _ in self._selector.select(pause_s):
                if key.data is None:
                    os.eventfd_read(self._wake)
                elif key.data in self._sources:
                    self._pass_on(key.data)
        for source in list(self._sources):
            self._drop(source)
        self._selector.close()

    def _pause_s(self) -> float | None:
        return None if self._end_by is None else max(0.0, self._end_by - time.monotonic())

    def _pass_on(self, source: _Source) -> None:
        lines, ended = source.read()
        if not self._write(source, lines):
            # Nobody reads our output: have the ranks find out as they would without us.
            for other in [other for other in self._sources if other.target is source.target]:
                self._drop(other)
        elif ended:
            self._drop(source)

    def _drop(self, source: _Source) -> None:
        self._sources.discard(source)
        self._selector.unregister(source.pipe)
        self._write(source, source.end())

    def _write(self, source: _Source, lines: Sequence[bytes]) -> bool:
        """Write lines to the log, and to our output; False if nobody reads that."""
        if self._logs and (trouble := self._logs.write(source.rank, b"".join(lines))):
            _try_write(sys.stderr, f"bireme run: {trouble}\n".encode(errors="replace"))
        return _try_write(source.target, source.label(lines))


def write(stream: TextIO, data: bytes) -> None:
    """Write bytes as they are to a text stream, past its buffer where it has a descriptor.

    Raises:
        OSError: If the stream's reader has gone.
        ValueError: If the stream is closed.
    """
    try:
        fd = stream.fileno()
    except (OSError, AttributeError):
        stream.write(data.decode(errors="replace"))
        return
    stream.flush()
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            _wait_writable(fd)


def _try_write(target: TextIO, data: bytes) -> bool:
    try:
        write(target, data)
    except (OSError, ValueError):
        return False
    return True


def _wait_writable(fd: int) -> None:
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    poller.poll()


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")[:_TAIL_WIDTH]
