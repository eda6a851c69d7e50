"""Fixtures of the tests on several ranks."""

from __future__ import annotations

import textwrap

import pytest
from inner import HEAD, PLUGIN, Session


@pytest.fixture
def session(pytester: pytest.Pytester) -> Session:
    """Run pytest on one file of tests."""

    def run(body: str, *options: str, conftest: str = "") -> pytest.RunResult:
        pytester.makepyfile(test_inner=HEAD + textwrap.dedent(body))
        if conftest:
            pytester.makeconftest(conftest)
        return pytester.runpytest_inprocess(*PLUGIN, "-ra", *options)

    return run
