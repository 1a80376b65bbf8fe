"""Allocates the pool's space: best fit, in extents aligned to 4 KiB. Freed extents are joined with free neighbours.

Pure bookkeeping on offsets: it never touches the memory. In the common case, one model with one extent size, each freed
extent fits the next allocation exactly.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, pairwise
from typing import Final

from kvdepot.errors import require

EXTENT_ALIGNMENT_BYTES: Final = 4096  # a page: direct I/O and memory registration need whole pages
NUM_REGIONS: Final = 96  # in the map of the pool: two lines of the map in `kvdepot top`
_RESTORE_STEP: Final = 2_000  # extents per step
_SORT_STEP: Final = 20_000  # numbers that are sorted per step


def extent_size(num_bytes: int) -> int:
    """Return the bytes that an extent for `num_bytes` takes."""
    return -(-num_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def sorted_runs(numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers in parts, each sorted in one step. `heapq.merge` joins them."""
    for start in range(0, len(numbers), _SORT_STEP):
        yield sorted(numbers[start : start + _SORT_STEP])


class ExtentAllocator:
    """Allocates and frees extents of `[0, capacity_bytes)`. `grow` makes the space usable from its start on."""

    def __init__(self, capacity_bytes: int, ready_bytes: int | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.ready_bytes = 0
        self._stays = False  # whether growth has ended before the capacity was reached
        self._region_bytes = max(1, -(-capacity_bytes // NUM_REGIONS))
        self.clear()
        self.grow(capacity_bytes if ready_bytes is None else ready_bytes)

    def clear(self) -> None:
        """Forget all extents, so that all usable space is free.

        The object stays the same, as the growing thread uses it.
        """
        self.used_bytes = 0
        self._is_restoring = False
        # Used bytes by region, an equal part of the capacity, in which an extent starts.
        self.region_bytes = [0] * NUM_REGIONS
        # The free extents by start, by end and by size.
        self._size_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._starts: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []  # the keys of `_starts`, sorted
        if self.ready_bytes:
            self._add_free(0, self.ready_bytes)

    def grow(self, ready_bytes: int) -> None:
        """Make the space up to `ready_bytes` usable. It never shrinks."""
        ready_bytes = min(ready_bytes, self.capacity_bytes)
        ready_bytes -= ready_bytes % EXTENT_ALIGNMENT_BYTES
        if ready_bytes > self.ready_bytes:
            if not self._is_restoring:  # the last step of restoring frees all space after the last extent
                self._add_free(self.ready_bytes, ready_bytes - self.ready_bytes)
            self.ready_bytes = ready_bytes

    def stop_growing(self) -> None:
        """Stop growing, because the file system has no more space."""
        self._stays = True

    @property
    def is_growing(self) -> bool:
        """Whether more of the capacity will become usable."""
        return self.ready_bytes < self.capacity_bytes and not self._stays

    def allocate(self, sizes: Sequence[int]) -> list[int]:
        """Return the offsets of extents with these sizes (`extent_size`), in order, as far as there is room.

        Extents of one call are neighbours where that is possible: they leave together, and are copied faster.
        """
        offsets: list[int] = []
        rest, regions, region_bytes = sum(sizes), self.region_bytes, self._region_bytes
        while len(offsets) < len(sizes) and self._sizes and self._sizes[-1] >= sizes[len(offsets)]:
            # The smallest free extent with room for all, else the largest: whatever is left of that is small.
            place = bisect_left(self._sizes, rest)
            found = self._sizes[place if place < len(self._sizes) else -1]
            start, _ = self._starts[found].popitem()
            self._forget(start, found)
            end = start + found
            for size in islice(sizes, len(offsets), None):
                if start + size > end:
                    break
                offsets.append(start)
                regions[start // region_bytes] += size
                start += size
            if start < end:
                self._insert(start, end - start)
            taken = start - (end - found)
            self.used_bytes += taken
            rest -= taken
        return offsets

    def free(self, extents: Iterable[tuple[int, int]]) -> None:
        """Free extents, each with the `num_bytes` that it was allocated for.

        A prefix is removed from its end on, and its extents are often neighbours: join these before looking for others.
        """
        regions, region_bytes, freed = self.region_bytes, self._region_bytes, 0
        start = end = 0
        for offset, num_bytes in extents:
            size = -(-num_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES
            freed += size
            regions[offset // region_bytes] -= size
            if offset + size == start:
                start = offset
            elif offset == end and start < end:
                end += size
            else:
                if start < end:
                    self._add_free(start, end - start)
                start, end = offset, offset + size
        if start < end:
            self._add_free(start, end - start)
        self.used_bytes -= freed

    def restore(self, count: int, extent: Callable[[int], tuple[int, int]]) -> Iterator[list[int]]:
        """Mark extents of an earlier server as used. Call this once, before any allocation.

        `extent(i)` returns `(offset, num_bytes)` of extent `i` of `count`. Iterating over the result does the work.
        Each item has the numbers of the extents taken in one step. An extent that is misaligned, out of range or
        overlaps an earlier one is not taken. Nothing can be allocated before the end.
        """
        if self.used_bytes:
            raise ValueError("restore comes before the first allocation")
        for start in list(self._size_at):
            self._remove(start)
        self._is_restoring = True
        return self._restore(count, extent)

    def _restore(self, count: int, extent: Callable[[int], tuple[int, int]]) -> Iterator[list[int]]:
        keys: list[int] = []
        for place in range(count):
            offset, num_bytes = extent(place)
            if offset >= 0:
                keys.append(offset << 96 | num_bytes << 32 | place)
            if place % _RESTORE_STEP == 0:
                yield []
        runs: list[list[int]] = []
        for run in sorted_runs(keys):
            runs.append(run)
            yield []
        end = 0
        taken: list[int] = []
        for key in merge(*runs):
            place = key & 0xFFFFFFFF
            offset, num_bytes = extent(place)
            size = extent_size(num_bytes)
            if offset % EXTENT_ALIGNMENT_BYTES or not end <= offset < offset + size <= self.ready_bytes:
                continue
            if offset > end:
                self._insert(end, offset - end)
            taken.append(place)
            self.used_bytes += size
            self.region_bytes[offset // self._region_bytes] += size
            end = offset + size
            if len(taken) == _RESTORE_STEP:
                yield taken
                taken = []
        self._is_restoring = False
        if end < self.ready_bytes:
            self._insert(end, self.ready_bytes - end)
        yield taken

    @property
    def free_bytes(self) -> int:
        """Usable bytes that are free."""
        return self.ready_bytes - self.used_bytes

    def free_extents(self) -> list[tuple[int, int]]:
        """Return `(offset, bytes)` of every free extent, by offset."""
        return sorted(self._size_at.items())

    def check_integrity(self, used: Iterable[tuple[int, int]]) -> None:
        """Check that the `used` `(offset, num_bytes)` and the free extents make up the usable space.

        Raises:
            IntegrityError: they have a gap or an overlap, or are miscounted.
        """
        taken = [(offset, extent_size(num_bytes)) for offset, num_bytes in used]
        end = 0
        for start, size in sorted([*taken, *self._size_at.items()]):
            require(start == end, f"the pool has a gap or an overlap between {end} and {start}")
            end = start + size
        require(end == self.ready_bytes, f"extents end at {end}, usable space at {self.ready_bytes}")
        num_bytes = sum(size for _, size in taken)
        require(
            num_bytes == self.used_bytes == sum(self.region_bytes), f"{num_bytes} bytes used, {self.used_bytes} counted"
        )
        free = self.free_extents()
        require(all(a + size < b for (a, size), (b, _) in pairwise(free)), "free extents touch")
        by_size = sorted((start, size) for size, starts in self._starts.items() for start in starts)
        require(by_size == free and self._sizes == sorted(self._starts), "free extents by size differ")
        require({start + size: start for start, size in free} == self._start_by_end, "free extents by end differ")

    def _add_free(self, start: int, size: int) -> None:
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
        starts = self._starts.get(size)
        if starts is None:
            starts = self._starts[size] = {}
            insort(self._sizes, size)
        starts[start] = None

    def _remove(self, start: int) -> int:
        size = self._size_at[start]
        del self._starts[size][start]
        self._forget(start, size)
        return size

    def _forget(self, start: int, size: int) -> None:
        del self._size_at[start], self._start_by_end[start + size]
        if not self._starts[size]:
            del self._starts[size], self._sizes[bisect_left(self._sizes, size)]
