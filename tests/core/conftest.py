from collections.abc import Iterator

import pytest

from kvdepot.client.operator import ask_depot
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from kvdepot.pool.inventory import find_pools
from support.peer import Peer


@pytest.fixture(scope="session", autouse=True)
def pools_are_removed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail a test that leaves a pool in memory, as many of them would fill it."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    assert not [pool for pool in find_pools() if f"{folder}/" in pool.server]


@pytest.fixture
def peer(depot: DepotProcess) -> Iterator[Peer]:
    """A worker of the depot that copies nothing."""
    peer = Peer(depot)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def shared_depot() -> Iterator[DepotProcess]:
    """A depot for a module's tests that neither stop it nor read its counters."""
    with DepotProcess() as depot:
        yield depot


@pytest.fixture
def emptied_depot(shared_depot: DepotProcess) -> Iterator[DepotProcess]:
    """The module's depot without clients, and with an empty pool."""
    yield shared_depot

    def is_empty() -> bool:
        ask_depot(o.Clear(), shared_depot.url, 20.0)
        status = shared_depot.status()
        return not (status.contexts or status.num_chunks or status.num_leases or status.num_tickets)

    wait_until(is_empty, what="an empty depot")  # the depot ends sessions and their leases in steps
