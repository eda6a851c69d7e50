"""How many times the chaos tests strike."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--trials", type=int, default=30, help="random ends in the chaos tests")
