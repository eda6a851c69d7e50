"""The tables of a benchmark as lines of text: nccl-tests' own, and one like OSU's for one side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = [
    "Half",
    "Item",
    "bounds",
    "collective_footer",
    "collective_head",
    "collective_row",
    "comparison",
    "decimal",
    "engine_table",
    "one_sided_head",
    "one_sided_row",
    "over",
    "preamble",
    "times",
]

NONE = "N/A"
_PLACES = f"#{'':62}out-of-place                       in-place          "
_NAMES = (
    "#       size         count      type   redop    root "
    "    time   algbw   busbw  #wrong     time   algbw   busbw  #wrong "
)
_UNITS = (
    "#        (B)    (elements)                           "
    "    (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         "
)


@dataclass(frozen=True)
class Half:
    """One half of a row.

    Args:
        time_us: Time of a call in microseconds.
        algbw: Algorithm bandwidth in 10**9 bytes per second.
        busbw: Bus bandwidth in 10**9 bytes per second.
        wrong: Number of wrong values; ``None`` where they were not checked.
    """

    time_us: float
    algbw: float
    busbw: float
    wrong: int | None


@dataclass(frozen=True)
class Item:
    """One line of the fixed table.

    Args:
        item: What was called.
        time_us: Each side's time in microseconds; ``None`` where it has no such call.
        x_mpi: The better MPI's time over bireme's.
        x_gloo: Gloo's time over bireme's.
        memcpy_us: Time of a plain copy between the same buffers, in microseconds.
        x_memcpy: bireme's time over it.
        switches: Context switches of one call of bireme.
        wrong: Number of wrong values of bireme; ``None`` where they were not checked.
    """

    item: str
    time_us: Mapping[str, float | None]
    x_mpi: float | None
    x_gloo: float | None
    memcpy_us: float | None
    x_memcpy: float | None
    switches: float | None
    wrong: int | None


def decimal(value: float, width: int) -> str:
    """Return a number with as many decimals as fit, as nccl-tests prints it.

    Args:
        value: Not negative.
        width: Characters; more are used only where nothing fits.
    """
    short = ".1e" if width >= 7 else ".0e"
    for style in (".2f", ".1f", ".0f"):
        if len(text := format(value, style)) <= width:
            return text.rjust(width)
    return format(value, short).rjust(width)


def times(ratio: float | None) -> str:
    """Return a ratio as ``3.1x``, or ``N/A``."""
    return NONE if ratio is None else f"{ratio:.2f}x" if ratio < 100 else f"{ratio:.0f}x"


def preamble(
    title: str, settings: str, ranks: Sequence[Mapping[str, int]], host: str, device: str
) -> list[str]:
    """Return the comment lines that come first.

    Args:
        title: What is tested.
        settings: How, in one line.
        ranks: Rank and process id of each.
        host: The host's name.
        device: What the ranks run on.
    """
    lines = [f"# Collective test starting: {title}", f"# {settings}", "#", "# Using devices"]
    lines += [
        f"#  Rank {row['rank']:2d} Group {0:2d} Pid {row['pid']:6d} on {host[:10]:>10} "
        f"device {0:2d} [cpu] {device}"
        for row in ranks
    ]
    return [*lines, "#"]


def collective_head() -> list[str]:
    """Return nccl-tests' three lines of column names."""
    return [_PLACES, _NAMES, _UNITS]


def collective_row(
    size: int, count: int, dtype: str, redop: str, root: int, out: Half | None, inside: Half | None
) -> str:
    """Return one row of nccl-tests' table.

    Args:
        size: Size in bytes.
        count: Elements of one rank's part.
        dtype: Element type.
        redop: Reduction, or ``"none"``.
        root: Root, or -1.
        out: Out of place; ``None`` where there is no such form.
        inside: In place; likewise.
    """
    start = f"{size:12d}  {count:12d}  {dtype:>8}  {redop:>6}  {root:>6}"
    return start + _half(out) + _half(inside)


