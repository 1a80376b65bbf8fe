"""The XPU backend passes the fault suite of every backend."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import WorkerPlan
from support.xpu.workers import XpuWorker


class TestFaults(FaultSuite):
    @pytest.fixture(autouse=True)
    def _device(self, device: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> XpuWorker:
        return XpuWorker(url, plan, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.staged.engine_child", "xpu", url, instance]
