import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from kvdepot.testing.processes import DepotProcess


class MakeModel(Protocol):
    """Makes a tiny model, or finds the one made before."""

    def __call__(self, name: str, seed: int = 0) -> Path: ...


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make a tiny model; in a child, as torch and transformers do not belong into the tests' process."""
    directory = tmp_path_factory.mktemp("models")

    def make(name: str, seed: int = 0) -> Path:
        return _run_models_script(str(directory), name, str(seed))

    return make


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[[Path, int], Path]:
    """Make a LoRA adapter for a model."""
    return lambda path, seed: _run_models_script(str(tmp_path), "adapter", str(path), str(seed))


def _run_models_script(*arguments: str) -> Path:
    script = Path(__file__).with_name("models.py")
    done = subprocess.run([sys.executable, str(script), *arguments], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return Path(done.stdout.split()[-1])


@pytest.fixture(scope="module")
def depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        yield depot
