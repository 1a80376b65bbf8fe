import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvdepot.testing.processes import DepotProcess

MakeModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make a tiny model; in a child, as torch and transformers do not belong into the tests' process."""
    directory = tmp_path_factory.mktemp("models")

    def make(name: str) -> Path:
        script = Path(__file__).with_name("models.py")
        done = subprocess.run(
            [sys.executable, str(script), str(directory), name], check=False, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return Path(done.stdout.split()[-1])

    return make


@pytest.fixture(scope="module")
def depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB") as depot:
        yield depot
