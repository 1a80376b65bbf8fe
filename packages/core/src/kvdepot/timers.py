"""Timers: the deadlines of requests, movers and sources in one heap. Cancelled timers leave nothing behind."""

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Final

_LEAST_ENTRIES: Final = 64  # smaller heaps are not worth clearing


class Timers:
    """Functions to be called once at their times.

    The heap has only times and numbers. At least half of its entries belong to pending functions.

    Attributes:
        due: when `expire` has work, infinity for never. If the next function was cancelled, `expire` finds none then.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._calls: dict[int, Callable[[], None]] = {}
        self._heap: list[tuple[float, int]] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def call_at(self, when: float, call: Callable[[], None]) -> int:
        """Schedule a function. Return the number for `cancel`, which is never 0."""
        number = next(self._numbers)
        self._calls[number] = call
        heapq.heappush(self._heap, (when, number))
        self.due = self._heap[0][0]
        return number

    def cancel(self, number: int) -> None:
        """Drop a function and everything it refers to. A function that was called or cancelled is ignored."""
        self._calls.pop(number, None)
        if len(self._heap) > max(_LEAST_ENTRIES, 2 * len(self._calls)):
            self._heap = [entry for entry in self._heap if entry[1] in self._calls]
            heapq.heapify(self._heap)

    def expire(self, now: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Call due functions until `is_over`, but at least one. A function that raises is not called again."""
        try:
            while self._heap and self._heap[0][0] <= now:
                _, number = heapq.heappop(self._heap)
                call = self._calls.pop(number, None)
                if call is not None:
                    call()
                    if is_over():
                        return
        finally:
            self.due = self._heap[0][0] if self._heap else math.inf
