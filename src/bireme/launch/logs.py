"""A file for each rank with what it has written, without the rank in front."""

from __future__ import annotations

import os
import stat

from bireme.errors import UsageError

__all__ = ["Logs"]


class Logs:
    """The files ``rank-<r>.log`` of one job in a folder, emptied at the start.

    The folder is made with mode 0700 if it is missing; the files have mode 0600.

    Args:
        folder: Path of the folder.
        size: Number of ranks.

    Raises:
        UsageError: If the folder cannot be made or used, or a file in it is no plain one of ours.
    """

    def __init__(self, folder: str, size: int) -> None:
        self._folder = folder
        self._fds: list[int] = []
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"--log-dir: cannot use {folder!r}: {error.strerror}") from None
        try:
            for rank in range(size):
                self._fds.append(_open(place, folder, f"rank-{rank}.log"))
        except BaseException:
            self.close()
            raise
        finally:
            os.close(place)

    def write(self, rank: int, data: bytes) -> str:
        """Add to a rank's file; return why that failed, once, and "" otherwise.

        After a failure nothing more is written to that file.
        """
        fd = self._fds[rank]
        view = memoryview(data)
        try:
            while view and fd >= 0:
                view = view[os.write(fd, view) :]
        except OSError as error:
            os.close(fd)
            self._fds[rank] = -1
            return f"{self._folder}/rank-{rank}.log ends here: {error.strerror}"
        return ""

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        for fd in self._fds:
            if fd >= 0:
                os.close(fd)
        self._fds.clear()


def _open(place: int, folder: str, name: str) -> int:
    """Open a file, through no link and only if it is a plain one of ours, and empty it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    path = f"{folder}/{name}"
    try:
        fd = os.open(name, flags, 0o600, dir_fd=place)
    except OSError as error:
        raise UsageError(f"--log-dir: cannot write {path}: {error.strerror}") from None
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise UsageError(f"--log-dir: expected {path} to be a plain file of yours: remove it")
    os.fchmod(fd, 0o600)
    os.ftruncate(fd, 0)
    return fd
