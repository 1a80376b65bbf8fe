"""The suites of every backend with NVIDIA's driver and a real device. Copies are made by the worker, with and without
the kernel, or by a mover. Workers, movers and depots are killed.

Skipped if there is no device. If KVDEPOT_REQUIRE_CUDA is set, as on machines with one, that is a failure. Needs no
torch: the driver allocates the tensors' memory. `test_conformance.py` runs the same suites with the fake driver.
"""

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.engine import PLAN
from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda import backend
from support.cuda.mover_faults import MoverFaultSuite, wait_for_mover
from support.cuda.on_device import DMA, KERNEL, ByAMover, Workers

REASON = backend.why_unavailable()
pytestmark = pytest.mark.skipif(
    REASON is not None and not os.environ.get("KVDEPOT_REQUIRE_CUDA"), reason=f"no device: {REASON}"
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernel needs Triton")


class TestByTheWorker(Workers, BackendSuite):
    options = DMA


@needs_triton
class TestByTheWorkerWithTheKernel(Workers, BackendSuite):
    options = KERNEL

    @pytest.fixture(autouse=True)
    def every_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make the kernel copy even single runs, as calls of these plans are small."""
        monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)


class TestByAMover(ByAMover, BackendSuite):
    splits = BackendSuite.splits[:3]  # each worker has a mover with a context of 0.5 GB, which takes seconds to start


class TestSmallAllocations(ByAMover):
    """Memory unlike any engine's: a failure shows how drivers place small allocations, and nothing about engines."""

    def test_each_is_opened_by_its_own_handle(self, depot: DepotProcess) -> None:
        worker = self.make_worker(depot.url, PLANS["several block sizes"], small_allocations=True)
        worker.wait_until_connected(30)
        cache = Cache(worker, PLANS["several block sizes"])
        assert cache.store(prompt(4))
        assert cache.retrieve(prompt(4)) == 4


class TestWorkerAndDepotKilled(Workers, FaultSuite):
    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "direct"]


class TestWorkerMoverAndDepotKilled(Workers, MoverFaultSuite):
    options = {"mode": "ipc"}  # noqa: RUF012

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "ipc"]

    def test_memory_of_a_worker_that_was_closed_can_be_freed_at_once(self, depot: DepotProcess) -> None:
        """No mover has it open. Another worker gets the same memory and its own bytes."""
        for number in range(4):
            plan = replace(PLAN, instance=f"engine-{number}")
            worker = self.make_worker(depot.url, plan)
            worker.wait_until_connected(30)
            wait_for_mover(depot, plan.instance)
            cache = Cache(worker, plan)
            assert cache.store(prompt(4, salt=number))
            assert cache.retrieve(prompt(4, salt=number)) == 4
            self.made.remove(worker)
            worker.close()
