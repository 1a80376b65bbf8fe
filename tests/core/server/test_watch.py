"""Counters of the server loop's watchdog."""

from kvdepot.server.loop import SLOW_TURN_SECONDS
from kvdepot.wire.status import SHORTEST_SECONDS, WatchedHistogram


def test_a_turn_is_slow_above_the_bound() -> None:
    turns = WatchedHistogram(SHORTEST_SECONDS, SLOW_TURN_SECONDS)
    turns.add(2 * SLOW_TURN_SECONDS)
    assert turns.longest == 2 * SLOW_TURN_SECONDS
    assert turns.num_above == 1
    turns.add(SLOW_TURN_SECONDS)
    assert turns.longest == 2 * SLOW_TURN_SECONDS
    assert (turns.num_above, sum(turns.counts)) == (1, 2)
