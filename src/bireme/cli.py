"""The `bireme` command."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click

__all__ = ["main"]

# Commands import what they need inside, so that `bireme --help` is fast.

_COUNT = click.IntRange(min=0)


def _show_version(context: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        import importlib.metadata

        try:
            version = importlib.metadata.version("bireme")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed)"
        click.echo(f"bireme {version}")
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Collectives and one-sided communication for distributed training, in one world."""


class _RunCommand(click.Command):
    """A command whose own options end where the user's program begins."""

    _WITH_VALUE = ("-n", "--ranks", "--timeout", "--bind", "--log-dir")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the user's program and its arguments from click."""
        end = 0
        while end < len(args) and args[end].startswith("-") and args[end] not in ("-m", "--"):
            end += 2 if args[end] in self._WITH_VALUE else 1
        ctx.meta["bireme.program"] = args[end:]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage line."""
        return ["-n N [OPTIONS] (SCRIPT | -m MODULE | -- COMMAND) [ARGS]..."]


@main.command("run", cls=_RunCommand)
@click.option("-n", "--ranks", "size", type=click.IntRange(min=1), help="Number of ranks.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End all ranks after this time, with exit code 124.",
)
@click.option(
    "--bind",
    type=click.Choice(["none", "core"]),
    default="none",
    help="core: give each rank its share of the cores.",
)
@click.option("--log-dir", metavar="DIR", help="Write the output also to DIR/rank-R.log.")
@click.pass_context
def run_command(
    ctx: click.Context,
    size: int | None,
    timeout_s: float | None,
    bind: str,
    log_dir: str | None,
) -> None:
    """Run a program as N ranks on this host.

    Every rank runs the same SCRIPT (a Python file), MODULE or, after --, any COMMAND. Its output
    has the rank in front. The exit code is that of the rank that failed first.
    """
    if size is None:
        raise click.UsageError("say how many ranks: bireme run -n 4 train.py")
    argv = _program(ctx.meta["bireme.program"])
    from bireme.errors import BiremeError
    from bireme.launch import run

    try:
        sys.exit(run(argv, size, timeout_s, bind=bind == "core", log_dir=log_dir))
    except BiremeError as error:
        raise click.ClickException(str(error)) from None


@main.command("bench", context_settings={"show_default": True})
@click.argument("op")
@click.option("-n", "--ranks", default=2, type=click.IntRange(min=1), help="Number of ranks.")
@click.option("-b", "--min-bytes", default="8", help="First size, such as 8 or 64K.")
@click.option("-e", "--max-bytes", default="64M", help="Largest size.")
@click.option(
    "-f", "--factor", default=4, type=_COUNT, help="Each size is so many times the one before."
)
@click.option("-i", "--step-bytes", default="0", help="Or so many bytes more than it.")
@click.option(
    "--iters", default=0, type=_COUNT, help="Calls of one measurement; 0: about 0.2 s, at least 5."
)
@click.option("--warmup", default=5, type=_COUNT, help="Calls before a measurement.")
@click.option("-d", "--dtype", default="float", help="Element type, as nccl-tests names it.")
@click.option("-o", "--op", "redop", default="sum", help="Reduction.")
@click.option("-r", "--root", default=0, help="Root.")
@click.option("--place", default="private", help="private or heap: where the buffers lie.")
@click.option("--rounds", default=3, type=click.IntRange(min=1), help="Starts of every side.")
@click.option("--peers", metavar="NAMES", help="Compare with any of gloo,mpich,openmpi.")
@click.option("--check/--no-check", default=True, help="Compare values with NumPy's first.")
@click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Limit of one side in one round.",
)
@click.option("--json", metavar="FILE", help="Write everything that was measured.")
@click.option("--plot", metavar="FILE", help="Draw the times (needs matplotlib).")
@click.option("--corrupt", is_flag=True, hidden=True, help="Spoil a value, to test the check.")
def bench_command(**options: Any) -> None:
    """Measure OP on N ranks of this host, alone or beside other libraries.

    OP is all_reduce, reduce, broadcast, all_gather, reduce_scatter, gather, scatter, all_to_all,
    sendrecv (a ring), barrier; put, get, atomic (fetch-add), put_signal (ping-pong); or engine, a
    fixed list. Tables are laid out as those of nccl-tests. The exit code is 1 if a value is wrong.
    """
    from bireme import knobs
    from bireme.bench.run import Settings, bench
    from bireme.errors import BiremeError

    options["command"] = shlex.join(["bireme", *sys.argv[1:]])
    try:
        for name in ("min_bytes", "max_bytes", "step_bytes"):
            options[name] = knobs.parse_bytes(options[name])
        names = (options.pop("peers") or "").split(",")
        options["peers"] = tuple(name for name in names if name)
        sys.exit(bench(Settings(**options), sys.stdout, sys.stderr))
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (BiremeError, OSError) as error:
        raise click.ClickException(str(error)) from None


def _program(words: Sequence[str]) -> list[str]:
    """Return the command line of a rank, checked before anything starts."""
    first, *rest = words or [""]
    if first not in ("-m", "--"):
        if not first:
            raise click.UsageError("say what to run: bireme run -n 4 train.py")
        if not os.path.exists(first):
            raise click.UsageError(f"the script {first!r} does not exist (a command goes after --)")
        return [sys.executable, *words]
    if not rest:
        raise click.UsageError(
            f"expected {'a module' if first == '-m' else 'a command'} after {first}"
        )
    if first == "-m":
        return [sys.executable, *words]
    if shutil.which(rest[0]) is None:
        raise click.UsageError(f"the command {rest[0]!r} does not exist or is not executable")
    return list(rest)


if __name__ == "__main__":
    main()
