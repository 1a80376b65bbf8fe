"""Copies an object's bytes to the places of its chunks, as they arrive."""

from collections import deque
from collections.abc import Iterable
from typing import Final

_COPIED_AT_ONCE: Final = 1 << 20  # bytes: about a tenth of a millisecond


class Scatter:
    """The chunks of an object that have not arrived completely.

    Args:
        targets: the offset of each chunk in the object, and its memory.
    """

    def __init__(self, targets: Iterable[tuple[int, memoryview]]) -> None:
        self._targets = deque(sorted(targets, key=lambda target: target[0]))
        self._num_copied = 0  # bytes of the first one
        self.complete = set[int]()  # offsets of the chunks that have arrived

    def feed(self, position: int, piece: memoryview) -> None:
        """Copy a piece of the object, which begins at `position`, after all earlier ones."""
        end = position + len(piece)
        while self._targets:
            offset, target = self._targets[0]
            start, stop = max(offset, position), min(offset + len(target), end)
            if start < stop:
                copy(piece[start - position : stop - position], target[start - offset : stop - offset])
                self._num_copied += stop - start
            if offset + len(target) > end:
                return
            if self._num_copied == len(target):
                self.complete.add(offset)
            self._targets.popleft()
            self._num_copied = 0


def copy(source: memoryview, target: memoryview) -> None:
    """Copy bytes in pieces, so that threads that wait for the GIL, like the depot's loop, get it in between."""
    for first in range(0, len(source), _COPIED_AT_ONCE):
        target[first : first + _COPIED_AT_ONCE] = source[first : first + _COPIED_AT_ONCE]
