from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from kvdepot.lab.processes import DepotProcess
from support.forking_python import ForkingPython
from support.leftovers import own_places
from support.nursery import Nursery
from support.vllm.engines import ENVIRONMENT, Engine, MakeModel, RunCode
from support.vllm.examples import SERVE

MODELS = Path(__file__).parents[1] / "support" / "vllm" / "models.py"


@pytest.fixture(scope="session", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the leftovers of killed engines."""
    tmp_path_factory.getbasetemp()  # before TMPDIR changes, so that pytest keeps its own folders
    with pytest.MonkeyPatch.context() as monkeypatch, own_places(monkeypatch):
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """A process that imports vLLM once, as torch and vLLM do not belong in the tests' process."""
    modules = (
        "transformers",
        "vllm",
        "vllm.entrypoints.llm",
        "vllm.v1.worker.cpu_worker",
        "vllm.v1.worker.cpu_model_runner",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.attention.backends.cpu_attn",
        "vllm.entrypoints.openai.api_server",
        "vllm.model_executor.layers.quantization.online.base",
        "vllm.model_executor.models.llama",
        "vllm.distributed.kv_transfer",
        "vllm.config",
        "kvdepot_vllm.connector",
        "support.vllm.ahead",
    )
    with Nursery(*modules, environment=ENVIRONMENT) as nursery, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Engine, "nursery", nursery)
        yield nursery


@pytest.fixture(scope="session")
def forking_python(nursery: Nursery) -> Iterator[str]:
    """An executable in place of Python that has imported vLLM already."""
    with ForkingPython(nursery) as forking:
        yield str(forking.python)


@pytest.fixture(scope="session")
def serve(forking_python: str) -> dict[str, str]:
    """Variables that make an example start vLLM's API server in a fork of the nursery's process."""
    return {"VLLM_SERVE": f"{forking_python} {SERVE} --model", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


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
    """Run code in its own process."""

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
    return Path(nursery.run(MODELS, *arguments).split()[-1])


@pytest.fixture(scope="module")
def depot() -> Iterator[DepotProcess]:
    """A depot with a pool of 512 MiB."""
    with DepotProcess(pool_size="512MiB", new_session=True) as depot:
        yield depot
