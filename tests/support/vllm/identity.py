"""An engine's configuration without vLLM, and the digest of everything that determines its KV."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvdepot_vllm.identity import engine_namespace
from kvdepot_vllm.settings import Settings


class Config:
    """A model configuration as in transformers."""

    _commit_hash = None

    def __init__(self, **values: Any) -> None:
        self.values = {
            "hidden_size": 256,
            "rope_parameters": {"rope_theta": 1e4},
            "transformers_version": "5.0",
            **values,
        }

    def to_dict(self) -> dict[str, Any]:
        return self.values


def vllm_config(model: Path | str, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "model": str(model),
        "revision": None,
        "code_revision": None,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "seed": 0,
        "hf_config": Config(**changes.pop("config", {})),
    }
    cache = {"cache_dtype": changes.pop("cache_dtype", "auto"), **changes.pop("cache", {})}
    load = {"load_format": changes.pop("load_format", "auto"), **changes.pop("load", {})}
    speculative = changes.pop("speculative", None)
    parallel = {"tensor_parallel_size": changes.pop("ranks", 1)}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**fields, **changes}),
        cache_config=SimpleNamespace(**cache),
        load_config=SimpleNamespace(**load),
        speculative_config=speculative,
        parallel_config=SimpleNamespace(**parallel),
    )


def digest(
    model: Path | str, settings: Settings | None = None, is_batch_invariant: bool = False, **changes: Any
) -> bytes:
    config, settings = vllm_config(model, **changes), settings or Settings()
    return engine_namespace(config, settings, is_batch_invariant=is_batch_invariant).digest(64)
