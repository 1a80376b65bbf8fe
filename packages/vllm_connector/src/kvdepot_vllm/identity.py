"""Identifies KV: the namespace of an engine, and everything besides tokens that determines the KV of a request.

Everything is computed from content and names without a seed, so equal engines get equal keys in all processes.
"""

import importlib
from typing import Any, Final, cast

import msgspec
from blake3 import blake3

from kvdepot.engines.identity import (
    RANDOM,
    commit_of,
    config_digest,
    config_values,
    digest_of,
    weights_of,
)
from kvdepot.keys import Namespace
from kvdepot_vllm.contents import Adapter
from kvdepot_vllm.engine import EngineRequest
from kvdepot_vllm.params import SharedHead
from kvdepot_vllm.settings import Settings

_WHOLE_PROMPT: Final = 1 << 40  # tokens, beyond the end of any prompt
_FROM_FILES: Final = frozenset(
    {
        "auto", "hf", "safetensors", "pt", "npcache", "mistral", "gguf", "bitsandbytes", "fastsafetensors",
        "instanttensor", "sharded_state", "runai_streamer", "runai_streamer_sharded",
    }
)  # fmt: skip
"""Load formats that take the weights from the model's folder."""
_LLAMA4_TOKENS: Final = 32768  # with a longer `max_model_len` vLLM tunes the attention's temperature


def engine_namespace(vllm_config: Any, settings: Settings, *, is_batch_invariant: bool = False) -> Namespace:
    """Return the namespace. Two engines share only if their namespaces are equal.

    It contains the model's name only if the weights have no fingerprint, so engines share equal weights under different
    paths. The number of ranks changes the last bits of KV. It counts if the engine must compute equal bits
    (`is_batch_invariant`).
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    name, load_format = _name(model), str(vllm_config.load_config.load_format)
    weights = "" if settings.weights else weights_of(name, load_format, _FROM_FILES, model.hf_config)
    extra = {
        "connector": "vllm",
        "namespace": settings.namespace,
        "config": config_digest(model.hf_config),
        "dtype": str(model.dtype).removeprefix("torch."),
        "cache_dtype": str(cache.cache_dtype),
        "code_revision": str(getattr(model, "code_revision", None) or ""),
        "load_format": load_format,
        "weights": settings.weights or weights or commit_of(model.hf_config),
        "length": _decided_by_length(model),
        "states": f"{_setting(cache, 'mamba_cache_dtype')} {_setting(cache, 'mamba_ssm_cache_dtype')}",
        "skipped": " ".join(sorted(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))),
        "drafter": _drafter(vllm_config, name, weights),
    }
    if not weights:
        extra["loader"] = str(getattr(vllm_config.load_config, "model_loader_extra_config", None) or "")
    if load_format == RANDOM:
        extra["seed"] = str(model.seed)
    if load_format == RANDOM or is_batch_invariant:  # each rank generates its own random weights
        extra["ranks"] = str(vllm_config.parallel_config.tensor_parallel_size)
    return Namespace(
        model="" if weights else name,
        revision=str(model.revision or ""),
        tenant=settings.tenant,
        tenant_salt=settings.tenant_salt,
        quantization=str(model.quantization or ""),
        extra=tuple(sorted(extra.items())),
    )


def _setting(config: Any, name: str) -> str:
    return str(getattr(config, name, None) or "auto")


def _name(model: Any) -> str:
    """Return the path or address that the user gave, not the folder into which vLLM loads from an object store."""
    return str(getattr(model, "model_weights", None) or model.model)


def _decided_by_length(model: Any) -> str:
    """Return how `max_model_len` changes values: LongRoPE's factors, Llama 4's temperature. "" if it does not."""
    values = config_values(model.hf_config)
    thresholds: set[int] = set()
    if any(kind in ("longrope", "su") for name in ("rope_type", "type") for kind in _found(values, name)):
        thresholds |= {int(value) for value in _found(values, "original_max_position_embeddings") if value}
        thresholds = thresholds or {int(model.max_model_len)}
    if any(str(kind).startswith("llama4") for kind in _found(values, "model_type")):
        thresholds.add(_LLAMA4_TOKENS)
    if not thresholds:
        return ""
    if getattr(model, "original_max_model_len", None) == -1:
        return "fitted"  # to the device's memory, after the model was built for more
    return " ".join(f"{'above' if model.max_model_len > limit else 'within'} {limit}" for limit in sorted(thresholds))


def _found(value: Any, name: str) -> list[Any]:
    """Return the values under a name, at any depth."""
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        own = [inner for key, inner in fields.items() if key == name and not isinstance(inner, dict | list | tuple)]
        return own + [item for inner in fields.values() for item in _found(inner, name)]
    if isinstance(value, list | tuple):
        return [item for inner in cast("list[Any]", value) for item in _found(inner, name)]
    return []


def _drafter(vllm_config: Any, target: str, target_weights: str) -> str:
    """Return a digest of the drafter if its KV lies beside the model's, else ""."""
    speculative = getattr(vllm_config, "speculative_config", None)
    model = getattr(speculative, "draft_model_config", None)
    if speculative is None or model is None or not speculative.uses_draft_kv_cache():
        return ""
    name, loading = _name(model), getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    weights = target_weights
    if name != target:
        weights = weights_of(name, str(loading.load_format), _FROM_FILES, model.hf_config)
    parts = [
        speculative.method,
        weights or name,
        model.revision,
        commit_of(model.hf_config),
        config_digest(model.hf_config),
        model.dtype,
        model.quantization,
        getattr(speculative, "kv_cache_dtype", None),
        loading.load_format,
    ]
    return digest_of("drafter", [str(part) for part in parts])


def extra_keys(
    request: EngineRequest, adapter: Adapter | None = None, head: SharedHead | None = None
) -> list[tuple[int, int, bytes]]:
    """Convert everything besides tokens that determines a request's KV into extra keys for `PrefixHasher`.

    Args:
        request: vLLM's request.
        adapter: its adapter, which its content alone identifies.
        head: a shared beginning of the prompt. The cache salt does not cover it. Its own salt does.

    Returns:
        `(first token, end, key)` for the adapter, cache salt, multimodal items and prompt embeddings.
    """
    found: list[tuple[int, int, bytes]] = []
    if adapter is not None:
        found.append((0, _WHOLE_PROMPT, msgspec.msgpack.encode(("adapter", adapter.loaded.content))))
    if request.cache_salt:
        first = head.num_tokens if head is not None else 0
        found.append((first, _WHOLE_PROMPT, msgspec.msgpack.encode(("salt", request.cache_salt))))
        if head is not None and head.salt:
            found.append((0, first, msgspec.msgpack.encode(("shared salt", head.salt))))
    if request.prompt_embeds is not None:
        known = ["embeds", _tensor_digest(request.prompt_embeds)]
        if request.prompt_is_token_ids is not None:  # vLLM gives embedded places the id 0, which is a token
            known.append(blake3(bytes(request.prompt_is_token_ids)).digest())
        found.append((0, _WHOLE_PROMPT, msgspec.msgpack.encode(known)))
    for item in request.mm_features:
        place = item.mm_position
        key = msgspec.msgpack.encode(("item", item.modality, item.identifier))
        found.append((place.offset, place.offset + place.length, key))
    return found


def _tensor_digest(tensor: Any) -> bytes:
    torch: Any = importlib.import_module("torch")
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return blake3(raw.tobytes(), derive_key_context="kvdepot 2026-11 embeddings").digest()
