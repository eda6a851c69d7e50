"""Every command that the documents show is run by something, so that it works as written."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Command -> what runs it: a test, or a file in which the same line stands.
COMMANDS = {
    "make venv": "tests/unit/test_docs.py::test_the_targets_of_make",
    "make demo": "tests/unit/test_docs.py::test_the_targets_of_make",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make docs": "tests/unit/test_docs.py::test_the_targets_of_make",
    "bireme run -n 2 examples/01_put.py": "tests/world/test_examples.py::test_put",
    "bireme run -n 4 examples/train_lm.py": (
        "tests/world/test_examples.py::test_demo_learns_and_shows_its_flows"
    ),
    "bireme run -n 2 examples/02_nvshmem_hello.py": (
        "tests/world/test_examples.py::test_nvshmem_hello"
    ),
    "python -m pytest -q tests/unit": "tests/unit/test_docs.py::test_the_targets_of_make",
}
FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
STARTS = ("bireme ", "python ", "make ")


def documents() -> list[Path]:
    top = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
    return [path for path in [*top, *sorted((ROOT / "docs").rglob("*.md"))] if path.exists()]


def commands(text: str) -> Iterator[str]:
    """The command lines of the shell blocks, without prompt and comment."""
    for block in FENCE.finditer(text):
        if block["language"] in {"bash", "console", "sh", "shell"}:
            for line in block["body"].replace("\\\n", " ").splitlines():
                command = re.sub(r"\s+", " ", line.strip().removeprefix("$ ").split("  #")[0])
                if command.startswith(STARTS):
                    yield command.strip()


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_the_commands_of_a_document_are_known(path: Path) -> None:
    unknown = [c for c in commands(path.read_text(encoding="utf-8")) if c not in COMMANDS]
    assert not unknown, f"add what runs them to COMMANDS: {unknown}"


@pytest.mark.parametrize(("command", "runner"), COMMANDS.items())
def test_what_runs_a_command_exists(command: str, runner: str) -> None:
    file, _, name = runner.partition("::")
    text = (ROOT / file).read_text(encoding="utf-8")
    assert f"def {name}(" in text if name else command in text.splitlines()


def test_the_layout_names_every_module() -> None:
    text = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    package = ROOT / "src" / "bireme"
    modules = {path.name for path in package.glob("*.py")}
    modules |= {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    named = set(re.findall(r"^ {8}(\S+) ", text, re.MULTILINE))
    assert sorted(modules - named) == []


def test_the_reader_of_documents() -> None:
    text = (
        "```bash\n$ make venv   # first\nls\nbireme run \\\n    -n 2 a.py\n```\n"
        "```python\npython x\n```\n"
    )
    assert list(commands(text)) == ["make venv", "bireme run -n 2 a.py"]


@pytest.mark.parametrize(
    ("target", "line"),
    [
        ("venv", "python -m pip install"),
        ("demo", "bireme run -n 4 examples/train_lm.py"),
        ("test", "python -m pytest -q"),
        ("docs", "> docs/knobs.md"),
    ],
)
def test_the_targets_of_make(target: str, line: str) -> None:
    # -n says what would be done, -W that the set-up is out of date.
    done = subprocess.run(
        ["make", "-n", "-W", "pyproject.toml", target],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert line in done.stdout
