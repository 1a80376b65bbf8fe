"""Space of the pool: extents, aligned to 4 KiB, given out best fit first and joined with their neighbours when freed.

Pure bookkeeping on offsets; nothing here touches memory. With one extent size in use (the common case: one model) each
freed extent is exactly what the next allocation needs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Final

from kvdepot.config import EXTENT_ALIGNMENT_BYTES

_RESTORE_STEP: Final = 250  # extents between two pauses: less than half a millisecond
NUM_REGIONS: Final = 96  # of the pool's map
_LEAST_SORTED_BYTES: Final = 4 << 20  # of the pool, whose extents are sorted at once
_MOST_SORTED: Final = 8192  # parts of the pool


def extent_size(num_bytes: int) -> int:
    """Return the bytes that an extent for `num_bytes` takes."""
    return -(-num_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


class ExtentAllocator:
    """Gives out and takes back extents of `[0, capacity_bytes)`, of which `grow` has made the first part usable."""

    def __init__(self, capacity_bytes: int, ready_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.ready_bytes = 0
        self.used_bytes = 0
        self.region_bytes = [0] * NUM_REGIONS  # used, by where an extent starts, of equal parts of the capacity
        self._region_bytes = max(1, -(-capacity_bytes // NUM_REGIONS))
        self._size_at: dict[int, int] = {}  # start of each hole -> its size
        self._start_by_end: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (size, start), sorted
        self.grow(capacity_bytes if ready_bytes is None else ready_bytes)

    def grow(self, ready_bytes: int) -> None:
        """Make the space up to `ready_bytes` usable; never shrinks."""
        ready_bytes = min(ready_bytes, self.capacity_bytes)
        ready_bytes -= ready_bytes % EXTENT_ALIGNMENT_BYTES
        if ready_bytes > self.ready_bytes:
            self._add_hole(self.ready_bytes, ready_bytes - self.ready_bytes)
            self.ready_bytes = ready_bytes

    def allocate(self, num_bytes: int) -> int | None:
        """Return the offset of an extent for `num_bytes`, None if no hole is large enough."""
        size = extent_size(num_bytes)
        place = bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        hole, start = self._by_size.pop(place)
        del self._size_at[start], self._start_by_end[start + hole]
        if hole > size:
            self._insert(start + size, hole - size)
        self.used_bytes += size
        self.region_bytes[start // self._region_bytes] += size
        return start

    def free(self, offset: int, num_bytes: int) -> None:
        """Take back the extent that `allocate` gave for `num_bytes`."""
        size = extent_size(num_bytes)
        self.used_bytes -= size
        self.region_bytes[offset // self._region_bytes] -= size
        self._add_hole(offset, size)

    def restore(self, extents: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        """Mark extents `(offset, num_bytes)` of an earlier life as used; call once, before any allocation.

        The work is done as the result is iterated over; each item has places in `extents` of some that were
        taken. One that is misaligned, out of range or overlaps an earlier one is not. Until the end nothing can
        be allocated.
        """
        if self.used_bytes:
            raise ValueError("restore comes before the first allocation")
        self._size_at.clear()
        self._start_by_end.clear()
        self._by_size.clear()
        return self._restore(extents)

    def _restore(self, extents: Sequence[tuple[int, int]]) -> Iterator[list[int]]:
        by_region: dict[int, list[int]] = {}
        region_bytes = max(_LEAST_SORTED_BYTES, self.capacity_bytes // _MOST_SORTED)
        for place, (offset, _) in enumerate(extents):
            by_region.setdefault(offset // region_bytes, []).append(place)
            if place % _RESTORE_STEP == 0:
                yield []
        end = 0
        for region in sorted(by_region):
            places = sorted(by_region.pop(region), key=extents.__getitem__)
            for first in range(0, len(places), _RESTORE_STEP):
                taken: list[int] = []
                for place in places[first : first + _RESTORE_STEP]:
                    offset, num_bytes = extents[place]
                    size = extent_size(num_bytes)
                    if offset % EXTENT_ALIGNMENT_BYTES or not end <= offset < offset + size <= self.ready_bytes:
                        continue
                    if offset > end:
                        self._insert(end, offset - end)
                    taken.append(place)
                    self.used_bytes += size
                    self.region_bytes[offset // self._region_bytes] += size
                    end = offset + size
                yield taken
        if end < self.ready_bytes:
            self._insert(end, self.ready_bytes - end)

    @property
    def free_bytes(self) -> int:
        """Usable bytes that nobody has."""
        return self.ready_bytes - self.used_bytes

    def holes(self) -> list[tuple[int, int]]:
        """Return `(offset, bytes)` of every hole, by offset."""
        return sorted(self._size_at.items())

    def _add_hole(self, start: int, size: int) -> None:
        before = self._start_by_end.get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in self._size_at:
            size += self._remove(start + size)
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_by_end[start + size] = start
        insort(self._by_size, (size, start))

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_by_end[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        return size
