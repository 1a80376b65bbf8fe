from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import DepotProcess


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 64 MiB."""
    with DepotProcess() as depot:
        yield depot
