"""Calls at set times. A call that is cancelled leaves nothing behind."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Final

_LEAST_ENTRIES: Final = 64  # a heap below this size is not worth clearing


class Timers:
    """Functions, each to be called once at its time.

    The heap holds times and numbers alone. At least half of them belong to functions that are still to be called.
    """

    def __init__(self) -> None:
        self._calls: dict[int, Callable[[], None]] = {}
        self._heap: list[tuple[float, int]] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._heap)

    def call_at(self, when: float, call: Callable[[], None]) -> int:
        """Have a function called at a time; return the number that cancels it, never 0."""
        number = next(self._numbers)
        self._calls[number] = call
        heapq.heappush(self._heap, (when, number))
        return number

    def cancel(self, number: int) -> None:
        """Forget a function and all that it holds. One that was called or cancelled before is ignored."""
        self._calls.pop(number, None)
        if len(self._heap) > max(_LEAST_ENTRIES, 2 * len(self._calls)):
            self._heap = [entry for entry in self._heap if entry[1] in self._calls]
            heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        """Return when `expire` has work, None if nothing is to be called."""
        heap = self._heap
        while heap and heap[0][1] not in self._calls:
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def expire(self, now: float, is_over: Callable[[], bool]) -> None:
        """Call what is due, one function at least, until `is_over`. A function that raises is not called again."""
        due = self.next_deadline()
        while due is not None and due <= now:
            _, number = heapq.heappop(self._heap)
            self._calls.pop(number)()
            if is_over():
                return
            due = self.next_deadline()
