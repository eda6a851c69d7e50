"""`bireme bench` from outside, on real ranks. Times are whatever they are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bireme.bench import cases, peers
from bireme.bench.worker import Plan

LIMIT_S = 120.0
QUICK = ("--iters", 3, "--rounds", 1)


def bench(*words: object, status: int = 0) -> str:
    command = [sys.executable, "-m", "bireme.cli", "bench", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines() if not line.startswith("#")]


def test_all_reduce(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sizes = ("-n", 2, "-b", 8, "-e", "64K", "-f", 8)
    found = rows(bench("all_reduce", *sizes, *QUICK, "--json", path))
    assert [row[0] for row in found] == ["8", "64", "512", "4096", "32768"]
    for row in found:
        assert len(row) == 13
        assert row[2:5] == ["float", "sum", "-1"]
        assert (row[8], row[12]) == ("0", "0")
    written = json.loads(path.read_text())
    assert [row["size"] for row in written["results"]] == [8, 64, 512, 4096, 32768]
    assert all(row[half]["time"] > 0 for row in written["results"]
               for half in ("out_of_place", "in_place"))  # fmt: skip
    assert [r["iters"] for r in written["rounds"][0]["results"]] == [3] * 10
    assert written["versions"]["bireme"]["engine"] == "shm"
    assert written["config"]["command"].startswith("bireme bench all_reduce -n 2")


def test_wrong_values_give_exit_status_1() -> None:
    text = bench("all_reduce", "-b", 8, "-e", 8, *QUICK, "--corrupt", status=1)
    assert rows(text)[0][8] == "1"
    assert "# Out of bounds values : 2 FAILED" in text


def measured(side: str, ranks: int, place: str = "private", **options: Any) -> list[dict[str, Any]]:
    """The results of all operations at three sizes, each value checked by the ranks."""
    wanted = []
    for op, kind in cases.OPS.items():
        if ranks >= kind.least_ranks:
            root = ranks - 1
            wanted += cases.op_cases(op, [8, 4096, 300_000], "float", "sum", root, place, ranks)
    plan = Plan(wanted, iters=2, warmup=1, limit_s=60.0, **options)
    return peers.run_side(side, ranks, plan).results


@pytest.mark.parametrize("place", ["private", "heap"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_operation(ranks: int, place: str) -> None:
    found = measured("bireme", ranks, place)
    assert [row for row in found if row.get("wrong") != 0] == []
    copied = {row["key"].split()[0] for row in found if "memcpy_us" in row}
    assert copied == ({"put", "get"} if ranks > 1 else set())


def test_every_operation_of_gloo() -> None:
    pytest.importorskip("torch", reason="torch is not installed: Gloo comes with it")
    found = measured("gloo", 2)
    assert [row for row in found if row.get("wrong", 0) != 0] == []
    lacks = {(row["key"].split()[0], row["half"]) for row in found if "lacks" in row}
    apart = {"all_gather", "reduce_scatter", "gather", "scatter", "all_to_all"}
    assert lacks == (
        {("all_reduce", "out"), ("reduce", "out")}
        | {(op, "in") for op in apart}
        | {(op, "out") for op in ("put", "get", "atomic")}
    )


@pytest.mark.parametrize("side", ["mpich", "openmpi"])
def test_every_operation_of_mpi(side: str) -> None:
    if not (peers.folder_of(side) / ".ready").exists():
        pytest.skip(f"{side} is not there: `bireme bench barrier --peers {side}` installs it")
    peers.prepare(side)
    found = measured(side, 2)
    assert [row for row in found if row.get("wrong") != 0] == []


def test_beside_gloo() -> None:
    pytest.importorskip("torch", reason="torch is not installed: Gloo comes with it")
    text = bench("all_reduce", "-b", 8, "-e", 64, "-f", 8, *QUICK, "--peers", "gloo")
    head = text.index("# all_reduce, in place: times")
    assert [row[0] for row in rows(text[head:])] == ["8", "64"]
    assert all(row[3].endswith("x") for row in rows(text[head:]))


def test_a_rank_that_fails_is_named() -> None:
    put = cases.op_cases("put", [8], "float", "sum", 0, "private", 2)
    with pytest.raises(peers.Failed, match=r"exit code 1: .*Error: .*rank"):
        peers.run_side("bireme", 1, Plan(put, iters=2, limit_s=60.0))  # to a rank 1 that is not
