"""Runs long tasks in steps between messages.

A task is an iterator; each `next` is a step of some microseconds. Urgent tasks run first, in order. Of the other kinds,
each is first in, first out, and the kinds take turns, one step at a time.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Final

from kvdepot.counting import Counts, depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.server.replies import Deferred, Refused
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

CHORES_FAILED: Final = depot_counter("chores_failed", "Background tasks that failed because of a bug")

_DONE_AT_ONCE: Final = 64  # steps

Task = Iterator[object]


class Kind(Enum):
    """Kinds of tasks that are not urgent."""

    OPERATOR = "requests of operators"
    HINT = "long prefixes whose end a request has ranked"
    ENDING = "prefixes whose time to live has passed"
    UNPINNING = "pins whose time has passed"
    SAMPLE = "a very long lookup, counted for the estimates"
    REPLAY = "events sent again"
    NOTE = "contents of chunks, for blends"


MAXIMUM_WAITING: Final = {Kind.OPERATOR: 64, Kind.HINT: 1024, Kind.NOTE: 16}  # one of any other kind


class Background:
    """Every task that has steps left.

    Args:
        epoch: goes into every reply.
        counters: a task that fails is counted in `chores_failed`, and the others continue.
    """

    def __init__(self, epoch: int, counters: Counts) -> None:
        self.num_waiting = 0  # tasks that have steps left: `work` has work
        self._epoch = epoch
        self._counters = counters
        self._urgent: deque[Task] = deque()
        self._tasks: dict[Kind, deque[Task]] = {}  # the kind whose turn it is comes first

    def add(self, task: Task, kind: Kind) -> bool:
        """Run a task later; False if as many of its kind wait as may."""
        waiting = self._tasks.setdefault(kind, deque())
        if len(waiting) >= MAXIMUM_WAITING.get(kind, 1):
            return False
        waiting.append(task)
        self.num_waiting += 1
        return True

    def add_urgent(self, task: Task, num_steps: int | None = None) -> None:
        """Run a task before all that are not urgent: at once if it is known to have few steps."""
        if num_steps is None or num_steps > _DONE_AT_ONCE:
            self._urgent.append(task)
            self.num_waiting += 1
            return
        for _ in task:
            pass

    def answer(self, steps: Iterator[frames.Reply | None], kind: Kind, deferred: Deferred) -> bool:
        """Run a task that yields None until it yields its reply; False if too many wait.

        An exception becomes an error reply. A task that yields no reply leaves replying to another part.
        """
        return self.add(self._answering(steps, deferred), kind)

    def go_on(self, steps: Iterator[frames.Reply | None], kind: Kind, deferred: Deferred) -> None:
        """Run the second part of a request whose first part was accepted, however many wait."""
        self._tasks.setdefault(kind, deque()).append(self._answering(steps, deferred))
        self.num_waiting += 1

    def _answering(self, steps: Iterator[frames.Reply | None], deferred: Deferred) -> Task:
        try:
            for reply in steps:
                if reply is not None:
                    deferred.send(reply)
                yield None
        except Refused as error:
            deferred.send(m.ErrorReply(self._epoch, error.code, str(error)))
        except Exception as error:
            if deferred.reply is None:
                deferred.send(m.ErrorReply(self._epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
            raise

    def work(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Run tasks until `is_over`, at least one urgent step and one step of another task."""
        is_first = True
        while self._urgent or self._tasks:
            is_urgent = bool(self._urgent)
            if is_urgent:
                self._step(self._urgent)
            if self._tasks and (is_first or not is_urgent):
                kind, tasks = next(iter(self._tasks.items()))
                self._step(tasks)
                del self._tasks[kind]
                if tasks:
                    self._tasks[kind] = tasks  # behind the other kinds
            is_first = False
            if is_over():
                break

    def _step(self, tasks: deque[Task]) -> None:
        try:
            is_done = next(tasks[0], self) is self
        except Exception:
            logger.exception("a background task failed")
            self._counters[CHORES_FAILED] += 1
            is_done = True
        if is_done:
            tasks.popleft()
            self.num_waiting -= 1
