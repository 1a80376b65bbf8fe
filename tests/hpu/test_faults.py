"""The HPU backend passes the fault suite of every backend, in both modes of a pretend Gaudi."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import WorkerPlan
from support.hpu.workers import HpuWorker
from support.staged.device import FakeDevice


class TestEager(FaultSuite):
    @pytest.fixture(autouse=True)
    def _mode(self, hpu: None) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> HpuWorker:
        return HpuWorker(url, plan, max_blocks=4, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.staged.engine_child", "hpu", url, instance]


class TestLazy(FaultSuite):
    @pytest.fixture(autouse=True)
    def _mode(self, lazy: FakeDevice) -> None: ...

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> HpuWorker:
        return HpuWorker(url, plan, max_blocks=4, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.staged.engine_child", "lazy", url, instance]