def _half(half: Half | None) -> str:
    if half is None:
        return f"  {NONE:>7}  {NONE:>6}  {NONE:>6}  {NONE:>6}"
    wrong = f"{NONE:>7}" if half.wrong is None else f"{half.wrong:>6g}"
    numbers = (decimal(half.time_us, 7), decimal(half.algbw, 6), decimal(half.busbw, 6))
    return "".join(f"  {text}" for text in (*numbers, wrong))


def collective_footer(title: str, wrong: int, busbw: float) -> list[str]:
    """Return the lines that come last.

    Args:
        title: What was tested.
        wrong: Number of wrong values in all.
        busbw: Mean of the bus bandwidths, in 10**9 bytes per second.
    """
    return [
        bounds(wrong),
        f"# Avg bus bandwidth    : {busbw:g} ",
        "#",
        f"# Collective test concluded: {title}",
    ]


def bounds(wrong: int) -> str:
    """Return the line that says whether values were wrong."""
    return f"# Out of bounds values : {wrong} {'FAILED' if wrong else 'OK'}"


def one_sided_head(*, memcpy: bool) -> str:
    """Return the column names of an OSU-like table; with ``memcpy`` those of the comparison too."""
    names = f"# {'size(B)':>10}  {'latency(us)':>12}  {'bandwidth(GB/s)':>15}  {'#wrong':>6}"
    return names + (f"  {'memcpy(us)':>12}  {'x memcpy':>8}" if memcpy else "")


def one_sided_row(size: int, half: Half, memcpy_us: float | None) -> str:
    """Return one row of an OSU-like table.

    Args:
        size: Size in bytes.
        half: What was measured.
        memcpy_us: Time of a plain copy in microseconds; ``None`` where there is none.
    """
    wrong = NONE if half.wrong is None else str(half.wrong)
    row = f"  {size:10d}  {half.time_us:12.2f}  {half.algbw:15.2f}  {wrong:>6}"
    if memcpy_us is None:
        return row
    return f"{row}  {memcpy_us:12.2f}  {times(half.time_us / memcpy_us):>8}"


def comparison(
    title: str, sides: Sequence[str], rows: Sequence[tuple[int, Sequence[float | None]]]
) -> list[str]:
    """Return a table of times side by side; ``x`` is a side's time over the first side's.

    Args:
        title: What is compared.
        sides: Names, bireme's first.
        rows: Size in bytes, and each side's time in microseconds or ``None``.
    """
    head = f"# {'size(B)':>10}  {sides[0] + '(us)':>12}"
    head += "".join(f"  {name + '(us)':>12}  {'x':>7}" for name in sides[1:])
    lines = ["#", f"# {title}: times, and how many times faster {sides[0]} is", head]
    for size, cells in rows:
        line = f"  {size:10d}  {_time(cells[0])}"
        for cell in cells[1:]:
            line += f"  {_time(cell)}  {times(over(cell, cells[0])):>7}"
        lines.append(line)
    return lines


def over(time_us: float | None, other_us: float | None) -> float | None:
    """Return the ratio of two times, ``None`` where one is missing."""
    return time_us / other_us if time_us is not None and other_us else None


def _time(time_us: float | None) -> str:
    return f"{NONE:>12}" if time_us is None else f"{time_us:12.2f}"


def engine_table(sides: Sequence[str], items: Sequence[Item]) -> list[str]:
    """Return the fixed table: times, times faster than peers, time over memcpy, switches a call.

    Args:
        sides: Names, bireme's first.
        items: One for each line.
    """
    head = f"# {'item':<26}" + "".join(f"  {name + '(us)':>12}" for name in sides)
    head += f"  {'x MPI':>7}  {'x gloo':>7}  {'x memcpy':>8}  {'switches':>8}"
    lines = [head]
    for item in items:
        line = f"  {item.item:<26}" + "".join(f"  {_time(item.time_us.get(s))}" for s in sides)
        line += f"  {times(item.x_mpi):>7}  {times(item.x_gloo):>7}  {times(item.x_memcpy):>8}"
        switches = NONE if item.switches is None else f"{item.switches:.2f}"
        lines.append(f"{line}  {switches:>8}")
    return lines
