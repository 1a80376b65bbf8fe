"""Measures how long the turns of the server's loop take."""

import time
from typing import Final

from kvdepot.wire.histogram import Histogram

SLOW_TURN_SECONDS: Final = 0.020
SHORTEST_SECONDS: Final = 0.000016  # of a histogram's first bucket


class TurnWatch:
    """The turns of one loop, by wall clock: waiting for a core or for a thread counts."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self.num_slow = 0  # longer than `SLOW_TURN_SECONDS`
        self.turns = Histogram(SHORTEST_SECONDS)
        self._began = 0.0

    def begin(self) -> float:
        """Begin a turn; return the time."""
        self._began = time.monotonic()
        return self._began

    def end(self) -> None:
        """End the turn."""
        seconds = time.monotonic() - self._began
        self.turns.add(seconds)
        self.longest_seconds = max(self.longest_seconds, seconds)
        if seconds > SLOW_TURN_SECONDS:
            self.num_slow += 1
