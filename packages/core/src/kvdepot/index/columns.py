"""Columns of numbers with their full length from the start, so that they are never copied to grow.

The kernel allocates each page when it is first touched, so unused length costs nothing. A growing `array` is copied
into new memory instead: that is 450 pages for the columns of an index with 240,000 chunks, at up to 14 us per page on
virtual machines that return free memory to their host.
"""

import mmap
from collections.abc import Iterator
from typing import Final, Literal

_ITEM_BYTES: Final = {"B": 1, "I": 4, "Q": 8}
_MAP_NORESERVE: Final = 0x4000  # do not reserve memory for untouched pages


def make_column(type_code: Literal["B", "I", "Q"], length: int) -> "memoryview[int]":
    """Return `length` zeros: bytes, or unsigned numbers of 4 or 8 bytes."""
    num_bytes = max(1, length) * _ITEM_BYTES[type_code]
    memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return memoryview(memory).cast(type_code)[:length]


class Links:
    """Linked lists of numbers below `length`. Each number is in at most one list, and every operation is O(1)."""

    __slots__ = ("_following", "_length", "_list_of", "_preceding", "sizes")

    def __init__(self, length: int, num_lists: int) -> None:
        self.sizes = [0] * num_lists
        self._length = length
        self._list_of = make_column("B" if num_lists < 256 else "I", length)  # list + 1, 0 for no list
        # The entries from `length` on are the lists' sentinels.
        self._following = make_column("I", length + num_lists)
        self._preceding = make_column("I", length + num_lists)
        for end in range(length, length + num_lists):
            self._following[end] = self._preceding[end] = end

    def list_of(self, number: int) -> int | None:
        """Return the list that contains a number, None if no list does."""
        place = self._list_of[number]
        return place - 1 if place else None

    def numbers(self, which: int) -> Iterator[int]:
        """Yield the numbers of a list, which must not change meanwhile."""
        end = number = self._length + which
        while (number := self._following[number]) != end:
            yield number

    def begin_with(self, number: int, which: int) -> None:
        """Rotate a list so that it begins with one of its numbers."""
        end = self._length + which
        before, after = self._preceding[end], self._following[end]
        self._following[before], self._preceding[after] = after, before
        before = self._preceding[number]
        self._following[before] = self._preceding[number] = end
        self._preceding[end], self._following[end] = before, number

    def append(self, number: int, which: int) -> None:
        """Move a number to the end of a list."""
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
        """Remove a number from its list, if it is in one."""
        place = self._list_of[number]
        if not place:
            return
        before, after = self._preceding[number], self._following[number]
        self._following[before], self._preceding[after] = after, before
        self._list_of[number] = 0
        self.sizes[place - 1] -= 1
