"""The threads that make a tier's calls, in the order contains, read, touch, clear, first writes, other writes.

At least one thread never takes writes. Only one touch runs at a time, as no request waits for it.

A clear waits for running writes, and writes wait for it. The depot's loop submits calls. It shares one lock with the
threads, which hold it only for a few operations on deques. One call wakes one thread: if all of them woke, the loop
would have to reacquire the interpreter lock from each.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvdepot.tiers.jobs import Call, JobKind

_EXCLUSIVE: Final = (JobKind.WRITE, JobKind.CLEAR)  # these exclude each other


class TierWorkers:
    """The worker threads of a tier. Methods must be called on one thread.

    Args:
        name: begins the names of the threads.
        most_writes: the maximum number of concurrent writes.
        make_call: makes a call on a worker. It never raises.
        on_ended: called on a worker when a call has ended and no longer counts as running.
        clock: returns monotonic seconds.
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
        self._has_work = threading.Condition(self._lock)  # workers wait for this
        self._has_ended = threading.Condition(self._lock)  # `close` waits for this
        self._waiting: tuple[deque[Call], ...] = tuple(deque[Call]() for _ in JobKind)
        self._first_writes = deque[Call]()  # of jobs with `is_first`
        self._running: set[Call] = set()
        self._num_to_end = 0  # dismissed threads that have not ended yet
        self._num_hired = 0
        self._is_closed = False

    def hire(self) -> None:
        """Start another thread."""
        self._num_hired += 1
        threading.Thread(target=self._work, name=f"kvdepot-{self._name}-{self._num_hired}", daemon=True).start()

    def dismiss(self) -> None:
        """End one thread as soon as one has no call."""
        with self._lock:
            self._num_to_end += 1
            self._has_work.notify()

    def hand_in(self, calls: Iterable[Call]) -> None:
        """Queue calls."""
        with self._lock:
            for call in calls:
                is_first = call.job.is_first and call.operation is JobKind.WRITE
                (self._first_writes if is_first else self._waiting[call.operation]).append(call)
                self._has_work.notify()

    def num_waiting(self, operation: JobKind) -> int:
        """Return the number of waiting calls of a kind."""
        return sum(map(len, self._queues(operation)))

    def _queues(self, operation: JobKind) -> tuple[deque[Call], ...]:
        """Return the queues with the waiting calls of a kind, in order."""
        waiting = self._waiting[operation]
        return (self._first_writes, waiting) if operation is JobKind.WRITE else (waiting,)

    def running(self) -> list[Call]:
        """Return the calls that have begun but not ended."""
        with self._lock:
            return list(self._running)

    def take_back(self, operation: JobKind, most: int, is_wanted: Callable[[Call], bool]) -> list[Call]:
        """Examine the next `most` waiting calls of a kind, twice as many for writes. Remove and return the wanted ones.

        The others keep waiting, behind the calls that were not examined.
        """
        with self._lock:
            taken = list[Call]()
            for waiting in self._queues(operation):
                for _ in range(min(most, len(waiting))):
                    call = waiting.popleft()
                    (taken if is_wanted(call) else waiting).append(call)
            return taken

    def close(self, drain_seconds: float, running_seconds: float, num_hung: int) -> None:
        """Wait for writes, drop waiting calls, then wait for running calls that do not hang. Both waits are bounded."""
        with self._lock:
            self._has_ended.wait_for(lambda: not (self.num_waiting(JobKind.WRITE) or self._num_writing), drain_seconds)
            self._is_closed = True
            for operation in JobKind:
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
                # This thread makes the next call. Other threads may now begin calls of other kinds.
                if call.operation in _EXCLUSIVE and self._next_operation() not in (None, call.operation):
                    self._has_work.notify(self._most_writes if call.operation is JobKind.CLEAR else 1)
            self._on_ended(call)

    def _next(self) -> Call | None:
        """Wait for a call. Return None to end this thread."""
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

    def _next_operation(self) -> JobKind | None:
        for operation in (JobKind.CONTAINS, JobKind.READ):
            if self._waiting[operation]:
                return operation
        if self._waiting[JobKind.TOUCH] and not any(call.operation is JobKind.TOUCH for call in self._running):
            return JobKind.TOUCH
        if self._waiting[JobKind.OUTDATE]:
            return JobKind.OUTDATE
        # A hung clear no longer counts, and neither does a hung write (`_num_writing`). Otherwise one such call would
        # stop all writes or clears for good, although other threads are free.
        is_clearing = any(call.operation is JobKind.CLEAR and not call.is_late for call in self._running)
        if self._waiting[JobKind.CLEAR]:
            return None if is_clearing or self._num_writing else JobKind.CLEAR
        if self.num_waiting(JobKind.WRITE) and not is_clearing and self._num_writing < self._most_writes:
            return JobKind.WRITE
        return None

    @property
    def _num_writing(self) -> int:
        return sum(call.operation is JobKind.WRITE and not call.is_late for call in self._running)
