"""Finds out what started this process, and joins the other ranks."""

from __future__ import annotations

import itertools
import os
import socket
import stat
import time
from collections.abc import Mapping

from bireme import knobs
from bireme.bootstrap import launchers, messages, place
from bireme.bootstrap.hub import Hub
from bireme.bootstrap.launchers import Job
from bireme.bootstrap.rendezvous import Rendezvous
from bireme.errors import BiremeError, EngineError, PeerLost, Timeout, UsageError

__all__ = ["join"]

_OURS = ("BIREME_RANK", "BIREME_SIZE", "BIREME_BOOTSTRAP_FD")
_RETRY_S = 0.02
_generations = itertools.count()


def join(timeout_s: float) -> Rendezvous:
    """Join the ranks of this job: every rank must call it, the same number of times.

    The environment says which job: that of `bireme run`, else of torchrun, else of mpiexec (Open
    MPI's, then MPICH's), else of srun, all on one host; else this process is alone. Rank 0 returns
    at once, the others when they have found it.

    Args:
        timeout_s: How long to look for the others, in seconds.

    Raises:
        UsageError: If the environment contradicts itself, or another user could interfere.
        EngineError: If the ranks are on several hosts.
        Timeout: If rank 0 was not found in time.
    """
    ours = _our_numbers()
    if any(number >= 0 for number in ours.values()):
        return _from_launcher(ours)
    texts = {name: knobs.foreign(name) for name in launchers.VARIABLES}
    job = launchers.find({name: text for name, text in texts.items() if text is not None})
    return _meet(job, timeout_s) if job else Rendezvous()


def _our_numbers() -> dict[str, int]:
    try:
        return {name: int(knobs.get(name)) for name in _OURS}
    except ValueError as error:
        raise UsageError(f"{error}: start the program with `bireme run`") from None


def _from_launcher(numbers: Mapping[str, int]) -> Rendezvous:
    rank, size, fd = (numbers[name] for name in _OURS)
    found = ", ".join(f"{name}={number}" for name, number in numbers.items())
    advice = f"Start it with `bireme run`, or unset {', '.join(_OURS)} to run it alone."
    if not 0 <= rank < size or fd < 0:
        raise UsageError(f"expected 0 <= rank < size and a descriptor, found {found}. {advice}")
    if not _is_bootstrap_socket(fd):
        raise UsageError(
            f"rank {rank}: expected descriptor {fd} to be the launcher's socket, it is not: "
            f"the variables came from a rank to another process. {advice}"
        )
    os.set_inheritable(fd, False)  # a program that this rank starts is no rank
    return Rendezvous(rank, size, socket.socket(fileno=os.dup(fd)), origin="launcher")


def _is_bootstrap_socket(fd: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
    except OSError:  # it is not open
        return False
    with socket.socket(fileno=os.dup(fd)) as sock:
        return sock.family == socket.AF_UNIX and sock.type == socket.SOCK_SEQPACKET


def _meet(job: Job, timeout_s: float) -> Rendezvous:
    """Meet the other ranks of a launcher that gave us no socket."""
    generation = next(_generations)
    if job.size == 1:
        return Rendezvous(origin=job.origin)
    path = place.folder(job.name, generation)
    if job.rank == 0:
        return _as_host(job, path, timeout_s)
    return _rendezvous(job, _as_guest(job, path, timeout_s))


def _rendezvous(job: Job, sock: socket.socket, hub: Hub | None = None) -> Rendezvous:
    return Rendezvous(
        job.rank,
        job.size,
        sock,
        local_rank=job.local_rank,
        local_size=job.local_size,
        origin=job.origin,
        hub=hub,
    )


def _as_host(job: Job, path: str, timeout_s: float) -> Rendezvous:
    """Be rank 0: open the folder and serve."""
    try:
        spot = place.Place(path, timeout_s)
    except BiremeError:
        raise
    except OSError as error:
        raise EngineError(f"rank 0 cannot meet the others in {path}: {error.strerror}") from None
    hub = Hub(job.size)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    hub.add(0, theirs)
    hub.listen(spot.listener, spot.remove)
    hub.start()
    return _rendezvous(job, ours, hub)


def _as_guest(job: Job, path: str, timeout_s: float) -> socket.socket:
    """Be another rank: find rank 0 and be let in."""
    deadline = time.monotonic() + timeout_s
    while (sock := place.connect(path, deadline - time.monotonic())) is not None:
        try:
            _enter(job, sock, deadline)
            return sock
        except PeerLost:  # a hub that was just ending; ours may come yet
            sock.close()
            time.sleep(_RETRY_S)
        except Timeout:
            sock.close()
            break
        except (BiremeError, OSError):
            sock.close()
            raise
    raise Timeout(
        f"rank {job.rank} found no rank 0 in {path} within {timeout_s:g} s: see whether rank 0 has "
        "called init, on this host and with the same variables"
    )


def _enter(job: Job, sock: socket.socket, deadline: float) -> None:
    hello = {"kind": "join", "rank": job.rank, "size": job.size}
    messages.send(sock, hello, timeout_s=max(0.0, deadline - time.monotonic()))
    answer, fds = messages.receive(sock, max(0.0, deadline - time.monotonic()))
    messages.close_all(fds)
    if answer.get("kind") != "joined":
        raise UsageError(f"rank {job.rank} was refused by rank 0: {answer.get('error')}")
