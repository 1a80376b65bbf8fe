"""The CUDA backend passes the suite of every backend in both modes, with a driver that has no device."""

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import BackendSuite
from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import PLANS, Cache, WorkerPlan, prompt
from kvdepot_cuda.context import CHECKSUM_THREADS, CudaOptions
from support.cuda.device_worker import DeviceWorker
from support.cuda.fake import FakeDriver, fake_gather, fake_sums
from support.cuda.fake_worker import FakeWorker
from support.cuda.node import FakeDevice
from support.cuda.on_device import ByAMover


class _OverTheFakeDriver(BackendSuite):
    has_batch_copy = True
    failing: tuple[str, ...] = ()
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture(autouse=True)
    def drivers(self) -> Iterator[None]:
        """Check that a test used its drivers correctly and released all resources."""
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
        return FakeWorker(url, plan, driver=driver, **{**self.options, **options})


class SharedDriver(FakeDriver):
    """A driver that is opened twice: by the memory's owner and by the context."""

    num_open = 2

    def close(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            super().close()


class TestWithBatches(_OverTheFakeDriver):
    pass


@pytest.mark.slow
class TestWithAPoolThatCannotBeRegistered(_OverTheFakeDriver):
    """Uses single copies, as with drivers that have no batches."""

    has_batch_copy = False
    failing = ("register_host",)
    # The parts are cut before the copies, here as in `TestWithBatches`.
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]


@pytest.mark.slow
class TestWithTheKernels(_OverTheFakeDriver):
    """A kernel copies every aligned page, in both directions: also single and large runs. Others compute checksums."""

    options: ClassVar[Mapping[str, Any]] = {
        "gather_kernel": True,
        "compile_gather": fake_gather,
        "checksum_kernel": True,
        "compile_sums": fake_sums,
    }
    # The parts are cut as for copies, and `test_every_block_size_reads_every_other` has small ones, too.
    test_every_split_reads_every_other = None  # pyright: ignore[reportAssignmentType]

    @pytest.fixture(autouse=True)
    def every_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvdepot_cuda.gather.MOST_RUN_BYTES", 1 << 20)
        monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)


@pytest.mark.slow
class TestByAMover(BackendSuite):
    """A process of the depot opens each worker's memory and copies for it."""

    @pytest.fixture
    def depot(self, device: FakeDevice) -> Iterator[DepotProcess]:
        """A depot that outlives its workers, to show that no mover is left over."""
        self.node = device
        with DepotProcess(pool_size="16MiB") as depot:
            yield depot
            wait_until(lambda: self.node.holders() == set(), 20, "all movers to end")

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        worker = self.node.worker(url, plan, **options)
        assert worker.context.transfer_mode == "ipc"
        return worker


@pytest.mark.slow
class TestTheDevicesOwnTests(ByAMover):
    """The fixtures of `test_on_device.py`, whose workers allocate by the driver, work with the fake one."""

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> None:
        self.device = device

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        driver = SharedDriver(root=self.device.memory)
        options |= {"open_driver": lambda _ordinal: driver, "mover": "fake-cuda"}  # pyright: ignore[reportUnknownLambdaType]
        return super().make_worker(url, plan, **options)


@pytest.mark.slow
class TestFaults(FaultSuite):
    """Faults of workers that copy by themselves, and of depots. Those of movers are in `test_movers.py`."""

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> None:
        self.device = device

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        return self.device.worker(url, plan, mode="direct", **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "direct", str(self.device.memory)]


def test_up_to_four_threads_make_the_checksums_of_a_store(driver: FakeDriver) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("kvdepot-checksum") for thread in threading.enumerate())

    with DepotProcess("--verify", "all") as depot:
        worker = FakeWorker(depot.url, PLANS["one group"], driver=driver, checksum_threads=3)
        worker.wait_until_connected(20)
        cache = Cache(worker, PLANS["one group"])
        assert cache.store(prompt(16))
        assert 1 <= threads() <= 2  # beside the thread of the transfer
        assert cache.retrieve(prompt(16)) == 16  # after comparing every checksum with the pool
        assert depot.status().counters["entries_corrupt"] == 0
        worker.context.close()
    assert threads() == 0
    assert 1 <= CHECKSUM_THREADS <= 4
    assert CudaOptions().checksum_threads == CHECKSUM_THREADS
