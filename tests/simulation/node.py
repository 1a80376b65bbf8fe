"""The nodes to which a history happens: `World`, on a clock of its own, or `Processes`, in real time."""

from collections.abc import Callable
from random import Random

Event = tuple[str, int, int, int]


def random_event(rng: Random, name: str) -> Event:
    """Return an event with random numbers, which choose among the possibilities at its moment."""
    return name, rng.getrandbits(8), rng.getrandbits(8), rng.getrandbits(8)


class Node:
    """Each event `NAME` is a method `on_NAME`. It returns the event in words, or None if it is impossible now.

    Args:
        say: receives each event in words.
    """

    def __init__(self, say: Callable[[str], object] | None = None) -> None:
        self._say = say
        self._events: dict[str, Callable[[int, int, int], str | None]] = {
            name.removeprefix("on_"): getattr(self, name) for name in dir(self) if name.startswith("on_")
        }

    def do(self, event: Event) -> bool:
        """Make an event happen. Return False if it is impossible now."""
        name, *numbers = event
        told = self._events[name](*numbers)
        if told is not None and self._say is not None:
            self._say(told)
        return told is not None
