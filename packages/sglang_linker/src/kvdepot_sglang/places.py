"""The place of a page in its prompt, which SGLang's interface for linkers does not tell.

SGLang calls a linker for the tail of a prompt behind what its device has, and for the pages of one node of its tree.
The depot keeps chunks under the prefix they belong to, so it needs the pages before those, too. These two hooks around
the methods that call the linker add them. Everything else of SGLang stays as it is.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

logger = logging.getLogger(__name__)


class Placed:
    """A linker that needs the names of the pages before those that it is called for."""

    page_size: int  # tokens
    before: Sequence[str] = ()  # in the prompt, from its first page on
    slots_before: Callable[[], Any]  # returns the device's slots of these pages; valid during a call of `offload`

    def keep_warm(self, rid: str) -> None:
        """Use the device's pages of a prompt in the depot, too. SGLang asks for nothing behind them."""
        raise NotImplementedError


def around_match(original: Callable[..., Any], wrapper: Any, key: Any, req: Any, result: Any) -> Any:
    """Tell the linker which pages of the prompt the device has. Without them there is no lookup."""
    linker = wrapper.cache_linker
    if isinstance(linker, Placed):
        before: Sequence[str] = ()
        if result.device_prefix_len:
            try:
                before = _pages_up_to(wrapper.cache, result.last_device_node)
            except Exception:
                logger.exception("SGLang did not name the pages of a prompt: it is not looked up")
            if len(before) * linker.page_size != result.device_prefix_len:
                return result
        linker.before = before
        if before and len(key) - result.device_prefix_len < linker.page_size:
            linker.keep_warm(req.rid)
    return original(wrapper, key, req, result)


def around_offload_nodes(original: Callable[..., Any], wrapper: Any, node_ids: Sequence[Any]) -> None:
    """Offload one node after the other, each with the names of the pages before it."""
    linker = wrapper.cache_linker
    if not isinstance(linker, Placed):
        original(wrapper, node_ids)
        return
    for node in node_ids:
        try:
            linker.before = list(wrapper.cache.get_prefix_hash_values(node))
        except Exception:
            logger.exception("SGLang did not name the pages before a node: it is not stored")
        else:
            linker.slots_before = functools.partial(_slots_before, wrapper.cache, node, len(linker.before))
            original(wrapper, [node])


def are_hooked(wrapper: Any) -> bool:
    """Return whether SGLang has applied both hooks to its class `UnifiedCacheLinkerWrapper`.

    SGLang wraps a method once for each plugin that hooks it.
    """
    return all(hasattr(getattr(wrapper, name), "__wrapped__") for name in ("match", "offload_nodes"))


def _slots_before(cache: Any, node: Any, num_pages: int) -> Any:
    return cache.path_device_indices(node)[: num_pages * cache.page_size]


def _pages_up_to(cache: Any, node: Any) -> list[str]:
    return [*cache.get_prefix_hash_values(node), *cache.tree_core.get_hash_values(node)]
