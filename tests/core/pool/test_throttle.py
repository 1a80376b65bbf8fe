"""The share of the cores that background work takes."""

import pytest

from kvdepot.pool.throttle import Throttle


class Thread:
    """A thread that works and sleeps on simulated clocks."""

    def __init__(self) -> None:
        self.worked = self.slept = 0.0

    def sleep(self, seconds: float) -> None:
        self.slept += seconds


@pytest.mark.parametrize(("num_cores", "share"), [(1, 0.01), (2, 0.02), (50, 0.5), (100, 1.0), (256, 1.0)])
def test_a_thread_takes_a_hundredth_of_the_cores_and_one_at_most(num_cores: int, share: float) -> None:
    thread = Thread()
    throttle = Throttle(num_cores, lambda: thread.worked, thread.sleep)
    for _ in range(10):
        thread.worked += 0.3
        throttle.rest(lambda: False)
    assert thread.worked / (thread.worked + thread.slept) == pytest.approx(share)


def test_a_rest_ends_early_when_the_work_is_urgent() -> None:
    thread = Thread()
    throttle = Throttle(2, lambda: thread.worked, thread.sleep)
    thread.worked += 1.0
    throttle.rest(lambda: thread.slept > 0.1)
    assert 0.1 < thread.slept < 0.2, "it looks every 20 ms"
    thread.worked += 1.0
    throttle.rest(lambda: True)
    assert thread.slept < 0.2
