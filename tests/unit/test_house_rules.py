"""The rules of the code that a machine can hold."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from bireme import knobs

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "bireme"

# Imports point one way: a module may import its own layer and those above it in this list.
LAYERS = (
    {"errors", "knobs", "memory", "arena", "_core"},
    {"arrays"},
    {"bootstrap"},
    {"engines"},
    {"routes"},
    {"collectives", "symmetric", "signals", "allocation", "agenda", "streams", "host", "world"},
    {"observe"},
    {"parallel", "irregular", "shmem", "torch", "horovod"},
    {"launch"},
    {"testing", "plan", "bench", "cli"},
)
# The public API on one screen, and `python -m bireme`.
ABOVE_ALL = {"__init__", "__main__"}

MAX_FILE_LINES = 500
MEDIAN_FUNCTION_LINES = 10
P95_FUNCTION_LINES = 50

# Whatever turns bytes into code or objects of any type.
UNSAFE = {"pickle", "cloudpickle", "marshal", "dill", "shelve", "eval", "exec"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")

TEXT = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".yml", ".yaml", ".cfg", ".sh", ".json"}
GENERATED = {".git", ".venv", "build", "dist", "runs", "__pycache__", "node_modules"}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def native() -> list[Path]:
    return sorted(path for path in (ROOT / "native").rglob("*") if path.is_file())


def checks() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def text_files() -> Iterator[Path]:
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts
        hidden = any(part in GENERATED or part.endswith("_cache") for part in inside)
        named = path.suffix in TEXT or path.name in {"Makefile", "LICENSE", "run"}
        if named and not hidden and path.is_file():
            yield path


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


def findings(found: list[str]) -> str:
    return "\n" + "\n".join(found)


# ---- imports


def layer(module: str) -> int | None:
    for index, names in enumerate(LAYERS):
        if module in names:
            return index
    return None


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when the module is imported: no function bodies, no types-only blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield child
        yield from at_import_time(child)


def imported(node: ast.AST, path: Path) -> Iterator[str]:
    """The modules of bireme that an import statement names, by their first name below bireme."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.startswith("bireme."):
                yield alias.name.split(".")[1]
    elif isinstance(node, ast.ImportFrom):
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            package = ["bireme", *path.relative_to(PACKAGE).parts[:-1]]
            parts = package[: len(package) - node.level + 1] + parts
        if parts[:1] == ["bireme"]:
            yield from parts[1:2] or (alias.name for alias in node.names)


def test_every_module_has_a_layer() -> None:
    modules = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in sources()}
    assert sorted(name for name in modules - ABOVE_ALL if layer(name) is None) == []


def test_imports_point_one_way() -> None:
    found = []
    for path in sources():
        own = layer(path.relative_to(PACKAGE).parts[0].removesuffix(".py"))
        if own is None:
            continue
        for node in at_import_time(tree_of(path)):
            for module in imported(node, path):
                other = layer(module)
                if other is None or other > own:
                    found.append(f"{name_of(path)}:{node.lineno} imports {module}")
    assert not found, findings(found)


# ---- what a module may not do


def test_only_knobs_reads_the_environment() -> None:
    found = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            attribute = isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT
            imports = isinstance(node, ast.ImportFrom) and node.module == "os"
            if attribute or (imports and ENVIRONMENT & {alias.name for alias in node.names}):
                found.append(f"{name_of(path)}:{node.lineno}")
    assert not [entry for entry in found if not entry.startswith("src/bireme/knobs.py:")]


def test_nothing_turns_bytes_into_code() -> None:
    found = []
    for path in sources():
        for node in ast.walk(tree_of(path)):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").split(".")[0], *(a.name for a in node.names)}
            elif isinstance(node, ast.Name):
                names = {node.id}
            elif isinstance(node, ast.keyword):
                names = {"pickle"} if node.arg == "allow_pickle" else set()
            if names & UNSAFE:
                found.append(f"{name_of(path)}:{node.lineno} {names & UNSAFE}")
    assert not found, findings(found)


