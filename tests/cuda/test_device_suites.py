"""The suites of `test_on_device.py` work over the fake driver, and do not pass where they would prove nothing."""

import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot.testing.engine import PLAN
from kvdepot.testing.faults import FaultSuite
from kvdepot_cuda.carrier import CudaOptions
from kvdepot_cuda.context import CudaTransferContext
from kvdepot_cuda.gather import KernelUnavailable
from kvdepot_cuda.image import GatherImage
from support.cuda.device_worker import DeviceWorker
from support.cuda.fake import DEFAULT_STREAM, FakeDriver, FakeEvent, fake_gather
from support.cuda.fake_worker import FakeWorker
from support.cuda.node import FakeDevice
from support.cuda.on_device import KERNEL, ByAMover
from support.cuda.order import BATCH_BYTES, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES, OrderSuite

pytestmark = pytest.mark.slow

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
    options: dict[str, Any], depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
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


class IgnoresEvents(FakeDriver):
    def wait_for_event(self, stream: int, event: int) -> None:
        del stream, event


class NeverWaits(FakeDriver):
    def synchronize_event(self, event: int) -> None:
        del event


class FakeEngine:
    """Its streams do nothing before somebody waits for them, and its work waits for `let_go`, too. It has no graphs."""

    def __init__(self, url: str, mode: str, kind: str, driver: FakeDriver) -> None:
        self._driver = driver
        with driver.activated():
            self._stream = DEFAULT_STREAM if kind == "default stream" else driver.create_stream()
        self._gate = threading.Event()
        tensors = [driver.tensor(NUM_BLOCKS, PAGE_BYTES) for _ in range(NUM_LAYERS)]
        self._memory = [driver.bytes_at(tensor.data_ptr(), NUM_BLOCKS * PAGE_BYTES) for tensor in tensors]
        self._fill(1)
        self.context = CudaTransferContext(
            KVCache([CacheGroup(tensors, 16)], "order", "bytes", chunk_tokens=16),
            CudaOptions(
                url=url, mode=mode, deadline_seconds=20.0, batch_bytes=BATCH_BYTES, piece_bytes=8 << 20,
                stream=lambda: self._stream, open_driver=lambda _ordinal: driver, mover="fake-cuda",
            ),
        )  # fmt: skip

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext()

    def write(self, value: int) -> None:
        gate = self._gate = threading.Event()

        def work() -> None:
            assert gate.wait(WAIT_SECONDS)
            self._fill(value)

        self._driver.launch(work, self._stream)

    def event(self) -> FakeEvent:
        return FakeEvent(self._driver, self._stream)

    def let_go(self) -> None:
        self._gate.set()

    def values(self) -> set[int]:
        with self._driver.activated():
            self._driver.synchronize_stream(self._stream)
        return {int(value) for memory in self._memory for value in np.unique(memory)}

    def _fill(self, value: int) -> None:
        for memory in self._memory:
            memory[:] = value


class TestOrder(OrderSuite):
    @pytest.fixture
    def order_depot(self, depot_with_movers: DepotProcess) -> DepotProcess:
        return depot_with_movers

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> None:
        self.device = device
        self.driver_type: type[FakeDriver] = FakeDriver

    @contextmanager
    def engine(self, url: str, mode: str, kind: str) -> Generator[FakeEngine]:
        driver = self.driver_type(root=self.device.memory)
        engine = FakeEngine(url, mode, kind, driver)
        try:
            yield engine
        finally:
            engine.let_go()
            engine.context.close()
        assert driver.violations == []

    @pytest.mark.parametrize(("careless", "mode"), [(IgnoresEvents, "direct"), (NeverWaits, "ipc")])
    def test_a_missing_wait_does_not_pass(
        self, careless: type[FakeDriver], mode: str, order_depot: DepotProcess
    ) -> None:
        self.driver_type = careless
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            self.test_transfers_come_after_the_work_of_the_engine(mode, "side stream", order_depot)
