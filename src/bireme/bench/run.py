"""`bireme bench`: the sides in alternating rounds, then tables, JSON and a plot of the medians."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, TextIO

from bireme.bench import cases, peers, plot, table
from bireme.bench.machine import cpu_model, machine
from bireme.bench.table import Half, Item, over
from bireme.bench.tally import Tally
from bireme.bench.worker import Case, Plan
from bireme.errors import EngineError

__all__ = ["Settings", "bench"]

US = "bireme"
_MPI = ("mpich", "openmpi")
_HALVES = {"out": "out of place", "in": "in place"}


@dataclass(frozen=True)
class Settings:
    """What the user asks for; see ``bireme bench --help``.

    Args:
        op: One of ``cases.OPS``, or ``"engine"`` for the fixed table.
        ranks: Number of ranks.
        min_bytes, max_bytes: The first size, and what no size exceeds.
        factor: Each size is so many times the one before.
        step_bytes: Or so much more.
        iters: Calls of one measurement; 0 chooses.
        warmup: Calls before it.
        dtype, redop, root: As nccl-tests names them.
        place: ``"private"`` or ``"heap"``.
        rounds: How often every side is started.
        peers: Others to compare with, of ``peers.PEERS``.
        check: Compare the values with NumPy's first.
        json, plot: Files to write, if any.
        timeout_s: Limit of one side in one round, in seconds.
        corrupt: Spoil a value, to test the check.
        command: The command line, for the report.
    """

    op: str
    ranks: int = 2
    min_bytes: int = 8
    max_bytes: int = 64 << 20
    factor: int = 4
    step_bytes: int = 0
    iters: int = 0
    warmup: int = 5
    dtype: str = "float"
    redop: str = "sum"
    root: int = 0
    place: str = "private"
    rounds: int = 3
    peers: tuple[str, ...] = ()
    check: bool = True
    json: str | None = None
    plot: str | None = None
    timeout_s: float = 600.0
    corrupt: bool = False
    command: str = ""


def bench(settings: Settings, out: TextIO, log: TextIO) -> int:
    """Measure and report.

    Args:
        settings: What the user asks for.
        out: Gets the tables.
        log: Gets the progress.

    Returns:
        The exit status: 1 if a value is wrong, else 0.

    Raises:
        ValueError: If the settings do not fit together.
        UsageError: If the plot cannot be made.
        EngineError: If bireme itself could not be measured.
    """
    wanted = cases_of(settings)
    if settings.plot:
        plot.require()
    tally = measure(settings, wanted, log)
    lines, results = _report(settings, wanted, tally)
    wrong = sum(tally.all_wrong(side) for side in tally.sides)
    notes = [f"# {side} is missing: {why}" for side, why in tally.missing.items()]
    notes += [f"# lacks: {text}" for text in tally.lacks()]
    notes += [
        f"# {side} has wrong values: {n}" for side in tally.sides if (n := tally.all_wrong(side))
    ]
    out.write("\n".join([*lines, *notes]) + "\n")
    out.flush()
    if settings.json:
        with open(settings.json, "w", encoding="utf-8") as file:
            json.dump(_document(settings, tally, results), file, indent=1)
            file.write("\n")
    if settings.plot:
        _draw(settings.plot, settings, wanted, tally)
    return 1 if wrong else 0


def cases_of(settings: Settings) -> list[Case]:
    """Return what is measured.

    Raises:
        ValueError: If the settings do not fit together.
    """
    _check_words(settings)
    engine = settings.op == cases.ENGINE
    least = 2 if engine else cases.OPS[settings.op].least_ranks
    if settings.ranks < least:
        raise ValueError(f"{settings.op}: expected at least {least} ranks, found {settings.ranks}")
    if engine:
        return cases.engine_cases()
    if not 0 <= settings.root < settings.ranks:
        raise ValueError(
            f"root: expected a rank from 0 to {settings.ranks - 1}, found {settings.root}"
        )
    if settings.redop == "avg" and "int" in settings.dtype:
        raise ValueError(f"reduction: expected a float type for avg, found {settings.dtype}")
    wanted = cases.sizes(
        settings.min_bytes, settings.max_bytes, settings.factor, settings.step_bytes
    )
    return cases.op_cases(
        settings.op, wanted, settings.dtype, settings.redop, settings.root, settings.place,
        settings.ranks,
    )  # fmt: skip


def _check_words(settings: Settings) -> None:
    choices: list[tuple[str, str, Sequence[str]]] = [
        ("operation", settings.op, (*cases.OPS, cases.ENGINE)),
        ("dtype", settings.dtype, cases.DTYPES),
        ("reduction", settings.redop, cases.REDOPS),
        ("place", settings.place, ("private", "heap")),
    ]
    choices += [("peers", name, peers.PEERS) for name in settings.peers]
    for what, word, known in choices:
        if word not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, found {word!r}")


def measure(settings: Settings, wanted: Sequence[Case], log: TextIO) -> Tally:
    """Start every side once a round, one after the other, each with fresh processes."""
    tally = Tally((US, *dict.fromkeys(settings.peers)), checked=settings.check)
    plan = Plan(
        wanted,
        iters=settings.iters,
        warmup=settings.warmup,
        check=settings.check,
        corrupt=settings.corrupt,
        limit_s=settings.timeout_s,
    )
    for side in tally.sides[1:]:
        _say(log, f"preparing {side}")
        try:
            peers.prepare(side)
        except peers.Failed as error:
            _drop(tally, side, str(error), log)
    for number in range(1, settings.rounds + 1):
        for side in list(tally.sides):
            _say(log, f"round {number} of {settings.rounds}: {side}")
            try:
                tally.add(number, side, peers.run_side(side, settings.ranks, plan))
            except peers.Failed as error:
                _drop(tally, side, f"round {number}: {error}", log)
    return tally


def _drop(tally: Tally, side: str, why: str, log: TextIO) -> None:
    if side == US:
        raise EngineError(f"bireme could not be measured in {why}")
    _say(log, f"going on without {side}: {why}")
    tally.drop(side, why)


def _say(log: TextIO, text: str) -> None:
    log.write(f"# {text}\n")
    log.flush()


# ---- reports ------------------------------------------------------------------------------------


def _report(
    settings: Settings, wanted: Sequence[Case], tally: Tally
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return the tables as lines, and the same as values."""
    lines = table.preamble(settings.op, _shown(settings), tally.ranks, platform.node(), cpu_model())
    if settings.op == cases.ENGINE:
        items = engine_items(wanted, tally)
        lines += [*table.engine_table(tally.sides, items), _bounds(tally)]
        return lines, [asdict(item) for item in items]
    halves = cases.OPS[settings.op].halves
    if wanted[0].op in cases.ONE_SIDED:
        lines += _one_sided(settings, wanted, tally)
    else:
        lines += _collective(settings, wanted, tally)
    for half in halves if len(tally.sides) > 1 else ():
        rows = [
            (cases.size_bytes(case, settings.ranks),
             [tally.median(side, case.key, half) for side in tally.sides])
            for case in wanted
        ]  # fmt: skip
        name = f"{settings.op}, {_HALVES[half]}" if len(halves) > 1 else settings.op
        lines += table.comparison(name, tally.sides, rows)
    return lines, [_result(settings, case, tally) for case in wanted]


