"""Small programs run as the ranks of a job, and what each rank told."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bireme import knobs

LIMIT_S = 20.0
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

HEAD = '''
import json, os, signal, sys, threading, time
import numpy as np
import bireme as bm

RANK = int(os.environ.get("BIREME_RANK", os.environ.get("RANK", "0")))

def tell(word):
    """Write a line that the test reads."""
    with open(os.path.join(os.path.dirname(__file__), f"rank{RANK}.told"), "a") as file:
        file.write(json.dumps(word) + "\\n")

def caught(call):
    """Tell which error a call raises, with its text."""
    try:
        call()
    except BaseException as error:
        tell([type(error).__name__, str(error)])
    else:
        tell(["nothing", ""])

def ones(n=3):
    return np.ones(n)

'''


@dataclass
class Ran:
    """How a job ended: its exit code, its output, and what each rank told."""

    code: int
    stdout: str
    stderr: str
    told: list[list[Any]]

    def errors(self, name: str) -> list[tuple[int, str]]:
        """The ranks whose last word is an error of this name, with its text."""
        last = [words[-1] if words else ["nothing", ""] for words in self.told]
        return [(rank, text) for rank, (kind, text) in enumerate(last) if kind == name]


def write(folder: Path, text: str) -> Path:
    """Write a program; returns its path."""
    path = folder / "program.py"
    path.write_text(HEAD + textwrap.dedent(text), encoding="utf-8")
    return path


def told(folder: Path, size: int) -> list[list[Any]]:
    """Read what each rank told."""
    files = [folder / f"rank{rank}.told" for rank in range(size)]
    lines = [
        file.read_text(encoding="utf-8").splitlines() if file.exists() else [] for file in files
    ]
    return [[json.loads(line) for line in some] for some in lines]


def clean_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The environment without what says that this process is a rank itself."""
    ours = {knob.name for knob in knobs.KNOBS}
    kept = knobs.child_environment({})
    return {k: v for k, v in kept.items() if k not in ours and k not in FOREIGN} | (extra or {})


def launch(folder: Path, size: int, text: str, **environment: str) -> Ran:
    """Run a program on ``size`` ranks under ``bireme run``, for 20 s at most."""
    path = write(folder, text)
    command = [sys.executable, "-m", "bireme.cli", "run", "-n", str(size), str(path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=clean_environment(environment),
    )
    return Ran(done.returncode, done.stdout, done.stderr, told(folder, size))
