from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Protocol

import pytest

from kvdepot.lab.processes import DepotProcess
from tests.nursery import Nursery
from tests.vllm.engines import ENVIRONMENT, Engine


class MakeModel(Protocol):
    """Makes a tiny model, or finds the one made before."""

    def __call__(self, name: str, seed: int = 0) -> Path: ...


class RunCode(Protocol):
    """Runs Python code where vLLM is imported, and returns what it printed."""

    def __call__(self, code: str, *arguments: str, given: str = "") -> str: ...


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Imports vLLM once; torch and vLLM do not belong into the tests' process."""
    modules = (
        "transformers", "vllm", "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker", "vllm.v1.worker.cpu_model_runner",
        "vllm.model_executor.models.llama", "vllm.distributed.kv_transfer", "vllm.config",
    )  # fmt: skip
    with Nursery(*modules, environment=ENVIRONMENT) as nursery, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Engine, "nursery", nursery)
        yield nursery


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> MakeModel:
    """Make a tiny model."""
    directory = tmp_path_factory.mktemp("models")

    @cache
    def make(name: str, seed: int = 0) -> Path:
        return _run_models_script(nursery, str(directory), name, str(seed))

    return make


@pytest.fixture
def run_code(tmp_path: Path, nursery: Nursery) -> RunCode:
    """Run code in a process of its own."""

    def run(code: str, *arguments: str, given: str = "") -> str:
        script = tmp_path / "code.py"
        script.write_text(code)
        return nursery.run(script, *arguments, given=given)

    return run


@pytest.fixture
def make_adapter(tmp_path: Path, nursery: Nursery) -> Callable[[Path, int], Path]:
    """Make a LoRA adapter for a model."""
    return lambda path, seed: _run_models_script(nursery, str(tmp_path), "adapter", str(path), str(seed))


def _run_models_script(nursery: Nursery, *arguments: str) -> Path:
    return Path(nursery.run(Path(__file__).with_name("models.py"), *arguments).split()[-1])


@pytest.fixture(scope="module")
def depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        yield depot
