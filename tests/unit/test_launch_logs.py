"""The files with each rank's output, and how cores are divided."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme.errors import UsageError
from bireme.launch import binding
from bireme.launch.logs import Logs
from bireme.launch.output import Output


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folder_and_files_are_private_and_files_start_empty(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "logs"
    with Logs(str(folder), 2) as logs:
        assert logs.write(0, b"zero\n") == logs.write(1, b"one\n") == ""
    assert mode(folder) == 0o700
    assert [mode(path) for path in sorted(folder.iterdir())] == [0o600, 0o600]
    (folder / "rank-1.log").chmod(0o644)
    folder.chmod(0o755)
    with Logs(str(folder), 2) as logs:
        logs.write(1, b"again\xff\r\n")
        logs.write(1, b"")
    assert mode(folder) == 0o755  # it is the user's
    assert (folder / "rank-0.log").read_bytes() == b""
    assert (folder / "rank-1.log").read_bytes() == b"again\xff\r\n"
    assert mode(folder / "rank-1.log") == 0o600


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "under"):
        with pytest.raises(UsageError, match=f"--log-dir: cannot use '{path}': "):
            Logs(str(path), 1)
    with pytest.raises(UsageError, match="cannot use ''"):
        Logs("", 1)


def test_links_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("data")
    folder = tmp_path / "logs"
    folder.mkdir()
    (folder / "rank-1.log").symlink_to(target)
    with pytest.raises(UsageError, match=r"cannot write .*/logs/rank-1\.log: "):
        Logs(str(folder), 2)
    assert target.read_text() == "data"


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    fifo = tmp_path / "rank-0.log"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match=r"cannot write .*rank-0\.log"):
        Logs(str(tmp_path), 1)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UsageError, match=r"expected .*rank-0\.log to be a plain file of yours"):
        Logs(str(tmp_path), 1)
    os.close(reader)


def test_a_full_disk_is_told_once(tmp_path: Path) -> None:
    with Logs(str(tmp_path), 2) as logs:
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, logs._fds[0])
        os.close(full)
        assert logs.write(0, b"x") == f"{tmp_path}/rank-0.log ends here: No space left on device"
        assert logs.write(0, b"y") == ""
        assert logs.write(1, b"z") == ""
    assert (tmp_path / "rank-1.log").read_bytes() == b"z"


class _Process:
    """A pipe in place of a rank."""

    def __init__(self) -> None:
        reading, self.out = os.pipe()
        self.stdout, self.stderr = os.fdopen(reading, "rb", 0), None


class _Full:
    """A file that is full."""

    def write(self, rank: int, data: bytes) -> str:
        return f"rank {rank} has no room for {len(data)} bytes"


def test_output_goes_on_without_the_log(capfdbinary: Any) -> None:
    process: Any = _Process()
    logs: Any = _Full()
    out = Output([process], logs)
    out.start()
    os.write(process.out, b"hello\n")
    os.close(process.out)
    out.finish()
    got, errors = capfdbinary.readouterr()
    assert got == b"[0] hello\n"
    assert errors.startswith(b"bireme run: rank 0 has no room for 6 bytes\n")


# ---- cores


@pytest.mark.parametrize(
    ("cores", "size", "expected"),
    [
        ({0, 1, 2, 3}, 2, [[0, 1], [2, 3]]),
        ({4, 0, 9, 2, 7}, 2, [[0, 2], [4, 7, 9]]),
        ({0, 1, 2}, 3, [[0], [1], [2]]),
        ({3, 5}, 5, [[3], [5], [3], [5], [3]]),
        ({1}, 1, [[1]]),
    ],
)
def test_shares(cores: set[int], size: int, expected: list[list[int]]) -> None:
    assert binding.shares(cores, size) == expected


@given(cores=st.sets(st.integers(0, 300), min_size=1), size=st.integers(1, 40))
def test_every_core_is_used_once_and_shares_are_equal(cores: set[int], size: int) -> None:
    found = binding.shares(cores, size)
    lengths = [len(share) for share in found]
    assert len(found) == size
    assert max(lengths) - min(lengths) <= 1
    if size <= len(cores):
        assert [core for share in found for core in share] == sorted(cores)
    else:
        assert lengths == [1] * size
        assert {core for share in found for core in share} == cores


def test_how_shares_are_said() -> None:
    assert binding.describe([[0, 1, 2, 3], [4]]) == "rank 0 on 0-3, rank 1 on 4"
    assert binding.describe([[0, 2, 3, 8]]) == "rank 0 on 0+2-3+8"
