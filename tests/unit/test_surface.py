"""The public API, frozen: a change of a name or a signature changes this file too.

``python tests/unit/test_surface.py`` prints the current surface for ``SURFACE``.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import bireme

CLASSES = ("World", "Group", "SymmetricArray", "Signal", "Signals", "Stream", "Work")

SURFACE = """
Aborted
BiremeError
EngineError
Group
MismatchError
PeerLost
Signal
Signals
Stream
SymmetricArray
Timeout
UsageError
Work
World
current()
init(*, engine=None, heap_bytes=None, timeout_s=None, warn_s=None, delivery=None, rank=None, size=None)

World:
    abort(self, text)
    exit(self)
    fail(self, error)
    record
    routes
    stream(self)
    synchronize(self)
    use(self, stream)

Group:
    all_gather(self, x, *, out=None, async_op=False, stream=None)
    all_reduce(self, x, op='sum', *, out=None, async_op=False, stream=None)
    all_to_all(self, x, *, out=None, async_op=False, stream=None)
    barrier(self, *, stream=None)
    broadcast(self, x, root=0, *, async_op=False, stream=None)
    check_open(self, what)
    close(self)
    exchange(self, words)
    fence(self, *, stream=None)
    flow(self, label)
    gather(self, x, root=0, *, out=None, async_op=False, stream=None)
    group(self, ranks, heap_bytes=0)
    one_sided
    quiet(self, *, stream=None)
    recv(self, x, peer, *, async_op=False, stream=None)
    reduce(self, x, root=0, op='sum', *, out=None, async_op=False, stream=None)
    reduce_scatter(self, x, op='sum', *, out=None, async_op=False, stream=None)
    refusing(self, op)
    scatter(self, x=None, root=0, *, out=None, async_op=False, stream=None)
    send(self, x, peer, *, async_op=False, stream=None)
    slot
    split(self, color, key=0, heap_bytes=0)
    world_rank(self, rank, what)

SymmetricArray:
    atomic_add(self, value, peer)
    atomic_and(self, value, peer)
    atomic_compare_swap(self, expected, desired, peer)
    atomic_fetch(self, peer)
    atomic_fetch_add(self, value, peer)
    atomic_fetch_and(self, value, peer)
    atomic_fetch_inc(self, peer)
    atomic_fetch_or(self, value, peer)
    atomic_fetch_xor(self, value, peer)
    atomic_inc(self, peer)
    atomic_or(self, value, peer)
    atomic_set(self, value, peer)
    atomic_swap(self, value, peer)
    atomic_xor(self, value, peer)
    block
    dtype
    free(self)
    get(self, out=None, *, peer, stream=None)
    get_nbi(self, out=None, *, peer, stream=None)
    group
    local
    nbytes
    ndim
    numpy(self)
    offset_bytes
    on(self, rank)
    put(self, src, peer, *, signal=None, signal_value=1, signal_op='set', stream=None)
    put_nbi(self, src, peer, *, signal=None, signal_value=1, signal_op='set', stream=None)
    torch(self)

Signal:
    add(self, value, peer)
    checked(self, value, op, group)
    reset(self, value=0)
    set(self, value, peer)
    test(self, value, cmp='==')
    value
    wait(self, value, cmp='==')

Signals:

Stream:
    drain(self)
    stop(self)
    synchronize(self)

Work:
    done(self)
    exception(self, timeout_s=None)
    result(self, timeout_s=None)
    wait(self, timeout_s=None)
"""  # noqa: E501


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
