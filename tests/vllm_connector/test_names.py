"""The depot's status names an engine by its served model, its address and its id."""

from types import SimpleNamespace
from typing import Any

import pytest

from kvdepot_vllm.inspection import address_of_server, name_of_engine

SERVE = ["/usr/bin/vllm", "serve", "some/model"]


@pytest.mark.parametrize(
    ("argv", "address"),
    [
        ([*SERVE, "--port", "8101", "--host=10.0.0.7", "--dtype", "float32"], "10.0.0.7:8101"),
        ([*SERVE, "--port=1", "--port=8102"], "port 8102"),
        ([*SERVE, "--host", "::1"], "[::1]:8000"),
        (SERVE, "port 8000"),
        ([*SERVE, "--config", "serve.yaml"], ""),
        ([*SERVE, "--config", "serve.yaml", "--port", "8103"], "port 8103"),
        ([*SERVE, "--uds", "/run/vllm.sock"], "/run/vllm.sock"),
        (["/lib/vllm/entrypoints/openai/api_server.py", "--model", "m", "--port", "8104"], "port 8104"),
        (["/usr/bin/vllm", "bench", "serve", "--port", "8105"], ""),
        (["train.py", "--port", "8106"], ""),
        (["-c"], ""),
        ([], ""),
    ],
)
def test_the_arguments_of_vllm_serve_tell_its_address(argv: list[str], address: str) -> None:
    assert address_of_server(argv) == address


def config(**parallel: Any) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(served_model_name="chat"),
        kv_transfer_config=SimpleNamespace(engine_id="3360e073-5aa4-4c5b-9d6e-0123456789ab"),
        parallel_config=SimpleNamespace(**{"nnodes": 1, **parallel}),
    )


def test_an_engine_is_named_by_its_model_address_and_id() -> None:
    argv = [*SERVE, "--port", "8101"]
    assert name_of_engine(config(distributed_executor_backend="mp"), argv) == "vllm chat port 8101 3360e073"


@pytest.mark.parametrize(
    "parallel", [{"distributed_executor_backend": "ray"}, {"distributed_executor_backend": "mp", "nnodes": 2}]
)
def test_processes_that_vllm_does_not_start_itself_agree_on_a_name_without_address(parallel: dict[str, Any]) -> None:
    assert name_of_engine(config(**parallel), [*SERVE, "--port", "8101"]) == "vllm chat 3360e073"
