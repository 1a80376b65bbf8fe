"""Threads that make a tier's calls, in the order contains, read, touch, clear, first writes, other writes.

At least one thread never takes writes. One touch runs at a time, as nobody waits for it.

A clear waits for running writes, and writes wait for it. The depot's loop hands calls in. It shares one lock with the
threads, which hold it only for a few operations on deques. One call wakes one thread: after waking all of them, the
loop would have to get the interpreter's lock back from each.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvdepot.tiers.jobs import Call, Operation

_EXCLUSIVE: Final = (Operation.WRITE, Operation.CLEAR)  # of each other


class Workers:
    """Hired threads without the dismissed ones. Call the methods on one thread.

    Args:
        name: for the names of the threads.
        most_writes: concurrent writes.
        make_call: makes a call, on a worker; raises nothing.
        on_ended: called on a worker once a call has ended and no longer counts as running.
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
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)  # workers wait for it
        self._has_ended = threading.Condition(self._lock)  # `close` waits for it
        self._waiting: tuple[deque[Call], ...] = tuple(deque[Call]() for _ in Operation)
        self._first_writes = deque[Call]()  # of jobs that go first
        self._running: set[Call] = set()
        self._num_to_end = 0  # dismissed threads that have not ended
        self._num_hired = 0
        self._is_closed = False

    def hire(self) -> None:
        """Start one more thread."""
        self._num_hired += 1
        threading.Thread(target=self._work, name=f"kvdepot-{self._name}-{self._num_hired}", daemon=True).start()

    def dismiss(self) -> None:
        """End one thread, once one has no call."""
        with self._lock:
            self._num_to_end += 1
            self._has_work.notify()

    def hand_in(self, calls: Iterable[Call]) -> None:
        """Queue calls."""
        with self._lock:
            for call in calls:
                is_first = call.job.is_first and call.operation is Operation.WRITE
                (self._first_writes if is_first else self._waiting[call.operation]).append(call)
                self._has_work.notify()

    def num_waiting(self, operation: Operation) -> int:
        """Return how many calls of a kind wait."""
        return sum(map(len, self._queues(operation)))

    def _queues(self, operation: Operation) -> tuple[deque[Call], ...]:
        """Return the waiting calls of a kind, the next ones first."""
        waiting = self._waiting[operation]
        return (self._first_writes, waiting) if operation is Operation.WRITE else (waiting,)

    def running(self) -> list[Call]:
        """Return the calls that have begun and not ended."""
        with self._lock:
            return list(self._running)

    def take_back(self, operation: Operation, most: int, is_wanted: Callable[[Call], bool]) -> list[Call]:
        """Remove and return the wanted ones of the next `most` waiting calls of a kind; twice as many writes.

        The others keep waiting, behind those that were not examined.
        """
        with self._lock:
            taken = list[Call]()
            for waiting in self._queues(operation):
                for _ in range(min(most, len(waiting))):
                    call = waiting.popleft()
                    (taken if is_wanted(call) else waiting).append(call)
            return taken

    def close(self, drain_seconds: float, running_seconds: float, num_hung: int) -> None:
        """Wait for the writes, drop waiting calls, then wait for the running calls that do not hang. Both waits end."""
        with self._lock:
            self._has_ended.wait_for(
                lambda: not (self.num_waiting(Operation.WRITE) or self._num_writing), drain_seconds
            )
            self._is_closed = True
            for operation in Operation:
                for waiting in self._queues(operation):
                    waiting.clear()
            self._has_ended.wait_for(lambda: len(self._running) <= num_hung, running_seconds)
        self.end()

    def end(self) -> None:
        """End all threads."""
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()

    # --- workers --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (call := self._next()) is not None:
            self._make_call(call)
            with self._lock:
                self._running.discard(call)
                call.has_run = True
                self._has_ended.notify()
                # This thread makes the next call. Another kind may begin beside it now, on other threads.
                if call.operation in _EXCLUSIVE and self._next_operation() not in (None, call.operation):
                    self._has_work.notify(self._most_writes if call.operation is Operation.CLEAR else 1)
            self._on_ended(call)

    def _next(self) -> Call | None:
        """Wait for a call. None ends this thread."""
        with self._lock:
            while (operation := self._next_operation()) is None:
                if self._is_closed:
                    return None
                if self._num_to_end:
                    self._num_to_end -= 1
                    return None
                self._has_work.wait()
            call = next(filter(None, self._queues(operation))).popleft()
            call.started_at = self._clock()
            self._running.add(call)
            return call

    def _next_operation(self) -> Operation | None:
        for operation in (Operation.CONTAINS, Operation.READ):
            if self._waiting[operation]:
                return operation
        if self._waiting[Operation.TOUCH] and not any(call.operation is Operation.TOUCH for call in self._running):
            return Operation.TOUCH
        if self._waiting[Operation.OUTDATE]:
            return Operation.OUTDATE
        is_clearing = any(call.operation is Operation.CLEAR and not call.is_late for call in self._running)
        if self._waiting[Operation.CLEAR]:
            return None if is_clearing or self._num_writing else Operation.CLEAR
        if self.num_waiting(Operation.WRITE) and not is_clearing and self._num_writing < self._most_writes:
            return Operation.WRITE
        return None

    @property
    def _num_writing(self) -> int:
        return sum(call.operation is Operation.WRITE and not call.is_late for call in self._running)
