"""Threads that make a tier's calls: questions before reads before writes, and always one left for what is no write.

A clear waits for the writes that run, and writes wait for it. One thread hands the calls in, the depot's loop, and it
must not wait for the others: what it shares with them are deques and a set, whose operations the interpreter makes one
at a time. There is a lock, but for the workers among themselves. Each sleeps by a lock of its own, its **bell**, so
that one call wakes one of them: if all were woken, the loop would have to get the interpreter's lock back from each.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Final

from kvdepot.tiers.jobs import Call, Operation

_EXCLUSIVE: Final = (Operation.WRITE, Operation.CLEAR)  # of each other


class Workers:
    """As many threads as are hired, less those that were dismissed. Its methods are called by one thread.

    Args:
        name: of the threads.
        most_writes: at a time.
        make_call: makes a call, on a worker; raises nothing.
        on_ended: called on a worker when a call has been made: it is none of those that run any more.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        most_writes: int,
        make_call: Callable[[Call], None],
        on_ended: Callable[[Call], None],
        clock: Callable[[], float],
    ) -> None:
        self._name = name
        self._most_writes = most_writes
        self._make_call = make_call
        self._on_ended = on_ended
        self._clock = clock
        self._waiting: tuple[deque[Call], ...] = tuple(deque[Call]() for _ in Operation)
        self._running: set[Call] = set()
        self._taking = threading.Condition(threading.Lock())  # of workers, and of who closes
        self._idle: deque[threading.Lock] = deque()  # their bells, who fell asleep last at the end
        self._dismissals: deque[None] = deque()
        self._num_hired = 0
        self._is_closed = False

    def hire(self) -> None:
        """Begin one more thread."""
        self._num_hired += 1
        threading.Thread(target=self._work, name=f"kvdepot-{self._name}-{self._num_hired}", daemon=True).start()

    def dismiss(self) -> None:
        """Have one of the threads end, as soon as one has no call."""
        self._dismissals.append(None)
        self._ring(1)

    def hand_in(self, calls: Iterable[Call]) -> None:
        """Have calls made."""
        for call in calls:
            self._waiting[call.operation].append(call)
            self._ring(1)

    def num_waiting(self, operation: Operation) -> int:
        """Return how many calls of a kind have not begun."""
        return len(self._waiting[operation])

    def running(self) -> list[Call]:
        """Return the calls that have begun and not ended."""
        return list(self._running)

    def take_back(self, operation: Operation, most: int, is_wanted: Callable[[Call], bool]) -> list[Call]:
        """Look at so many calls of a kind that have not begun; return those that are wanted, which will not be made.

        The others wait on, after those that were not looked at.
        """
        waiting, taken = self._waiting[operation], list[Call]()
        for _ in range(min(most, len(waiting))):
            try:
                call = waiting.popleft()
            except IndexError:
                break  # workers were faster
            (taken if is_wanted(call) else waiting).append(call)
        self._ring(1)  # who found none while this thread had the last
        return taken

    def close(self, drain_seconds: float, running_seconds: float, num_hung: int) -> None:
        """Give writes a time to end, drop what waits, give what runs a time to end, but for those that hang."""
        with self._taking:
            self._taking.wait_for(lambda: not (self._waiting[Operation.WRITE] or self._num_writing), drain_seconds)
            self._is_closed = True
            for waiting in self._waiting:
                waiting.clear()
            self._taking.wait_for(lambda: len(self._running) <= num_hung, running_seconds)
        self.end()

    def end(self) -> None:
        """Have all threads end."""
        self._is_closed = True
        self._ring(len(self._idle))

    # --- workers --------------------------------------------------------------------------------------------------

    def _ring(self, count: int) -> None:
        """Wake so many of those who sleep."""
        with suppress(IndexError):  # nobody does
            for _ in range(count):
                self._idle.pop().release()

    def _work(self) -> None:
        bell = threading.Lock()
        bell.acquire()
        before: Operation | None = None
        while (call := self._next(bell)) is not None:
            if before in _EXCLUSIVE and call.operation is not before:
                self._ring(len(self._idle))  # what this thread did before had kept others from beginning
            before = call.operation
            self._make_call(call)
            with self._taking:
                self._running.discard(call)
                call.has_run = True
                self._taking.notify_all()  # who closes
            self._on_ended(call)

    def _next(self, bell: threading.Lock) -> Call | None:
        """Wait for a call; None: this thread ends."""
        while (call := self._take()) is None:
            self._idle.append(bell)
            call = self._take()  # it may have come just before
            if call is not None or self._ends():
                try:
                    self._idle.remove(bell)
                except ValueError:
                    bell.acquire()  # it was rung
                break
            bell.acquire()
        return call

    def _ends(self) -> bool:
        if self._is_closed:
            return True
        with suppress(IndexError):
            self._dismissals.popleft()
            return True
        return False

    def _take(self) -> Call | None:
        with self._taking:
            operation = self._next_operation()
            if operation is None:
                return None
            try:
                call = self._waiting[operation].popleft()
            except IndexError:
                return None  # it was taken back
            call.started_at = self._clock()
            self._running.add(call)
            return call

    def _next_operation(self) -> Operation | None:
        for operation in (Operation.CONTAINS, Operation.READ):
            if self._waiting[operation]:
                return operation
        is_clearing = any(call.operation is Operation.CLEAR and not call.is_late for call in self._running)
        if self._waiting[Operation.CLEAR]:
            return None if is_clearing or self._num_writing else Operation.CLEAR
        if self._waiting[Operation.WRITE] and not is_clearing and self._num_writing < self._most_writes:
            return Operation.WRITE
        return None

    @property
    def _num_writing(self) -> int:
        return sum(call.operation is Operation.WRITE and not call.is_late for call in self._running)
