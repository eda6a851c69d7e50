"""`bireme run` from outside: cores, files, much output, and two jobs side by side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bireme.bootstrap import discover, launchers
from bireme.errors import UsageError
from bireme.launch import run

LIMIT_S = 60.0
CLI = [sys.executable, "-m", "bireme.cli", "run"]
MODULE = sys.modules["bireme.launch.run"]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*discover._OURS, *launchers.VARIABLES, "BIREME_LOG"):
        monkeypatch.delenv(name, raising=False)


def launch(*words: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [*CLI, *map(str, words)]
    return subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, **options)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text("import os, sys, time\nrank = int(os.environ['BIREME_RANK'])\n" + text)
    return path


# ---- cores


def bound(folder: Path, size: int, *words: str) -> subprocess.CompletedProcess[bytes]:
    return launch("-n", size, *words, script(folder, "print(sorted(os.sched_getaffinity(0)))\n"))


def test_without_binding_every_rank_has_all_cores(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for words in ((), ("--bind", "none")):
        ended = bound(tmp_path, 2, *words)
        assert sorted(ended.stdout.decode().splitlines()) == [f"[{r}] {cores}" for r in range(2)]
        assert ended.stderr == b""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_gets_its_share_before_it_starts(size: int, tmp_path: Path) -> None:
    shares = MODULE.binding.shares(os.sched_getaffinity(0), size)
    ended = bound(tmp_path, size, "--bind", "core")
    lines = sorted(ended.stdout.decode().splitlines())
    assert lines == [f"[{rank}] {share}" for rank, share in enumerate(shares)]
    assert ended.stderr == b""


def test_the_cores_are_said_once_where_decisions_are_shown(tmp_path: Path) -> None:
    shares = MODULE.binding.shares(os.sched_getaffinity(0), 2)
    path = script(tmp_path, "")
    ended = launch("-n", 2, "--bind=core", path, env={**os.environ, "BIREME_LOG": "info"})
    text = f"bireme run: bound to cores: {MODULE.binding.describe(shares)}\n"
    assert ended.stderr.decode() == text


def test_a_level_that_does_not_exist_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIREME_LOG", "loud")
    with pytest.raises(UsageError, match=r"BIREME_LOG: expected one of .*'loud'"):
        run(["true"], 1, bind=True)


# ---- files


def test_output_goes_to_the_terminal_and_to_files(tmp_path: Path) -> None:
    text = "os.write(1, b'out %d\\r\\n' % rank); os.write(2, b'err\\xff\\n10%\\r20%\\nend')\n"
    folder = tmp_path / "logs"
    ended = launch("-n", 2, "--log-dir", folder, script(tmp_path, text))
    assert ended.returncode == 0
    assert sorted(ended.stdout.splitlines()) == [b"[0] out 0", b"[1] out 1"]
    assert ended.stderr.count(b"] end\n") == 2
    assert sorted(path.name for path in folder.iterdir()) == ["rank-0.log", "rank-1.log"]
    for rank in range(2):
        lines = (folder / f"rank-{rank}.log").read_bytes().splitlines(keepends=True)
        out = b"out %d\r\n" % rank
        assert out in lines
        lines.remove(out)
        assert lines == [b"err\xff\n", b"10%\r", b"20%\n", b"end\n"]


def test_a_folder_that_cannot_be_used_starts_nothing(tmp_path: Path) -> None:
    ended = launch("-n", 2, "--log-dir", tmp_path / "script.py", script(tmp_path, "print('ran')"))
    assert ended.returncode == 1
    assert b"--log-dir: cannot use" in ended.stderr
    assert ended.stdout == b""


def test_what_a_failed_rank_wrote_is_in_its_file(tmp_path: Path) -> None:
    path = script(tmp_path, "raise ValueError('the reason')\n")
    ended = launch("-n", 1, f"--log-dir={tmp_path}", path)
    assert ended.returncode == 1
    text = (tmp_path / "rank-0.log").read_text()
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("ValueError: the reason\n")


# ---- much output


def test_a_hundred_thousand_lines_are_complete_and_in_order(tmp_path: Path) -> None:
    count = 100_000
    text = (
        f"for start in range(0, {count}, 1000):\n"
        "    text = ''.join(f'{i} of {rank}\\n' for i in range(start, start + 1000))\n"
        "    sys.stdout.write(text)\n"
        f"for i in range({count}) if rank == 0 else ():\n"
        "    os.write(2, b'%d\\n' % i)\n"
    )
    ended = launch("-n", 2, "--log-dir", tmp_path / "logs", script(tmp_path, text))
    assert ended.returncode == 0
    lines = ended.stdout.decode().splitlines()
    assert len(lines) == 2 * count
    for rank in range(2):
        mine = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [f"[{rank}] {i} of {rank}" for i in range(count)]
    assert ended.stderr.decode().splitlines() == [f"[0] {i}" for i in range(count)]
    logged = (tmp_path / "logs" / "rank-1.log").read_text().splitlines()
    assert logged == [f"{i} of 1" for i in range(count)]
    logged = (tmp_path / "logs" / "rank-0.log").read_text().splitlines()
    assert [line for line in logged if "of" in line] == [f"{i} of 0" for i in range(count)]
    assert [line for line in logged if "of" not in line] == [str(i) for i in range(count)]


# ---- two jobs in one process group

MEET = (
    "import bireme.bootstrap\n"
    "end = bireme.bootstrap.join(30.0)\n"
    "def together(tag):\n"
    "    parts = end.all_gather(tag, {'job': sys.argv[1]}, timeout_s=30.0)\n"
    "    return ''.join(value['job'] for value, _ in parts)\n"
    "print('met', together('first'), flush=True)\n"
    "if sys.argv[1] == 'a':\n"
    "    time.sleep(60)\n"
    "sys.stdin.readline() if rank == 0 else None\n"
    "print('still', together('second'))\n"
)


def start(words: Sequence[object], group: int | None = None) -> subprocess.Popen[str]:
    """A launcher in our process group, or another one (0: a new one), with a default Ctrl-C."""

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if group is not None:
            os.setpgid(0, group)

    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*CLI, "-n", "2", *map(str, words)],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=prepare,
    )


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().rstrip("\n") for _ in range(count))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_one_job_does_not_disturb_the_other(number: int, tmp_path: Path) -> None:
    path = script(tmp_path, MEET)
    with start([path, "a"]) as one, start([path, "b"]) as two:
        try:
            assert os.getpgid(one.pid) == os.getpgid(two.pid) == os.getpgid(0)
            assert read_lines(one, 2) == ["[0] met aa", "[1] met aa"]
            assert read_lines(two, 2) == ["[0] met bb", "[1] met bb"]
            one.send_signal(number)
            out, _ = one.communicate(timeout=LIMIT_S)
            assert out == ""
            assert one.returncode != 0
            out, err = two.communicate("go on\n", timeout=LIMIT_S)
            assert sorted(out.splitlines()) == ["[0] still bb", "[1] still bb"]
            assert (two.returncode, err) == (0, "")
        finally:
            one.kill()
            two.kill()


def test_a_ctrl_c_ends_both_jobs_of_a_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, MEET)
    with start([path, "a"], 0) as one, start([path, "a"], one.pid) as two:
        try:
            for process in (one, two):
                assert read_lines(process, 2) == ["[0] met aa", "[1] met aa"]
            os.killpg(one.pid, signal.SIGINT)
            for process in (one, two):
                _, err = process.communicate(timeout=LIMIT_S)
                assert process.returncode == 130
                assert err.count("bireme run: stopped by SIGINT\n") == 1
                assert err.count("killed by signal 2 (SIGINT), KeyboardInterrupt\n") == 2
        finally:
            one.kill()
            two.kill()


# ---- the deadline


def test_the_timeout_gives_its_code_whatever_the_ranks_answer() -> None:
    text = "trap 'exit 0' TERM; [ $BIREME_RANK = 0 ] || trap '' TERM; while :; do sleep 0.02; done"
    ended = launch("-n", 2, "--timeout", 2, "--", "sh", "-c", text)
    assert ended.returncode == 124
    assert ended.stderr.decode().splitlines() == [
        "bireme run: timeout after 2 s; still running: rank 0, 1",
        "bireme run: rank 0: exit code 0",
        "bireme run: rank 1: killed by signal 9 (SIGKILL), told to end with SIGKILL",
    ]


def test_a_job_that_ends_in_time_has_its_own_code() -> None:
    assert launch("-n", 2, "--timeout", 60, "--", "true").returncode == 0
    assert launch("-n", 1, "--timeout", 60, "--", "sh", "-c", "exit 5").returncode == 5
