"""The linker that keeps SGLang's KV cache in a kvdepot server.

The entry point is `register` (`sglang.srt.plugins`), which SGLang calls in every process at start. This module imports
nothing heavy.
"""

import importlib
import logging
from typing import Any, Final

from kvdepot_sglang.hooks import UPDATING_METHODS, around_match, around_offload_nodes, around_update

logger = logging.getLogger(__name__)

_WRAPPER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


def register() -> None:
    """Hook SGLang's methods that write weights, and those that know the pages before a call of the linker."""
    try:
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        hooks.HookRegistry.register(f"{_WRAPPER}.match", around_match, hooks.HookType.AROUND)
        hooks.HookRegistry.register(f"{_WRAPPER}.offload_nodes", around_offload_nodes, hooks.HookType.AROUND)
        for method in UPDATING_METHODS:
            hooks.HookRegistry.register(f"{_UPDATER}.{method}", around_update, hooks.HookType.AROUND)
    except Exception:  # SGLang can serve without kvdepot; the linker refuses to start without its hooks
        logger.exception("kvdepot's hooks could not be registered with this SGLang")
