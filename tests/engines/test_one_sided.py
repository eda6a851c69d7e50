"""Put and get: the right bytes at the right rank, and when they are there."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import contract

import bireme as bm
import reference as ref

SIZES = (0, 1, 7, 3000)


def neighbours(world: bm.World) -> tuple[int, int]:
    return (world.rank - 1) % world.size, (world.rank + 1) % world.size


# ---- allocation -------------------------------------------------------------------------------


def made_arrays(world: bm.World) -> None:
    for name in ref.ALL:
        for shape in ((), 5, (2, 3), (0,), (4, 0, 2), [3], np.int64(2)):
            wanted = np.zeros(shape, ref.dtype(name))
            x = world.symmetric.zeros(shape, name)
            assert ref.same_bits(x.local, wanted), (name, shape)
            assert (x.shape, x.dtype, x.ndim) == (wanted.shape, wanted.dtype, wanted.ndim)
            assert (x.size, x.nbytes) == (wanted.size, wanted.nbytes)
            wanted[...] = 1
            assert ref.same_bits(world.symmetric.full(shape, 1, name).local, wanted)
            assert world.symmetric.empty(shape, name).shape == wanted.shape


def dtypes_as_written(world: bm.World) -> None:
    for written in (np.float32, np.dtype("f4"), "f4", "float32", float, "d", ml_dtypes.bfloat16):
        assert world.symmetric.zeros(2, written).dtype == np.dtype(written)
    assert world.symmetric.zeros(2).dtype == np.float32, "the default"
    assert world.symmetric.zeros(2, "bfloat16").dtype == ml_dtypes.bfloat16


def full_takes_any_value(world: bm.World) -> None:
    assert np.isnan(world.symmetric.full(3, np.nan).local).all()
    assert world.symmetric.full(3, -7, "int8").local.tolist() == [-7] * 3
    assert world.symmetric.full(3, True, "bool").local.all()
    minus = world.symmetric.full(3, -0.0).local
    assert np.signbit(minus).all(), "minus zero is not zero"


def wrong_values_take_no_memory(world: bm.World) -> None:
    before = world.arena.free_bytes
    for value, name in (("abc", "float32"), (300, "uint8"), (-1, "uint16"), (1j, "float64")):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            world.symmetric.full(3, value, name)
        assert world.arena.free_bytes == before, value


def wrong_allocations(world: bm.World) -> None:
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "shape: expected integers, found", ((1.5,), "float32")),
        (TypeError, "shape: expected integers, found", ((True,), "float32")),
        (ValueError, "sizes of at least 0", (-1, "float32")),
        (ValueError, "sizes of at least 0", ((2, -3), "float32")),
        (TypeError, "dtype: expected one of bool", (3, "complex64")),
        (TypeError, "dtype: expected one of bool", (3, "no such")),
        (TypeError, "dtype: expected one of bool", (3, object)),
    ]
    for kind, text, arguments in cases:
        with pytest.raises(kind, match=text):
            world.symmetric.empty(*arguments)
    with pytest.raises(ValueError, match="device: expected cpu, found cuda:0"):
        world.symmetric.zeros(3, device="cuda:0")
    with pytest.raises(ValueError, match="sizes of at least 0"):
        world.symmetric.signals(-1)
    assert world.symmetric.zeros(3, device="cpu").size == 3


def wrong_numbers_of_signals(world: bm.World) -> None:
    for wrong in ("3", 2.5, None):
        with pytest.raises(TypeError, match="expected"):
            world.symmetric.signals(wrong)


# ---- put and get ------------------------------------------------------------------------------


def put_every_dtype(world: bm.World) -> None:
    left, right = neighbours(world)
    for name in ref.ALL:
        for size in SIZES:
            mine, theirs = (ref.data(name, size, rank) for rank in (world.rank, left))
            for nbi in (False, True):
                x = world.symmetric.zeros(size, name)
                (x.put_nbi if nbi else x.put)(mine, right)
                world.barrier()
                assert ref.same_bits(x.local, theirs), (name, size, nbi)


def get_every_dtype(world: bm.World) -> None:
    _, right = neighbours(world)
    for name in ref.ALL:
        for size in SIZES:
            x = world.symmetric.empty(size, name)
            x.local[...] = ref.data(name, size, world.rank)
            wanted = ref.data(name, size, right)
            world.barrier()
            assert ref.same_bits(x.get(peer=right), wanted), (name, size)
            out = np.zeros(size, ref.dtype(name))
            assert x.get(out, peer=right) is out
            assert ref.same_bits(out, wanted), (name, size)
            later = np.zeros(size, ref.dtype(name))
            assert x.get_nbi(later, peer=right) is later
            fresh = x.get_nbi(peer=right)
            world.quiet()
            assert ref.same_bits(later, wanted), (name, size)
            assert ref.same_bits(fresh, wanted), (name, size)
            world.barrier()


def slices_move_their_bytes_only(world: bm.World) -> None:
    left, right = neighbours(world)
    plain = np.zeros((5, 7))
    for key in (2, (3, slice(2, 5)), slice(1, 3), (4, -1), (slice(3, 4), slice(0, 7)), (0, ...)):
        x = world.symmetric.zeros((5, 7), "float64")
        part = x[key]
        assert part.shape == plain[key].shape, key
        part.put(np.full(part.shape, world.rank + 1.0), right)
        world.barrier()
        wanted = np.zeros((5, 7))
        wanted[key] = left + 1
        assert ref.same_bits(x.local, wanted), key
        assert ref.same_bits(part.local, np.asarray(wanted[key])), key
        assert (part.get(peer=right) == world.rank + 1).all(), key


def slices_of_slices(world: bm.World) -> None:
    x = world.symmetric.zeros((4, 6, 2), "int32")
    x.local[...] = np.arange(48).reshape(4, 6, 2)
    keys = (x[1:3][1], x[-2], x[2][...], x[2, :], x[2:3][0][0:6])
    for part in keys:
        assert part.local.tolist() == x.local[2].tolist()
    assert x[3, 5, 1].local == 47
    assert x[3, 5, 1].shape == ()
    assert x[2:2].shape == (0, 6, 2)
    assert x[::1].shape == x.shape
    assert x[0:1][::-1].shape == (1, 6, 2)
    assert x[np.int64(1)].offset_bytes == x.offset_bytes + 48
    assert len(x) == 4
    with pytest.raises(TypeError, match=r"len\(\) of a symmetric array with no dimension"):
        len(x[0, 0, 0])
    assert "shape=(4, 6, 2), dtype=int32" in repr(x)


def wrong_indices(world: bm.World) -> None:
    x = world.symmetric.zeros((4, 6))
    for key in ((slice(None), 1), slice(None, None, 2), slice(None, None, -1), (..., 6 - 1)):
        with pytest.raises(ValueError, match="expected a contiguous part"):
            x[key]
    for key in (None, "a", 1.0, True, [1, 2], np.array([True] * 4), (0, None)):
        with pytest.raises(TypeError, match=r"expected integers, slices or \.\.\."):
            x[key]
    for key in (4, -5, (0, 6), (0, 0, 0)):
        with pytest.raises(IndexError):
            x[key]


def sources_of_all_kinds(world: bm.World) -> None:
    left, right = neighbours(world)
    locked = np.full(6, world.rank + 1.0)
    locked.flags.writeable = False
    other = world.symmetric.full((2, 3), world.rank + 1, "float64")
    # As many elements in another shape are fine.
    for source in (locked, locked.reshape(3, 2), other, other[0:2]):
        x = world.symmetric.zeros((3, 2), "float64")
        x.put(source, right)
        world.barrier()
        assert (x.local == left + 1).all()
    x.get(other, peer=world.rank)
    assert (other.local == left + 1).all()
    world.barrier()


def torch_sources(world: bm.World) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    left, right = neighbours(world)
    x = world.symmetric.zeros(4, torch.bfloat16)
    x.put(torch.full((4,), world.rank, dtype=torch.bfloat16), right)
    world.barrier()
    assert x.local.tolist() == [left] * 4
    found = x.get(peer=right)
    assert (type(found), found.dtype) == (torch.Tensor, torch.bfloat16)
    out = torch.zeros(4, dtype=torch.bfloat16)
    before = out._version
    x.get(out, peer=right)
    assert out.tolist() == [world.rank] * 4
    assert out._version > before
    world.barrier()
    x.put(torch._neg_view(torch.ones(4, dtype=torch.bfloat16)), right)
    world.barrier()
    assert x.local.tolist() == [-1.0] * 4
    world.barrier()
    x.put_nbi(torch._neg_view(torch.full((4,), 2, dtype=torch.bfloat16)), right)
    world.barrier()
    assert x.local.tolist() == [-2.0] * 4, "what the view is resolved to stays alive"


def put_to_oneself(world: bm.World) -> None:
    x = world.symmetric.zeros(6, "int64")
    x.local[...] = np.arange(6)
    x[2:6].put(x[0:4], world.rank)
    world.quiet()
    assert x.local.tolist() == [0, 1, 0, 1, 2, 3], "an overlap moves as memmove does"
    x[0:2].get(x[4:6], peer=world.rank)
    assert x.local.tolist() == [0, 1, 0, 1, 0, 1]


def blocking_put_copies_its_source(world: bm.World) -> None:
    left, right = neighbours(world)
    x = world.symmetric.zeros(50, "int64")
    source = np.full(50, world.rank)
    x.put(source, right)
    source[:] = -1
    world.barrier()
    assert (x.local == left).all()


def everybody_puts_to_everybody(world: bm.World) -> None:
    x = world.symmetric.zeros((world.size, 40), "float32")
    for peer in range(world.size):
        x[world.rank].put(np.full(40, 10 * world.rank + peer, np.float32), peer)
    world.barrier()
    wanted = 10 * np.arange(world.size, dtype=np.float32)[:, None] + world.rank
    assert (x.local == wanted).all()


def quiet_then_signal(world: bm.World) -> None:
    left, right = neighbours(world)
    x, ready = world.symmetric.zeros(3000, "int64"), world.symmetric.signal()
    for turn in range(1, 20):
        x.put(np.full(3000, 100 * turn + world.rank), right)
        world.quiet()
        ready.set(turn, right)
        ready.wait(turn)
        assert (x.local == 100 * turn + left).all()
        world.barrier()


def views_of_peers(world: bm.World) -> None:
    left, right = neighbours(world)
    x = world.symmetric.full((2, 3), world.rank, "int64")
    assert (x.on(right) == right).all()
    world.barrier()
    x.on(right)[1] = 100 + world.rank
    world.barrier()
    assert x.local.tolist() == [[world.rank] * 3, [100 + left] * 3]
    assert x[1].on(right).tolist() == [100 + world.rank] * 3
    x.on(world.rank)[0, 0] = -5
    assert x.local[0, 0] == -5
    world.barrier()


# ---- what is refused --------------------------------------------------------------------------


def wrong_puts_and_gets(world: bm.World) -> None:
    x = world.symmetric.zeros(4)
    good = np.ones(4, np.float32)
    locked = np.ones(4, np.float32)
    locked.flags.writeable = False
    n = world.size
    cases: list[tuple[type[Exception], str, Any]] = [
        (TypeError, "src: expected dtype float32, found float64", lambda: x.put(np.ones(4), 0)),
        (ValueError, r"expected 4 elements.*found 3.*x\[:3\]", lambda: x.put(good[:3], 0)),
        (TypeError, "src: expected a NumPy array", lambda: x.put([1, 2, 3, 4], 0)),
        (ValueError, "src: expected a C-contiguous", lambda: x.put(np.ones((4, 2), "f4")[:, 0], 0)),
        (ValueError, f"put: peer: expected a rank from 0 to {n - 1}", lambda: x.put(good, n)),
        (ValueError, "found -1", lambda: x.put(good, -1)),
        (TypeError, "put: peer: expected a rank, found True", lambda: x.put_nbi(good, True)),
        (TypeError, "found '0'", lambda: x.put(good, "0")),
        (ValueError, "get: peer: expected a rank from 0", lambda: x.get(peer=n)),
        (
            TypeError,
            "out: expected dtype float32, found int8",
            lambda: x.get(good.astype("i1"), peer=0),
        ),
        (ValueError, "out: expected a writable array", lambda: x.get(locked, peer=0)),
        (ValueError, "out: expected 4 elements", lambda: x.get_nbi(good[:2], peer=0)),
        (ValueError, "on: peer: expected a rank from 0", lambda: x.on(n)),
        (TypeError, "signal: expected a Signal, found int", lambda: x.put(good, 0, signal=1)),
    ]
    world.barrier()
    for kind, text, call in cases:
        with pytest.raises(kind, match=text):
            call()
    world.barrier()
    assert not x.local.any(), "nothing has moved"
    world.barrier()
    x.put(good, np.int64(0))
    world.barrier()
    assert x.local.all() == (world.rank == 0)


test_eager, test_lazy, test_null = contract(
    made_arrays,
    dtypes_as_written,
    full_takes_any_value,
    wrong_values_take_no_memory,
    wrong_allocations,
    wrong_numbers_of_signals,
    put_every_dtype,
    get_every_dtype,
    slices_move_their_bytes_only,
    slices_of_slices,
    wrong_indices,
    sources_of_all_kinds,
    torch_sources,
    put_to_oneself,
    blocking_put_copies_its_source,
    everybody_puts_to_everybody,
    quiet_then_signal,
    views_of_peers,
    wrong_puts_and_gets,
    ranks=(1, 2, 3),
    lazy=(1, 2, 3, 4),
)


@pytest.mark.ranks(2, 3)
@pytest.mark.world(timeout_s=5)
def test_a_wrong_value_on_one_rank(world: bm.World) -> None:
    # Where it is refused before anything moves, rank 0 hears of it.
    expected = (TypeError, ValueError) if world.rank else (bm.MismatchError,)
    with pytest.raises(expected, match="abc"):
        world.symmetric.full(3, "abc" if world.rank else 3, "uint8")
    assert world.symmetric.full(3, 3, "uint8").local.tolist() == [3] * 3
