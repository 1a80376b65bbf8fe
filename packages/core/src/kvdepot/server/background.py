"""Runs long work in steps between messages.

A step takes some microseconds. Urgent steps come first, in order. The other queues take turns, one step at a time. A
handler enters a queue by what it yields (`kvdepot.server.replies`); a chore is an iterator, each `next` of it a step.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final

from kvdepot.counting import Counts, depot_counter
from kvdepot.server.replies import Wait

logger = logging.getLogger(__name__)

CHORES_FAILED: Final = depot_counter("chores_failed", "Background tasks that failed because of a bug")

MAXIMUM_OPERATIONS: Final = 64  # requests of operators that wait for their turn
_MOST_HINTS: Final = 1024  # each holds the rest of one prefix
_MOST_NOTES: Final = 16  # each holds the names of a prompt's segments, 192 KiB at most
_DONE_AT_ONCE: Final = 64  # steps

Task = Iterator[object]


class Turns:
    """A queue for turns, first in, first out. Work with steps left keeps its place."""

    def __init__(self, background: "Background", most: int | None) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self._background = background
        self._most = most  # may wait; None: without a bound, as other bounds hold

    def enter(self, resume: Callable[[], None]) -> bool:
        """Wait for a first turn; False if as many wait as may."""
        if self._most is not None and len(self.waiting) >= self._most:
            return False
        self.waiting.append(resume)
        self._background.num_waiting += 1
        return True

    def again(self, resume: Callable[[], None]) -> bool:
        """Wait for a further turn: the next one if the present one is of this queue, else behind all that wait."""
        if self._background.present is self:
            self.waiting.appendleft(resume)
        else:
            self.waiting.append(resume)
        self._background.num_waiting += 1
        return True

    def total(self, steps: Iterator[int]) -> Generator[Wait, bool, int]:
        """Take the steps of an iterator in a turn each, within a handler; return the sum of their numbers."""
        total = 0
        for number in steps:
            total += number
            yield self.again
        return total

    def add(self, task: Task) -> bool:
        """Run a chore; False if as many wait as may."""
        return self.enter(_Chore(self, task))


class _Chore:
    """Iterates in turns of one queue. A closure that names itself would keep what it held until it is collected."""

    __slots__ = ("_task", "_turns")

    def __init__(self, turns: Turns, task: Task) -> None:
        self._turns = turns
        self._task = task

    def __call__(self) -> None:
        if next(self._task, self) is not self:
            self._turns.again(self)


class Background:
    """All work that has steps left.

    Args:
        counters: a chore that fails is counted in `chores_failed`, and the others continue.
    """

    def __init__(self, counters: Counts) -> None:
        self.num_waiting = 0  # steps that `work` has to do
        self.present: Turns | None = None  # the queue whose step runs
        self.urgent = Turns(self, None)
        self.operators = Turns(self, MAXIMUM_OPERATIONS)
        self.hints = Turns(self, _MOST_HINTS)  # long prefixes whose end a request has ranked
        self.notes = Turns(self, _MOST_NOTES)  # contents of chunks, for blends
        self.endings = Turns(self, 1)  # prefixes whose time to live has passed
        self.unpinnings = Turns(self, 1)  # pins whose time has passed
        self.generations = Turns(self, 1)  # chunks of weights that became outdated
        self.samples = Turns(self, 1)  # a very long lookup, counted for the estimates
        self.replays = Turns(self, 1)  # events sent again
        self.hottest = Turns(self, 1)  # lists of prefixes
        self.descriptions = Turns(self, 1)  # tokens of an earlier server, or the file of tokens written anew
        self._counters = counters
        self._others = deque(
            [
                self.operators,
                self.hints,
                self.notes,
                self.endings,
                self.unpinnings,
                self.generations,
                self.samples,
                self.replays,
                self.hottest,
                self.descriptions,
            ]
        )

    def add_urgent(self, task: Task, num_steps: int | None = None) -> None:
        """Run a chore before all that is not urgent: at once if it is known to have few steps."""
        if num_steps is None or num_steps > _DONE_AT_ONCE:
            self.urgent.add(task)
            return
        for _ in task:
            pass

    def work(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Work until `is_over`, at least one urgent step and one step of another queue."""
        is_first = True
        while self.num_waiting:
            is_urgent = bool(self.urgent.waiting)
            if is_urgent:
                self._step(self.urgent)
            if is_first or not is_urgent:
                self._step_of_others()
            is_first = False
            if is_over():
                break

    def _step_of_others(self) -> None:
        for _ in range(len(self._others)):
            turns = self._others[0]
            self._others.rotate(-1)  # behind the other queues
            if turns.waiting:
                self._step(turns)
                return

    def _step(self, turns: Turns) -> None:
        resume = turns.waiting.popleft()
        self.num_waiting -= 1
        self.present = turns
        try:
            resume()
        except Exception:
            logger.exception("a background task failed")
            self._counters[CHORES_FAILED] += 1
        finally:
            self.present = None
