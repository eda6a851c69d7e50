"""The tables: nccl-tests' columns, widths and numbers."""

from __future__ import annotations

import pytest

from bireme.bench import table
from bireme.bench.table import Half, Item

HEAD = """\
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         """  # noqa: E501, W291


def test_head() -> None:
    assert "\n".join(table.collective_head()) == HEAD


def test_rows_stand_below_their_names() -> None:
    row = table.collective_row(
        1048576, 262144, "float", "sum", -1, Half(48.24, 21.74, 21.74, 0), Half(1e5, 0.01, 0.02, 3)
    )
    assert row == (
        "     1048576        262144     float     sum      -1"
        "    48.24   21.74   21.74       0   100000    0.01    0.02       3"
    )
    assert len(row) == len(HEAD.splitlines()[1]) - 1  # the names end in a blank


def test_a_half_that_does_not_exist_and_values_that_were_not_checked() -> None:
    row = table.collective_row(8, 2, "half", "none", 1, None, Half(1.0, 0.0, 0.0, None))
    assert row == (
        "           8             2      half    none       1"
        "      N/A     N/A     N/A     N/A     1.00    0.00    0.00      N/A"
    )


@pytest.mark.parametrize(
    ("value", "width", "text"),
    [
        (0.0, 6, "  0.00"),
        (1.234, 7, "   1.23"),
        (1234.5, 7, "1234.50"),
        (12345.6, 7, "12345.6"),
        (123456.0, 7, " 123456"),
        (1234567.0, 7, "1234567"),
        (12345678.0, 7, "1.2e+07"),
        (999.994, 6, "999.99"),
        (9999.94, 6, "9999.9"),
        (99999.4, 6, " 99999"),
        (1234567.0, 6, " 1e+06"),
    ],
)
def test_decimals_as_far_as_there_is_room(value: float, width: int, text: str) -> None:
    assert table.decimal(value, width) == text


def test_what_comes_first_and_last() -> None:
    ranks = [{"rank": 0, "pid": 41}, {"rank": 1, "pid": 42}]
    lines = table.preamble("all_reduce", "nRanks 2", ranks, "a-long-host-name", "cpu")
    assert lines == [
        "# Collective test starting: all_reduce",
        "# nRanks 2",
        "#",
        "# Using devices",
        "#  Rank  0 Group  0 Pid     41 on a-long-hos device  0 [cpu] cpu",
        "#  Rank  1 Group  0 Pid     42 on a-long-hos device  0 [cpu] cpu",
        "#",
    ]
    assert table.collective_footer("all_reduce", 0, 0.645846)[:2] == [
        "# Out of bounds values : 0 OK",
        "# Avg bus bandwidth    : 0.645846 ",
    ]
    assert table.bounds(3) == "# Out of bounds values : 3 FAILED"


@pytest.mark.parametrize(
    ("ratio", "text"), [(None, "N/A"), (0.5, "0.50x"), (3.14159, "3.14x"), (123.4, "123x")]
)
def test_ratios(ratio: float | None, text: str) -> None:
    assert table.times(ratio) == text


def test_ratios_of_what_is_missing() -> None:
    assert table.over(6.0, 2.0) == 3.0
    assert table.over(None, 2.0) is None
    assert table.over(6.0, None) is None
    assert table.over(6.0, 0.0) is None


def test_one_sided_rows() -> None:
    assert table.one_sided_row(8, Half(0.5, 0.016, 0.016, 0), 0.25).split() == [
        "8", "0.50", "0.02", "0", "0.25", "2.00x",
    ]  # fmt: skip
    assert table.one_sided_row(8, Half(0.5, 0.016, 0.016, None), None).split() == [
        "8", "0.50", "0.02", "N/A",
    ]  # fmt: skip
    assert "memcpy" not in table.one_sided_head(memcpy=False)


def test_comparison() -> None:
    rows = [(8, [2.0, 5.0, None]), (16, [None, 5.0, 7.0])]
    lines = table.comparison("put", ["bireme", "mpich", "gloo"], rows)
    assert lines[1] == "# put: times, and how many times faster bireme is"
    assert lines[3].split() == ["8", "2.00", "5.00", "2.50x", "N/A", "N/A"]
    assert lines[4].split() == ["16", "N/A", "5.00", "N/A", "7.00", "N/A"]
    assert len({len(line) for line in lines[2:]}) == 1


def test_fixed_table() -> None:
    times = {"bireme": 2.0, "mpich": 5.0}
    items = [
        Item("put 8 B", times, 2.5, None, 1.0, 2.0, 0.25, 0),
        Item("barrier", {"bireme": None, "mpich": 1.0}, None, None, None, None, None, None),
    ]
    lines = table.engine_table(["bireme", "mpich"], items)
    assert lines[1].split() == ["put", "8", "B", "2.00", "5.00", "2.50x", "N/A", "2.00x", "0.25"]
    assert lines[2].split()[-6:] == ["N/A", "1.00", "N/A", "N/A", "N/A", "N/A"]
    assert len({len(line) for line in lines}) == 1
