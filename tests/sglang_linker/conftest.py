from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from support.leftovers import own_places
from support.sglang.engines import nursery

MODELS = Path(__file__).parents[1] / "support" / "vllm" / "models.py"
MakeModel = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the leftovers of killed engines."""
    tmp_path_factory.getbasetemp()  # before TMPDIR changes, so that pytest keeps its own folders
    with pytest.MonkeyPatch.context() as monkeypatch, own_places(monkeypatch):
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """Make the tiny model of a name. Another seed gives other weights."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str, seed: int = 0) -> Path:
        return Path(nursery().run(MODELS, str(directory), name, str(seed)).split()[-1])

    return make


@pytest.fixture(scope="module")
def shared_depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        yield depot
