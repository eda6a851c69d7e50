"""What all tests share: pytester, the ranks plugin, the check for leaks, one hypothesis profile."""

from __future__ import annotations

import hypothesis
import pytest

from bireme import knobs

# The plugin is named here too, so that a checkout on PYTHONPATH works as an installed package does.
pytest_plugins = ["pytester", "bireme.testing.plugin"]

# Ranks share cores with each other: how long one example takes says nothing. On several ranks all
# must draw the same examples, and none may go back to a smaller one by itself.
hypothesis.settings.register_profile("bireme", deadline=None, print_blob=True)
hypothesis.settings.register_profile(
    "ranks",
    deadline=None,
    derandomize=True,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("bireme" if knobs.get("BIREME_RANK") < 0 else "ranks")


@pytest.fixture(autouse=True)
def no_leaks(leak_check: None) -> None:
    """Every test leaves the process as it found it."""
