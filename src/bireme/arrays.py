"""One view over NumPy, torch, ml_dtypes and other DLPack arrays: address, dtype, shape.

``read`` and ``write`` turn whatever the user passes into a ``Buffer`` or raise a TypeError or
ValueError that says what was expected and what was found. Nothing is copied.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from bireme import _core

__all__ = ["DTYPES", "REDUCTIONS", "Buffer", "dtype_of", "new", "read", "write"]

# The order is that of native/dtypes.h.
DTYPES = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64",
)  # fmt: skip
REDUCTIONS = ("sum", "prod", "min", "max", "avg")
FLOATS = frozenset(DTYPES.index(name) for name in ("float16", "bfloat16", "float32", "float64"))

_NUMPY = tuple(
    np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name) for name in DTYPES
)
_CODES: dict[Any, int] = {dtype: code for code, dtype in enumerate(_NUMPY)}
_TORCH_CODES: dict[Any, int] = {}
_core.set_bfloat16(_NUMPY[DTYPES.index("bfloat16")].num)


@dataclass(frozen=True)
class Buffer:
    """Where an array lies and what it holds.

    Args:
        pointer: Address of the first element; 0 for an empty array.
        count: Number of elements.
        dtype: Index into ``DTYPES``.
        shape: The array's shape.
        owner: The array itself, which keeps the memory alive.
        torch: Whether the user speaks torch: results are then tensors.
    """

    pointer: int
    count: int
    dtype: int
    shape: tuple[int, ...]
    owner: Any
    torch: bool = False

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.count * _NUMPY[self.dtype].itemsize

    @property
    def name(self) -> str:
        """The dtype's name, such as ``"float32"``."""
        return DTYPES[self.dtype]

    def __str__(self) -> str:
        return f"{self.name}{list(self.shape)}"


def numpy_dtype(code: int) -> np.dtype[Any]:
    """Return the NumPy dtype of an index into ``DTYPES``."""
    return _NUMPY[code]


def _torch() -> Any:
    """Return torch where the program has imported it, else ``None``."""
    return sys.modules.get("torch")


def _torch_codes() -> dict[Any, int]:
    torch = _torch()
    if not _TORCH_CODES and torch is not None:
        for code, name in enumerate(DTYPES):
            if hasattr(torch, name):
                _TORCH_CODES[getattr(torch, name)] = code
        known = [getattr(torch, name, None) for name in DTYPES]
        _core.set_torch(torch.Tensor, torch.autograd.graph.increment_version, known)
    return _TORCH_CODES


def dtype_of(dtype: Any) -> tuple[int, bool]:
    """Read a dtype as users write it.

    Args:
        dtype: A name, a NumPy dtype or type, an ml_dtypes type or a torch dtype.

    Returns:
        Its index into ``DTYPES`` and whether it is torch's.

    Raises:
        TypeError: If it is none of these, or a type that bireme does not move.
    """
    found = None
    try:
        if dtype in _torch_codes():
            return _TORCH_CODES[dtype], True
        if dtype is not None:  # NumPy would take it for float64
            found = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    except TypeError:
        pass  # no dtype, or a description of one that cannot be looked up
    if found is None or found not in _CODES:
        raise TypeError(f"dtype: expected one of {', '.join(DTYPES)}, found {dtype!r}")
    return _CODES[found], False


def shape_of(shape: int | Sequence[int]) -> tuple[int, ...]:
    """Read a shape as users write it: an int or a sequence of ints, none negative."""
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(isinstance(s, bool) or not isinstance(s, (int, np.integer)) for s in sizes):
        raise TypeError(f"shape: expected integers, found {shape!r}")
    if any(s < 0 for s in sizes):
        raise ValueError(f"shape: expected sizes of at least 0, found {shape!r}")
    return tuple(int(s) for s in sizes)


def read(x: Any, what: str = "array") -> Buffer:
    """Return where a source array lies.

    Args:
        x: A NumPy array, torch CPU tensor, symmetric array or DLPack CPU array, C-contiguous.
        what: The argument's name, for error texts.

    Raises:
        TypeError: If ``x`` is no array, or holds a dtype that bireme does not move.
        ValueError: If ``x`` is not C-contiguous or not in host memory.
    """
    return _buffer(x, what, writes=False)


