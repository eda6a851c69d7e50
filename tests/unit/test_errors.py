"""The tree of exceptions is what users catch: it does not change by accident."""

from __future__ import annotations

import pytest

from bireme import errors


def test_every_error_is_listed_and_is_a_bireme_error() -> None:
    assert errors.__all__ == sorted(errors.__all__)
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.BiremeError)


@pytest.mark.parametrize(
    ("error", "builtin"),
    [(errors.PeerLost, ConnectionError), (errors.Timeout, TimeoutError)],
)
def test_errors_that_python_has_a_name_for(
    error: type[Exception], builtin: type[Exception]
) -> None:
    with pytest.raises(builtin, match="rank 3"):
        raise error("rank 3")


def test_no_error_is_caught_with_another() -> None:
    leaves = [getattr(errors, name) for name in errors.__all__ if name != "BiremeError"]
    for one in leaves:
        for other in leaves:
            assert one is other or not issubclass(one, other)
