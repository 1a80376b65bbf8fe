"""Measures how long the turns of the server's loop take."""

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

    def add(self, seconds: float) -> None:
        """Count a turn that took this long."""
        self.turns.add(seconds)
        self.longest_seconds = max(self.longest_seconds, seconds)
        if seconds > SLOW_TURN_SECONDS:
            self.num_slow += 1
