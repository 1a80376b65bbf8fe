"""The plugin: patches SGLang where its interface for linkers lacks an argument.

The entry point is `register` (`sglang.srt.plugins`), which SGLang calls in every process at start. This module imports
nothing heavy. `kvdepot_sglang.linker` keeps SGLang's KV cache in a kvdepot server.

SGLang calls a linker for the tail of a prompt behind the pages on its device, and for the pages of one node of its
tree. The depot keeps chunks under their prefix, so it needs the pages before those, too. Two hooks around the methods
that call the linker add them. The third hook is around the methods that write new weights into a running engine, and
reports these. Nothing else in SGLang changes.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

logger = logging.getLogger(__name__)

_WRAPPER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_UPDATER: Final = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATING_METHODS: Final = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",  # packs the received weights, or completes those that peers wrote into memory
)
"""Methods of SGLang's `SchedulerWeightUpdaterManager`, called on every rank between two batches."""


def register() -> None:
    """Hook SGLang's methods that write weights, and methods that know the pages before a call of the linker."""
    try:
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        hooks.HookRegistry.register(f"{_WRAPPER}.match", around_match, hooks.HookType.AROUND)
        hooks.HookRegistry.register(f"{_WRAPPER}.offload_nodes", around_offload_nodes, hooks.HookType.AROUND)
        for method in UPDATING_METHODS:
            hooks.HookRegistry.register(f"{_UPDATER}.{method}", around_update, hooks.HookType.AROUND)
    except Exception:  # SGLang can serve without kvdepot; the linker refuses to start without its hooks
        logger.exception("kvdepot's hooks could not be registered with this SGLang")


class Placed:
    """A linker that needs the names of the pages before the pages of a call."""

    page_size: int  # tokens
    before: Sequence[str] = ()  # names of the prompt's pages before those of the call
    slots_before: Callable[[], Any]  # returns the device's slots of these pages; valid during a call of `offload`

    def keep_warm(self, rid: str) -> None:
        """Tell the depot that a prompt uses pages which are all on the device, as SGLang then looks up nothing."""
        raise NotImplementedError


def around_match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """Pass the linker the prompt's pages on the device. Without them, there is no lookup."""
    linker = wrapper.cache_linker
    if isinstance(linker, Placed):
        before: Sequence[str] = ()
        if result.device_prefix_len:
            try:
                cache, node = wrapper.cache, result.last_device_node
                before = [*cache.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
            except Exception:
                logger.exception("no lookup of a prompt, because SGLang did not name its pages")
            if len(before) * linker.page_size != result.device_prefix_len:
                return result
        linker.before = before
        if before and len(key) - result.device_prefix_len < linker.page_size:
            linker.keep_warm(req.rid)
    return original(wrapper, key, req, result)


def around_offload_nodes(original: Callable[..., Any], wrapper: Any, node_ids: Sequence[Any]) -> None:
    """Offload nodes one by one, each with the names of the pages before it."""
    linker = wrapper.cache_linker
    if not isinstance(linker, Placed):
        original(wrapper, node_ids)
        return
    for node in node_ids:
        try:
            linker.before = list(wrapper.cache.get_prefix_hash_values(node))
        except Exception:
            logger.exception("no store of a node, because SGLang did not name the pages before it")
        else:
            linker.slots_before = functools.partial(_slots_before, wrapper.cache, node, len(linker.before))
            original(wrapper, [node])


def are_hooked(wrapper: Any) -> bool:
    """Return whether SGLang has applied both hooks to its class `UnifiedCacheLinkerWrapper`.

    SGLang wraps a method once per plugin that hooks it.
    """
    return all(hasattr(getattr(wrapper, name), "__wrapped__") for name in ("match", "offload_nodes"))


def _slots_before(cache: Any, node: Any, num_pages: int) -> Any:
    return cache.path_device_indices(node)[: num_pages * cache.page_size]


def around_update(original: Callable[..., Any], manager: Any, *args: Any, **options: Any) -> Any:
    """Tell the linker first which model gets new weights, because SGLang may flush its cache in the same call."""
    try:
        wrapper = getattr(manager.scheduler.tree_cache, "linker", None)
        note: Callable[[Any], None] | None = getattr(getattr(wrapper, "cache_linker", None), "note_update", None)
        if note is not None:
            note(manager.tp_worker.model_runner.model)
    except Exception:
        logger.exception(
            "the linker missed an update of the weights: flush the cache; then this engine shares with no other"
        )
    return original(manager, *args, **options)
