"""A pytest session inside a test, for the tests of the plugin."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Session = Callable[..., pytest.RunResult]
PLUGIN = ("-p", "bireme.testing.plugin")
HEAD = """
import os, sys, time, warnings
import numpy as np
import pytest
import bireme
from bireme import knobs

RANK = knobs.get("BIREME_RANK")
"""


def text(result: pytest.RunResult) -> str:
    return result.stdout.str()
