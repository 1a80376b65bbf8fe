"""`Watchdog`: notices copies that hang in the driver."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvdepot.backends import Direction


@dataclass(slots=True)
class _Watched:
    began: float
    is_hung: bool = False


class Watchdog:
    """Notices copies that hang in the driver: watches one copy per direction, on its own thread.

    In mode `ipc` the depot kills a hung mover; here, only a thread hangs.

    Args:
        on_hang: called once, on that thread, with the direction and the reason.
        seconds: the longest time of a copy.
    """

    def __init__(self, on_hang: Callable[[Direction, str], None], seconds: float) -> None:
        self._on_hang = on_hang
        self._seconds = seconds
        self._lock = threading.Lock()
        self._copies: list[_Watched | None] = [None, None]
        self._reported = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kvdepot-watchdog", daemon=True)
        self._thread.start()

    @property
    def has_hung_copy(self) -> bool:
        """Whether a reported copy has not returned yet."""
        return any(copy is not None and copy.is_hung for copy in self._copies)

    def begin(self, direction: Direction) -> None:
        """Start watching the copy that the calling thread begins now."""
        self._copies[direction] = _Watched(time.monotonic())

    def end(self, direction: Direction) -> bool:
        """Stop watching the copy. Return whether it was reported; if so, wait until `on_hang` has returned."""
        with self._lock:
            copy, self._copies[direction] = self._copies[direction], None
        if copy is None or not copy.is_hung:
            return False
        self._reported.wait()
        return True

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._stop.wait(self._seconds / 4):
            for direction in Direction:
                with self._lock:
                    copy = self._copies[direction]
                    if copy is None or copy.is_hung or time.monotonic() - copy.began < self._seconds:
                        continue
                    copy.is_hung = True
                try:
                    self._on_hang(
                        direction,
                        f"a {direction.name.lower()} has not returned from the driver for {self._seconds:.0f} s",
                    )
                finally:
                    self._reported.set()
