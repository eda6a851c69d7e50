"""Test your own strategy on n ranks: a pytest plugin, and ``run`` for notebooks.

    @pytest.mark.ranks(1, 2, 4)
    def test_mine(world):
        total = world.all_reduce(np.ones(3))
        assert total[0] == world.size

Each number of ranks gets one set of worker processes, started at its first test and kept for the
next. A test passes when it passed on every rank; the traceback and the output of each rank that
failed are shown under that rank's name.
"""

from bireme.testing.forked import RankFailure, run

__all__ = ["RankFailure", "run"]

# pytest loads what a plugin module lists here; `run` alone does not need pytest.
pytest_plugins = ["bireme.testing.plugin"]
