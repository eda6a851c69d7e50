"""`bireme run` from outside: output, exit codes, signals, and nothing left behind."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from bireme.bootstrap import discover, launchers
from bireme.cli import main
from bireme.launch import run

LIMIT_S = 30.0
CLI = [sys.executable, "-m", "bireme.cli"]
MODULE = sys.modules["bireme.launch.run"]
NOT_INHERITED = (*discover._OURS, *launchers.VARIABLES, "OMP_NUM_THREADS")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NOT_INHERITED:
        monkeypatch.delenv(name, raising=False)


def cli(*words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [*CLI, *map(str, words)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=False, **options
    )


def launch(size: int, *words: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return cli("run", "-n", size, *words, **options)


def script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text("import os, sys, time, signal\nrank = int(os.environ['BIREME_RANK'])\n" + text)
    return path


def shell(text: str) -> list[str]:
    return ["--", "sh", "-c", text]


def gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return True
    return stat.rpartition(") ")[2].startswith("Z")


def until(condition: Any) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def report(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if not line.startswith("[")]


@contextlib.contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A launcher that runs on, with a default Ctrl-C also where ours is ignored."""
    process = subprocess.Popen(
        [*CLI, "run", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        with process:
            yield process
            process.wait(LIMIT_S)
    finally:
        process.kill()


def read_lines(process: subprocess.Popen[str], count: int) -> list[str]:
    assert process.stdout is not None
    return sorted(process.stdout.readline().rstrip("\n") for _ in range(count))


# ---- output and exit codes


def test_output_has_the_rank_in_front(tmp_path: Path) -> None:
    code = (
        "import bireme.bootstrap\n"
        "end = bireme.bootstrap.join(20.0)\n"
        "told = end.all_gather('t', {'rank': rank}, timeout_s=20.0)\n"
        "print('hello', [v['rank'] for v, _ in told], end.origin, os.environ['OMP_NUM_THREADS'])\n"
        "sys.stderr.write('no end of line')\n"
    )
    ended = launch(2, script(tmp_path, code))
    assert ended.returncode == 0, ended.stderr
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(ended.stdout.splitlines()) == [
        f"[{rank}] hello [0, 1] launcher {threads}" for rank in range(2)
    ]
    assert sorted(ended.stderr.splitlines()) == ["[0] no end of line", "[1] no end of line"]


def test_binary_output_and_progress_lines() -> None:
    text = r"printf '\377\000\n'; printf '10%%\r20%%\r\n'"
    command = [*CLI, "run", "-n", "1", *shell(text)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    assert ended.stdout == b"[0] \xff\x00\n[0] 10%\r[0] 20%\r\n"


def test_what_the_user_has_set_stays() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "5", "RANK": "1"}
    ended = launch(1, *shell("echo $OMP_NUM_THREADS.$RANK"), env=environment)
    assert ended.stdout == "[0] 5.\n"


def test_our_input_goes_to_rank_0() -> None:
    ended = launch(2, *shell('read -r line; echo "<$line>"'), input="hello\n")
    assert sorted(ended.stdout.splitlines()) == ["[0] <hello>", "[1] <>"]


def test_a_rank_that_ends_early_and_well_is_no_failure() -> None:
    ended = launch(2, *shell("[ $BIREME_RANK = 0 ] || sleep 0.1; echo $BIREME_RANK"))
    assert ended.returncode == 0
    assert ended.stdout == "[0] 0\n[1] 1\n"
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("text", "status", "words"),
    [
        ("exit 3", 3, "exit code 3"),
        ("kill -9 $$", 137, "killed by signal 9 (SIGKILL)"),
        ("kill -11 $$", 139, "killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_first_failure_is_on_top(
    text: str, status: int, words: str, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(MODULE, "_NOTICE_S", 0.2)
    rest = "[ $BIREME_RANK = 0 ] || sleep 60"
    assert run(["sh", "-c", f"[ $BIREME_RANK = 1 ] && {text}; {rest}"], 3) == status
    lines = report(capfd.readouterr().err)
    assert lines == [
        f"bireme run: rank 1 failed first: {words}",
        "bireme run: rank 0: exit code 0",
        "bireme run: rank 2: killed by signal 15 (SIGTERM), told to end with SIGTERM",
    ]


def test_the_culprit_is_named_though_its_victim_ends_first(tmp_path: Path) -> None:
    code = (
        "from bireme.bootstrap import join\n"
        "from bireme.errors import PeerLost\n"
        "end = join(20.0)\n"
        "if rank == 1:\n"
        "    try:\n        {}['key']\n"
        "    except KeyError as error:\n"
        "        end.fail('it has a bug')\n"
        "        time.sleep(0.5)\n"
        "        raise ValueError('the reason') from error\n"
        "end.all_gather('t', {}, timeout_s=20.0)\n"
    )
    ended = launch(2, script(tmp_path, code))
    assert ended.returncode == 1
    lines = report(ended.stderr)
    assert lines[0] == "bireme run: rank 1 failed first: exit code 1"
    assert lines[1] == "  Traceback (most recent call last):"
    assert "  KeyError: 'key'" in lines
    assert lines[-2] == "  ValueError: the reason"
    assert re.match(
        r"bireme run: rank 0: exit code 1, bireme\.errors\.PeerLost: rank 0 in bootstrap step 't': "
        "rank 1 has failed: it has a bug",
        lines[-1],
    )


def test_the_reader_of_our_output_may_leave() -> None:
    with running("-n", 1, *shell("while echo x; do :; done")) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr is not None
        assert "rank 0 failed first" in process.stderr.read()


def test_a_stderr_without_a_reader_costs_the_report_only() -> None:
    with running("-n", 1, *shell("sleep 0.1; exit 7")) as process:
        assert process.stderr is not None
        process.stderr.close()
    assert process.returncode == 7


# ---- the command line


def test_a_module_gets_its_arguments_untouched(tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text("import sys; print(sys.argv[1:])")
    ended = launch(1, "-m", "mod", "-n", "3", "--", "--timeout=x", cwd=tmp_path)
    assert ended.stdout == "[0] ['-n', '3', '--', '--timeout=x']\n", ended.stderr


def test_a_script_gets_its_arguments_untouched(tmp_path: Path) -> None:
    path = script(tmp_path, "print(sys.argv[1:])")
    ended = cli("run", "--ranks=1", "--timeout", "60", path, "-n", "--help", "--", "a b")
    assert ended.stdout == "[0] ['-n', '--help', '--', 'a b']\n", ended.stderr


def test_a_command_gets_its_arguments_untouched() -> None:
    ended = cli("run", "-n1", "--", "echo", "-n", "--", "a")
    assert ended.stdout == "[0] -- a\n", ended.stderr


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["script.py"], "say how many ranks: bireme run -n 4 train.py"),
        (["-n", "2"], "say what to run"),
        (["-n", "2", ""], "say what to run"),
        (["-n", "2", "-m"], "expected a module after -m"),
        (["-n", "2", "--"], "expected a command after --"),
        (["-n", "2", "no-such-file.py"], "the script 'no-such-file.py' does not exist"),
        (["-n", "2", "--", "no-such-command"], "the command 'no-such-command' does not exist"),
        (["-n", "0", "script.py"], "0 is not in the range x>=1"),
        (["-n", "2", "--timeout", "0", "script.py"], "is not in the range x>0"),
        (["-n", "2", "--bind", "socket", "script.py"], "'socket' is not one of 'none', 'core'"),
        (["-n", "2", "--log-dir"], "requires an argument"),
        (["-n", "2", "--unknown", "script.py"], "No such option"),
        (["-n"], "requires an argument"),
    ],
)
def test_wrong_command_lines_start_nothing(words: list[str], reason: str) -> None:
    ended = CliRunner().invoke(main, ["run", *words])
    assert ended.exit_code == 2
    assert reason in ended.stderr
    assert ended.stdout == ""


def test_a_command_that_the_kernel_refuses(tmp_path: Path) -> None:
    path = tmp_path / "broken"
    path.write_bytes(b"\x7fELF")
    path.chmod(0o755)
    ended = launch(2, "--", path)
    assert ended.returncode == 1
    assert "cannot start" in ended.stderr
    assert "Exec format error" in ended.stderr


def test_help_and_version() -> None:
    ended = cli("run", "--help")
    usage = "run -n N [OPTIONS] (SCRIPT | -m MODULE | -- COMMAND) [ARGS]..."
    assert usage in " ".join(ended.stdout.split())
    version = cli("--version")
    assert version.stdout.startswith("bireme ")
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        assert version.stdout == f"bireme {importlib.metadata.version('bireme')}\n"


def test_the_version_of_a_checkout() -> None:
    code = (
        "import importlib.metadata as m, sys\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        "from bireme.cli import main\n"
        "main(['--version'])\n"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.stdout == "bireme (not installed)\n", ended.stderr


# ---- signals and deadlines


def test_ctrl_c_reaches_the_ranks(tmp_path: Path) -> None:
    code = "try:\n    print('ready')\n    time.sleep(60)\nfinally:\n    print('cleaned up')\n"
    with running("-n", 2, script(tmp_path, code)) as process:
        assert read_lines(process, 2) == ["[0] ready", "[1] ready"]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert sorted(out.splitlines()) == ["[0] cleaned up", "[1] cleaned up"]
    assert report(err) == [
        "bireme run: stopped by SIGINT",
        "bireme run: rank 0: killed by signal 2 (SIGINT), KeyboardInterrupt",
        "bireme run: rank 1: killed by signal 2 (SIGINT), KeyboardInterrupt",
    ]


def test_a_second_ctrl_c_ends_stubborn_ranks() -> None:
    with running("-n", 2, *shell("trap '' INT; echo ready; sleep 60; sleep 60")) as process:
        read_lines(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130
    assert report(err) == [
        "bireme run: stopped by SIGINT",
        "bireme run: rank 0: killed by signal 9 (SIGKILL), told to end with SIGKILL",
        "bireme run: rank 1: killed by signal 9 (SIGKILL), told to end with SIGKILL",
    ]


def test_a_termination_may_be_answered_with_a_clean_end() -> None:
    text = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.01; done"
    with running("-n", 2, *shell(text)) as process:
        read_lines(process, 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]
    assert report(err)[0] == "bireme run: stopped by SIGTERM"


@pytest.mark.parametrize("name", ["USR1", "USR2", "HUP"])
def test_other_signals_reach_the_ranks_only(name: str) -> None:
    text = f"trap 'echo got {name}; exit 0' {name}; sleep 60 & echo ready; wait"
    with running("-n", 2, *shell(text)) as process:
        read_lines(process, 2)
        process.send_signal(getattr(signal, f"SIG{name}"))
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert sorted(out.splitlines()) == [f"[0] got {name}", f"[1] got {name}"]
    assert err == ""


def test_a_hangup_that_we_ignore_stays_ignored() -> None:
    command = ["nohup", *CLI, "run", "-n", "1", *shell("echo ready; sleep 0.2; echo done")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        read_lines(process, 1)
        process.send_signal(signal.SIGHUP)
        assert process.communicate(timeout=LIMIT_S)[0] == "[0] done\n"
    assert process.returncode == 0


def test_the_timeout_names_who_still_ran() -> None:
    text = "[ $BIREME_RANK = 1 ] || sleep 60"
    ended = cli("run", "-n", "3", "--timeout", "0.4", *shell(text))
    assert ended.returncode == 124
    assert report(ended.stderr) == [
        "bireme run: timeout after 0.4 s; still running: rank 0, 2",
        "bireme run: rank 0: killed by signal 15 (SIGTERM), told to end with SIGTERM",
        "bireme run: rank 1: exit code 0",
        "bireme run: rank 2: killed by signal 15 (SIGTERM), told to end with SIGTERM",
    ]


def test_a_killed_launcher_leaves_no_orphan() -> None:
    text = "trap '' TERM HUP; sleep 60 & echo $$ $!; wait"
    with running("-n", 2, *shell(text)) as process:
        pids = [int(pid) for line in read_lines(process, 2) for pid in line.split()[1:]]
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) == 3  # the ranks and the watchdog
        process.kill()
        until(lambda: all(gone(pid) for pid in [*pids, *map(int, children)]))
    assert process.returncode == -signal.SIGKILL


def test_a_finished_launcher_leaves_no_process() -> None:
    ended = launch(2, *shell("sleep 60 & echo $! $PPID"))
    pids = [int(pid) for line in ended.stdout.splitlines() for pid in line.split()[1:]]
    assert len(pids) == 4
    assert all(gone(pid) for pid in pids)


# ---- inside one process, with shorter times


def waits(text: str) -> list[str]:
    return ["sh", "-c", text]


def test_ranks_that_do_not_notice_a_failure_are_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(MODULE, "_NOTICE_S", 0.1)
    monkeypatch.setattr(MODULE, "_TERM_S", 0.1)
    text = "[ $BIREME_RANK = 1 ] && exit 3; trap '' TERM; while :; do sleep 0.02; done"
    assert run(waits(text), 2, timeout_s=60.0) == 3
    assert report(capfd.readouterr().err) == [
        "bireme run: rank 1 failed first: exit code 3",
        "bireme run: rank 0: killed by signal 9 (SIGKILL), told to end with SIGKILL",
    ]


def test_the_grace_after_a_signal_ends(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setattr(MODULE, "_GRACE_S", 0.2)
    before = signal.getsignal(signal.SIGTERM)
    text = "trap '' TERM; kill -TERM $PPID; while :; do sleep 0.02; done"
    assert run(waits(text), 1) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert report(capfd.readouterr().err)[0] == "bireme run: stopped by SIGTERM"


def test_stubborn_ranks_are_killed_after_the_timeout(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(MODULE, "_TIMEOUT_GRACE_S", 0.1)
    assert run(waits("trap '' TERM; while :; do sleep 0.02; done"), 1, timeout_s=0.2) == 124
    assert report(capfd.readouterr().err) == [
        "bireme run: timeout after 0.2 s; still running: rank 0",
        "bireme run: rank 0: killed by signal 9 (SIGKILL), told to end with SIGKILL",
    ]


def test_a_timeout_while_a_failure_is_handled_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setattr(MODULE, "_NOTICE_S", 0.3)
    assert run(waits("[ $BIREME_RANK = 1 ] && exit 3; sleep 60"), 2, timeout_s=0.2) == 3
    assert "rank 1 failed first" in capfd.readouterr().err


def test_outside_the_main_thread_there_are_no_signals(capfd: Any) -> None:
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(run(waits("echo hi"), 2)))
    thread.start()
    thread.join(LIMIT_S)
    assert codes == [0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] hi", "[1] hi"]


def test_an_error_of_our_own_ends_the_ranks(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("a bug in the launcher")

    monkeypatch.setattr(MODULE._Job, "_loop", broken)
    with pytest.raises(RuntimeError, match="a bug in the launcher"):
        run(waits("sleep 60"), 2)
    assert capfd.readouterr().err == ""


def test_how_a_rank_ended_is_written_into_the_control_segment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    notes: list[tuple[bytes, int, int, int]] = []

    class Core:
        @staticmethod
        def note_exit(fd: int, rank: int, kind: int, value: int) -> None:
            notes.append((os.pread(fd, 20, 0), rank, kind, value))

    monkeypatch.setitem(sys.modules, "bireme._core", Core)
    code = (
        "from bireme.bootstrap import join\n"
        "fd = os.memfd_create('control')\n"
        "os.write(fd, b'of rank %d' % rank)\n"
        "end = join(20.0)\n"
        "end.all_gather('control', {}, [fd] if rank == 0 else [], timeout_s=20.0)\n"
        "end.all_gather('done', {}, timeout_s=20.0)\n"
        "if rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "try:\n    end.all_gather('never', {}, timeout_s=20.0)\n"
        "except ConnectionError:\n    time.sleep(0.2)\n"
        "sys.exit(4)\n"
    )
    assert run([sys.executable, str(script(tmp_path, code))], 2) == 137
    assert notes == [(b"of rank 0", 1, 2, 9), (b"of rank 0", 0, 1, 4)]
