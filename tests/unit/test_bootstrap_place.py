"""The private folder: nobody else's is used, and what a dead job left is no obstacle."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from bireme import knobs
from bireme.bootstrap import place
from bireme.bootstrap.door import peer_uid
from bireme.errors import Timeout, UsageError

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes its user id: needs root")


def in_child(body: Callable[[], bool]) -> int:
    """Start a child that ends with 0 if the body returns true; return its process id."""
    pid = os.fork()
    if pid == 0:
        code = 2
        try:
            code = 0 if body() else 1
        finally:
            os._exit(code)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def close(spot: place.Place) -> None:
    spot.listener.close()
    spot.remove()


def test_the_name_is_the_jobs(tmp_path: Path) -> None:
    with knobs.override(BIREME_RUN_DIR=str(tmp_path)):
        path = place.folder(("run", "29500", "0"), 0)
        assert path == place.folder(("run", "29500", "0"), 0)
        assert Path(path).parent == tmp_path
        assert f"-{os.geteuid()}-" in path
        others = [
            place.folder(("run", "29500", "1"), 0),
            place.folder(("run2", "9500", "0"), 0),
            place.folder(("run", "29500", "0"), 1),
        ]
    assert len({path, *others}) == 4


def test_where_the_folder_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = ("", "", "")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert Path(place.folder(job, 0)).parent == tmp_path
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert str(Path(place.folder(job, 0)).parent) == tempfile.gettempdir()
    with (
        knobs.override(BIREME_RUN_DIR=str(tmp_path / "none")),
        pytest.raises(UsageError, match="BIREME_RUN_DIR: expected a folder, found"),
    ):
        place.folder(job, 0)


def test_a_place_is_private_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    spot = place.Place(str(path), 1.0)
    assert path.stat().st_mode & 0o777 == 0o700
    sock = place.connect(str(path), 1.0)
    assert sock is not None
    assert peer_uid(sock) == os.geteuid()
    sock.close()
    close(spot)
    assert list(tmp_path.iterdir()) == []


def test_a_long_path_is_fine(tmp_path: Path) -> None:
    path = str(tmp_path / ("x" * 200))
    spot = place.Place(path, 1.0)
    sock = place.connect(path, 1.0)
    assert sock is not None
    sock.close()
    close(spot)


def test_what_a_dead_job_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    dead = place.Place(str(path), 1.0)
    dead.listener.close()
    os.close(dead._fd)  # as when its process is killed: the lock goes, the socket's file stays
    assert place.connect(str(path), 0.0) is None
    spot = place.Place(str(path), 1.0)
    sock = place.connect(str(path), 1.0)
    assert sock is not None
    sock.close()
    close(spot)
    assert list(tmp_path.iterdir()) == []


def test_what_a_live_job_uses_is_not_touched(tmp_path: Path) -> None:
    path = str(tmp_path / "spot")
    spot = place.Place(path, 1.0)
    with pytest.raises(Timeout, match="another live process uses"):
        place.Place(path, 0.05)
    sock = place.connect(path, 1.0)
    assert sock is not None
    sock.close()
    close(spot)


def test_a_folder_that_vanishes_under_the_lock_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "spot"
    real = fcntl.flock
    calls: list[int] = []

    def flock(fd: int, how: int) -> None:
        calls.append(how)
        if len(calls) == 1:
            path.rmdir()
        if len(calls) == 2:
            path.rmdir()
            path.mkdir(0o700)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    spot = place.Place(str(path), 5.0)
    assert os.path.samestat(os.fstat(spot._fd), path.stat())
    assert len(calls) == 3
    close(spot)


def test_a_socket_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_inside", lambda fd: str(tmp_path / "no" / "such" / "folder"))
    with pytest.raises(FileNotFoundError):
        place.Place(str(tmp_path / "spot"), 1.0)
    assert list(tmp_path.iterdir()) == []


def make_open(path: Path) -> None:
    path.mkdir()
    path.chmod(0o755)


def make_link(path: Path) -> None:
    target = path.parent / "target"
    target.mkdir(0o700)
    path.symlink_to(target)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (make_open, f"found owner {os.geteuid()} and mode 0755"),
        (make_link, "found something else"),
        (Path.touch, "found something else"),
    ],
)
def test_what_is_not_a_private_folder_is_refused(
    tmp_path: Path, make: Callable[[Path], None], found: str
) -> None:
    path = tmp_path / "spot"
    make(path)
    before = path.lstat()
    for attempt in (place.Place, place.connect):
        with pytest.raises(UsageError, match=rf"expected a folder \(no link\).*{found}"):
            attempt(str(path), 1.0)
    assert path.lstat().st_ino == before.st_ino


@as_root
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    path.mkdir(0o700)
    os.chown(path, NOBODY, NOBODY)
    for attempt in (place.Place, place.connect):
        with pytest.raises(UsageError, match="found owner 65534 and mode 0700"):
            attempt(str(path), 1.0)


@as_root
def test_a_server_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "spot"
    path.mkdir(0o700)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path / "socket"))

    def listen() -> bool:
        os.setuid(NOBODY)
        listener.listen()
        return True

    assert exit_code(in_child(listen)) == 0  # the socket remembers who called listen
    with pytest.raises(UsageError, match="user 65534 listens in it, expected user 0"):
        place.connect(str(path), 1.0)
    listener.close()


def test_nobody_is_there_in_time(tmp_path: Path) -> None:
    assert place.connect(str(tmp_path / "spot"), 0.03) is None
