"""A copy hangs in the driver: other transfers end, no transfer is reported too early, and the worker can be closed.

The pool is not registered while the engine captures its graphs.
"""

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.backends import Direction, TransferFuture
from kvdepot.copying.runs import Addresses
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda.driver import CopyKind
from kvdepot_cuda.watchdog import Watchdog
from support.cuda.fake import FakeDriver, fake_gather
from support.cuda.fake_worker import NUM_PIECES, FakeWorker

PLAN = PLANS["one group"]
WAIT_SECONDS = 20.0


class HangingDriver(FakeDriver):
    """A driver whose batches in one direction, or all of whose launches, do not return until `gate` is set."""

    hangs: CopyKind | None = None

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.is_inside = threading.Event()

    def copy_batch(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        if self.hangs is direction:
            self.is_inside.set()
            assert self.gate.wait(WAIT_SECONDS)
        super().copy_batch(sources, targets, sizes, direction, stream)

    def launch_kernel(self, *arguments: Any, **named: Any) -> None:
        if self.hangs is not None:
            self.is_inside.set()
            assert self.gate.wait(WAIT_SECONDS)
        super().launch_kernel(*arguments, **named)


@pytest.fixture
def driver() -> HangingDriver:
    return HangingDriver()


@pytest.fixture
def by_kernel() -> bool:
    """Whether the kernel copies every run."""
    return False


@pytest.fixture
def cache(
    depot: DepotProcess, driver: HangingDriver, by_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cache]:
    monkeypatch.setattr("kvdepot_cuda.context.HANG_SECONDS", 0.4)
    monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
    worker = FakeWorker(depot.url, PLAN, driver=driver, gather_kernel=by_kernel, compile_gather=fake_gather)
    worker.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: worker.context.is_warm)
    yield Cache(worker, PLAN)
    driver.gate.set()
    worker.context.close()


@pytest.mark.parametrize("by_kernel", [False, True], ids=["DMA", "kernel"])
@pytest.mark.parametrize("direction", list(CopyKind))
def test_a_copy_that_hangs_leaves_no_other_transfer_waiting(
    direction: CopyKind, cache: Cache, driver: HangingDriver, depot: DepotProcess, caplog: pytest.LogCaptureFixture
) -> None:
    context = cache.context
    assert cache.store(prompt(2))
    driver.hangs = direction
    is_store = direction is CopyKind.TO_HOST

    def submit(salt: int) -> TransferFuture[bool]:
        if is_store:
            return context.submit_store("r", prompt(2, salt=salt), [list(range(8))])
        return context.submit_retrieve("r", prompt(2), [list(range(8))], 0)

    first = submit(1)
    assert driver.is_inside.wait(WAIT_SECONDS)
    behind = [submit(2), submit(3)]
    assert [future.result(WAIT_SECONDS) for future in behind] == [False, False]
    assert not context.submit_store("r", prompt(1, salt=9), [list(range(4))]).result(WAIT_SECONDS)
    assert not context.submit_retrieve("r", prompt(1), [list(range(4))], 0).result(WAIT_SECONDS)
    if is_store:  # its blocks are only read, and the read bytes are dropped
        assert first.result(WAIT_SECONDS) is False
        assert depot.status().num_tickets == 1  # the driver may still write there
    else:
        with pytest.raises(TimeoutError):  # its blocks may still be written
            first.result(0.3)
    lost = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(lost) == 1
    assert "has not returned from the driver" in lost[0].getMessage()
    driver.gate.set()
    assert first.result(WAIT_SECONDS) is False
    wait_until(lambda: depot.status().num_tickets == depot.status().num_leases == 0)
    assert depot.status().num_entries == 2
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    context.close()
    assert driver.left_over == {}
    assert driver.violations == []


def test_a_worker_whose_copy_hangs_closes_and_gives_nothing_back(cache: Cache, driver: HangingDriver) -> None:
    driver.hangs = CopyKind.TO_HOST
    future = cache.context.submit_store("r", prompt(2), [list(range(8))])
    assert not future.result(WAIT_SECONDS)
    began = time.monotonic()
    cache.context.close()
    assert time.monotonic() - began < 5
    assert driver.left_over["registrations"] == NUM_PIECES
    assert driver.violations == []


def test_a_copy_that_takes_its_time_is_left_alone(
    cache: Cache, driver: HangingDriver, caplog: pytest.LogCaptureFixture
) -> None:
    driver.hangs = CopyKind.TO_HOST
    threading.Timer(0.2, driver.gate.set).start()
    assert cache.store(prompt(2))
    assert cache.retrieve(prompt(2)) == 2
    assert not caplog.records


def test_a_copy_goes_on_only_when_its_end_was_reported() -> None:
    reported: list[tuple[Direction, str]] = []
    gate = threading.Event()

    def on_hang(direction: Direction, why: str) -> None:
        gate.wait(WAIT_SECONDS)
        reported.append((direction, why))

    watch = Watchdog(on_hang, 0.05)
    watch.begin(Direction.RETRIEVE)
    wait_until(lambda: watch.has_hung_copy)
    threading.Timer(0.2, gate.set).start()
    assert watch.end(Direction.RETRIEVE)
    assert reported == [(Direction.RETRIEVE, "a retrieve has not returned from the driver for 0 s")]
    assert not watch.has_hung_copy
    watch.begin(Direction.STORE)
    assert not watch.end(Direction.STORE)
    watch.close()


@pytest.mark.parametrize("how", ["by a copy", "by the engine"])
def test_the_pool_is_registered_when_the_engine_serves(how: str, depot: DepotProcess) -> None:
    """Until then, the worker makes no call to the device that could break a concurrent capture."""
    driver = FakeDriver()
    worker = FakeWorker(depot.url, PLAN, driver=driver, register_when_asked=True)
    worker.wait_until_connected(WAIT_SECONDS)
    cache = Cache(worker, PLAN)
    assert not any(thread.name == "kvdepot-register" for thread in threading.enumerate())
    assert driver.calls["register_host"] == 0
    assert not worker.context.is_warm
    if how == "by a copy":
        assert cache.store(prompt(2))
        assert driver.calls["pageable"] > 0
    else:
        worker.context.start_registering()
        worker.context.start_registering()
    wait_until(lambda: worker.context.num_registered == NUM_PIECES)
    assert cache.store(prompt(2, salt=1))
    assert cache.retrieve(prompt(2, salt=1)) == 2
    assert driver.calls["register_host"] == NUM_PIECES
    worker.context.close()
    assert driver.left_over == {}
    assert driver.violations == []


def test_an_engine_that_never_serves_registers_nothing(depot: DepotProcess) -> None:
    driver = FakeDriver()
    worker = FakeWorker(depot.url, PLAN, driver=driver, register_when_asked=True)
    worker.wait_until_connected(WAIT_SECONDS)
    worker.context.close()
    worker.context.start_registering()
    assert driver.calls["register_host"] == 0
    assert driver.left_over == {}
