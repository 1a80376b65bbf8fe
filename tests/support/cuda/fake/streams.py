"""`FakeStream` runs work in order, on a thread, on demand."""

import collections
import threading
from collections.abc import Callable
from typing import Final

from kvdepot_cuda.driver import DriverError

_WAIT_SECONDS: Final = 30.0


class FakeStream:
    """Does nothing until a thread waits for it, then works in order."""

    def __init__(self, name: str) -> None:
        self.changed = threading.Condition()
        self.error: DriverError | None = None
        self.num_added = 0
        self.num_done = 0
        self.touched: collections.deque[tuple[int, list[tuple[int, int]]]] = collections.deque()  # host ranges
        self.num_waits = 0  # waits for events that have not finished
        self._demanded = 0
        self._work: collections.deque[Callable[[], None]] = collections.deque()
        self._is_open = True
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], None], host_ranges: list[tuple[int, int]] | None = None) -> int:
        """Queue work that touches ranges of host memory; return its number."""
        with self.changed:
            self._work.append(work)
            self.num_added += 1
            if host_ranges:
                self.touched.append((self.num_added, host_ranges))
            self.changed.notify_all()
            return self.num_added

    def finish(self, number: int) -> None:
        """Run the first `number` pieces of work and wait for them."""
        with self.changed:
            self._demanded = max(self._demanded, number)
            self.changed.notify_all()
            if not self.changed.wait_for(lambda: self.num_done >= number, _WAIT_SECONDS):
                raise DriverError("synchronize", "the fake device hangs")

    def close(self) -> None:
        """End the thread. Queued work is dropped."""
        with self.changed:
            self._is_open = False
            self.changed.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: not self._is_open or (self._work and self.num_done < self._demanded))
                if not self._is_open:
                    return
                work = self._work.popleft()
            try:
                work()
            except DriverError as error:
                self.error = error
            with self.changed:
                self.num_done += 1
                while self.touched and self.touched[0][0] <= self.num_done:
                    self.touched.popleft()
                self.changed.notify_all()
