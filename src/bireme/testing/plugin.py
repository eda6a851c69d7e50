"""The pytest plugin: the marker ``ranks``, the fixture ``world``, and the check for leaks."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from bireme.errors import Aborted, PeerLost
from bireme.testing import leaks
from bireme.testing.merge import Outcome, add_failure, merge
from bireme.testing.workers import WorkerSet

__all__ = ["IN_WORKER", "leak_check", "world"]

IN_WORKER = pytest.StashKey[bool]()
_SIZE = "bireme_ranks"
_TIMEOUT_S = 60.0
_WORKERS = pytest.StashKey[dict[int, WorkerSet]]()
_FAILURE = pytest.StashKey[BaseException]()

_MARKERS = (
    "ranks(*sizes, timeout=60): run the test on worlds of these numbers of ranks.",
    "world(**settings): how the `world` fixture opens its world, as bireme.init takes it.",
    "may_leak(*kinds, reason): kinds of leaks that the leak check lets pass, all without kinds.",
)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the markers."""
    for line in _MARKERS:
        config.addinivalue_line("markers", line)
    config.stash[_WORKERS] = {}


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the workers."""
    for workers in config.stash.get(_WORKERS, {}).values():
        workers.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a ranked test once for each number of ranks."""
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    sizes = marker.args
    legal = all(type(size) is int and size > 0 for size in sizes) and not set(marker.kwargs) - {
        "timeout"
    }
    if not sizes or not legal:
        pytest.fail(
            "expected @pytest.mark.ranks(n, ..., timeout=seconds) with numbers of ranks, found "
            f"args {sizes} and {marker.kwargs} on {metafunc.definition.nodeid}",
            pytrace=False,
        )
    metafunc.fixturenames.append(_SIZE)
    metafunc.parametrize(_SIZE, sizes, ids=[f"ranks{size}" for size in sizes])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Send a ranked test to its workers; a worker itself runs it as pytest does."""
    size = _size(item)
    if size is None or IN_WORKER in item.config.stash or item.config.getoption("setuponly", False):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _run_ranked(item, size, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget an earlier try of the test; refuse the marker where pytest cannot parametrise."""
    if _FAILURE in item.stash:
        del item.stash[_FAILURE]
    if item.get_closest_marker("ranks") and _size(item) is None:
        pytest.fail(
            "the marker `ranks` needs a test function or a plain class; methods of "
            "unittest.TestCase cannot have parameters",
            pytrace=False,
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep the exception of a test for the fixtures that are torn down after it."""
    report = yield
    if call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception):
        item.stash[_FAILURE] = call.excinfo.value
    return report


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A fresh world of the test's ranks, closed after the test; of one rank without the marker.

    All ranks meet before and after the test. Where the test fails on a rank, that rank aborts
    the world, so that the others do not wait for it. A test that breaks its world on purpose, by a
    mismatch say, closes it.
    """
    import bireme

    marker = request.node.get_closest_marker("world")
    opened = bireme.init(**(marker.kwargs if marker else {}))
    try:
        opened.barrier()
        yield opened
        failure = request.node.stash.get(_FAILURE, None)
        if failure is None:
            _meet(opened)
        else:
            opened.abort(f"{request.node.nodeid} failed: {type(failure).__name__}: {failure}")
    finally:
        opened.close()


@pytest.fixture
def leak_check(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test if it leaves more behind than it found; see ``bireme.testing.leaks``."""
    marker = request.node.get_closest_marker("may_leak")
    ignore = _may_leak(marker) if marker else ()
    before = leaks.take()
    yield
    if _FAILURE not in request.node.stash:
        found = leaks.settled(before, ignore)
        if found:
            pytest.fail("the test leaks\n  " + "\n  ".join(found), pytrace=False)


def _may_leak(marker: pytest.Mark) -> tuple[str, ...]:
    kinds = marker.args or leaks.KINDS
    if not marker.kwargs.get("reason") or set(kinds) - set(leaks.KINDS):
        pytest.fail(
            f"expected @pytest.mark.may_leak(*kinds, reason=...) with kinds of {leaks.KINDS}, "
            f"found {marker.args} and {marker.kwargs}",
            pytrace=False,
        )
    return tuple(kinds)


def _meet(opened: Any) -> None:
    # The rank that failed or died is reported by itself.
    with contextlib.suppress(Aborted, PeerLost):
        if not opened.closed:
            opened.barrier()


def _size(item: pytest.Item) -> int | None:
    size: int | None = getattr(getattr(item, "callspec", None), "params", {}).get(_SIZE)
    return size


def _run_ranked(
    item: pytest.Item, size: int, nextitem: pytest.Item | None
) -> list[pytest.TestReport]:
    workers = item.config.stash[_WORKERS].setdefault(size, WorkerSet(size, item.config))
    marker = item.get_closest_marker("ranks")
    timeout_s = float(marker.kwargs.get("timeout", _TIMEOUT_S)) if marker else _TIMEOUT_S
    following = _following(item, size)
    outcomes: list[Outcome] = []

    def run() -> None:
        outcomes.extend(workers.run(item, following, timeout_s))
        if following is None:
            workers.stop()

    stops = (KeyboardInterrupt, pytest.exit.Exception)
    call = pytest.CallInfo.from_call(run, when="call", reraise=stops)
    if call.excinfo is None:
        reports = merge(item, outcomes)
    else:
        workers.kill()
        reports = [pytest.TestReport.from_item_and_call(item, call)]
    done = pytest.CallInfo.from_call(
        lambda: _tear_down(item, nextitem), when="teardown", reraise=stops
    )
    if done.excinfo is not None:
        failed = pytest.TestReport.from_item_and_call(item, done)
        add_failure(reports[-1], "the parent process:", failed)
    return reports


def _tear_down(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the fixtures of tests that ran in this process and that the next test does not share."""
    capture = getattr(item.config.pluginmanager.getplugin("capturemanager"), "item_capture", None)
    with capture("teardown", item) if capture else contextlib.nullcontext():
        item.session._setupstate.teardown_exact(nextitem)


def _following(item: pytest.Item, size: int) -> pytest.Item | None:
    """Return the next test of the same workers, for which they keep shared fixtures."""
    items = iter(item.session.items)
    for other in items:
        if other is item:
            break
    return next((other for other in items if _size(other) == size), None)
