"""Counters of the server loop's watchdog."""

from kvdepot.server.loop import SLOW_TURN_SECONDS, TurnWatch


def test_a_turn_is_slow_above_the_bound() -> None:
    turns = TurnWatch()
    turns.add(2 * SLOW_TURN_SECONDS)
    assert turns.longest_seconds == 2 * SLOW_TURN_SECONDS
    assert turns.num_slow == 1
    turns.add(SLOW_TURN_SECONDS)
    assert turns.longest_seconds == 2 * SLOW_TURN_SECONDS
    assert (turns.num_slow, sum(turns.turns.counts)) == (1, 2)
