"""The public API, frozen: a change of a name or a signature changes this file too.

``python tests/unit/test_surface.py`` prints the current surface for ``SURFACE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import bireme

CLASSES = ("World", "Group", "SymmetricArray", "Signal", "Signals", "Stream", "Work")

SURFACE = """
"""


def signature(function: object) -> str:
    """A signature without annotations, which differ between versions of Python."""
    assert callable(function)
    bare = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in bare.parameters.values()]
    return str(bare.replace(parameters=parameters, return_annotation=bare.empty))


def members(kind: type) -> Iterator[str]:
    """The public methods and properties that a class or its bases in bireme define."""
    for name in sorted(dir(kind)):
        value = inspect.getattr_static(kind, name)
        owner = next(base for base in kind.__mro__ if name in vars(base))
        if name.startswith("_") or not owner.__module__.startswith("bireme"):
            continue
        yield name if isinstance(value, property) else name + signature(getattr(kind, name))


def surface() -> str:
    lines = sorted(
        name + signature(value) if inspect.isfunction(value) else name
        for name in bireme.__all__
        for value in [getattr(bireme, name)]
    )
    for name in CLASSES:
        kind = getattr(bireme, name)
        inherited = {
            line for base in kind.__mro__[1:] if base.__name__ in CLASSES for line in members(base)
        }
        lines += ["", f"{name}:"]
        lines += [f"    {line}" for line in members(kind) if line not in inherited]
    return "\n".join(lines) + "\n"


def test_the_surface_is_what_it_was() -> None:
    assert surface() == SURFACE.lstrip("\n")


if __name__ == "__main__":
    print(surface(), end="")
