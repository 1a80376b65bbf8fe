"""The fake device, and workers in this process that copy by themselves."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import PLANS, Cache
from support.cuda.fake import FakeDriver
from support.cuda.fake_worker import NUM_PIECES, FakeWorker
from support.cuda.node import FakeDevice, fake_device

WAIT_SECONDS = 20.0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """A device that other processes can open."""
    with fake_device(monkeypatch) as device:
        yield device
        assert device.violations == ""


@pytest.fixture
def depot_with_movers(device: FakeDevice) -> Iterator[DepotProcess]:
    """A depot that finds the device's movers, which may be slow here."""
    del device
    with DepotProcess("--move-seconds", "20") as depot:
        yield depot


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


@pytest.fixture
def worker_options() -> dict[str, Any]:
    """The options of the workers that `cache` makes. Modules can override them."""
    return {}


@pytest.fixture
def cache(depot: DepotProcess, driver: FakeDriver, worker_options: dict[str, Any]) -> Iterator[MakeCache]:
    """Makes connected workers. `num_pieces` of their pool are registered: all pieces that the driver accepts.

    The kernel is loaded, too, if there is one.
    """
    made: list[Cache] = []

    def make(**given: Any) -> Cache:
        options: dict[str, Any] = {"plan": "one group", "num_pieces": NUM_PIECES} | worker_options | given
        plan, num_pieces = PLANS[options.pop("plan")], options.pop("num_pieces")
        worker = FakeWorker(depot.url, plan, driver=driver, **options)
        made.append(Cache(worker, plan))
        worker.wait_until_connected(WAIT_SECONDS)
        wait_until(lambda: worker.context.is_warm, what="the registration of the pool")
        assert worker.context.num_registered == num_pieces
        return made[-1]

    yield make
    for cache in made:
        cache.context.close()
    assert driver.violations == []
    assert driver.left_over == {}
