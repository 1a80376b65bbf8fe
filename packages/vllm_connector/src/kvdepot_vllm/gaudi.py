"""Refuses engines on Gaudi (vllm-gaudi) that cannot use a depot, before a block is moved. Based on its source.

`kvdepot_hpu` checks the tensors themselves and refuses keys without values (fp8 with dynamic scales).
"""

from collections.abc import Mapping
from typing import Final

from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache, Unsupported

_OFF: Final = ("0", "false", "f", "no", "n", "off")


def check(cache: EngineCache, *, prefix_caching: bool, environment: Mapping[str, str]) -> None:
    """Refuse an engine whose block ids or tensors do not match its block table.

    Args:
        cache: the engine's.
        prefix_caching: whether vLLM's own is on.
        environment: of the worker's process.

    Raises:
        Unsupported: with the reason and a remedy.
    """
    for group in cache.groups:
        if group.kind is GroupKind.RECURRENT:
            raise Unsupported(
                f"KV cache group {group.number} keeps recurrent states, which vllm-gaudi hands over as if they were"
                " blocks of attention: models with them cannot use a depot on Gaudi"
            )
    if _moves_blocks(prefix_caching, environment):
        raise Unsupported(
            "vllm-gaudi moves blocks in device memory behind the scheduler's ids (VLLM_DEFRAG, on with"
            " VLLM_CONTIGUOUS_PA, which is on without prefix caching): start vLLM with --enable-prefix-caching, or with"
            " VLLM_DEFRAG=false"
        )


def _moves_blocks(prefix_caching: bool, environment: Mapping[str, str]) -> bool:
    """Return whether the defragmenter may be on. The first flag that is set decides, else prefix caching."""
    for name in ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA"):
        value = environment.get(name)
        if value is not None:
            return value.strip().lower() not in _OFF
    return not prefix_caching
