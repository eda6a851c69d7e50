"""The parent's side of ranked tests: sets of worker processes, one set for each number of ranks."""

from __future__ import annotations

import builtins
import contextlib
import json
import os
import selectors
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

import pytest

from bireme.testing.channel import Channel, Message
from bireme.testing.merge import Outcome
from bireme.testing.processes import Log, dump_stacks, how_it_ended

__all__ = ["WorkerSet"]

_START_S = 120.0  # a worker imports what its conftest files import
_GRACE_S = 5.0  # for the other ranks once one has died, and for an orderly end
_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); "
    "from bireme.testing.worker import main; main()"
)
_count = 0


class Worker:
    """One worker process as the parent sees it."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        ours, self.theirs = socket.socketpair()
        self.channel = Channel(ours)
        self.log = Log(f"bireme-rank{rank}of{size}")
        self.process: subprocess.Popen[Any] | None = None
        self._captures: list[int] = []

    @property
    def pid(self) -> int:
        """The process id."""
        assert self.process is not None
        return self.process.pid

    def ended(self) -> bool:
        """Whether the process is gone."""
        return self.process is None or self.process.poll() is not None

    def death(self) -> str:
        """Say how the process ended."""
        code = None if self.process is None else self.process.poll()
        how = "closed its channel" if code is None else how_it_ended(code)
        return f"this rank {how} in the middle of the test"

    def send(self, message: Message) -> None:
        """Send a message; a worker that is gone is found when its answer is read."""
        with contextlib.suppress(OSError):
            self.channel.send(message)

    def open_captures(self, fds: list[int]) -> None:
        """Open the files that pytest captures this worker's stdout and stderr in."""
        with contextlib.suppress(OSError):
            self._captures = [os.open(f"/proc/{self.pid}/fd/{fd}", os.O_RDONLY) for fd in fds]

    def captured(self) -> list[tuple[str, str]]:
        """Return what a test has printed that will never report: it hangs, or its process died."""
        found = []
        for fd, name in zip(self._captures, ("stdout", "stderr"), strict=False):
            if text := os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace"):
                found.append((f"Captured {name} call", text))
        if text := self.log.take():
            found.append(("Captured worker output", text))
        return found

    def close(self) -> None:
        """Close the parent's ends."""
        self.channel.close()
        self.theirs.close()
        self.log.close()
        for fd in self._captures:
            os.close(fd)


