"""What `test_on_device.py` is made of works over the fake driver, and does not pass where it would prove nothing."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot.testing.engine import PLAN
from kvdepot.testing.faults import FaultSuite
from kvdepot_cuda.gather import KernelUnavailable
from kvdepot_cuda.image import GatherImage
from kvdepot_cuda.testing import FakeDriver, fake_gather
from support.cuda.device_worker import DeviceWorker
from support.cuda.fake_worker import FakeWorker
from support.cuda.node import FakeDevice
from support.cuda.on_device import KERNEL, ByAMover

WAIT_SECONDS = 30.0


def no_kernel(_capability: int) -> GatherImage:
    raise KernelUnavailable("there is no Triton")


class SharedDriver(FakeDriver):
    """Opened twice: by whom the memory is, and by the context."""

    num_open = 2

    def allocate_device(self, num_bytes: int) -> int:
        self.allocated = [*getattr(self, "allocated", []), num_bytes]
        return super().allocate_device(num_bytes)

    def close(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            super().close()


def device_worker(url: str, driver: FakeDriver, **options: Any) -> DeviceWorker:
    given: dict[str, Any] = {"compile_gather": fake_gather} | options
    return DeviceWorker(url, PLAN, open_driver=lambda _ordinal: driver, **given)


@pytest.mark.parametrize("small_allocations", [False, True])
def test_a_worker_has_one_allocation_as_an_engine_has(small_allocations: bool, depot: DepotProcess) -> None:
    driver = SharedDriver()
    worker = device_worker(depot.url, driver, small_allocations=small_allocations)
    if small_allocations:
        assert len(driver.allocated) == sum(len(group.page_sizes_bytes) for group in PLAN.groups) > 1
    else:
        assert [size % (2 << 20) for size in driver.allocated] == [0]
    worker.close()
    assert driver.left_over == {}


@pytest.mark.parametrize("options", [{}, KERNEL])
def test_a_worker_is_ready_when_its_pool_is_registered_and_its_kernel_loaded(
    options: dict[str, Any], depot: DepotProcess
) -> None:
    driver = SharedDriver()
    worker = device_worker(depot.url, driver, **options)
    cache = Cache(worker, PLAN)
    worker.wait_until_connected(WAIT_SECONDS)
    assert cache.store(prompt(4))
    assert cache.retrieve(prompt(4)) == 4
    assert (driver.calls["gathered"] > 0) == bool(options)
    worker.close()
    assert driver.left_over == {}
    assert driver.violations == []


@pytest.mark.parametrize(
    ("options", "call", "why"),
    [
        ({}, "register_host", "registered nothing"),
        (KERNEL | {"compile_gather": no_kernel}, "", "kernel was not loaded"),
    ],
)
def test_a_suite_does_not_pass_without_what_it_is_to_show(
    options: dict[str, Any], call: str, why: str, depot: DepotProcess
) -> None:
    driver = SharedDriver()
    if call:
        driver.fail(call)
    worker = device_worker(depot.url, driver, **options)
    with pytest.raises(AssertionError, match=why):
        worker.wait_until_connected(WAIT_SECONDS)
    worker.close()


class TestByAMover(ByAMover):
    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> None:
        self.device = device

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        driver = SharedDriver(root=self.device.memory)

        def open_driver(_ordinal: int) -> SharedDriver:
            return driver

        return super().make_worker(url, plan, open_driver=open_driver, mover="fake-cuda", **options)

    def test_a_mover_that_registers_nothing_does_not_pass(self, capfd: pytest.CaptureFixture[str]) -> None:
        self.device.fail("register_host")
        with pytest.raises(AssertionError, match="cannot be registered"):
            self.test_the_mover_registers_the_pool_and_copies_go_on(capfd)


class TestFaults(FaultSuite):
    """Workers that copy by themselves, and depots."""

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> Iterator[None]:
        self.device = device
        yield

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        return self.device.worker(url, plan, mode="direct", **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "direct", str(self.device.memory)]
