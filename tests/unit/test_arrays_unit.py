"""How dtypes and shapes are read, and where an array lies."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bireme import _core, arrays


@pytest.mark.parametrize("code", range(len(arrays.DTYPES)), ids=arrays.DTYPES)
def test_every_spelling_of_a_dtype(code: int) -> None:
    name = arrays.DTYPES[code]
    kind = np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    spellings = [name, kind, kind.type]
    if name != "bfloat16":
        spellings += [kind.char, kind.str]
    for written in spellings:
        assert arrays.dtype_of(written) == (code, False), written
    assert arrays.numpy_dtype(code) == kind
    assert _core.DTYPES[code] == name, "the core counts in the same order"


def test_dtypes_of_python_and_torch() -> None:
    for written, name in ((float, "float64"), (int, "int64"), (bool, "bool"), ("f4", "float32")):
        assert arrays.dtype_of(written) == (arrays.DTYPES.index(name), False)
    assert arrays.dtype_of(np.longlong) == (arrays.DTYPES.index("int64"), False)
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for code, name in enumerate(arrays.DTYPES):
        assert arrays.dtype_of(getattr(torch, name)) == (code, True)
    with pytest.raises(TypeError, match=r"found torch\.complex64"):
        arrays.dtype_of(torch.complex64)


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "float",
        "bf16",
        "float128",
        "complex64",
        ">i4",
        "U3",
        object,
        "M8[s]",
        [("a", "f4")],
        7,
        b"x",
    ],
    ids=repr,
)
def test_other_dtypes(wrong: Any) -> None:
    if wrong == "float":
        assert arrays.dtype_of(wrong)[0] == arrays.DTYPES.index("float64"), "NumPy knows this name"
        return
    with pytest.raises(TypeError, match=r"dtype: expected one of bool, int8, .*, found"):
        arrays.dtype_of(wrong)


def test_no_dtype_is_no_default() -> None:
    with pytest.raises(TypeError, match="found None"):
        arrays.dtype_of(None)


def test_shapes() -> None:
    for written, wanted in (
        (3, (3,)),
        (np.int32(3), (3,)),
        ((), ()),
        ((2, np.int64(3)), (2, 3)),
        ([0, 4], (0, 4)),
        (range(1, 3), (1, 2)),
    ):
        found = arrays.shape_of(written)
        assert found == wanted
        assert all(type(size) is int for size in found)


@pytest.mark.parametrize("wrong", [1.0, None, "3", (1.0,), ("1",), (None,), True, (True, 2)])
def test_shapes_of_other_things(wrong: Any) -> None:
    with pytest.raises(TypeError):
        arrays.shape_of(wrong)


@pytest.mark.parametrize("wrong", [-1, (2, -3), [-(2**70)]])
def test_negative_sizes(wrong: Any) -> None:
    with pytest.raises(ValueError, match="sizes of at least 0, found"):
        arrays.shape_of(wrong)


def test_a_buffer_says_where_and_what() -> None:
    x = np.zeros((2, 3), np.int16)
    buffer = arrays.read(x)
    assert (buffer.pointer, buffer.count, buffer.shape) == (x.ctypes.data, 6, (2, 3))
    assert (buffer.nbytes, buffer.name, str(buffer)) == (12, "int16", "int16[2, 3]")
    assert buffer.owner is x
    assert not buffer.torch
    empty = arrays.read(np.zeros((0, 3)))
    assert (empty.pointer, empty.count, empty.nbytes) == (0, 0, 0)


def test_the_argument_is_named() -> None:
    for read in (arrays.read, arrays.write):
        with pytest.raises(TypeError, match=r"^weights: expected a NumPy array"):
            read([1], "weights")
        with pytest.raises(TypeError, match=r"^array: expected"):
            read(3)


def test_overlaps() -> None:
    x = np.zeros(10)
    whole, left, right = (arrays.read(part) for part in (x, x[:5], x[5:]))
    assert arrays.overlap(whole, left)
    assert arrays.overlap(right, whole)
    assert arrays.overlap(arrays.read(x[4:6]), left)
    assert not arrays.overlap(left, right), "neighbours do not overlap"
    assert not arrays.overlap(whole, arrays.read(x[5:5]))
    assert not arrays.overlap(whole, arrays.read(np.zeros(10)))


def test_new_arrays_are_of_the_same_library() -> None:
    x = arrays.new((2, 3), arrays.read(np.zeros(1, ml_dtypes.bfloat16)))
    assert (type(x), x.dtype, x.shape) == (np.ndarray, np.dtype(ml_dtypes.bfloat16), (2, 3))
    torch = pytest.importorskip("torch", reason="torch is not installed")
    y = arrays.new((2, 3), arrays.read(torch.zeros(1, dtype=torch.int8)))
    assert (y.dtype, tuple(y.shape)) == (torch.int8, (2, 3))


def test_a_program_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    like = arrays.Buffer(0, 0, arrays.DTYPES.index("float32"), (0,), None, torch=True)
    assert isinstance(arrays.new((3,), like), np.ndarray), "the others may speak torch"
    assert arrays.read(np.zeros(3)).count == 3
    with pytest.raises(ModuleNotFoundError, match="torch"):
        arrays.torch_view(np.zeros(3))


def test_torch_views_share_memory() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for code, name in enumerate(arrays.DTYPES):
        x = np.zeros((2, 2), arrays.numpy_dtype(code))
        view = arrays.torch_view(x)
        assert view.dtype == getattr(torch, name)
        view[0, 1] = 1
        assert x.tolist() == [[0, 1], [0, 0]], name


def test_counts() -> None:
    assert arrays.count_of(()) == 1
    assert arrays.count_of((3, 0, 2)) == 0
    assert arrays.count_of((2**20, 2**20, 2**20, 2**20)) == 2**80, "no overflow"
