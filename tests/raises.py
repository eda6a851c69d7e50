"""Lists every ``raise`` of the package that no test has executed.

``make raises`` runs the tests under coverage, also in workers and ranks, and then this script on
the output of ``coverage json``.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def raises(path: Path) -> Iterator[ast.Raise]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise):
            yield node


def never_raised(report: Path) -> list[str]:
    files = json.loads(report.read_text(encoding="utf-8"))["files"]
    executed = {
        (ROOT / name).resolve(): set(told["executed_lines"]) for name, told in files.items()
    }
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)[:80]}"
        for path in sorted((ROOT / "src" / "bireme").rglob("*.py"))
        for node in sorted(raises(path), key=lambda node: node.lineno)
        if node.lineno not in executed.get(path, set())
    ]


if __name__ == "__main__":
    found = never_raised(Path(sys.argv[1]))
    print("\n".join(found))
    sys.exit(f"{len(found)} raises are executed by no test" if found else 0)
