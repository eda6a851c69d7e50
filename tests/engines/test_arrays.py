"""What may be passed: NumPy, torch, ml_dtypes, DLPack and symmetric arrays, and what may not."""

from __future__ import annotations

import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from contract import contract

import bireme as bm
import reference as ref


class Exporter:
    """An array of another library: all that is known of it is DLPack."""

    def __init__(self, array: ref.Array) -> None:
        self.array = array

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class LegacyExporter(Exporter):
    """One of before DLPack 1.0, which cannot say whether its memory may be written."""

    def __dlpack__(self, stream: Any = None) -> Any:  # type: ignore[override]
        return self.array.__dlpack__()


class ElsewhereExporter(Exporter):
    """One whose memory is on a device that NumPy cannot read."""

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("this array is on a device")


def torch_or_skip() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


def total(world: bm.World) -> int:
    return sum(range(1, world.size + 1))


# ---- the libraries ----------------------------------------------------------------------------


def numpy_arrays(world: bm.World) -> None:
    x = np.full((2, 3), world.rank + 1, np.int32)
    assert (world.all_reduce(x) == total(world)).all()
    part = np.zeros((4, 3), np.int32)
    part[1:3] = world.rank + 1
    world.all_reduce(part[1:3])
    assert part.sum() == 6 * total(world), "a contiguous part is written in place"
    gathered = world.all_gather(np.array([world.rank], np.longlong))
    assert gathered.tolist() == list(range(world.size)), "long and long long are both int64"


def ml_dtypes_arrays(world: bm.World) -> None:
    x = np.full(5, world.rank + 1, ml_dtypes.bfloat16)
    assert world.all_reduce(x).tolist() == [total(world)] * 5
    assert world.all_gather(x).dtype == ml_dtypes.bfloat16
    with pytest.raises(TypeError, match="expected dtype bool, int8"):
        world.all_reduce(np.zeros(2, ml_dtypes.float8_e4m3fn))


def torch_tensors(world: bm.World) -> None:
    torch = torch_or_skip()
    for name in ref.ALL:
        kind = getattr(torch, name)
        x = torch.tensor([world.rank == 0] * 3).to(kind)
        assert world.all_reduce(x) is x
        assert x.tolist() == [1, 1, 1], name
        joined = world.all_gather(x)
        assert (type(joined), joined.dtype) == (torch.Tensor, kind)
        assert joined.tolist() == [1] * (3 * world.size), name
    assert world.all_reduce(torch.tensor(1.0)).item() == world.size, "no dimension"
    assert world.all_reduce(torch.empty(0, 3)).shape == (0, 3)


def torch_results(world: bm.World) -> None:
    torch = torch_or_skip()
    x = torch.arange(2 * world.size, dtype=torch.bfloat16)
    for result in (world.all_to_all(x), world.reduce_scatter(x), world.gather(x, world.rank * 0)):
        assert result is None or (type(result), result.dtype) == (torch.Tensor, torch.bfloat16)
    told = world.scatter(x if world.rank == 0 else None)
    assert isinstance(told, torch.Tensor)
    assert told.tolist() == [2 * world.rank, 2 * world.rank + 1]
    out = np.zeros(2 * world.size, ml_dtypes.bfloat16)
    assert world.all_reduce(x, out=out) is out, "out may be another library's"
    assert out.tolist() == [i * world.size for i in range(2 * world.size)]


def torch_neg_views(world: bm.World) -> None:
    torch = torch_or_skip()
    x = torch._neg_view(torch.ones(4))
    assert x.is_neg()
    assert world.all_gather(x).tolist() == [-1.0] * (4 * world.size), "a source is resolved"
    assert world.all_reduce(x, out=torch.zeros(4)).tolist() == [-world.size] * 4
    with pytest.raises(ValueError, match="neg or conj view cannot be written"):
        world.all_reduce(x)


def torch_versions(world: bm.World) -> None:
    torch = torch_or_skip()
    x, out = torch.ones(world.size), torch.ones(world.size)
    before = x._version, out._version
    world.all_reduce(x, out=out)
    assert x._version == before[0], "a source is not written"
    assert out._version > before[1]
    world.all_reduce(x)
    assert x._version > before[0]


