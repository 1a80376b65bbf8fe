"""A refusal or failure of the driver costs one miss. The pool's registration is undone."""

import contextlib
import logging
from collections.abc import Generator

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda.driver import DriverError
from support.cuda.fake import FakeDriver
from support.cuda.fake_worker import NUM_PIECES, POOL_BYTES, FakeWorker

pytestmark = pytest.mark.slow

WAIT_SECONDS = 20.0


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.promise(9, 24)
@pytest.mark.parametrize(
    ("store_call", "retrieve_call"),
    [
        *[(call, call) for call in ("execute", "record_event", "wait_for_event")],
        ("synchronize_stream", "synchronize_event"),
    ],
)
def test_a_call_that_fails_is_a_miss_and_the_next_transfer_works(
    store_call: str,
    retrieve_call: str,
    cache: MakeCache,
    driver: FakeDriver,
    depot: DepotProcess,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each of the two failures is one line in the log, without a traceback."""
    worker = cache()
    driver.fail(store_call, "CUDA_ERROR_UNKNOWN (999)", times=1)
    assert not worker.store(prompt(4))
    assert depot.status().num_entries == 0
    assert worker.store(prompt(4))
    driver.fail(retrieve_call, "CUDA_ERROR_UNKNOWN (999)", times=1)
    assert worker.retrieve(prompt(4)) == 0
    assert worker.retrieve(prompt(4)) == 4
    wait_until(lambda: depot.status().num_leases == 0)
    assert (depot.status().num_tickets, depot.status().quarantined_bytes) == (0, 0)
    errors = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(errors) == 2
    assert all("UNKNOWN (999)" in record.getMessage() and record.exc_info is None for record in errors)


def test_a_copy_that_fails_half_way_is_a_miss_after_the_others_are_done(cache: MakeCache, driver: FakeDriver) -> None:
    """The fake reports a stream that still writes when the extents are returned."""
    driver.has_batch_copy = False
    worker = cache()
    driver.fail("copy", "CUDA_ERROR_INVALID_VALUE (1)", after=5, times=1)
    waits = driver.calls["synchronize_stream"]
    assert not worker.store(prompt(4))
    assert driver.calls["synchronize_stream"] == waits + 1
    assert worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 4


def test_a_retrieve_that_fails_behind_its_copies_is_a_miss_after_they_are_done(
    cache: MakeCache, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, activated = cache(), driver.activated
    assert worker.store(prompt(4))
    batches, waits = driver.calls["copy_batch"], driver.calls["synchronize_stream"]

    @contextlib.contextmanager
    def leave() -> Generator[None]:
        with activated():
            yield
        if driver.calls["copy_batch"] > batches and driver.calls["synchronize_stream"] == waits:
            raise DriverError("cuCtxPopCurrent", "CUDA_ERROR_UNKNOWN (999)")

    monkeypatch.setattr(driver, "activated", leave)
    assert worker.retrieve(prompt(4)) == 0
    assert driver.calls["synchronize_stream"] == waits + 1
    assert worker.retrieve(prompt(4)) == 4


def test_a_driver_whose_batches_fail_is_asked_for_single_copies(
    cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache()
    assert worker.store(prompt(2))
    assert driver.calls["copy"] == 0
    driver.fail("copy_batch", "CUDA_ERROR_NOT_SUPPORTED (801)")
    batches = driver.calls["copy_batch"]
    for salt in range(3):
        assert worker.store(prompt(2, salt=salt))
        assert worker.retrieve(prompt(2, salt=salt)) == 2
    assert driver.calls["copy_batch"] == batches + 1
    assert len([record for record in caplog.records if "because a batch failed" in record.message]) == 1


@pytest.mark.parametrize("is_first_seen_by", ["copy_batch", "record_event"])
def test_a_device_that_is_lost_is_misses_for_ever_one_line_and_closes(
    is_first_seen_by: str, cache: MakeCache, driver: FakeDriver, depot: DepotProcess, caplog: pytest.LogCaptureFixture
) -> None:
    """The device is not called again, and its loss is logged only once."""
    worker = cache()
    assert worker.store(prompt(2))
    for call in ("synchronize_stream", "copy", "copy_batch", "wait_for_event"):
        driver.fail(call, "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    if is_first_seen_by == "record_event":
        driver.fail("record_event", "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    assert worker.retrieve(prompt(2)) == 0
    before = driver.calls.copy()
    for _ in range(3):
        assert worker.retrieve(prompt(2)) == 0
        assert not worker.store(prompt(2, salt=1))
    assert driver.calls == before
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "has lost the device" in line.getMessage()
    assert line.exc_info is None
    wait_until(lambda: depot.status().num_leases == 0)


def test_a_pool_that_cannot_be_unregistered_is_one_line(depot: DepotProcess, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver()
    worker = FakeWorker(depot.url, PLANS["one group"], driver=driver)
    worker.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: worker.context.num_registered == NUM_PIECES)
    driver.fail("unregister_host", "CUDA_ERROR_ILLEGAL_ADDRESS (700)")
    worker.context.close()
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"cannot unregister {NUM_PIECES} pieces of the pool" in line.getMessage()


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_are_bounded(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache(batch_runs=10)
    assert worker.store(prompt(15))
    assert worker.retrieve(prompt(15)) == 15
    assert driver.largest_batch == 10


# --- registration -----------------------------------------------------------------------------------------------------


@pytest.mark.promise(23, 27)
def test_ten_restarts_of_the_depot_leave_one_registration(
    cache: MakeCache, driver: FakeDriver, depot: DepotProcess
) -> None:
    worker = cache()
    assert worker.store(prompt(3))
    for _ in range(10):
        before = driver.calls["register_host"]
        depot.kill()
        assert worker.retrieve(prompt(3)) == 0
        depot.start()
        worker.worker.wait_until_connected(WAIT_SECONDS)
        wait_until(lambda before=before: driver.calls["register_host"] == before + NUM_PIECES)
        wait_until(lambda: not depot.status().recovering)
        assert worker.retrieve(prompt(3)) == 3
    assert driver.registered_bytes == POOL_BYTES
    assert driver.calls["unregister_host"] == 10 * NUM_PIECES
    assert driver.left_over == {
        "streams": 2,
        "events": driver.calls["create_event"],
        "registrations": NUM_PIECES,
        "open": 1,
    }
    assert driver.calls["create_event"] <= 4


def test_transfers_do_not_wait_for_the_registration(driver: FakeDriver, depot: DepotProcess) -> None:
    """A worker that is closed while its pool is being registered also releases everything."""
    worker = FakeWorker(depot.url, PLANS["one group"], driver=driver, piece_bytes=16384)
    cache = Cache(worker, PLANS["one group"])
    worker.wait_until_connected(WAIT_SECONDS)
    assert cache.store(prompt(4))
    assert cache.retrieve(prompt(4)) == 4
    worker.context.close()
    assert driver.left_over == {}
    assert driver.violations == []


def test_the_depot_knows_how_bytes_are_moved(cache: MakeCache, depot: DepotProcess) -> None:
    cache()
    (context,) = depot.status().contexts
    assert (context.transfer_mode, context.device) == ("direct", "cuda:0")
