"""The suites of every backend with NVIDIA's driver and a real device: by the worker and by a mover, with and without
the kernel; and workers, movers and depots that are killed.

Skipped where there is no device; with KVDEPOT_REQUIRE_CUDA set, as on machines that have one, that is a failure. Needs
no torch: the tensors are memory that the driver allocates. `test_device_suites.py` shows over the fake driver that
these classes work.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import PLANS, BackendSuite, Cache, WorkerPlan, prompt
from kvdepot.testing.engine import PLAN
from kvdepot.testing.faults import FaultSuite
from kvdepot_cuda.availability import why_unavailable
from tests.cuda.device_worker import DeviceWorker
from tests.cuda.mover_faults import MoverFaultSuite, wait_for_mover

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(
    REASON is not None and not os.environ.get("KVDEPOT_REQUIRE_CUDA"), reason=f"no device: {REASON}"
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernel needs Triton")
KERNEL: dict[str, Any] = {"kernel_run_bytes": 1 << 20, "kernel_runs": 1, "kernel_in_mover": True}
REFUSALS = ("cannot be registered", "no kernel", "no batches", "not possible")


class Workers:
    """Makes workers and frees their memory."""

    options: dict[str, Any] = {}  # noqa: RUF012  # of this class

    @pytest.fixture(autouse=True)
    def memory(self) -> Iterator[None]:
        self.made: list[DeviceWorker] = []
        yield
        for worker in self.made:
            worker.close()

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        self.made.append(DeviceWorker(url, plan, **(self.options | options)))
        assert self.made[-1].context.transfer_mode == self.options.get("mode", "direct")
        return self.made[-1]


class ByAMover(Workers):
    options = {"mode": "ipc"}  # noqa: RUF012

    @pytest.fixture
    def depot(self) -> Iterator[DepotProcess]:
        """One whose movers may be slow."""
        with DepotProcess("--move-seconds", "20") as depot:
            yield depot

    def test_the_mover_registers_the_pool_and_copies_go_on(self, capfd: pytest.CaptureFixture[str]) -> None:
        """Its first copies are pageable, later ones are not; what it could not do would be in the depot's log."""
        plan = PLANS["large pages"]
        with DepotProcess("--move-seconds", "20") as depot:  # started here, so that what its mover says is seen here
            worker = self.make_worker(depot.url, plan)
            worker.wait_until_connected(30)
            cache = Cache(worker, plan)
            assert cache.store(prompt(8))
            wait_until(
                lambda: cache.retrieve(prompt(8)) == 8 and worker.context.is_settled, 60, "the mover to be settled"
            )
            for _ in range(3):
                assert cache.retrieve(prompt(8)) == 8
            assert cache.store(prompt(8, salt=1))
            assert depot.status().counters["moves"] >= 6
            worker.context.close()
        said = capfd.readouterr().err
        assert not any(refusal in said for refusal in REFUSALS), said


class TestByTheWorker(Workers, BackendSuite):
    pass


@needs_triton
class TestByTheWorkerWithTheKernel(Workers, BackendSuite):
    options = KERNEL


class TestByAMover(ByAMover, BackendSuite):
    pass


@needs_triton
class TestByAMoverWithTheKernel(ByAMover, BackendSuite):
    options = {"mode": "ipc"} | KERNEL


class TestSmallAllocations(ByAMover):
    """Memory as no engine has it: a failure here says how drivers place small allocations, nothing about engines."""

    def test_each_is_opened_by_its_own_handle(self, depot: DepotProcess) -> None:
        worker = self.make_worker(depot.url, PLANS["several block sizes"], small_allocations=True)
        worker.wait_until_connected(30)
        cache = Cache(worker, PLANS["several block sizes"])
        assert cache.store(prompt(4))
        assert cache.retrieve(prompt(4)) == 4


class TestWorkerAndDepotKilled(Workers, FaultSuite):
    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "tests.cuda.engine_child", url, instance, "direct"]


class TestWorkerMoverAndDepotKilled(Workers, MoverFaultSuite):
    options = {"mode": "ipc"}  # noqa: RUF012

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "tests.cuda.engine_child", url, instance, "ipc"]

    def test_memory_of_a_worker_that_was_closed_can_be_freed_at_once(self, depot: DepotProcess) -> None:
        """No mover has it open; another worker gets the same memory and its own bytes."""
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
