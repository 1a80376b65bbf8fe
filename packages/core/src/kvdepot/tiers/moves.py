"""Runs the moves of entries between the pool and the tiers, a step of each at a time.

A move is a generator. It yields `Pause.STEP` after about half a millisecond of work, and `Pause.WAIT` if it can go on
only when somebody has called `Moves.wake`.
"""

import itertools
from collections.abc import Callable, Generator, Hashable, Iterator
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class Pause(Enum):
    """The reason why a move pauses."""

    STEP = 0  # so that others can run
    WAIT = 1  # for a tier, or for entries of another move


Steps: TypeAlias = Generator[Pause, None, T]


class Moves(Generic[K]):
    """The moves of one kind that have not ended, by key. The one whose step is running is left out.

    Args:
        on_end: called with the key of a move that has ended or raised.

    Attributes:
        ready: the moves that can go on, in order.
    """

    def __init__(self, on_end: Callable[[K], object]) -> None:
        self.ready: dict[K, Steps[None]] = {}
        self._waiting: dict[K, Steps[None]] = {}
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self.ready) + len(self._waiting)

    def __iter__(self) -> Iterator[K]:
        return itertools.chain(self.ready, self._waiting)

    def __contains__(self, key: object) -> bool:
        return key in self.ready or key in self._waiting

    def wake(self, key: K) -> None:
        """Let a waiting move go on."""
        # Several reads may end before its next step, and one that hung after its last: to these, it does not wait.
        if key in self._waiting:
            self.ready[key] = self._waiting.pop(key)

    def step(self, key: K, steps: Steps[None]) -> bool:
        """Run a step of a move that is in neither state now. Return False if it has ended."""
        try:
            pause = next(steps)
        except StopIteration:
            self._on_end(key)
            return False
        except Exception:  # a bug: others go on
            self._on_end(key)
            raise
        (self.ready if pause is Pause.STEP else self._waiting)[key] = steps
        return True

    def turn(self, is_over: Callable[[], bool]) -> None:
        """Run a step of a move that can go on, then more until `is_over`."""
        while self.ready:
            key = next(iter(self.ready))
            self.step(key, self.ready.pop(key))
            if is_over():
                break
