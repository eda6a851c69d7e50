"""The `bireme` command."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import click

__all__ = ["main"]

# Commands import what they need inside, so that `bireme --help` is fast.


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

    _WITH_VALUE = ("-n", "--ranks", "--timeout")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the user's program and its arguments from click."""
        end = 0
        while end < len(args) and args[end].startswith("-") and args[end] not in ("-m", "--"):
            end += 2 if args[end] in self._WITH_VALUE else 1
        ctx.meta["bireme.program"] = args[end:]
        return super().parse_args(ctx, args[:end])

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return the usage line."""
        return ["-n N [--timeout S] (SCRIPT | -m MODULE | -- COMMAND) [ARGS]..."]


@main.command("run", cls=_RunCommand)
@click.option("-n", "--ranks", "size", type=click.IntRange(min=1), help="Number of ranks.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End all ranks after this time, with exit code 124.",
)
@click.pass_context
def run_command(ctx: click.Context, size: int | None, timeout_s: float | None) -> None:
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
        sys.exit(run(argv, size, timeout_s))
    except BiremeError as error:
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
