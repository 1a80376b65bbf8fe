"""The plugin: patches SGLang where its interface for linkers lacks an argument.

The entry point is `register` (`sglang.srt.plugins`), which SGLang calls in every process at start. This module imports
nothing heavy. `kvdepot_sglang.linker` keeps SGLang's KV cache in a kvdepot server.

SGLang calls a linker for the tail of a prompt behind the pages on its device, and for the pages of one node of its
tree. The depot keeps chunks under their prefix, so it needs the pages before those, too. Two hooks around the methods
that call the linker add them, and one around inserts into the tree adds the tokens, of which routers learn. One more is
around the methods that write new weights into a running engine, and reports these.

SGLang would make a batch wait for the loads of its requests, and abort these if a load fails. Three more hooks let a
request wait for its load in the queue instead: one begins the load where SGLang would admit the request, one passes
over the request until the load has ended, and one waits for loads if nothing else is to be done. Nothing else in SGLang
changes.
"""

import functools
import importlib
import logging
import pkgutil
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final

logger = logging.getLogger(__name__)

_WRAPPER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinkerWrapper"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_ADDER: Final = "sglang.srt.managers.schedule_policy.PrefillAdder"
_SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
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
    """Hook SGLang's methods, see the module."""
    try:
        hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
        for method, hook in (*HOOKS.items(), *((f"{_UPDATER}.{each}", around_update) for each in UPDATING_METHODS)):
            hooks.HookRegistry.register(method, hook, hooks.HookType.AROUND)
    except Exception:  # SGLang can serve without kvdepot; the linker refuses to start without its hooks
        logger.exception("kvdepot's hooks could not be registered with this SGLang")


class Placed:
    """A linker that needs the names of the pages before the pages of a call, and whose requests wait for loads."""

    page_size: int  # tokens
    before: Sequence[str] = ()  # names of the prompt's pages before those of the call
    slots_before: Callable[[], Any]  # returns the device's slots of these pages; valid during a call of `offload`
    prompt: Any = None  # SGLang's `RadixKey` whose pages are looked up or stored, None if unknown
    has_postponed: bool = False  # whether the request that SGLang wanted to admit has to wait for a load

    def keep_warm(self, rid: str) -> None:
        """Tell the depot that a prompt uses pages which are all on the device, as SGLang then looks up nothing."""
        raise NotImplementedError

    def is_loading(self, rid: str | None = None) -> bool:
        """Return whether a load for the request is under way; None for any request."""
        raise NotImplementedError

    def is_coming(self, page: str) -> bool:
        """Return whether a load under way brings the page of this name."""
        raise NotImplementedError

    def hold(self, cache: Any, req: Any, first: int, names: Sequence[str], slots: Any, evicted: Any) -> None:
        """Take over the load that `load` has just begun, until it ends.

        Args:
            cache: SGLang's `UnifiedRadixCache`.
            req: the request.
            first: the tokens of its prefix on the device, behind which the loaded pages belong.
            names: the names of the pages.
            slots: SGLang's slots of the pages, in full attention.
            evicted: by component of SGLang's tree, the number of the prompt's leading tokens that it does not keep.
        """
        raise NotImplementedError

    def wait_for_load(self) -> bool:
        """Wait a moment for a load. Return whether one is under way."""
        raise NotImplementedError


