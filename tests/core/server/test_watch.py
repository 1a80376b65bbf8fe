"""What the watchdog of the server's loop counts."""

import threading

from kvdepot.server.watch import SLOW_TURN_SECONDS, TurnWatch


def turn(turns: TurnWatch, seconds: float) -> None:
    turns.begin()
    threading.Event().wait(seconds)
    turns.end()


def test_a_turn_counts_by_wall_clock_and_is_slow_above_the_bound() -> None:
    turns = TurnWatch()
    turn(turns, 2 * SLOW_TURN_SECONDS)
    assert turns.longest_seconds >= 2 * SLOW_TURN_SECONDS
    assert turns.num_slow == 1
    longest = turns.longest_seconds
    turn(turns, 0.0)
    assert turns.longest_seconds == longest
    assert sum(turns.turns.counts) == 2