def test_no_bare_except() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not found, findings(found)


def test_only_the_command_line_prints() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not [entry for entry in found if not entry.startswith("src/bireme/cli.py:")]


def test_nothing_is_left_unfinished() -> None:
    found = [
        f"{name_of(path)}:{number} {match[0]}"
        for path in [*sources(), *native()]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if (match := UNFINISHED.search(line))
    ]
    assert not found, findings(found)


# ---- size


def test_no_file_is_long() -> None:
    found = []
    for path in [*sources(), *native(), *checks()]:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{name_of(path)} has {lines} lines")
    assert not found, findings(found)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring, which may be as long as it needs to be."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None and first.end_lineno is not None:
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_are_short() -> None:
    lengths = {
        f"{name_of(path)}:{node.lineno} {node.name}": code_lines(node)
        for path in sources()
        for node in ast.walk(tree_of(path))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    ordered = sorted(lengths.values())
    longest = sorted(lengths.items(), key=lambda pair: -pair[1])[:5]
    assert statistics.median(ordered) <= MEDIAN_FUNCTION_LINES, longest
    assert ordered[int(0.95 * (len(ordered) - 1))] <= P95_FUNCTION_LINES, longest


# ---- text


def undocumented(node: ast.AST, where: str) -> Iterator[str]:
    """Public classes, functions and methods without a docstring."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        decorators = {ast.unparse(entry) for entry in child.decorator_list}
        exempt = any(entry.endswith(("overload", ".setter")) for entry in decorators)
        if child.name.startswith("_") or exempt:
            continue
        if ast.get_docstring(child) is None:
            yield f"{where}:{child.lineno} {child.name}"
        if isinstance(child, ast.ClassDef):
            yield from undocumented(child, where)


def test_everything_public_has_a_docstring() -> None:
    found = []
    for path in sources():
        tree = tree_of(path)
        if ast.get_docstring(tree) is None:
            found.append(name_of(path))
        found += undocumented(tree, name_of(path))
    assert not found, findings(found)


def test_sources_are_ascii() -> None:
    found = [
        name_of(path)
        for path in [*sources(), *native(), *checks()]
        if not path.read_bytes().isascii()
    ]
    assert not found, findings(found)


def test_the_settings_page_is_up_to_date() -> None:
    page = (ROOT / "docs" / "knobs.md").read_text(encoding="utf-8")
    assert page == knobs.markdown(), "run `make docs`"


def test_no_text_names_a_place_on_this_machine() -> None:
    if str(ROOT.parent) in {"/", "/tmp", "/home", "/root", "/opt", "/srv", "/usr", "/usr/src"}:
        pytest.skip("the checkout lies in a folder that any text may name")
    place = re.compile(rf"(?<![\w.]){re.escape(str(ROOT.parent))}(/|\b)")
    found = [
        f"{name_of(path)}:{number}"
        for path in text_files()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if place.search(line)
    ]
    assert not found, findings(found)


# ---- the rules themselves


@pytest.mark.parametrize(
    ("code", "modules"),
    [
        ("import bireme.world", {"world"}),
        ("from bireme import cli", {"cli"}),
        ("from bireme.plan.report import table", {"plan"}),
        ("from . import base", {"engines"}),
        ("from .. import errors", {"errors"}),
        ("from ..world import World", {"world"}),
        ("import numpy", set()),
        ("def f():\n    import bireme.cli", set()),
        ("if TYPE_CHECKING:\n    from bireme import cli", set()),
        ("class A:\n    from bireme import cli", {"cli"}),
        ("try:\n    import bireme.cli\nexcept ImportError:\n    pass", {"cli"}),
    ],
)
def test_the_reader_of_imports(code: str, modules: set[str]) -> None:
    path = PACKAGE / "engines" / "some.py"
    assert {
        module for node in at_import_time(ast.parse(code)) for module in imported(node, path)
    } == modules
