"""The plot of a benchmark; needs matplotlib, which is optional."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from bireme.errors import UsageError

__all__ = ["bars", "curves", "require"]

_DOTS = 150


def require() -> None:
    """Refuse a plot before anything is measured where it cannot be made.

    Raises:
        UsageError: If matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install 'bireme[plot]'")


def curves(path: str, title: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    """Draw time over size, one line for each series.

    Args:
        path: The file; its ending chooses the format.
        title: What is shown.
        series: By name, pairs of size in bytes and time in microseconds.
    """
    figure, axes = _figure(title)
    for name, points in series.items():
        pairs = [(size, time_us) for size, time_us in points if size > 0]  # the axis is a log
        axes.plot([size for size, _ in pairs], [t for _, t in pairs], marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="size (bytes)", ylabel="time (us)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=_DOTS)


def bars(path: str, title: str, groups: Mapping[str, Mapping[str, float | None]]) -> None:
    """Draw times as bars, one group for each item.

    Args:
        path: The file; its ending chooses the format.
        title: What is shown.
        groups: By item, each side's time in microseconds or ``None``.
    """
    figure, axes = _figure(title, height=2 + 0.5 * len(groups))
    sides = list(dict.fromkeys(side for found in groups.values() for side in found))
    thick = 0.8 / max(len(sides), 1)
    for number, side in enumerate(sides):
        rows = [(i, found[side]) for i, found in enumerate(groups.values()) if found.get(side)]
        places = [i + (number - (len(sides) - 1) / 2) * thick for i, _ in rows]
        axes.barh(places, [time_us for _, time_us in rows], thick, label=side)
    axes.set(xscale="log", xlabel="time (us)", yticks=range(len(groups)), yticklabels=groups)
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=_DOTS)


def _figure(title: str, height: float = 5.0) -> tuple[Any, Any]:
    # A figure of its own, without pyplot: no window system is looked for.
    figure = importlib.import_module("matplotlib.figure").Figure((9.0, height), layout="tight")
    axes = figure.subplots()
    axes.set_title(title)
    return figure, axes
