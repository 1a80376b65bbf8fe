"""Work that takes several turns of the loop: handlers that wait, and chores.

A handler returns its reply. If it has to wait, it is a generator: it yields each of its waits, and returns the reply at
the end. A chore is an iterator: each `next` is a step of some microseconds. A handler enters a queue of steps by
yielding `Turns.enter`. Urgent steps run first, in order. The other queues are served round-robin, one step at a time.
"""

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Final, Generic, TypeAlias, TypeVarTuple

from kvdepot.counting import Counts, depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.wire import frames

logger = logging.getLogger(__name__)

Wait: TypeAlias = Callable[[Callable[[], None]], bool]
"""Begins a wait, and calls the function once at its end. Returns False if there is nothing to wait for."""

Steps: TypeAlias = Generator[Wait, bool, frames.Reply]
"""A handler that yields its waits, is sent whether each has waited, and returns its reply."""

Task: TypeAlias = Iterator[object]
"""A chore: each `next` is a step."""

Ts = TypeVarTuple("Ts")

CHORES_FAILED: Final = depot_counter("chores_failed", "Background tasks that failed because of a bug")

MAXIMUM_OPERATIONS: Final = 64  # operators' requests that wait for their turn: people and scripts send few at a time
_MOST_ENDS: Final = 1024  # each holds the rest of one prefix; without room for it, only the last chunks change
_MOST_REMOVALS: Final = 1024  # one for each worker that has just registered: many times those of a node
_DONE_AT_ONCE: Final = 64  # steps, each one lease: an end of more takes turns


class Refused(Exception):
    """Refuses a request that has changed nothing. Becomes an error reply."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Awaited(Generic[*Ts]):
    """The outcome of an operation that a handler began. The handler waits for it by `yield from`."""

    def __init__(self) -> None:
        self._values: list[tuple[*Ts]] = []
        self._resume: Callable[[], None] | None = None

    def set(self, *values: *Ts) -> None:
        """Set the outcome, and resume the handler if it waits."""
        self._values.append(values)
        if self._resume is not None:
            self._resume()

    def wait(self) -> Generator[Wait, bool, tuple[*Ts]]:
        """Wait for the outcome and return it."""
        if not self._values:
            yield self._begin
        return self._values[0]

    def _begin(self, resume: Callable[[], None]) -> bool:
        self._resume = resume
        return True


class PendingReply:
    """A waiting handler, and later its reply. Only `run` creates one.

    An object, not two closures that refer to each other: their cycle would keep the bytes of a finished request until
    the garbage collector runs.
    """

    __slots__ = ("_on_error", "_steps", "on_reply", "reply")

    def __init__(self, steps: Steps, on_error: Callable[[Exception], frames.Reply]) -> None:
        self.reply: frames.Reply | None = None
        # Set by the sender of the reply. If it raises, it is called again with the error reply.
        self.on_reply: Callable[[frames.Reply], None] | None = None
        self._steps = steps
        self._on_error = on_error

    def begin(self, wait: Wait) -> None:
        """Begin the handler's wait, or resume it at once if there is nothing to wait for."""
        while not wait(self._resume):
            wait = self._steps.send(False)

    def _resume(self) -> None:
        try:
            try:
                # An inner `try`, because sending the reply may raise, too, and is then answered with an error.
                self.begin(self._steps.send(True))
            except StopIteration as end:
                self._give(end.value)
        except Exception as error:
            self._give(self._on_error(error))

    def _give(self, reply: frames.Reply) -> None:
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)


def run(steps: Steps, on_error: Callable[[Exception], frames.Reply]) -> frames.Reply | PendingReply:
    """Run a handler until its reply or its first wait.

    An exception before the first wait is raised here. `on_error` turns a later one into a reply.
    """
    pending = PendingReply(steps, on_error)
    try:
        pending.begin(next(steps))
    except StopIteration as end:
        return end.value
    # The wait may have ended while it began. Then the reply is here, and nobody would call `on_reply`.
    return pending.reply or pending


class Turns:
    """A FIFO queue for turns. Work with steps left keeps its place."""

    def __init__(self, background: "Background", most: int | None) -> None:
        self.waiting: deque[Callable[[], None]] = deque()
        self._background = background
        self._most = most  # bound of `waiting`; None: unbounded, because other bounds apply

    def enter(self, resume: Callable[[], None]) -> bool:
        """Wait for a first turn. Return False if the queue is full."""
        if self._most is not None and len(self.waiting) >= self._most:
            return False
        self.waiting.append(resume)
        self._background.num_waiting += 1
        return True

    def first(self) -> Generator[Wait, bool, None]:
        """Wait for a first turn within a handler.

        Raises:
            Refused: the queue is full.
        """
        if not (yield self.enter):
            raise Refused(ErrorCode.DRAINING, f"{self._most} such requests wait already: ask again")

    def again(self, resume: Callable[[], None]) -> bool:
        """Wait for a further turn: at the front if this queue has the present turn, else at the end."""
        # At the end, work of many steps would wait after each of them for all work that came later.
        if self._background.present is self:
            self.waiting.appendleft(resume)
        else:
            self.waiting.append(resume)
        self._background.num_waiting += 1
        return True

    def total(self, steps: Iterator[int]) -> Generator[Wait, bool, int]:
        """Iterate within a handler, one turn per item. Return the sum of the items."""
        total = 0
        for number in steps:
            total += number
            yield self.again
        return total

    def add(self, task: Task) -> bool:
        """Queue a chore. Return False if the queue is full."""
        return self.enter(_Chore(self, task))


class _Chore:
    """Iterates in turns of one queue.

    Not a closure: one that refers to itself would keep its objects alive until the garbage collector runs.
    """

    __slots__ = ("_task", "_turns")

    def __init__(self, turns: Turns, task: Task) -> None:
        self._turns = turns
        self._task = task

    def __call__(self) -> None:
        if next(self._task, self) is not self:
            self._turns.again(self)


class Background:
    """All work with steps left.

    Args:
        counters: `chores_failed` counts chores that raise. The others continue.
    """

    def __init__(self, counters: Counts) -> None:
        self.num_waiting = 0  # entries of all queues
        self.present: Turns | None = None  # the queue whose step is running
        self._counters = counters
        self._others = deque[Turns]()
        self.urgent = Turns(self, None)
        self.operators = self.queue(MAXIMUM_OPERATIONS)
        self.ends = self.queue(_MOST_ENDS)  # the rest of long prefixes; a request changes their last chunks itself
        self.unreadable = self.queue(_MOST_REMOVALS)  # entries with other page sizes than those of a new worker

    def queue(self, most: int) -> Turns:
        """Return a new queue, which takes turns with the others, for at most this many pieces of work."""
        self._others.append(Turns(self, most))
        return self._others[-1]

    def add_urgent(self, task: Task, num_steps: int | None = None) -> None:
        """Run a chore before all work that is not urgent: now if it is known to have few steps."""
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
            # One step in any case: while engines end leases all the time, an operator would never get an answer.
            if is_first or not is_urgent:
                self._step_of_others()
            is_first = False
            if is_over():
                break

    def _step_of_others(self) -> None:
        for number, turns in enumerate(self._others, start=1):
            if turns.waiting:
                self._others.rotate(-number)  # it is the last now
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
