# pyright: basic
"""The namespace of an SGLang engine: everything besides tokens that determines its KV.

SGLang's names of pages already distinguish tokens, adapters (`extra_key`) and salts (`cache_salt`).
"""

from typing import Any, Final

from kvdepot.engines.identity import RANDOM, commit_of, config_digest, weights_of
from kvdepot.keys import Namespace
from kvdepot_sglang.settings import Settings

_FROM_FILES: Final = frozenset(
    {"auto", "pt", "safetensors", "npcache", "gguf", "bitsandbytes", "layered", "sharded_state", "fastsafetensors"}
)
"""Load formats that take the weights from the model's folder."""
_DECIDING: Final = (  # fields of `ServerArgs` that change bits of KV
    "dtype",
    "kv_cache_dtype",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "load_format",
    "model_loader_extra_config",
    "json_model_override_args",
    "context_length",
    "torchao_config",
    "modelopt_quant",
)


def engine_namespace(server_args: Any, hf_config: Any, device: str, num_ranks: int, settings: Settings) -> Namespace:
    """Return the namespace. Two engines share only if their namespaces are equal.

    Args:
        server_args: SGLang's `ServerArgs`.
        hf_config: the model's configuration.
        device: type of the device.
        num_ranks: tensor-parallel ranks. They count only if each generates its own weights or bits must be equal.
        settings: the user's settings.
    """
    model, load_format = str(server_args.model_path), _plain(getattr(server_args, "load_format", ""))
    weights = "" if settings.weights else weights_of(model, load_format, _FROM_FILES, hf_config)
    extra = {
        "connector": "sglang",
        "namespace": settings.namespace,
        "config": config_digest(hf_config),
        "weights": settings.weights or weights or commit_of(hf_config),
        "device": device,
        **{name: _plain(getattr(server_args, name, "")) for name in _DECIDING},
    }
    if load_format == RANDOM:
        extra["seed"] = str(getattr(server_args, "random_seed", ""))
    if load_format == RANDOM or getattr(server_args, "enable_deterministic_inference", False):
        extra["ranks"] = str(num_ranks)
    return Namespace(
        model="" if weights else model,
        revision=str(getattr(server_args, "revision", None) or ""),
        tenant=settings.tenant,
        tenant_salt=settings.tenant_salt,
        quantization=str(getattr(server_args, "quantization", None) or ""),
        extra=tuple(sorted(extra.items())),
    )


def _plain(value: Any) -> str:
    """Return a setting as text; for an enumeration, its value."""
    return str(getattr(value, "value", value) or "").removeprefix("torch.")