class WorkerSet:
    """n worker processes that run one test at a time together.

    Args:
        size: The number of ranks.
        config: The parent's configuration.
    """

    def __init__(self, size: int, config: pytest.Config) -> None:
        self.size = size
        self._config = config
        self._live = config.getoption("capture", "no") == "no"
        self._workers: list[Worker] = []
        self._hub: Any = None
        self._busy = False

    def run(
        self, item: pytest.Item, following: pytest.Item | None, timeout_s: float
    ) -> list[Outcome]:
        """Run one test on all ranks and return what became of it on each.

        Args:
            item: The test.
            following: The next test of this set, for which its fixtures are kept.
            timeout_s: After so many seconds the stacks of all ranks are taken and the set is
                killed; the next test gets a new one.
        """
        if any(worker.ended() for worker in self._workers):
            self.kill()
        if not self._workers:
            late = self._start()
            if late:
                return self._broken(late, {}, f"did not start within {_START_S:g} s")
        command = {
            "path": str(item.path),
            "nodeid": item.nodeid,
            "next": following and (str(following.path), following.nodeid),
        }
        self._busy = True
        for worker in self._workers:
            worker.send(command)
        answers, late = self._answers(timeout_s)
        self._busy = False
        if late:
            return self._broken(late, answers, f"did not finish within {timeout_s:g} s")
        outcomes = [self._outcome(worker, answers[worker]) for worker in self._workers]
        if any(answer["fatal"] for answer in answers.values()):
            self.stop()
        return outcomes

    def stop(self) -> None:
        """End the workers in order, or kill them when one is in the middle of a test."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + (0 if self._busy else _GRACE_S)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                if worker.process is not None:
                    worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """End the workers at once."""
        started = [worker.process for worker in self._workers if worker.process is not None]
        for process in started:
            process.kill()
        for process in started:
            process.wait()
        for worker in self._workers:
            worker.close()
        if self._hub is not None:
            self._hub.stop()
        self._workers, self._hub, self._busy = [], None, False

    def _start(self) -> list[Worker]:
        """Start the workers; return those that were not ready in time."""
        from bireme import bootstrap, launch

        self._hub = bootstrap.Hub(self.size)
        self._workers = [Worker(rank, self.size) for rank in range(self.size)]
        fds = [(worker.theirs.fileno(), worker.log.fd) for worker in self._workers]
        argv = [sys.executable, "-c", _BOOT, json.dumps(fds), json.dumps(sys.path)]
        processes = launch.spawn(argv, self.size, self._hub, pass_fds=fds, stdin=subprocess.DEVNULL)
        self._hub.start()
        for worker, process in zip(self._workers, processes, strict=True):
            worker.process = process
            worker.theirs.close()
            worker.send(self._setup(worker.rank))
        answers, late = self._answers(_START_S)
        for worker, answer in answers.items():
            worker.open_captures(answer["captures"])
        return late

    def _setup(self, rank: int) -> Message:
        global _count
        _count += 1
        factory = getattr(self._config, "_tmp_path_factory")  # noqa: B009 - not in its type
        return {
            "dir": str(self._config.invocation_params.dir),
            "args": [str(arg) for arg in self._config.invocation_params.args],
            "argv": sys.argv,
            "basetemp": str(factory.getbasetemp() / f"rank{rank}of{self.size}-{_count}"),
            "live": self._live,
        }

    def _answers(self, timeout_s: float) -> tuple[dict[Worker, Message], list[Worker]]:
        """Wait for one message from each worker; return them, and the workers without one."""
        answers: dict[Worker, Message] = {}
        late = set(self._workers)
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            while late and (left := deadline - time.monotonic()) > 0:
                for key, _ in selector.select(min(left, 0.1)):
                    worker = key.data
                    message = worker.channel.poll()
                    if message is not None:
                        answers[worker] = message
                    if message is not None or worker.channel.ended:
                        selector.unregister(worker.channel)
                        late.discard(worker)
                # A process may have left its socket open in a child of its own.
                gone = {worker for worker in self._workers if worker.ended()} - set(answers)
                late -= gone
                if gone or len(answers) + len(late) < self.size:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return answers, [worker for worker in self._workers if worker not in answers]

    def _broken(
        self, late: list[Worker], answers: dict[Worker, Message], reason: str
    ) -> list[Outcome]:
        """Say what each rank was doing, and kill the set."""
        time.sleep(0.05)  # the end of a process is seen a little after that of its socket
        hung = [worker for worker in late if not worker.ended()]
        if len(hung) < len(late):
            reason = "did not finish after another rank had ended"
        shown = {worker: worker.captured() for worker in late}
        stacks = dump_stacks({worker.pid: worker.log for worker in hung})
        outcomes = []
        for worker in self._workers:
            if worker in answers:
                outcome = self._outcome(worker, answers[worker])
            elif worker in hung:
                outcome = Outcome(worker.rank, trouble=f"{reason}\n{stacks[worker.pid]}")
            else:
                outcome = Outcome(worker.rank, trouble=worker.death())
            outcome.sections += shown.get(worker, [])
            outcomes.append(outcome)
        self.kill()
        return outcomes

    def _outcome(self, worker: Worker, answer: Message) -> Outcome:
        outcome = Outcome(worker.rank, trouble=answer["trouble"])
        hook = self._config.hook
        for data in answer["reports"]:
            report = hook.pytest_report_from_serializable(config=self._config, data=data)
            report.sections = [tuple(section) for section in report.sections]
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # of a skip: JSON has no tuples
            outcome.add(report)
        if output := worker.log.take():
            outcome.sections.append(("Captured worker output", output))
        for warning in answer["warnings"] if worker.rank == 0 else ():
            self._warn(warning)
        return outcome

    def _warn(self, warning: Message) -> None:
        """Record a warning of rank 0 as if it had come up here."""
        category = getattr(builtins, warning["category"], UserWarning)
        self._config.hook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": warnings.WarningMessage(
                    warning["text"], category, warning["filename"], warning["lineno"]
                ),
                "nodeid": warning["nodeid"],
                "when": warning["when"],
                "location": warning["location"] and tuple(warning["location"]),
            }
        )
