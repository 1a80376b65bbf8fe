import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess

MODELS = Path(__file__).parents[1] / "support" / "vllm" / "models.py"
MakeModel = Callable[[str], Path]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make a tiny model."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str) -> Path:
        command = [sys.executable, str(MODELS), str(directory), name, "0"]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return Path(done.stdout.split()[-1])

    return make


@pytest.fixture(scope="module")
def shared_depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        yield depot
