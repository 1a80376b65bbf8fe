# pyright: basic
"""Decides whether ranks and stages can divide the KV heads and layers of a group, so that engines of any size share.

Ranks can divide heads if each head's bytes are one piece of each row of a page. Otherwise pages are opaque: their bytes
fit only the rank with the same number in an engine of the same size. Pipeline stages can divide layers if all layers of
the model are alike.
"""

import math
import re
from collections.abc import Iterable
from typing import Any, Final

from kvdepot.layout import MAXIMUM_HEADS

_PLAIN_SPECS: Final = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_PLAIN_DTYPES: Final = frozenset({"auto", "float16", "bfloat16", "float32"})
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_NAMES_OF_KV_HEADS: Final = re.compile(r"(kv|key_value).*head|head.*kv")


def heads_of(vllm_config: Any, group: Any, kind: str) -> int:
    """Return the KV heads of a group in the whole model, 0 if its pages are opaque. Latent attention has one.

    Args:
        vllm_config: `VllmConfig`.
        group: `KVCacheGroupSpec`.
        kind: vLLM's name for the kind of its spec.
    """
    spec = group.kv_cache_spec
    layers = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    if "mla" in kind:
        return int(all(getattr(layer, "max_tp_shards", None) == 1 for layer in layers))  # every rank has the same
    if getattr(group, "is_eagle_group", False) or str(vllm_config.cache_config.cache_dtype) not in _PLAIN_DTYPES:
        return 0  # the heads of a drafter are its own; a quantised page may have scales between its heads
    heads, ranks = _total_heads(vllm_config.model_config), vllm_config.parallel_config.tensor_parallel_size
    if not 0 < heads <= MAXIMUM_HEADS or (heads % ranks and ranks % heads):
        return 0
    return heads if all(_is_plain(layer, max(1, heads // ranks)) for layer in layers) else 0


def layers_of(vllm_config: Any, kv_cache_config: Any, group: Any) -> tuple[int, int]:
    """Return the first layer of this process's stage, and the number of layers of the model; 0, 0 if stages differ.

    All stages must give the same answer, though each sees only its own layers. So a model that may have layers without
    a KV cache of their own gives 0, 0, wherever these layers are.

    Args:
        vllm_config: `VllmConfig`.
        kv_cache_config: `KVCacheConfig` of this worker.
        group: this worker's `KVCacheGroupSpec`.
    """
    model = vllm_config.model_config
    config: Any = getattr(model, "hf_text_config", None)
    if (
        len(kv_cache_config.kv_cache_groups) > 1  # vLLM forms the groups anew for each number of stages
        or vllm_config.speculative_config is not None  # the layers of a drafter are in the last stage
        or model.is_hybrid
        or model.has_noops
        or any("shared" in name and "kv" in name and value for name, value in config.to_dict().items())
    ):
        return 0, 0
    first, end = model.get_layers_start_end_indices(vllm_config.parallel_config)
    numbers = [_NUMBER.findall(name) for name in group.layer_names]
    is_whole = numbers == [[str(number)] for number in range(first, end)]
    return (first, model.get_total_num_hidden_layers()) if is_whole else (0, 0)


def name_of_layers(name: str) -> str:
    """Return the name that layers of a model have in common, without their number."""
    return _NUMBER.sub("*", name)


def _total_heads(model: Any) -> int:
    """Return the number of KV heads of a model; 0 if its layers differ in it, or if it is unknown."""
    config: Any = getattr(model, "hf_text_config", None)
    if not hasattr(config, "to_dict") or getattr(model.model_arch_config, "per_layer_overrides", None):
        return 0
    heads = int(model.get_total_num_kv_heads())
    # With more ranks than heads, each rank has one head. Then only other fields of the configuration show that some
    # layers have another number of heads.
    named = (value for name, value in config.to_dict().items() if _NAMES_OF_KV_HEADS.search(name))
    return heads if all(value in (None, heads) for value in named) else 0


def _is_plain(spec: Any, heads: int) -> bool:
    return (
        type(spec).__name__ in _PLAIN_SPECS
        and spec.num_kv_heads == heads
        and getattr(spec, "num_head_slots", None) in (None, heads)
        and getattr(spec, "state_content_bytes", None) is None
        and getattr(spec, "tokens_per_state", 1) == 1
    )


def rows_of(layout: str, block_tokens: int, kernel_blocks: int) -> int:
    """Return the rows of a page, each with all heads of a rank.

    Args:
        layout: vLLM's name for the order in memory: L(ayers), B(locks), H(eads), N (tokens), C(ontent).
        block_tokens: tokens of a block in the block table.
        kernel_blocks: the kernel's blocks in such a block.
    """
    return kernel_blocks if layout.find("H") < layout.find("N") else block_tokens


def lie_apart(tensors: Iterable[Any], rows: int, heads: int) -> bool:
    """Return whether blocks of tensors `(num_blocks, ...)` are rows of heads in memory. A single head always is."""
    return heads == 1 or all(_lie_apart(tensor, rows, heads) for tensor in tensors)


def _lie_apart(tensor: Any, rows: int, heads: int) -> bool:
    order = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True), reverse=True)
    sizes = [int(size) for _, size in order if size != 1]
    return any(math.prod(sizes[:n]) == rows and sizes[n] == heads for n in range(len(sizes)))
