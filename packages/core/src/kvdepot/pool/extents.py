"""Allocates the pool's space: best fit, in extents aligned to 4 KiB. Freed extents are joined with free neighbours.

Pure bookkeeping on offsets: it never touches the memory. In the common case, one model with one extent size, each freed
extent fits the next allocation exactly.

Large pools are divided into **arenas**. The extents of one owner, a part of a model, lie together in arenas, so that a
worker that copies one part of eight touches an eighth of the pool, and registers no more than that with its device.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from itertools import islice, pairwise
from typing import Final

from kvdepot.errors import require

EXTENT_ALIGNMENT_BYTES: Final = 4096  # for direct I/O; a page, or a part of one on machines with larger pages
NUM_REGIONS: Final = 96  # in the map of the pool: two lines of the map in `kvdepot top`
ARENA_BYTES: Final = 1 << 30  # whole registered pieces (`kvdepot_cuda.registration`)
_LEAST_ARENAS: Final = 64  # smaller pools have one: eight devices register 64 GiB in 2.5 minutes
_NOBODY: Final = -1  # the owner of arenas that no owner has taken yet
_STRANDED_SHARE: Final = 32
"""Above a 32nd of the pool, space that is free in the arenas of others is used, before more is evicted. Eight ranks
that store the same prompts leave a few hundred MiB to each other; a model that is not used any more leaves it all."""
_RESTORE_STEP: Final = 2_000  # extents per step
_SORT_STEP: Final = 20_000  # numbers that are sorted per step


def extent_size(num_bytes: int) -> int:
    """Return the bytes that an extent for `num_bytes` takes."""
    return -(-num_bytes // EXTENT_ALIGNMENT_BYTES) * EXTENT_ALIGNMENT_BYTES


def sorted_runs(numbers: list[int]) -> Iterator[list[int]]:
    """Yield the numbers in parts, each sorted in one step. `heapq.merge` joins them."""
    for start in range(0, len(numbers), _SORT_STEP):
        yield sorted(numbers[start : start + _SORT_STEP])


class _Holes:
    """The free extents in the arenas of one owner, by size."""

    def __init__(self) -> None:
        self.starts: dict[int, dict[int, None]] = {}
        self.sizes: list[int] = []  # the keys of `starts`, sorted

    def add(self, start: int, size: int) -> None:
        starts = self.starts.get(size)
        if starts is None:
            starts = self.starts[size] = {}
            insort(self.sizes, size)
        starts[start] = None

    def remove(self, start: int, size: int) -> None:
        starts = self.starts[size]
        del starts[start]
        if not starts:
            del self.starts[size], self.sizes[bisect_left(self.sizes, size)]

    def fitting(self, size: int) -> tuple[int, int]:
        """Return the start and size of the smallest that has room for `size`, else of the largest."""
        place = bisect_left(self.sizes, size)
        found = self.sizes[place if place < len(self.sizes) else -1]
        return next(reversed(self.starts[found])), found

    @property
    def largest(self) -> int:
        return self.sizes[-1] if self.sizes else 0


class ExtentAllocator:
    """Allocates and frees extents of `[0, capacity_bytes)`. `grow` makes the space usable from its start on.

    Args:
        capacity_bytes: the size of the pool.
        ready_bytes: the usable space at its start; None for all of it.
        arena_bytes: the size of an arena. A pool of fewer than 64 has only one.
    """

    def __init__(self, capacity_bytes: int, ready_bytes: int | None = None, *, arena_bytes: int = ARENA_BYTES) -> None:
        self.capacity_bytes = capacity_bytes
        self.ready_bytes = 0
        self._stays = False  # whether growth has ended before the capacity was reached
        self._region_bytes = max(1, -(-capacity_bytes // NUM_REGIONS))
        self._has_arenas = capacity_bytes >= _LEAST_ARENAS * arena_bytes
        self._arena_bytes = arena_bytes if self._has_arenas else max(1, capacity_bytes)
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
        self._owners = [_NOBODY] * -(-self.capacity_bytes // self._arena_bytes)  # by arena
        # The free extents by start, by end, and by size for each owner. None lies in arenas of two owners.
        self._size_at: dict[int, int] = {}
        self._start_by_end: dict[int, int] = {}
        self._holes: dict[int, _Holes] = {_NOBODY: _Holes()}
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

    def allocate(self, sizes: Sequence[int], owners: Sequence[int] = (), *, anywhere: bool = True) -> list[int]:
        """Return the offsets of extents with these sizes (`extent_size`), in order, as far as there is room.

        Extents of one owner and one call are neighbours where that is possible: they leave together, and are copied
        faster.

        Args:
            sizes: the sizes of the extents.
            owners: the owner of each extent, in whose arenas it is to lie. Empty: all have the same.
            anywhere: use the space that others left in their arenas, too, if there is no other.
        """
        if not self._has_arenas:
            return self._allocate(sizes, _NOBODY, anywhere=anywhere)
        found: dict[int, int] = {}  # by place in `sizes`
        for owner in dict.fromkeys(owners or [0]):
            places = [place for place, each in enumerate(owners) if each == owner] or range(len(sizes))
            offsets = self._allocate([sizes[place] for place in places], owner, anywhere=anywhere)
            found |= zip(places, offsets, strict=False)
        count = next((place for place in range(len(sizes)) if place not in found), len(sizes))
        self.free([(found[place], sizes[place]) for place in sorted(found) if place >= count])
        offsets = [found[place] for place in range(count)]
        # A later extent may have taken the room of an earlier one with another owner.
        for size, owner in zip(sizes[count:], owners[count:], strict=False):
            more = self._allocate([size], owner, anywhere=anywhere)
            if not more:
                break
            offsets += more
        return offsets

    def _allocate(self, sizes: Sequence[int], owner: int, *, anywhere: bool) -> list[int]:
        offsets: list[int] = []
        rest, regions, region_bytes = sum(sizes), self.region_bytes, self._region_bytes
        while len(offsets) < len(sizes):
            holes = self._holes_for(owner, sizes[len(offsets)], rest, anywhere=anywhere)
            if holes is None:
                break
            # The smallest free extent with room for all, else the largest: whatever is left of that is small.
            start, found = holes.fitting(rest)
            self._remove(start)
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

    def _holes_for(self, owner: int, size: int, rest: int, *, anywhere: bool) -> _Holes | None:
        """Return holes of which the largest has room for `size`: the owner's, if possible with room for `rest`."""
        holes = self._holes.setdefault(owner, _Holes())
        if self._has_arenas:
            while holes.largest < max(size, min(rest, self._arena_bytes)) and self._take_arena(owner):
                pass
        if holes.largest >= size:
            return holes
        # While the pool grows, there may be no arena to take, and the first stores of all ranks must find room.
        if anywhere or self.is_growing or self.free_bytes > self.capacity_bytes // _STRANDED_SHARE:
            holes = max(self._holes.values(), key=lambda each: each.largest)
            return holes if holes.largest >= size else None
        return None

    def _take_arena(self, owner: int) -> bool:
        """Give an arena to an owner: one that nobody has, else a free one of another owner. Return False without."""
        for other, holes in self._holes.items():  # the first is `_NOBODY`
            if other == owner:
                continue
            for size in reversed(holes.sizes):
                if size < self._arena_bytes and other != _NOBODY:
                    break
                for start in holes.starts[size]:
                    # Space of nobody begins with an arena, and ends within one where the pool still grows.
                    first = -(-start // self._arena_bytes)
                    begin, end = first * self._arena_bytes, start + size
                    stop = begin + self._arena_bytes
                    if stop > end and not (other == _NOBODY and begin < end == self.ready_bytes):
                        continue
                    self._remove(start)
                    if stop < end:
                        self._insert(stop, end - stop)
                    if start < begin:
                        self._insert(start, begin - start)
                    self._owners[first] = owner
                    self._join(begin, min(stop, end) - begin)
                    return True
        return False

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

    def restore(self, offsets: Sequence[int], sizes: Sequence[int], owners: Sequence[int]) -> Iterator[list[int]]:
        """Mark extents of an earlier server as used. Call this once, before any allocation.

        Iterating over the result does the work. Each item has the positions of the extents taken in one step. An extent
        that is misaligned, out of range or overlaps an earlier one is not taken. Nothing can be allocated before the
        end. An arena belongs to the owner of its first extent.

        Args:
            offsets: the offset of each extent.
            sizes: the `num_bytes` that each was allocated for.
            owners: the owner of each.
        """
        if self.used_bytes:
            raise ValueError("restore comes before the first allocation")
        for start in list(self._size_at):
            self._remove(start)
        self._is_restoring = True
        return self._restore(offsets, sizes, owners)

    def _restore(self, offsets: Sequence[int], sizes: Sequence[int], owners: Sequence[int]) -> Iterator[list[int]]:
        keys: list[int] = []
        for start in range(0, len(offsets), _RESTORE_STEP):
            some = offsets[start : start + _RESTORE_STEP]
            keys += [offset << 32 | place for place, offset in enumerate(some, start)]
            yield []
        runs: list[list[int]] = []
        for run in sorted_runs(keys):
            runs.append(run)
            yield []
        page, regions, region_bytes, has_arenas = (
            EXTENT_ALIGNMENT_BYTES,
            self.region_bytes,
            self._region_bytes,
            self._has_arenas,
        )
        end = 0
        taken: list[int] = []
        for key in merge(*runs):
            offset, place = key >> 32, key & 0xFFFFFFFF
            size = -(-sizes[place] // page) * page
            if offset % page or not end <= offset < offset + size <= self.ready_bytes:
                continue
            if has_arenas:
                self._own(offset, size, owners[place])
            if offset > end:
                self._add_free(end, offset - end)
            taken.append(place)
            self.used_bytes += size
            regions[offset // region_bytes] += size
            end = offset + size
            if len(taken) == _RESTORE_STEP:
                yield taken
                taken = []
        self._is_restoring = False
        if end < self.ready_bytes:
            self._add_free(end, self.ready_bytes - end)
        yield taken

    def _own(self, offset: int, size: int, owner: int) -> None:
        """Give an owner the arenas of an extent that nobody has."""
        for arena in range(offset // self._arena_bytes, (offset + size - 1) // self._arena_bytes + 1):
            if self._owners[arena] == _NOBODY:
                self._owners[arena] = owner
                self._holes.setdefault(owner, _Holes())

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
        owner = self._owner_at
        require(
            all(a + size < b or (a + size == b and owner(a) != owner(b)) for (a, size), (b, _) in pairwise(free)),
            "free extents touch",
        )
        by_size: list[tuple[int, int]] = []
        for number, holes in self._holes.items():
            by_size += [(start, size) for size, starts in holes.starts.items() for start in starts]
            require(holes.sizes == sorted(holes.starts), "sizes of free extents differ")
            require(
                all(
                    {owner(start), owner(start + size - 1)} == {number}
                    for size in holes.sizes
                    for start in holes.starts[size]
                ),
                "a free extent lies in another owner's arena",
            )
        require(sorted(by_size) == free, "free extents by size differ")
        require({start + size: start for start, size in free} == self._start_by_end, "free extents by end differ")

    def _add_free(self, start: int, size: int) -> None:
        arena, owners = self._arena_bytes, self._owners
        for number in range(start // arena + 1, (start + size - 1) // arena + 1):
            if owners[number] != owners[number - 1]:
                self._join(start, number * arena - start)
                start, size = number * arena, start + size - number * arena
        self._join(start, size)

    def _join(self, start: int, size: int) -> None:
        """Add free space of one owner, and join it with the owner's free space beside it."""
        owner = self._owner_at(start)
        before = self._start_by_end.get(start)
        if before is not None and self._owner_at(before) == owner:
            size += self._remove(before)
            start = before
        if start + size in self._size_at and self._owner_at(start + size) == owner:
            size += self._remove(start + size)
        self._insert(start, size)

    def _owner_at(self, offset: int) -> int:
        return self._owners[offset // self._arena_bytes]

    def _holes_at(self, offset: int) -> _Holes:
        return self._holes[self._owner_at(offset)]

    def _insert(self, start: int, size: int) -> None:
        self._size_at[start] = size
        self._start_by_end[start + size] = start
        self._holes_at(start).add(start, size)

    def _remove(self, start: int) -> int:
        size = self._size_at.pop(start)
        del self._start_by_end[start + size]
        self._holes_at(start).remove(start, size)
        return size
