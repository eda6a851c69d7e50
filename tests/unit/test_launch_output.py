"""The launcher's output: whole lines with the rank in front, whatever the ranks write."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.launch import output
from bireme.launch.output import LineSplitter, Output

LIMIT_S = 10.0


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.end()


def test_lines_and_their_ends() -> None:
    assert split(b"a\nb\r\nc") == [b"a\n", b"b\r\n", b"c\n"]
    assert split(b"a\r", b"\nb\r", b"c") == [b"a\r\n", b"b\r", b"c\n"]
    assert split(b"\n\n", b"") == [b"\n", b"\n"]
    assert split(b"\r10%\r20%\n") == [b"\r", b"10%\r", b"20%\n"]
    assert split(b"done\r") == [b"done\n"]
    assert split() == []


def test_a_very_long_line_is_cut() -> None:
    longest = output._LONGEST_LINE
    lines = split(b"x" * longest, b"y", b"z\n")
    assert lines == [b"x" * longest + b"\n", b"yz\n"]
    assert split(b"x" * (2 * longest + 1)) == [b"x" * longest + b"\n"] * 2 + [b"x\n"]


@given(chunks=st.lists(st.lists(st.sampled_from([b"a", b"\xff", b"\0", b"\r", b"\n"]))))
def test_nothing_is_lost_however_it_is_cut(chunks: list[list[bytes]]) -> None:
    pieces = [b"".join(chunk) for chunk in chunks]
    text = b"".join(pieces)
    lines = split(*pieces)
    assert lines == split(text)
    joined = b"".join(lines)
    assert joined in (text, text + b"\n", text.removesuffix(b"\r") + b"\n")
    assert all(line.strip(b"\r\n").find(b"\n") < 0 for line in lines)


class _Process:
    """Two pipes in place of a rank."""

    def __init__(self) -> None:
        pipes = [os.pipe() for _ in range(2)]
        self.stdout, self.stderr = (os.fdopen(reading, "rb", 0) for reading, _ in pipes)
        self.out, self.err = (writing for _, writing in pipes)

    def close(self) -> None:
        for fd in (self.out, self.err):
            os.close(fd)


def pump(processes: Sequence[Any]) -> Output:
    out = Output(processes)
    out.start()
    return out


def test_streams_stay_apart_and_ranks_are_named(capfdbinary: Any) -> None:
    processes = [_Process() for _ in range(2)]
    out = pump(processes)
    for rank, process in enumerate(processes):
        os.write(process.out, b"out %d\nbinary \xff\0" % rank)
        os.write(process.err, b"err %d\n\rhalf\rwhole\n" % rank)
        process.close()
    out.finish()
    got, errors = capfdbinary.readouterr()
    for rank in range(2):
        assert b"[%d] out %d\n" % (rank, rank) in got
        assert b"[%d] binary \xff\0\n" % rank in got
        assert b"[%d] err %d\n[%d] half\r[%d] whole\n" % ((rank,) * 4) in errors
        assert out.tail(rank) == [f"err {rank}", "whole"]
    assert got.count(b"\n") == 4


def test_lines_of_many_ranks_do_not_mix(capfdbinary: Any) -> None:
    processes = [_Process() for _ in range(4)]
    out = pump(processes)

    def chatter(rank: int) -> None:
        for _ in range(300):
            os.write(processes[rank].out, b"%d" % rank * 50)
            os.write(processes[rank].out, b"%d\n" % rank * 2)
        processes[rank].close()

    threads = [threading.Thread(target=chatter, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    out.finish()
    lines = capfdbinary.readouterr().out.splitlines()
    long = {b"[%d] %s" % (rank, b"%d" % rank * 51) for rank in range(4)}
    short = {b"[%d] %d" % (rank, rank) for rank in range(4)}
    assert set(lines) == long | short
    assert len(lines) == 4 * 600


def test_the_tail_is_short(capfdbinary: Any) -> None:
    process = _Process()
    out = pump([process])
    for index in range(250):
        os.write(process.err, b"%d\n" % index)
    os.write(process.err, b"x" * 10000)
    process.close()
    out.finish()
    assert out.tail(0) == [*map(str, range(51, 250)), "x" * 4096]
    assert capfdbinary.readouterr().err.startswith(b"[0] 0\n[0] 1\n")


def test_a_pipe_that_something_holds_open_is_left_with_what_it_has(capfdbinary: Any) -> None:
    process = _Process()
    out = pump([process])
    os.write(process.out, b"last words")
    out.finish(0.05)
    assert capfdbinary.readouterr().out == b"[0] last words\n"
    with pytest.raises(BrokenPipeError):
        os.write(process.out, b"nobody reads")
    process.close()


def test_a_slow_reader_gets_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in a pipe when time is up is still written."""
    reading, writing = os.pipe()
    process = _Process()
    text = b"x" * 999 + b"\n"
    got: list[bytes] = []

    def read() -> None:
        with os.fdopen(reading, "rb") as pipe:
            got.append(pipe.read())

    with os.fdopen(writing, "w") as ours:
        monkeypatch.setattr(sys, "stdout", ours)
        out = pump([process])
        for _ in range(120):  # more than one pipe holds, less than two
            os.write(process.out, text)
        process.close()
        finisher = threading.Thread(target=out.finish, args=(0.0,))
        finisher.start()
        time.sleep(0.05)
        reader = threading.Thread(target=read)
        reader.start()
        finisher.join(LIMIT_S)
    reader.join(LIMIT_S)
    assert got == [(b"[0] " + text) * 120]


def breaks(fd: int) -> bool:
    """Write until nobody reads, soon."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        try:
            os.write(fd, b"hello\n")
        except BrokenPipeError:
            return True
    return False


def test_a_reader_that_has_gone_is_passed_on_to_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = _Process()
    with os.fdopen(writing, "w") as ours:
        monkeypatch.setattr(sys, "stdout", ours)
        out = pump([process])
        os.write(process.out, b"hello\n")
        assert breaks(process.out)
        os.write(process.err, b"still heard\n")
        process.close()
        out.finish()
    assert capfdbinary.readouterr().err == b"[0] still heard\n"


def test_streams_without_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    output.write(stream, b"a\xff\n")
    assert stream.getvalue() == "a\ufffd\n"


def test_a_stream_that_does_not_block() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with os.fdopen(writing, "w") as stream:
        writer = threading.Thread(target=output.write, args=(stream, b"x" * 300_000))
        writer.start()
        got = 0
        while got < 300_000:
            got += len(os.read(reading, 10_000))
        writer.join(LIMIT_S)
    os.close(reading)


def test_ranks_without_pipes() -> None:
    process = subprocess.Popen(["true"])
    out = pump([process])
    process.wait()
    out.finish()
    assert out.tail(0) == []