def around_match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """Pass the linker the prompt's pages on the device. Without them, there is no lookup."""
    linker = wrapper.cache_linker
    if not isinstance(linker, Placed):
        return original(wrapper, key, req, result)
    if linker.is_loading(req.rid):
        return result
    before: Sequence[str] = ()
    if result.device_prefix_len:
        try:
            cache, node = wrapper.cache, result.last_device_node
            before = [*cache.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
        except Exception:
            logger.exception("no lookup of a prompt, because SGLang did not name its pages")
        if len(before) * linker.page_size != result.device_prefix_len:
            return result
    linker.before, linker.prompt = before, key
    try:
        if before and len(key) - result.device_prefix_len < linker.page_size:
            linker.keep_warm(req.rid)
        return original(wrapper, key, req, result)
    finally:
        linker.prompt = None


def around_load_back(original: Callable[..., Any], wrapper: Any, req: Any) -> Any:
    """Begin the load of a request, and let it wait: None tells SGLang to try again.

    SGLang allocates and prepares the slots for a stand-in of the request, because the request does not own them.
    """
    linker, rid = wrapper.cache_linker, req.rid
    if not isinstance(linker, Placed) or rid not in wrapper.hit_markers:
        return original(wrapper, req)
    hit = wrapper.hit_markers[rid]
    # Without this, requests that begin with the same pages would each load them when they arrive together.
    if linker.is_coming(hit.tail_hashes[0]):
        del wrapper.hit_markers[rid]
        linker.has_postponed = True
        return None
    holder = SimpleNamespace(rid=rid, last_node=req.last_node, kv=None, swa_branching_seqlen=None)
    queued = original(wrapper, holder)
    if not queued[0]:
        return queued
    wrapper.inflight_load_rids.remove(rid)
    slots = wrapper.private_load_indices.pop(rid)
    evicted: Any = {} if holder.kv is None else holder.kv.component_evicted_seqlens
    linker.hold(wrapper.cache, req, hit.device_hit_len, hit.tail_hashes, slots, evicted)
    linker.has_postponed = True
    return None


def around_add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **options: Any) -> Any:
    """Pass over a request that waits for a load, so that the ones behind it are admitted."""
    linker = _linker(adder.tree_cache)
    if linker is None:
        return original(adder, req, *args, **options)
    verdicts: Any = importlib.import_module(_ADDER.rpartition(".")[0]).AddReqResult
    if linker.is_loading(req.rid):
        return verdicts.CONTINUE
    linker.has_postponed = False
    verdict = original(adder, req, *args, **options)
    if linker.has_postponed and verdict is verdicts.OTHER:
        return verdicts.CONTINUE
    # After "no token", SGLang admits nobody until a running request has ended, even a request whose load ends before.
    if verdict is verdicts.NO_TOKEN and linker.is_loading():
        return verdicts.OTHER
    return verdict


def around_on_idle(original: Callable[..., Any], scheduler: Any) -> None:
    """Wait for loads if SGLang has nothing to do."""
    linker = _linker(scheduler.tree_cache)
    # If the request of a load was aborted, SGLang would take the load's slots for leaked ones, and end the engine.
    if linker is None or not linker.wait_for_load() or not scheduler.is_fully_idle():
        original(scheduler)


def _linker(cache: Any) -> Placed | None:
    linker = getattr(getattr(cache, "linker", None), "cache_linker", None)
    return linker if isinstance(linker, Placed) else None


def around_insert(original: Callable[..., Any], cache: Any, params: Any) -> Any:
    """Tell the linker which tokens have the pages that SGLang offers it during an insert."""
    linker = _linker(cache)
    if linker is None:
        return original(cache, params)
    linker.prompt = params.key
    try:
        return original(cache, params)
    finally:
        linker.prompt = None


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


def missing_hooks() -> list[str]:
    """Return the methods that SGLang has not hooked. It wraps a method once per plugin that hooks it."""
    return [name for name in HOOKS if not hasattr(pkgutil.resolve_name(name), "__wrapped__")]


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


HOOKS: Final = {
    f"{_CACHE}.insert": around_insert,
    f"{_WRAPPER}.match": around_match,
    f"{_WRAPPER}.offload_nodes": around_offload_nodes,
    f"{_WRAPPER}.load_back": around_load_back,
    f"{_ADDER}.add_one_req": around_add_one_req,
    f"{_SCHEDULER}.on_idle": around_on_idle,
}
"""Hooks without which the linker does not start, by the method of SGLang."""
