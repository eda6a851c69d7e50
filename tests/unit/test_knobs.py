"""Settings: where they come from, what they accept, how a wrong one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bireme import knobs


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("4096", 4096),
        ("64K", 64 << 10),
        ("64k", 64 << 10),
        ("256M", 256 << 20),
        ("1.5G", 3 << 29),
        ("2T", 2 << 40),
        ("8KiB", 8 << 10),
        ("8kb", 8 << 10),
        (" 16M ", 16 << 20),
        ("12B", 12),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert knobs.parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "M", "-1", "-1K", "1X", "1 2", "ten", "nan", "inf", "9e99"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as"):
        knobs.parse_bytes(text)


@given(st.integers(0, 2**20), st.sampled_from(["", "K", "M", "G", "T"]))
def test_any_whole_size(count: int, unit: str) -> None:
    assert knobs.parse_bytes(f"{count}{unit}") == count << {"": 0}.get(
        unit, 10 * (" KMGT".find(unit))
    )


def test_default_environment_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BIREME_WARN_S", raising=False)
    default = knobs.get("BIREME_WARN_S")
    assert isinstance(default, float)
    monkeypatch.setenv("BIREME_WARN_S", "2.5")
    assert knobs.get("BIREME_WARN_S") == 2.5
    with knobs.override(BIREME_WARN_S=1):
        assert knobs.get("BIREME_WARN_S") == 1.0
        with knobs.override(BIREME_WARN_S="0.5"):
            assert knobs.get("BIREME_WARN_S") == 0.5
        assert knobs.get("BIREME_WARN_S") == 1.0
    assert knobs.get("BIREME_WARN_S") == 2.5


def test_override_ends_with_the_block_that_fails() -> None:
    before = knobs.get("BIREME_WARN_S")
    with pytest.raises(RuntimeError, match="stop"), knobs.override(BIREME_WARN_S=3):
        raise RuntimeError("stop")
    assert knobs.get("BIREME_WARN_S") == before


def test_override_of_an_unknown_name() -> None:
    refused = pytest.raises(KeyError, match=r"BIREME_NOPE is not a knob; see docs/knobs\.md")
    with refused, knobs.override(BIREME_NOPE=1):
        pass


def test_a_value_of_the_wrong_type_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_TIMEOUT_S", "soon")
    with pytest.raises(ValueError, match=r"BIREME_TIMEOUT_S: .*soon"):
        knobs.get("BIREME_TIMEOUT_S")
    monkeypatch.setenv("BIREME_HEAP_BYTES", "much")
    with pytest.raises(ValueError, match="BIREME_HEAP_BYTES: expected a size"):
        knobs.get("BIREME_HEAP_BYTES")


def test_a_choice_names_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_DELIVERY", "never")
    with pytest.raises(ValueError, match=r"BIREME_DELIVERY: expected one of eager, .*'never'"):
        knobs.get("BIREME_DELIVERY")


def test_foreign_variables_are_those_that_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert knobs.foreign("LOCAL_RANK") == "3"
    monkeypatch.delenv("LOCAL_RANK")
    assert knobs.foreign("LOCAL_RANK") is None
    with pytest.raises(KeyError, match="HOME is not listed"):
        knobs.foreign("HOME")


def test_the_environment_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    child = knobs.child_environment({"LOCAL_RANK": "4", "BIREME_RANK": "0"})
    assert (child["LOCAL_RANK"], child["BIREME_RANK"]) == ("4", "0")
    assert knobs.foreign("LOCAL_RANK") == "3"


@pytest.mark.parametrize("knob", knobs.KNOBS, ids=lambda knob: knob.name)
def test_every_knob_has_a_legal_default_and_a_sentence(
    knob: knobs.Knob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(knob.name, raising=False)
    value = knobs.get(knob.name)
    assert value is knob.default is None or isinstance(
        value, int if knob.type is bytes else knob.type
    )
    assert knob.name.startswith("BIREME_")
    assert knob.doc.endswith(".")
    assert f"| `{knob.name}` |" in knobs.markdown()
