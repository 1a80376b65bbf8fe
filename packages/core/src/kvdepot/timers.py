"""Calls at set times: the one heap of deadlines of a server. A call that is cancelled leaves nothing behind."""

import heapq
import math
from collections.abc import Callable
from itertools import count
from typing import Final

_LEAST_ENTRIES: Final = 64  # a heap below this size is not worth clearing


class Timers:
    """Functions, each to be called once at its time.

    The heap holds times and numbers alone. At least half of them belong to functions that are still to be called.

    Attributes:
        due: when `expire` has work, infinity for never. Early if the next function was cancelled: then it finds none.
    """

    def __init__(self) -> None:
        self.due = math.inf
        self._calls: dict[int, Callable[[], None]] = {}
        self._heap: list[tuple[float, int]] = []
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._calls)

    def call_at(self, when: float, call: Callable[[], None]) -> int:
        """Have a function called at a time; return the number that cancels it, never 0."""
        number = next(self._numbers)
        self._calls[number] = call
        heapq.heappush(self._heap, (when, number))
        self.due = self._heap[0][0]
        return number

    def cancel(self, number: int) -> None:
        """Forget a function and all that it holds. One that was called or cancelled before is ignored."""
        self._calls.pop(number, None)
        if len(self._heap) > max(_LEAST_ENTRIES, 2 * len(self._calls)):
            self._heap = [entry for entry in self._heap if entry[1] in self._calls]
            heapq.heapify(self._heap)

    def expire(self, now: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Call what is due, one function at least, until `is_over`. A function that raises is not called again."""
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