def _shown(settings: Settings) -> str:
    iters = settings.iters or "auto"
    how = f"warmup iters: {settings.warmup} iters: {iters} rounds: {settings.rounds} "
    how += f"validation: {int(settings.check)}"
    if settings.op == cases.ENGINE:
        return f"nRanks {settings.ranks} {how}"
    step = (
        f"{settings.step_bytes}(bytes)" if settings.step_bytes > 0 else f"{settings.factor}(factor)"
    )
    return (
        f"nRanks {settings.ranks} minBytes {settings.min_bytes} maxBytes {settings.max_bytes} "
        f"step: {step} {how} place: {settings.place}"
    )


def half_of(settings: Settings, case: Case, half: str, tally: Tally, side: str = US) -> Half | None:
    """Return the medians of one half of a row, ``None`` where it was not measured."""
    time_us = tally.median(side, case.key, half)
    if time_us is None:
        return None
    algbw, busbw = cases.bandwidths(case, settings.ranks, time_us)
    return Half(time_us, algbw, busbw, tally.wrong(side, case.key, half))


def _collective(settings: Settings, wanted: Sequence[Case], tally: Tally) -> list[str]:
    lines = table.collective_head()
    for case in wanted:
        redop, root = _redop_and_root(case)
        lines.append(
            table.collective_row(
                cases.size_bytes(case, settings.ranks), case.count, case.dtype, redop, root,
                half_of(settings, case, "out", tally), half_of(settings, case, "in", tally),
            )
        )  # fmt: skip
    busbw = _average(settings, wanted, tally)
    return lines + table.collective_footer(settings.op, tally.all_wrong(US), busbw)


def _redop_and_root(case: Case) -> tuple[str, int]:
    op = cases.OPS[case.op]
    return case.redop if op.reduces else "none", case.root if op.rooted else -1


