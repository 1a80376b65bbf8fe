"""The CUDA backend in mode `direct` passes the suite of every backend, over a driver without a device."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite, WorkerPlan
from kvdepot_cuda.testing import FakeDriver
from tests.cuda.fake_worker import FakeWorker


class _OverTheFakeDriver(BackendSuite):
    has_batch_copy = True
    failing: tuple[str, ...] = ()

    @pytest.fixture(autouse=True)
    def drivers(self) -> Iterator[None]:
        """All that a test made was used as a device may be used, and everything was given back."""
        self.made: list[FakeDriver] = []
        yield
        for driver in self.made:
            assert driver.violations == []
            assert driver.left_over == {}

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        driver = FakeDriver(has_batch_copy=self.has_batch_copy)
        for call in self.failing:
            driver.fail(call)
        self.made.append(driver)
        return FakeWorker(url, plan, driver=driver, **options)


class TestWithBatches(_OverTheFakeDriver):
    pass


class TestWithAPoolThatCannotBeRegistered(_OverTheFakeDriver):
    """Single copies, as for drivers that know no batches."""

    has_batch_copy = False
    failing = ("register_host",)
