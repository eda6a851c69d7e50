"""`bireme run` and what watches the ranks."""

from bireme.launch.processes import spawn
from bireme.launch.run import run

__all__ = ["run", "spawn"]
