# pyright: basic, reportMissingImports=false
"""Starts blending in a worker, if its engine can blend and the self-test with the model succeeds."""

import logging
from typing import Any

from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvdepot.backends import TransferContext
from kvdepot_vllm.blend.blender import Blender
from kvdepot_vllm.blend.self_test import blocks_needed, self_test
from kvdepot_vllm.blend.supported import why_not
from kvdepot_vllm.blend.worker import BlendWorker
from kvdepot_vllm.runner import find_runner
from kvdepot_vllm.settings import Settings

logger = logging.getLogger(__name__)


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
            if result.ok:
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