def torch_gradients(world: bm.World) -> None:
    torch = torch_or_skip()
    leaf = torch.ones(3, requires_grad=True)
    world.all_reduce(leaf)
    assert leaf.tolist() == [world.size] * 3
    leaf.sum().backward()
    assert world.all_reduce(leaf.grad).tolist() == [world.size] * 3
    saved = torch.ones(3, requires_grad=True) * 1
    loss = (saved**2).sum()
    world.all_reduce(saved.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def torch_refusals(world: bm.World) -> None:
    torch = torch_or_skip()
    x = torch.ones(4, 3)
    cases = (
        (ValueError, "contiguous tensor, found strides", x.t()),
        (ValueError, "contiguous tensor, found strides", torch.ones(8)[::2]),
        (TypeError, "dense tensor, found layout", x.to_sparse()),
        (TypeError, "expected dtype bool", x.to(torch.complex64)),
        (TypeError, "expected dtype bool", x.to(torch.float8_e5m2)),
        (ValueError, "tensor on cpu, found meta", torch.ones(3, device="meta")),
    )
    for kind, text, wrong in cases:
        with pytest.raises(kind, match=text):
            world.all_reduce(wrong)
        with pytest.raises(kind, match=text):
            world.all_gather(wrong)
    assert world.all_reduce(x)[0, 0] == world.size


def dlpack_sources(world: bm.World) -> None:
    for name in ("bool", "int16", "float16", "float64"):
        parts = [ref.data(name, (2, 3), rank) for rank in range(world.size)]
        found = world.all_gather(Exporter(parts[world.rank]))
        assert ref.same_bits(found, np.concatenate(parts)), name
    with pytest.raises(ValueError, match="C-contiguous"):
        world.all_gather(Exporter(np.ones((3, 4)).T))
    with pytest.raises(TypeError, match="expected dtype bool"):
        world.all_gather(Exporter(np.ones(3, np.complex64)))
    with pytest.raises(TypeError, match=r"through DLPack.*on a device"):
        world.all_gather(ElsewhereExporter(np.ones(3)))


def legacy_dlpack(world: bm.World) -> None:
    mine = LegacyExporter(np.full(2, world.rank))
    assert world.all_gather(mine)[::2].tolist() == list(range(world.size))
    with pytest.raises(ValueError, match="read-only"):
        world.all_reduce(mine)


def dlpack_destinations(world: bm.World) -> None:
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy views every DLPack array as read-only")
    mine = Exporter(np.full(3, world.rank + 1))
    assert world.all_reduce(mine) is mine
    assert mine.array.tolist() == [total(world)] * 3
    out = Exporter(np.zeros(3 * world.size, np.int64))
    assert world.all_gather(mine, out=out) is out
    assert out.array.tolist() == [total(world)] * (3 * world.size)


def symmetric_arrays(world: bm.World) -> None:
    x = world.symmetric.full((2, 3), world.rank + 1, "int64")
    assert world.all_reduce(x) is x
    assert (x.local == total(world)).all()
    joined = world.all_gather(x[0])
    assert isinstance(joined, np.ndarray)
    assert joined.shape == (3 * world.size,)
    single = world.all_reduce(x[1, 2])
    assert single.local == total(world) * world.size


def torch_symmetric_arrays(world: bm.World) -> None:
    torch = torch_or_skip()
    for name in ref.ALL:
        x = world.symmetric.full(4, 1, getattr(torch, name))
        local = x.local
        assert (type(local), local.dtype) == (torch.Tensor, getattr(torch, name))
        local[0] = 0
        world.all_reduce(x, "max")
        assert x.numpy().tolist() == [0, 1, 1, 1], name
        assert world.all_gather(x).dtype == local.dtype
        assert x.on(world.rank).dtype == local.dtype
    plain = world.symmetric.zeros(4, "bfloat16")
    assert isinstance(plain.local, np.ndarray)
    assert plain.torch().dtype == torch.bfloat16


def symmetric_destination_of_torch(world: bm.World) -> None:
    torch = torch_or_skip()
    out = world.symmetric.zeros(3, torch.float32)
    assert world.all_reduce(torch.ones(3), out=out) is out
    assert out.local.tolist() == [world.size] * 3


# ---- read-only --------------------------------------------------------------------------------


def read_only_sources(world: bm.World) -> None:
    x = np.full(world.size, world.rank + 1.0)
    x.flags.writeable = False
    assert world.all_reduce(x, out=np.zeros(world.size))[0] == total(world)
    assert world.all_gather(x).size == world.size**2
    assert world.reduce_scatter(x).tolist() == [total(world)]
    assert world.all_to_all(x).tolist() == list(range(1, world.size + 1))
    if world.rank:
        assert world.reduce(x, 0) is x, "only root's x is written"
    else:
        world.reduce(np.ones(world.size), 0)
    for wrong in (lambda: world.all_reduce(x), lambda: world.all_gather(x[:1], out=x)):
        with pytest.raises(ValueError, match="expected a writable array, found a read-only one"):
            wrong()
    assert (x == world.rank + 1).all()


def read_only_files_are_broadcast(world: bm.World) -> None:
    # Memory that the system protects: a write, even of the same bytes, would end the process.
    for nbytes in (64, 100_000):
        with tempfile.TemporaryFile() as file:
            file.write(bytes(range(1, 65)) * max(nbytes // 64, world.size))
            file.flush()
            weights = np.memmap(file, np.uint8, mode="r")
            x = weights if world.rank == 0 else np.zeros(weights.size, np.uint8)
            world.broadcast(x, 0)
            assert x[:64].tolist() == list(range(1, 65))
            scattered = world.scatter(weights[: 64 * world.size], 0)
            assert scattered.tolist() == list(range(1, 65))


def only_receivers_must_be_writable(world: bm.World) -> None:
    x = np.full(3, world.rank)
    x.flags.writeable = world.rank == 0
    if world.size > 1:
        # Every rank but root refuses; root hears of it.
        kind = bm.MismatchError if world.rank == 0 else ValueError
        with pytest.raises(kind, match="read-only"):
            world.broadcast(x, 0)
    assert world.all_gather(x).reshape(-1, 3)[:, 0].tolist() == list(range(world.size))


# ---- what is no array, or of no dtype ---------------------------------------------------------


def strides_are_refused(world: bm.World) -> None:
    x = np.ones((4, 3))
    for wrong in (x.T, x[:, 1], x[::2], x[::-1], np.asfortranarray(x)):
        with pytest.raises(ValueError, match=r"C-contiguous array, found strides.*ascontiguous"):
            world.all_reduce(wrong)
        with pytest.raises(ValueError, match="C-contiguous"):
            world.all_gather(wrong)
    assert world.all_reduce(x[:, :1].copy())[0] == world.size
    assert world.all_reduce(x[1:2, 1:2])[0] == world.size, "one element is always contiguous"


def dtypes_are_refused(world: bm.World) -> None:
    swapped = np.dtype(np.int32).newbyteorder()
    kinds = ("complex64", "object", swapped, "U3", "S3", "M8[s]", "m8[s]", "V4", "longdouble")
    for kind in (*kinds, [("a", "f4")]):
        with pytest.raises(TypeError, match="expected dtype bool, int8"):
            world.all_reduce(np.zeros(3, kind))
    for no_array in ([1.0], (1,), 3, 3.0, "abc", None, b"abc", np.float32(1), memoryview(b"abc")):
        with pytest.raises(TypeError, match="expected a NumPy array, torch tensor, symmetric"):
            world.all_reduce(no_array)
    assert world.all_reduce(np.ones(1))[0] == world.size


def masks_are_refused(world: bm.World) -> None:
    with pytest.raises(TypeError, match="masked array's mask would be lost"):
        world.all_reduce(np.ma.masked_array([1.0, 2.0], [True, False]))
    assert world.all_reduce(np.ones(1))[0] == world.size


test_eager, test_lazy, test_null = contract(
    numpy_arrays,
    ml_dtypes_arrays,
    torch_tensors,
    torch_results,
    torch_neg_views,
    torch_versions,
    torch_gradients,
    torch_refusals,
    dlpack_sources,
    legacy_dlpack,
    dlpack_destinations,
    symmetric_arrays,
    torch_symmetric_arrays,
    symmetric_destination_of_torch,
    read_only_sources,
    read_only_files_are_broadcast,
    only_receivers_must_be_writable,
    strides_are_refused,
    dtypes_are_refused,
    masks_are_refused,
    ranks=(1, 3),
    lazy=(2,),
)
