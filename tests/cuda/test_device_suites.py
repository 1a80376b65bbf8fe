"""The suites of `test_on_device.py` and `test_order_on_device.py` work with the fake driver."""

import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.faults import FaultSuite
from kvdepot.testing.plan import WorkerPlan
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
from support.cuda.device_worker import DeviceWorker
from support.cuda.fake import DEFAULT_STREAM, FakeDriver, FakeEvent, fake_gather
from support.cuda.fake_worker import FakeWorker
from support.cuda.node import FakeDevice
from support.cuda.on_device import ByAMover
from support.cuda.order import BATCH_BYTES, NUM_BLOCKS, NUM_LAYERS, PAGE_BYTES, WAYS, OrderSuite

pytestmark = pytest.mark.slow

WAIT_SECONDS = 30.0


class SharedDriver(FakeDriver):
    """A driver that is opened twice: by the memory's owner and by the context."""

    num_open = 2

    def close(self) -> None:
        self.num_open -= 1
        if not self.num_open:
            super().close()


class TestByAMover(ByAMover):
    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> None:
        self.device = device

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        driver = SharedDriver(root=self.device.memory)

        def open_driver(_ordinal: int) -> SharedDriver:
            return driver

        return super().make_worker(url, plan, open_driver=open_driver, mover="fake-cuda", **options)


class TestFaults(FaultSuite):
    """Faults of workers that copy by themselves, and of depots."""

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> Iterator[None]:
        self.device = device
        yield

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        return self.device.worker(url, plan, mode="direct", **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "direct", str(self.device.memory)]


class FakeEngine:
    """An engine whose streams run only when waited for. Its work also waits for `let_go`. It has no graphs."""

    def __init__(self, url: str, way: str, kind: str, driver: FakeDriver) -> None:
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
                url=url,
                deadline_seconds=20.0,
                batch_bytes=BATCH_BYTES,
                piece_bytes=8 << 20,
                stream=lambda: self._stream,
                open_driver=lambda _ordinal: driver,
                mover="fake-cuda",
                compile_gather=fake_gather,
                **WAYS[way],
            ),
        )

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

    @contextmanager
    def engine(self, url: str, way: str, kind: str) -> Generator[FakeEngine]:
        driver = FakeDriver(root=self.device.memory)
        engine = FakeEngine(url, way, kind, driver)
        try:
            yield engine
        finally:
            engine.let_go()
            engine.context.close()
        assert driver.violations == []
