"""Which part of the symmetric heap belongs to which array.

An arena is a range of offsets. Every rank of a group does the same allocations and frees in the
same order, so each rank's own arena gives the same offsets as the others', without talking.
"""

from __future__ import annotations

from bireme.errors import EngineError

__all__ = ["Arena"]

ALIGN = 128  # two cache lines: neighbours do not disturb each other


class Arena:
    """First fit over a sorted list of free ranges."""

    def __init__(self, offset: int, nbytes: int, within: object = None) -> None:
        self.nbytes = nbytes
        self.within = within  # the parent's block that this arena divides, kept as long as needed
        self._free: list[tuple[int, int]] = [(offset, nbytes)] if nbytes else []

    @property
    def free_bytes(self) -> int:
        """Bytes that are not allocated."""
        return sum(size for _, size in self._free)

    @property
    def largest_bytes(self) -> int:
        """The largest range that is free."""
        return max((size for _, size in self._free), default=0)

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Take a range.

        Returns:
            Its offset and its size, which is ``nbytes`` rounded up; empty arrays take one unit.

        Raises:
            EngineError: If no free range is large enough.
        """
        size = max(-(-nbytes // ALIGN), 1) * ALIGN
        for i, (offset, free) in enumerate(self._free):
            if free >= size:
                rest = [(offset + size, free - size)] if free > size else []
                self._free[i : i + 1] = rest
                return offset, size
        raise EngineError(
            f"the symmetric heap is full: expected a free range of {size} bytes, found at most "
            f"{self.largest_bytes} of {self.free_bytes} free bytes in an arena of {self.nbytes}; "
            "raise BIREME_HEAP_BYTES or init(heap_bytes=...), or split(heap_bytes=...) for a group"
        )

    def release(self, offset: int, size: int) -> None:
        """Give a range back and join it with its free neighbours."""
        ranges = sorted([*self._free, (offset, size)])
        joined = [ranges[0]]
        for start, length in ranges[1:]:
            last, last_length = joined[-1]
            if last + last_length == start:
                joined[-1] = (last, last_length + length)
            else:
                joined.append((start, length))
        self._free = joined
