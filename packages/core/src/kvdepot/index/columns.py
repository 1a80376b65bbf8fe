"""Columns of numbers that are as long as they may get from the start: nothing is copied as what they describe grows.

Their memory comes when it is touched first, page by page, so what is not used costs nothing. An `array` or a dictionary
that grows is copied into memory that nobody touched yet: 450 pages for the columns of an index at 240,000 chunks, and
each takes up to 14 us where a machine gives what is free back to its host.
"""

import mmap
from collections.abc import Iterator
from typing import Final, Literal

_ITEM_BYTES: Final = {"B": 1, "I": 4, "Q": 8}
_MAP_NORESERVE: Final = 0x4000  # what is not touched counts nowhere


def make_column(type_code: Literal["B", "I", "Q"], length: int) -> "memoryview[int]":
    """Return `length` zeros: bytes, or unsigned numbers of 4 or 8 bytes."""
    num_bytes = max(1, length) * _ITEM_BYTES[type_code]
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return memoryview(memory).cast(type_code)[:length]


class Links:
    """Lists of numbers below `length`, each number in one of them at most; every step is O(1)."""

    __slots__ = ("_following", "_length", "_list_of", "_preceding", "sizes")

    def __init__(self, length: int, num_lists: int) -> None:
        self.sizes = [0] * num_lists
        self._length = length
        self._list_of = make_column("B" if num_lists < 256 else "I", length)  # plus one; 0 for none
        # Behind the numbers: what is before the first and after the last of each list.
        self._following = make_column("I", length + num_lists)
        self._preceding = make_column("I", length + num_lists)
        for end in range(length, length + num_lists):
            self._following[end] = self._preceding[end] = end

    def list_of(self, number: int) -> int | None:
        """Return the list that a number is in, None if it is in none."""
        place = self._list_of[number]
        return place - 1 if place else None

    def first(self, which: int) -> int | None:
        """Return the number that has been in a list longest, None if it is empty."""
        return self._following[self._length + which] if self.sizes[which] else None

    def numbers(self, which: int) -> Iterator[int]:
        """Yield the numbers of a list, which stays as it is meanwhile."""
        end = number = self._length + which
        while (number := self._following[number]) != end:
            yield number

    def begin_with(self, number: int, which: int) -> None:
        """Make a number of a list its first: those before it go to the end, in their order."""
        end = self._length + which
        before, after = self._preceding[end], self._following[end]
        self._following[before], self._preceding[after] = after, before
        before = self._preceding[number]
        self._following[before] = self._preceding[number] = end
        self._preceding[end], self._following[end] = before, number

    def append(self, number: int, which: int) -> None:
        """Put a number to the end of a list; out of the one where it was."""
        following, preceding = self._following, self._preceding
        if self._list_of[number]:
            self.remove(number)
        end = self._length + which
        last = preceding[end]
        following[last] = preceding[end] = number
        preceding[number], following[number] = last, end
        self._list_of[number] = which + 1
        self.sizes[which] += 1

    def remove(self, number: int) -> None:
        """Take a number out of its list, if it is in one."""
        place = self._list_of[number]
        if not place:
            return
        before, after = self._preceding[number], self._following[number]
        self._following[before], self._preceding[after] = after, before
        self._list_of[number] = 0
        self.sizes[place - 1] -= 1
