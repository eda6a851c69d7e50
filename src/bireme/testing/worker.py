"""A worker: a pytest session that runs single tests on command instead of a whole collection.

Started by ``bireme.testing.workers`` once per rank. It never collects by itself: the first command
for a file collects that file.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import socket
import sys
from typing import Any

import pytest

from bireme import knobs
from bireme.testing.channel import Channel, Message
from bireme.testing.plugin import IN_WORKER

__all__ = ["Worker", "main"]

# Options of the parent's command line that choose or report tests: the parent alone does that.
_PARENT_ONLY: dict[str, Any] = {
    "cacheclear": False,
    "cacheshow": None,
    "collectonly": False,
    "deselect": None,
    "failedfirst": False,
    "keyword": "",
    "lf": False,
    "log_file": os.devnull,
    "markexpr": "",
    "maxfail": 0,
    "newfirst": False,
    "pastebin": None,
    "setuponly": False,
    "setupplan": False,
    "setupshow": False,
    "stepwise": False,
    "stepwise_skip": False,
    "trace": False,
    "usepdb": False,
    "xmlpath": None,
}
_PARENT_ONLY_PLUGINS = ("lfplugin", "nfplugin", "stepwiseplugin")


class Worker:
    """The pytest plugin that turns a session into a worker."""

    def __init__(self, channel: Channel, basetemp: str) -> None:
        self._channel = channel
        self._basetemp = basetemp
        self._items: dict[str, pytest.Item] = {}
        self._collected: set[str] = set()
        self._trouble: list[str] = []
        self._reports: list[Message] = []
        self._warnings: list[Message] = []
        self._promised: pytest.Item | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self, config: pytest.Config) -> None:
        """Keep the options that say how a test runs, and drop the others."""
        for name, value in _PARENT_ONLY.items():
            if hasattr(config.option, name):
                setattr(config.option, name, value)
        config.option.basetemp = self._basetemp
        config.stash[IN_WORKER] = True
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Silence the session: the parent prints."""
        manager = config.pluginmanager
        for name in _PARENT_ONLY_PLUGINS:
            if manager.has_plugin(name):
                manager.unregister(name=name)
        if manager.has_plugin("terminalreporter"):
            reporter: Any = manager.unregister(name="terminalreporter")
            # Others ask it for its writer: it stays, and writes to nowhere.
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until we end
            manager.register(type(reporter)(config, nowhere), "terminalreporter")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self) -> bool:
        """Collect nothing yet."""
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run commands until the parent closes the channel."""
        self._channel.send({"captures": _capture_files(session.config)})
        while (command := self._channel.receive()) is not None:
            try:
                self._channel.send(self._answer(session, command))
            except (KeyboardInterrupt, pytest.exit.Exception) as error:
                text = f"the test ended this rank's session: {type(error).__name__}: {error}"
                self._channel.send(_outcome(trouble=text, fatal=True))
                raise
        return True

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep why a file could not be collected."""
        if report.failed:
            self._trouble.append(f"could not collect {report.nodeid}\n{report.longreprtext}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a phase's report for the answer."""
        config = self._config
        self._reports.append(
            config.hook.pytest_report_to_serializable(config=config, report=report)
        )

    def pytest_warning_recorded(
        self, warning_message: Any, when: str, nodeid: str, location: Any
    ) -> None:
        """Keep a warning for the answer."""
        self._warnings.append(
            {
                "text": str(warning_message.message),
                "category": warning_message.category.__name__,
                "filename": warning_message.filename,
                "lineno": warning_message.lineno,
                "when": when,
                "nodeid": nodeid,
                "location": location,
            }
        )

    def _answer(self, session: pytest.Session, command: Message) -> Message:
        self._reports, self._warnings, self._trouble = [], [], []
        item = self._find(session, command["path"], command["nodeid"])
        if item is None:
            text = "\n".join(self._trouble) or f"this rank did not find {command['nodeid']}"
            return _outcome(warnings=self._warnings, trouble=text)
        following = command["next"] and self._find(session, *command["next"])
        self._run(session, item, following or None)
        return _outcome(reports=self._reports, warnings=self._warnings)

    def _run(
        self, session: pytest.Session, item: pytest.Item, following: pytest.Item | None
    ) -> None:
        if self._promised is not item:
            # Fixtures were kept for another test than the one that came.
            session._setupstate.teardown_exact(item)
        self._promised = following
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)

    def _find(self, session: pytest.Session, path: str, nodeid: str) -> pytest.Item | None:
        if nodeid not in self._items and path not in self._collected:
            self._collected.add(path)
            try:
                found = session.perform_collect([path])
            except pytest.UsageError as error:
                self._trouble.append(str(error))
                return None
            self._items.update({item.nodeid: item for item in found})
        return self._items.get(nodeid)


def _capture_files(config: pytest.Config) -> list[int]:
    """The descriptors of the files that hold stdout and stderr; none where they are not files."""
    capturing = getattr(config.pluginmanager.getplugin("capturemanager"), "_global_capturing", None)
    streams = (getattr(capturing, "out", None), getattr(capturing, "err", None))
    try:
        return [stream.tmpfile.fileno() for stream in streams if stream is not None]
    except (AttributeError, OSError):
        return []


def _outcome(**values: Any) -> Message:
    return {"reports": [], "warnings": [], "trouble": None, "fatal": False, **values}


def main() -> None:
    """Run one worker; ``sys.argv[1]`` lists a socket and a log descriptor for each rank."""
    sock_fd, log_fd = json.loads(sys.argv[1])[knobs.get("BIREME_RANK")]
    os.set_inheritable(sock_fd, False)
    os.set_inheritable(log_fd, False)
    faulthandler.register(signal.SIGUSR1, file=log_fd, all_threads=True, chain=False)
    channel = Channel(socket.socket(fileno=sock_fd))
    setup = channel.receive()
    if setup is None:
        return
    if not setup["live"]:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
    os.chdir(setup["dir"])
    sys.argv[:] = setup["argv"]
    arguments = [*setup["args"], "-p", "bireme.testing.plugin"]
    sys.exit(pytest.main(arguments, plugins=[Worker(channel, setup["basetemp"])]))
