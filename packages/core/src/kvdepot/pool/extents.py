"""Space of the pool: extents, aligned to 4 KiB, given out best fit first and joined with their neighbours when freed.

Pure bookkeeping on offsets; nothing here touches memory. With one extent size in use (the common case: one model) each
freed extent is exactly what the next allocation needs.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Final

from kvdepot.pool.spread import NUM_PARTS

EXTENT_ALIGNMENT_BYTES: Final = 4096
_RESTORE_STEP: Final = 250  # extents between two pauses: less than half a millisecond
NUM_REGIONS: Final = 96  # of the pool's map
_LEAST_SORTED_BYTES: Final = 4 << 20  # of the pool, whose extents are sorted at once
_MOST_SORTED: Final = 8192  # parts of the pool
_BLOCK: Final = 512  # holes
_MIXER: Final = 2_654_435_761  # 2^32 over the golden ratio: bits 24 and up of a product depend on all of a small number


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
        # Of each hole; in several dictionaries, as one that holds half a million takes 30 ms to grow.
        self._size_at: list[dict[int, int]] = [{} for _ in range(NUM_PARTS)]
        self._start_by_end: list[dict[int, int]] = [{} for _ in range(NUM_PARTS)]
        self._by_size = _SortedPairs()  # (size, start)
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
        found = self._by_size.take_from((size, 0))
        if found is None:
            return None
        hole, start = found
        del _part(self._size_at, start)[start], _part(self._start_by_end, start + hole)[start + hole]
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
        for start, _ in self.holes():
            self._remove(start)
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
        return sorted(chain.from_iterable(part.items() for part in self._size_at))

    def _add_hole(self, start: int, size: int) -> None:
        before = _part(self._start_by_end, start).get(start)
        if before is not None:
            size += self._remove(before)
            start = before
        if start + size in _part(self._size_at, start + size):
            size += self._remove(start + size)
        self._insert(start, size)

    def _insert(self, start: int, size: int) -> None:
        _part(self._size_at, start)[start] = size
        _part(self._start_by_end, start + size)[start + size] = start
        self._by_size.add((size, start))

    def _remove(self, start: int) -> int:
        size = _part(self._size_at, start).pop(start)
        del _part(self._start_by_end, start + size)[start + size]
        self._by_size.remove((size, start))
        return size


def _part(parts: list[dict[int, int]], offset: int) -> dict[int, int]:
    """Return the dictionary that an offset belongs to: neighbours to different ones."""
    return parts[(offset // EXTENT_ALIGNMENT_BYTES * _MIXER >> 24) % NUM_PARTS]


class _SortedPairs:
    """Pairs in order, in blocks: inserting into one list of half a million takes 0.4 ms."""

    def __init__(self) -> None:
        self._blocks: list[list[tuple[int, int]]] = []  # none is empty
        self._last: list[tuple[int, int]] = []  # of each block

    def add(self, pair: tuple[int, int]) -> None:
        """Put a pair that is not there to its place."""
        place = bisect_left(self._last, pair)
        if place == len(self._blocks):
            if not place or len(self._blocks[-1]) >= _BLOCK:
                self._blocks.append([pair])
                self._last.append(pair)
                return
            place -= 1
        block = self._blocks[place]
        insort(block, pair)
        if len(block) > 2 * _BLOCK:
            self._blocks.insert(place + 1, block[_BLOCK:])
            self._last.insert(place + 1, block[-1])
            del block[_BLOCK:]
        self._last[place] = block[-1]

    def remove(self, pair: tuple[int, int]) -> None:
        """Take out a pair that is there."""
        taken = self.take_from(pair)
        assert taken == pair

    def take_from(self, least: tuple[int, int]) -> tuple[int, int] | None:
        """Take out and return the first pair that is not below `least`, None if all are."""
        place = bisect_left(self._last, least)
        if place == len(self._blocks):
            return None
        block = self._blocks[place]
        pair = block.pop(bisect_left(block, least))
        if not block:
            del self._blocks[place], self._last[place]
        elif pair == self._last[place]:
            self._last[place] = block[-1]
        return pair
