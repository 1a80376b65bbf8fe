"""How long the server's loop does nothing but what it is at: the watchdog of its turns."""

import contextlib
import gc
import os
import time
from collections.abc import Mapping
from typing import Final

from kvdepot.wire.histogram import Histogram

SLOW_TURN_SECONDS: Final = 0.005
SHORTEST_SECONDS: Final = 0.000016  # of a histogram's first bucket
_WAITED_FIELD: Final = 1  # of a thread's schedstat: nanoseconds that it could have run and had no core

_LONG_COLLECTION_SECONDS: Final = 0.0005
_COLLECTION_THRESHOLDS: Final = 700, 2, 1  # so that none looks through much more than what 4,200 new objects are


class TurnWatch:
    """Measures the turns of one thread.

    A turn **blocks** for as long as it takes, less what the thread waits for a core that others use: work, system calls
    and waiting for threads of this process count. Where the kernel does not tell (`CONFIG_SCHED_INFO`), all of it does.
    """

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self.longest_blocked_seconds = 0.0
        self.num_slow = 0  # that blocked for more than `SLOW_TURN_SECONDS`
        self.turns = Histogram(SHORTEST_SECONDS)
        self._fd = -1
        self._began = 0.0
        self._counts_before = b""

    def open(self) -> None:
        """Watch the thread that calls this."""
        with contextlib.suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Let go of the descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def begin(self) -> float:
        """Begin a turn; return the time."""
        self._began = time.monotonic()
        if self._fd >= 0:
            self._counts_before = os.pread(self._fd, 80, 0)  # a microsecond; what is in it is looked at if need be
        return self._began

    def end(self) -> None:
        """End the turn."""
        seconds = time.monotonic() - self._began
        self.turns.add(seconds)
        if seconds > min(self.longest_blocked_seconds, SLOW_TURN_SECONDS):
            self.note(seconds, self._waited_seconds())

    def note(self, seconds: float, waited_seconds: float) -> None:
        """Note a turn that may be one of the longest, and how much of it was waiting for a core."""
        blocked = seconds - waited_seconds
        self.longest_seconds = max(self.longest_seconds, seconds)
        self.longest_blocked_seconds = max(self.longest_blocked_seconds, blocked)
        self.num_slow += blocked > SLOW_TURN_SECONDS

    def _waited_seconds(self) -> float:
        if self._fd < 0:
            return 0.0
        before, now = self._counts_before.split(), os.pread(self._fd, 80, 0).split()
        return (int(now[_WAITED_FIELD]) - int(before[_WAITED_FIELD])) / 1e9


class CollectionWatch:
    """Has the garbage collector leave alone what it found to be in use, whenever looking through that took long.

    Like that no collection, in whichever thread, holds the others up for more than a millisecond or two: 14 ms for what
    was imported alone, each time. What is left alone and becomes a cycle of garbage stays; there is next to none.

    A mapping of tuples of numbers, strings or bytes cannot be left alone: a full collection stops following it as
    nothing in it can be part of a cycle, and with the next tuple all of it is new again. None that may be large is one.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._thresholds = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.collect()  # of nothing: it waits for a quarter as many new objects as the last one found
        gc.set_threshold(*_COLLECTION_THRESHOLDS)
        gc.callbacks.append(self._note)

    def close(self) -> None:
        """Look no longer."""
        gc.callbacks.remove(self._note)
        gc.set_threshold(*self._thresholds)

    def _note(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        elif info["generation"] == len(_COLLECTION_THRESHOLDS) - 1:
            self._after_all(time.monotonic() - self._began)

    def _after_all(self, seconds: float) -> None:
        if seconds > _LONG_COLLECTION_SECONDS:
            gc.freeze()
