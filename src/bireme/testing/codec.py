"""Values between the processes of ``bireme.testing.run``: a JSON header, then raw bytes.

Only plain data passes: None, bool, int, float, str, bytes, list, tuple, dict and NumPy arrays and
scalars. Nothing that is read can run code.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

__all__ = ["decode", "encode"]

_PLAIN = (type(None), bool, int, float, str)
_LENGTH_BYTES = 8


def encode(value: Any) -> bytes:
    """Turn a value into bytes.

    Raises:
        TypeError: If the value, or one inside it, is of another type.
    """
    blobs: list[bytes] = []
    tree = _encode(value, blobs)
    header = json.dumps({"tree": tree, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *blobs])


def decode(data: bytes) -> Any:
    """Turn bytes of ``encode`` into the value; arrays are fresh and writable."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    header = json.loads(data[_LENGTH_BYTES:end])
    blobs = []
    for size in header["sizes"]:
        blobs.append(data[end : end + size])
        end += size
    return _decode(header["tree"], blobs)


def _encode(value: Any, blobs: list[bytes]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is bytes:
        blobs.append(value)
        return {"bytes": len(blobs) - 1}
    if kind is list or kind is tuple:
        return {kind.__name__: [_encode(entry, blobs) for entry in value]}
    if kind is dict:
        pairs = [[_encode(key, blobs), _encode(entry, blobs)] for key, entry in value.items()]
        return {"dict": pairs}
    if kind is np.ndarray or isinstance(value, np.generic):
        return _encode_array(np.asarray(value), kind is not np.ndarray, blobs)
    raise TypeError(
        f"cannot send {kind.__module__}.{kind.__qualname__} to the calling process: expected "
        "None, bool, int, float, str, bytes, list, tuple, dict or a NumPy array"
    )


def _encode_array(array: np.ndarray[Any, Any], scalar: bool, blobs: list[bytes]) -> Any:
    # The types of ml_dtypes are void to NumPy's `str`, and known to it by their names.
    name = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    if array.dtype.hasobject or array.dtype.names or not _known(name):
        raise TypeError(f"cannot send an array of {array.dtype} to the calling process")
    blobs.append(array.tobytes())
    return {"array": len(blobs) - 1, "dtype": name, "shape": array.shape, "scalar": scalar}


def _known(name: str) -> bool:
    import ml_dtypes  # noqa: F401 - registers its names with NumPy

    try:
        np.dtype(name)
    except TypeError:
        return False
    return True


def _decode(tree: Any, blobs: list[bytes]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "bytes" in tree:
        return blobs[tree["bytes"]]
    if "dict" in tree:
        return {_decode(key, blobs): _decode(entry, blobs) for key, entry in tree["dict"]}
    if "array" in tree:
        _known(tree["dtype"])
        dtype, shape = np.dtype(tree["dtype"]), tuple(tree["shape"])
        array = np.ndarray(shape, dtype, buffer=blobs[tree["array"]]).copy()
        return array[()] if tree["scalar"] else array
    entries = [_decode(entry, blobs) for entry in next(iter(tree.values()))]
    return tuple(entries) if "tuple" in tree else entries
