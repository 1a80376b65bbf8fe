"""`FakeStream` runs work in order, on demand."""

import collections
import threading
from collections.abc import Callable
from typing import Final

from kvdepot_cuda.driver import DriverError

_WAIT_SECONDS: Final = 30.0


class FakeStream:
    """Does nothing until a thread waits for it. That thread then does the work, in order."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.error: DriverError | None = None
        self.num_added = 0
        self.num_done = 0
        self.touched: collections.deque[tuple[int, list[tuple[int, int]]]] = collections.deque()  # host ranges
        self.num_waits = 0  # waits for events that have not finished
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._is_working = False

    def add(self, work: Callable[[], None], host_ranges: list[tuple[int, int]] | None = None) -> int:
        """Queue work that touches ranges of host memory; return its number."""
        with self.changed:
            self._work.append(work)
            self.num_added += 1
            if host_ranges:
                self.touched.append((self.num_added, host_ranges))
            return self.num_added

    def finish(self, number: int) -> None:
        """Do the first `number` pieces of work, or wait until other threads have done them."""
        while True:
            with self.changed:
                if not self.changed.wait_for(lambda: self.num_done >= number or not self._is_working, _WAIT_SECONDS):
                    raise DriverError("synchronize", "the fake device hangs")
                if self.num_done >= number:
                    return
                work = self._work.popleft()
                self._is_working = True  # other threads may add work and see what is done
            try:
                work()
            except DriverError as error:
                self.error = error
            with self.changed:
                self._is_working = False
                self.num_done += 1
                while self.touched and self.touched[0][0] <= self.num_done:
                    self.touched.popleft()
                self.changed.notify_all()
