# pyright: basic, reportMissingImports=false
"""Starts blending in a worker, if its engine can blend and a test with its model succeeds, before the first request.

The test computes the same tokens at two positions. If attention depends only on distances, K must differ by the
rotation and V not at all. The test detects learned positions, a wrong table of angles, a layer mistaken for one with
rotation, and a misread layout. It also runs moves within and between blocks and the scores of policies.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvdepot.backends import TransferContext
from kvdepot_vllm.blend import why_not
from kvdepot_vllm.blend.blender import Blender, choose
from kvdepot_vllm.blend.policies import DEFAULT, Budget
from kvdepot_vllm.blend.worker import BlendWorker
from kvdepot_vllm.inspection import find_runner
from kvdepot_vllm.settings import Settings

logger = logging.getLogger(__name__)

_SHIFT: Final = 1000  # tokens between the two positions, if the context is long enough
_LEAST_SHIFT: Final = 64  # a smaller one may turn K too little to show a wrong rotation
_TOKENS: Final = 96  # few, so that the test is short; a question of 16 and the rest are enough to choose from
_LIMITS: Final = {torch.float32: (0.001, 0.001)}  # the largest relative errors of K and V in the worst layer
_LIMITS_OF_HALVES: Final = (0.05, 0.1)  # SmolLM2-135M in bfloat16 has 0.013 and 0.026


def start_blending(
    vllm_config: Any, kv_cache_config: Any, settings: Settings, context: TransferContext
) -> tuple[BlendWorker | None, str]:
    """Return the worker's side of blends, None if this worker does not blend, and one line for operators."""
    try:
        reason = why_not(vllm_config, kv_cache_config, lambda spec: get_kv_cache_spec_kind(spec).value)
        runner = find_runner() if reason is None else None
        if reason is None and runner is None:
            reason = "vLLM's runner does not show its model"
        if reason is None and runner is not None:
            blender = Blender(runner.get_model(), vllm_config, kv_cache_config, move_tokens=context.move_tokens)
            model_config = vllm_config.model_config
            blocks = range(1, 1 + blocks_needed(blender.block_tokens))  # no request has any block yet
            result = self_test(blender, blocks, model_config.get_vocab_size(), model_config.max_model_len)
            if not result.why:
                text = (
                    f"blend is on; self-test: keys differ by {result.k_error:.2g} after rotation"
                    f" ({result.unrotated_error:.2g} without), values by {result.v_error:.2g}"
                )
                logger.info("%s", text)
                return BlendWorker(context, blender, blender.block_tokens, settings.blend_step_tokens), text
            reason = f"the self-test failed: {result.why}"
    except Exception as error:
        logger.debug("blend cannot start", exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    logger.warning("blend is off, requests are served exactly: %s", reason)
    return None, f"blend is off: {reason}"


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result. Errors are norms of differences, relative to the norm of the right values, in the worst layer.

    Attributes:
        k_error: the error of K after our rotation.
        v_error: the error of V.
        unrotated_error: the error of K without our rotation. It must be large, or the test shows nothing.
        why: the reason if the engine cannot blend, else "".
    """

    k_error: float
    v_error: float
    unrotated_error: float
    why: str


def blocks_needed(block_tokens: int) -> int:
    """Return how many blocks the test needs."""
    return 2 * _num_blocks(block_tokens)


def self_test(blender: Blender, block_ids: Sequence[int], vocabulary: int, max_tokens: int) -> SelfTest:
    """Test a model, in two forward passes of a hundred tokens or little more than a block.

    Args:
        blender: this worker's blender. All ranks must test at the same time.
        block_ids: `blocks_needed` blocks that no request has; their bytes are restored.
        vocabulary: the number of token ids.
        max_tokens: the most tokens of a prompt and its answer.
    """
    ids = torch.tensor(block_ids, dtype=torch.int64)
    pages = [layer.module.kv_cache.unflatten(0, (-1, blender.splits)) for layer in blender.layers]
    saved = [each[ids].clone() for each in pages]
    try:
        return _tested(blender, ids, vocabulary, min(_SHIFT, max_tokens - _num_tokens(blender.block_tokens)))
    except Exception as error:
        return SelfTest(0.0, 0.0, 0.0, f"{type(error).__name__}: {error}")
    finally:
        for each, bytes_before in zip(pages, saved, strict=True):
            each[ids] = bytes_before


def _tested(blender: Blender, ids: Any, vocabulary: int, shift: int) -> SelfTest:
    if shift < _LEAST_SHIFT:
        return SelfTest(0.0, 0.0, 0.0, "the model's context is too short to test it")
    count = _num_tokens(blender.block_tokens)
    table, other = ids.split(_num_blocks(blender.block_tokens))
    tokens = torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(count)
    slots = blender.slots(table, positions)
    blender.forward(tokens, positions, table, shift=shift)
    wanted = _rows(blender, slots)
    blender.forward(tokens, positions, table)
    unrotated = _rows(blender, slots)
    elsewhere = blender.slots(other, positions[:-1] + 1)
    blender.move(slots[:-1], elsewhere, positions[:-1], positions[:-1] + shift)
    blender.move(slots, slots, positions, positions + shift)
    moved, copied = _rows(blender, slots), _rows(blender, elsewhere)
    shorter = [(k[:-1], v[:-1]) for k, v in wanted]
    pairs = list(zip([*moved, *copied], [*wanted, *shorter], strict=True))
    k, v = (max(_error(got[which], right[which]) for got, right in pairs) for which in (0, 1))
    raw = max(_error(got, right) for (got, _), (right, _) in zip(unrotated, wanted, strict=True))
    why = _why_not(k, v, raw, blender)
    if not why:  # an exception here becomes the reason
        choose(blender, DEFAULT, tokens, [(0, count - 16)], table, (count - 16, count), Budget())
    return SelfTest(k, v, raw, why)


def _why_not(k: float, v: float, raw: float, blender: Blender) -> str:
    most_k, most_v = _LIMITS.get(blender.layers[0].module.kv_cache.dtype, _LIMITS_OF_HALVES)
    if not v <= most_v:  # also catches NaN
        return f"V depends on the position: it differs by {v:.2%}, more than {most_v:.2%}"
    if not k <= max(2 * v, most_k):
        return f"K does not turn as expected: it differs by {k:.2%}, more than {max(2 * v, most_k):.2%}"
    if any(layer.rotation for layer in blender.layers) and raw < 4 * max(2 * v, most_k):
        return f"K hardly turns: without a rotation it differs by {raw:.2%} only"
    return ""


def _rows(blender: Blender, slots: Any) -> list[tuple[Any, Any]]:
    return [layer.rows(slots.to(blender.device)) for layer in blender.layers]


def _error(got: Any, right: Any) -> float:
    return float((got.float() - right.float()).norm() / right.float().norm())


def _num_tokens(block_tokens: int) -> int:
    """Return the number of tokens of the test: whole blocks and a part of one."""
    return max(_TOKENS, block_tokens) + block_tokens // 4 + 1


def _num_blocks(block_tokens: int) -> int:
    return -(-_num_tokens(block_tokens) // block_tokens)
