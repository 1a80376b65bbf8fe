"""The XPU backend passes the fault suite of every backend, staged and registered."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvdepot.testing.backend import WorkerPlan
from kvdepot.testing.xpu_kernels import FakeKernels
from support.staged.forked import ForkedFaultSuite
from support.xpu.workers import RegisteredWorker, XpuWorker


def _command(url: str, instance: str, path: str) -> Sequence[str]:
    return [sys.executable, "-m", "support.xpu.engine_child", url, instance, path]


class TestStaged(ForkedFaultSuite):
    @pytest.fixture(autouse=True)
    def _device(self, device: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, path="staged", **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return _command(url, instance, "staged")


class TestRegistered(ForkedFaultSuite):
    @pytest.fixture(autouse=True)
    def _kernels(self, kernels: FakeKernels) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return RegisteredWorker(url, plan, path="registered", **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return _command(url, instance, "registered")
