"""Refuses engines on Gaudi that cannot use a depot, before any block is moved. Based on the source of vllm-gaudi.

`kvdepot_hpu.context` checks the tensors themselves and refuses keys without values (fp8 with dynamic scales).
"""

from collections.abc import Mapping
from typing import Final

from kvdepot.backends import EngineTraits
from kvdepot.layout import GroupKind

_OFF: Final = ("0", "false", "f", "no", "n", "off")


def why_unsuited(engine: EngineTraits, environment: Mapping[str, str]) -> str | None:
    """Return why an engine's block ids or tensors do not match its block table, None if they do.

    Args:
        engine: vLLM on a Gaudi.
        environment: the environment of the worker's process.
    """
    if GroupKind.RECURRENT in engine.kinds:
        return (
            "the model keeps recurrent states, which vllm-gaudi hands over as if they were blocks of attention: models"
            " with them cannot use a depot on Gaudi"
        )
    if _moves_blocks(environment, prefix_caching=engine.prefix_caching):
        return (
            "vllm-gaudi moves blocks in device memory behind the scheduler's ids (VLLM_DEFRAG, on with"
            " VLLM_CONTIGUOUS_PA, which is on without prefix caching): start vLLM with --enable-prefix-caching, or with"
            " VLLM_DEFRAG=false"
        )
    return None


def _moves_blocks(environment: Mapping[str, str], *, prefix_caching: bool) -> bool:
    """Return whether the defragmenter may be on. The first set flag decides; without one, prefix caching does."""
    for name in ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA"):
        value = environment.get(name)
        if value is not None:
            return value.strip().lower() not in _OFF
    return not prefix_caching
