"""Backends that stage pass the suites of every backend: on their device if it is here, else on the pretend one."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import WorkerPlan
from support.staged.devices import Device, StagedWorker


class OnADevice:
    @pytest.fixture(autouse=True)
    def _device(self, device: Device) -> None:
        self.device = device

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> StagedWorker:
        return self.device.make_worker(url, plan, **options)


class TestBackend(OnADevice, BackendSuite):
    pass


class TestFaults(OnADevice, FaultSuite):
    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.staged.engine_child", self.device.name, url, instance]
