"""The XPU backend passes the suite of every backend on each path: on an Intel GPU if there is one, else pretended."""

from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite, WorkerPlan
from kvdepot.testing.xpu_kernels import FakeKernels
from kvdepot_cpu.xpu.context import Path
from support.xpu.workers import RegisteredWorker, XpuWorker


class TestStaged(BackendSuite):
    """In small moves, many a batch, so that the staging slots take turns."""

    @pytest.fixture(autouse=True)
    def _device(self, device: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, path=Path.STAGED, max_blocks=3, **options)


class TestSynchronous(BackendSuite):
    @pytest.fixture(autouse=True)
    def _device(self, xpu: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, path=Path.SYNCHRONOUS, **options)


class TestRegistered(BackendSuite):
    @pytest.fixture(autouse=True)
    def _kernels(self, kernels: FakeKernels) -> None:
        self._pretended = kernels

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> RegisteredWorker:
        return RegisteredWorker(url, plan, path=Path.REGISTERED, **options)
