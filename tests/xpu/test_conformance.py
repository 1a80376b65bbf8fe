"""The XPU backend passes the suite of every backend: on an Intel GPU if there is one, else on the pretend device."""

from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.plan import WorkerPlan
from support.xpu.workers import XpuWorker


class TestPinned(BackendSuite):
    """Uses small moves, many a batch, so that the staging slots take turns."""

    # The host cuts the parts the same way: `TestNotPinned` shows it with whole runs, tests/hpu with small moves.
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(autouse=True)
    def _device(self, device: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, max_blocks=3, **options)


class TestNotPinned(BackendSuite):
    @pytest.fixture(autouse=True)
    def _device(self, xpu: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, **options)