def _average(settings: Settings, wanted: Sequence[Case], tally: Tally) -> float:
    found = [half_of(settings, case, half, tally) for case in wanted for half in case.halves]
    return fmean([half.busbw for half in found if half is not None] or [0.0])


def _one_sided(settings: Settings, wanted: Sequence[Case], tally: Tally) -> list[str]:
    copies = [tally.median(US, case.key, "out", "memcpy_us") for case in wanted]
    lines = [table.one_sided_head(memcpy=any(copy is not None for copy in copies))]
    for case, copy in zip(wanted, copies, strict=True):
        half = half_of(settings, case, "out", tally)
        if half is not None:
            lines.append(table.one_sided_row(cases.size_bytes(case, settings.ranks), half, copy))
    return [*lines, _bounds(tally)]


def _bounds(tally: Tally) -> str:
    return table.bounds(tally.all_wrong(US))


def engine_items(wanted: Sequence[Case], tally: Tally) -> list[Item]:
    """Return the lines of the fixed table."""
    return [_item(case, case.halves[0], tally) for case in wanted]


def _item(case: Case, half: str, tally: Tally) -> Item:
    found = {side: tally.median(side, case.key, half) for side in tally.sides}
    best = min((t for side in _MPI if (t := found.get(side)) is not None), default=None)
    memcpy_us = tally.median(US, case.key, half, "memcpy_us")
    return Item(
        case.key,
        found,
        over(best, found[US]),
        over(found.get("gloo"), found[US]),
        memcpy_us,
        over(found[US], memcpy_us),
        tally.median(US, case.key, half, "switches"),
        tally.wrong(US, case.key, half),
    )


def _result(settings: Settings, case: Case, tally: Tally) -> dict[str, Any]:
    """Return a row as nccl-tests writes it in JSON, with the peers' times beside it."""
    redop, root = _redop_and_root(case)
    row: dict[str, Any] = {
        "size": cases.size_bytes(case, settings.ranks),
        "count": case.count,
        "type": case.dtype,
        "redop": redop,
        "root": root,
    }
    for half, name in (("out", "out_of_place"), ("in", "in_place")):
        row[name] = _half_values(half_of(settings, case, half, tally))
        if row[name] is None:
            continue
        row[name]["switches"] = tally.median(US, case.key, half, "switches")
        row[name]["memcpy"] = tally.median(US, case.key, half, "memcpy_us")
        row[name]["peers"] = {
            side: {"time": time_us, "ratio": over(time_us, row[name]["time"])}
            for side in tally.sides[1:]
            if (time_us := tally.median(side, case.key, half)) is not None
        }
    return row


def _half_values(half: Half | None) -> dict[str, Any] | None:
    if half is None:
        return None
    return {
        "time": half.time_us, "alg_bw": half.algbw, "bus_bw": half.busbw, "nwrong": half.wrong
    }  # fmt: skip


def _document(
    settings: Settings, tally: Tally, results: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    wrong = tally.all_wrong(US)
    document = {
        "config": asdict(settings),
        "machine": machine(),
        "versions": tally.about,
        "missing": tally.missing,
        "lacks": tally.lacks(),
        "results": list(results),
        "out_of_bounds": {"count": wrong, "okay": wrong == 0},
        "rounds": tally.rounds,
    }
    if settings.op not in (cases.ENGINE, *cases.ONE_SIDED):
        busbw = _average(settings, cases_of(settings), tally)
        document["average_bus_bandwidth"] = {"bandwidth": busbw, "okay": True}
    return document


def _draw(path: str, settings: Settings, wanted: Sequence[Case], tally: Tally) -> None:
    title = f"bireme bench {settings.op}, {settings.ranks} ranks"
    if settings.op != cases.ENGINE and len(wanted) > 1:
        plot.curves(path, title, dict(_series(settings, wanted, tally)))
        return
    groups = {
        case.key: {side: tally.median(side, case.key, case.halves[0]) for side in tally.sides}
        for case in wanted
    }
    plot.bars(path, title, groups)


def _series(
    settings: Settings, wanted: Sequence[Case], tally: Tally
) -> Iterator[tuple[str, list[tuple[int, float]]]]:
    for side in tally.sides:
        for half in wanted[0].halves:
            points = [
                (cases.size_bytes(case, settings.ranks), time_us)
                for case in wanted
                if (time_us := tally.median(side, case.key, half)) is not None
            ]
            if points:
                yield f"{side}, {_HALVES[half]}", points
