"""Reuses KV that is not a prefix, inside a vLLM worker.

`blender.Blender` is the facade: it finds the layers, moves KV to other positions, runs the model over scattered
positions of a prompt, and chooses the tokens to recompute by a policy. At start, `setup` checks that all of this
works for the model. `why_not` refuses engines that cannot blend; it needs neither torch nor a running engine.
"""

from collections.abc import Callable
from typing import Any, Final

_COPIED_VERBATIM: Final = ("auto", "bfloat16", "float16", "float32", "half", "float")


def why_not(vllm_config: Any, kv_cache_config: Any, kind_of: Callable[[Any], str]) -> str | None:
    """Return why this engine cannot blend, None if it can.

    Args:
        vllm_config: `VllmConfig`.
        kv_cache_config: `KVCacheConfig`.
        kind_of: vLLM's name for the kind of a KV cache spec.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    groups = kv_cache_config.kv_cache_groups
    kinds = [kind_of(group.kv_cache_spec) for group in groups]
    odd = next((kind for kind in kinds if kind not in ("full_attention", "mla_attention")), None)
    dtype = str(vllm_config.cache_config.cache_dtype)
    reasons = {
        f"the model has a KV cache group of kind {odd}: only full attention can be blended": odd is not None,
        f"the model has {len(groups)} KV cache groups: only one can be blended": len(groups) != 1,
        f"the KV cache is quantized ({dtype})": dtype not in _COPIED_VERBATIM,
        "the model is an encoder-decoder model": bool(getattr(model, "is_encoder_decoder", False)),
        "the model takes images or sound": bool(getattr(model, "is_multimodal_model", False)),
        "LoRA is enabled": vllm_config.lora_config is not None,
        "the model is split into pipeline stages": parallel.pipeline_parallel_size > 1,
        "the context of a request is split over devices": any(
            getattr(parallel, name, 1) > 1 for name in ("decode_context_parallel_size", "prefill_context_parallel_size")
        ),
        "data parallel replicas compute in step": parallel.data_parallel_size > 1,
        "experts are split over devices": bool(getattr(parallel, "use_sequence_parallel_moe", False)),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