def write(x: Any, what: str = "array") -> Buffer:
    """Return where a destination array lies; as ``read``, and read-only arrays are refused.

    A torch tensor's version counter is bumped, so that autograd notices the write.
    """
    return _buffer(x, what, writes=True)


def _buffer(x: Any, what: str, *, writes: bool) -> Buffer:
    if isinstance(x, np.ndarray):
        return _of_numpy(x, what, writes)
    torch = _torch()
    if torch is not None and isinstance(x, torch.Tensor):
        return _of_torch(torch, x, what, writes)
    if hasattr(x, "__bireme_buffer__"):
        buffer: Buffer = x.__bireme_buffer__()
        return buffer
    if hasattr(x, "__dlpack__") and not isinstance(x, np.generic):
        return _of_dlpack(x, what, writes)
    raise TypeError(
        f"{what}: expected a NumPy array, torch tensor, symmetric array or DLPack array, "
        f"found {type(x).__name__}"
    )


def _of_numpy(x: np.ndarray[Any, Any], what: str, writes: bool) -> Buffer:
    code = _CODES.get(x.dtype)
    if code is None or not x.dtype.isnative:
        raise TypeError(f"{what}: expected dtype {', '.join(DTYPES)}, found {x.dtype.str!r}")
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{what}: a masked array's mask would be lost; pass x.filled(...)")
    if not x.flags.c_contiguous:
        raise ValueError(
            f"{what}: expected a C-contiguous array, found strides {x.strides} for shape "
            f"{x.shape}; pass np.ascontiguousarray(x)"
        )
    if writes and not x.flags.writeable:
        raise ValueError(f"{what}: expected a writable array, found a read-only one")
    pointer = x.__array_interface__["data"][0] if x.size else 0
    return Buffer(pointer, x.size, code, x.shape, x)


def _of_torch(torch: Any, x: Any, what: str, writes: bool) -> Buffer:
    if x.layout is not torch.strided:
        raise TypeError(f"{what}: expected a dense tensor, found layout {x.layout}")
    code = _torch_codes().get(x.dtype)
    if code is None:
        raise TypeError(f"{what}: expected dtype {', '.join(DTYPES)}, found {x.dtype}")
    if x.device.type != "cpu":
        raise ValueError(f"{what}: expected a tensor on cpu, found {x.device}")
    if not x.is_contiguous():
        raise ValueError(
            f"{what}: expected a contiguous tensor, found strides {x.stride()} for shape "
            f"{tuple(x.shape)}; pass x.contiguous()"
        )
    if x.is_neg() or x.is_conj():
        if writes:
            raise ValueError(f"{what}: a neg or conj view cannot be written; pass x.resolve_neg()")
        x = x.resolve_neg().resolve_conj()
    if writes:
        torch.autograd.graph.increment_version(x)
    count = x.numel()
    return Buffer(x.data_ptr() if count else 0, count, code, tuple(x.shape), x, torch=True)


def _of_dlpack(x: Any, what: str, writes: bool) -> Buffer:
    try:
        view = np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise TypeError(
            f"{what}: NumPy cannot view this {type(x).__name__} through DLPack ({error}); "
            "pass a C-contiguous CPU array of a supported dtype"
        ) from error
    return replace(_of_numpy(view, what, writes), owner=x)


def new(shape: Sequence[int], like: Buffer) -> Any:
    """Return an uninitialised array of the same library and dtype as ``like``."""
    torch = _torch()
    if like.torch and torch is not None:
        return torch.empty(tuple(shape), dtype=getattr(torch, like.name))
    return np.empty(tuple(shape), _NUMPY[like.dtype])


def torch_view(x: np.ndarray[Any, Any]) -> Any:
    """Return a NumPy array's memory as a torch tensor, bfloat16 through an integer view.

    Raises:
        ModuleNotFoundError: If torch is not installed.
    """
    import torch

    name = DTYPES[_CODES[x.dtype]]
    if name == "bfloat16":
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def overlap(a: Buffer, b: Buffer) -> bool:
    """Return whether two buffers share bytes."""
    apart = a.pointer + a.nbytes <= b.pointer or b.pointer + b.nbytes <= a.pointer
    return bool(a.count and b.count and not apart)


def count_of(shape: Sequence[int]) -> int:
    """Return the number of elements of a shape."""
    return math.prod(shape)
