"""Rests between the steps of background work, so that it hardly slows a model that uses every core.

A lower priority would not achieve that. Linux compares priorities only within a scheduling group, and depot and engine
are in different groups. Also, a worker's thread that is preempted inside a system call keeps the process's memory lock.
"""

import os
import time
from collections.abc import Callable
from typing import Final

_SHARE_OF_CORES: Final = 0.01  # measured: at 0.05, first requests beside a new pool of 6 GiB took 1.2 times as long
_LOOK_SECONDS: Final = 0.02  # between two checks whether to end the rest early


class Throttle:
    """Limits the calling thread to a hundredth of the cores that it may use, and to one core at most.

    Args:
        num_cores: the number of cores; None for those that the thread may use.
        worked: returns the thread's processor time in seconds.
        sleep: sleeps for a number of seconds.
    """

    def __init__(
        self,
        num_cores: int | None = None,
        worked: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        share = _SHARE_OF_CORES * (num_cores or len(os.sched_getaffinity(0)))
        self._rest_per_work = max(0.0, 1 / share - 1)
        self._worked = worked
        self._sleep = sleep
        self._began = worked()

    def rest(self, is_over: Callable[[], bool]) -> None:
        """Rest in proportion to the work since the last rest, but at most until `is_over`."""
        seconds = (self._worked() - self._began) * self._rest_per_work
        while seconds > 0 and not is_over():
            self._sleep(min(seconds, _LOOK_SECONDS))
            seconds -= _LOOK_SECONDS
        self._began = self._worked()
