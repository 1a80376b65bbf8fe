"""The HPU backend passes the suite of every backend, on a Gaudi if there is one, else on the pretend device."""

from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.plan import WorkerPlan
from support.hpu.workers import HpuWorker
from support.staged.device import FakeDevice


class TestEager(BackendSuite):
    """Uses small moves, many a batch, so that the staging slots take turns."""

    @pytest.fixture(autouse=True)
    def _mode(self, hpu: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> HpuWorker:
        return HpuWorker(url, plan, max_blocks=4, **options)


class TestLazy(BackendSuite):
    # The host cuts the parts: lazy or not, the device sees whole blocks.
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(autouse=True)
    def _mode(self, lazy: FakeDevice) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> HpuWorker:
        return HpuWorker(url, plan, **options)
