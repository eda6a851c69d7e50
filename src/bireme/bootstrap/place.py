"""The private folder in which the ranks of one job meet when no launcher of ours started them.

The folder has mode 0700 and belongs to us, or nothing is done with it. Rank 0 holds a lock on it
while it listens there, so what a dead job has left is told from what a live one uses. All paths go
through an open descriptor of the folder: swapping it for another changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import stat
import tempfile
import time

from bireme import knobs
from bireme.bootstrap.door import peer_uid
from bireme.errors import Timeout, UsageError

__all__ = ["Place", "connect", "folder"]

_SOCKET = "socket"
_RETRY_S = 0.01
_BACKLOG = 128


def folder(job: tuple[str, ...], generation: int) -> str:
    """Return the folder's path, the same on every rank of a job.

    Args:
        job: What names the job, such as torchrun's run id, port and restart number.
        generation: How many times this process has joined before.

    Raises:
        UsageError: If ``BIREME_RUN_DIR`` is not a folder.
    """
    digest = hashlib.sha256("\0".join(job).encode()).hexdigest()[:24]
    return os.path.join(_base(), f"bireme-{os.geteuid()}-{digest}-{generation}")


def _base() -> str:
    chosen = str(knobs.get("BIREME_RUN_DIR"))
    if chosen:
        if not os.path.isdir(chosen):
            raise UsageError(f"BIREME_RUN_DIR: expected a folder, found {chosen!r}")
        return chosen
    runtime = knobs.foreign("XDG_RUNTIME_DIR") or ""
    return runtime if os.path.isdir(runtime) else tempfile.gettempdir()


class Place:
    """Rank 0's side: the folder, locked, with a listening socket in it.

    Args:
        path: The folder; made, or taken over from a dead job.
        timeout_s: How long to wait for a live job that uses it, in seconds.

    Raises:
        UsageError: If the path is not a folder of ours with mode 0700.
        Timeout: If another live process keeps using it.
    """

    def __init__(self, path: str, timeout_s: float) -> None:
        self._path = path
        self._fd = _claim(path, time.monotonic() + timeout_s)
        try:
            self.listener = self._listen()
        except OSError:
            self.remove()
            raise

    def remove(self) -> None:
        """Unlink the socket and the folder, and unlock."""
        with contextlib.suppress(OSError):
            os.unlink(_SOCKET, dir_fd=self._fd)
        with contextlib.suppress(OSError):
            os.rmdir(self._path)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        os.close(self._fd)

    def _listen(self) -> socket.socket:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_SOCKET, dir_fd=self._fd)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(_inside(self._fd))
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener


def connect(path: str, timeout_s: float) -> socket.socket | None:
    """Connect to rank 0's socket in the folder; None when nobody has listened there in time.

    Args:
        path: The folder.
        timeout_s: How long to try, in seconds.

    Raises:
        UsageError: If the folder, or who listens in it, is not ours.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        sock = _try_connect(path)
        if sock is not None:
            return sock
        if time.monotonic() >= deadline:
            return None
        time.sleep(_RETRY_S)


def _try_connect(path: str) -> socket.socket | None:
    try:
        fd = _open(path)
    except FileNotFoundError:
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.setblocking(False)
        sock.connect(_inside(fd))
        _check_server(sock, path)
        sock.setblocking(True)
        return sock
    except OSError:  # no socket yet, nobody listens on it yet, or its backlog is full
        sock.close()
        return None
    except UsageError:
        sock.close()
        raise
    finally:
        os.close(fd)


def _check_server(sock: socket.socket, path: str) -> None:
    uid = peer_uid(sock)
    if uid != os.geteuid():
        raise UsageError(
            f"{path}: user {uid} listens in it, expected user {os.geteuid()}: "
            "set BIREME_RUN_DIR to a folder of yours"
        )


def _claim(path: str, deadline: float) -> int:
    """Make or take over the folder and lock it; return its descriptor."""
    while True:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        with contextlib.suppress(FileNotFoundError):  # who left it has just removed it
            fd = _open(path)
            if _lock(fd, path):
                return fd
            os.close(fd)
        if time.monotonic() >= deadline:
            raise Timeout(
                f"rank 0: another live process uses {path}: if two jobs have the same run id and "
                "port, give one another BIREME_RUN_DIR"
            )
        time.sleep(_RETRY_S)


def _lock(fd: int, path: str) -> bool:
    """Lock the folder if nobody has and it is still the one at the path."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False


def _open(path: str) -> int:
    """Open the folder, if it is one of ours that nobody else can enter."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"{_wanted(path)}, found something else ({error.strerror})") from None
    info = os.fstat(fd)
    mode = info.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
    if info.st_uid == os.geteuid() and mode == stat.S_IRWXU:
        return fd
    os.close(fd)
    raise UsageError(f"{_wanted(path)}, found owner {info.st_uid} and mode 0{mode:03o}")


def _wanted(path: str) -> str:
    return (
        f"{path}: expected a folder (no link) of user {os.geteuid()} with mode 0700: remove it, or "
        "set BIREME_RUN_DIR to a folder of yours"
    )


def _inside(fd: int) -> str:
    """Return the socket's path through the folder's descriptor: short, and no race."""
    return f"/proc/self/fd/{fd}/{_SOCKET}"
