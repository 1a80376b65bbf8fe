"""What of an engine on Gaudi (vllm-gaudi) cannot use a depot, told before a block is moved. Knows it by its source.

The tensors themselves are checked by `kvdepot_hpu`: keys without values (fp8 with dynamic scales) are refused there.
"""

from collections.abc import Mapping
from typing import Final

from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache, Unsupported

_OFF: Final = ("0", "false", "f", "no", "n", "off")


def check(cache: EngineCache, *, prefix_caching: bool, environment: Mapping[str, str]) -> None:
    """Refuse an engine whose block ids or tensors do not mean what they say.

    Args:
        cache: the engine's.
        prefix_caching: whether vLLM's own is on.
        environment: of the worker's process.

    Raises:
        Unsupported: with the way out.
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
    """Return whether the defragmenter may be on: each flag decides if it is set, else the one that it follows."""
    for name in ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA"):
        value = environment.get(name)
        if value is not None:
            return value.strip().lower() not in _OFF
    return not prefix_caching
