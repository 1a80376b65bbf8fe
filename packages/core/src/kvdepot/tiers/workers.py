"""Threads that make a tier's calls. Priority: contains, read, clear, write; at least one thread never takes writes.

A clear waits for the writes that run, and writes wait for it. The depot's loop hands calls in and shares one lock with
the threads, which hold it for a few operations on deques only. One call wakes one thread: if all were woken, the loop
would have to get the interpreter's lock back from each of them.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from kvdepot.tiers.jobs import Call, Operation

_EXCLUSIVE: Final = (Operation.WRITE, Operation.CLEAR)  # of each other


class Workers:
    """As many threads as were hired, less those that were dismissed. Its methods are called by one thread.

    Args:
        name: of the threads.
        most_writes: at a time.
        make_call: makes a call, on a worker; raises nothing.
        on_ended: called on a worker when a call has been made and does not count as running any more.
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
        self._has_work = threading.Condition(self._lock)  # of workers
        self._has_ended = threading.Condition(self._lock)  # of `close`
        self._waiting: tuple[deque[Call], ...] = tuple(deque[Call]() for _ in Operation)
        self._running: set[Call] = set()
        self._num_to_end = 0  # threads that were dismissed and have not ended
        self._num_hired = 0
        self._is_closed = False

    def hire(self) -> None:
        """Begin one more thread."""
        self._num_hired += 1
        threading.Thread(target=self._work, name=f"kvdepot-{self._name}-{self._num_hired}", daemon=True).start()

    def dismiss(self) -> None:
        """Have one thread end, as soon as one has no call."""
        with self._lock:
            self._num_to_end += 1
            self._has_work.notify()

    def hand_in(self, calls: Iterable[Call]) -> None:
        """Have calls made."""
        with self._lock:
            for call in calls:
                self._waiting[call.operation].append(call)
                self._has_work.notify()

    def num_waiting(self, operation: Operation) -> int:
        """Return how many calls of a kind have not begun."""
        return len(self._waiting[operation])

    def running(self) -> list[Call]:
        """Return the calls that have begun and not ended."""
        with self._lock:
            return list(self._running)

    def take_back(self, operation: Operation, most: int, is_wanted: Callable[[Call], bool]) -> list[Call]:
        """Look at so many calls of a kind that have not begun; return those that are wanted, which will not be made.

        The others wait on, behind those that were not looked at.
        """
        with self._lock:
            waiting, taken = self._waiting[operation], list[Call]()
            for _ in range(min(most, len(waiting))):
                call = waiting.popleft()
                (taken if is_wanted(call) else waiting).append(call)
            return taken

    def close(self, drain_seconds: float, running_seconds: float, num_hung: int) -> None:
        """Give writes a time to end, drop calls that wait, give those that run a time to end, but for hung ones."""
        with self._lock:
            self._has_ended.wait_for(lambda: not (self._waiting[Operation.WRITE] or self._num_writing), drain_seconds)
            self._is_closed = True
            for waiting in self._waiting:
                waiting.clear()
            self._has_ended.wait_for(lambda: len(self._running) <= num_hung, running_seconds)
        self.end()

    def end(self) -> None:
        """Have all threads end."""
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
                # This thread makes the next call; another kind may begin beside it now.
                if call.operation in _EXCLUSIVE and self._next_operation() not in (None, call.operation):
                    self._has_work.notify(self._most_writes if call.operation is Operation.CLEAR else 1)
            self._on_ended(call)

    def _next(self) -> Call | None:
        """Wait for a call; None: this thread ends."""
        with self._lock:
            while (operation := self._next_operation()) is None:
                if self._is_closed:
                    return None
                if self._num_to_end:
                    self._num_to_end -= 1
                    return None
                self._has_work.wait()
            call = self._waiting[operation].popleft()
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
