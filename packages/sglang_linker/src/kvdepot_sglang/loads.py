# pyright: basic, reportMissingImports=false
"""Loads: brings pages from the depot while their requests wait in SGLang's queue, and other requests run.

The interface for linkers lets a batch wait for the loads of its requests, layer by layer. But that wait is on the
scheduler's thread, so nobody decodes meanwhile, and SGLang aborts the requests of a load that fails. So a load begins
when SGLang would admit its request, into slots that belong to the load alone. Once it has ended on all ranks, its pages
are inserted into SGLang's tree, where the request finds them. If it failed, its slots are freed, and SGLang computes
the tokens.

All calls come from the scheduler's thread, and all ranks make the same ones.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot.backends import TransferFuture
from kvdepot.logs import never_raises
from kvdepot_sglang.ranks import Ranks


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way.

    The other attributes are the arguments of `Placed.hold`.

    Attributes:
        lock: SGLang's lock of the prefix on the device, which the tree would evict otherwise.
        job: the copy; None if it could not be submitted, which is a failure.
    """

    cache: Any
    req: Any
    first: int
    names: Sequence[str]
    slots: Any
    evicted: Any
    lock: Any
    job: TransferFuture[bool] | None

    def has_ended(self) -> bool:
        """Return whether nothing writes the slots any more."""
        return self.job is None or self.job.query()

    def has_landed(self) -> bool:
        """Once it has ended: return whether all pages are in place."""
        return self.job is not None and self.job.result()


class Loads:
    """The loads of one rank.

    Args:
        ranks: the ranks that load the same pages.
        on_end: called when a load has ended, with whether it landed on all ranks.
    """

    def __init__(self, ranks: Ranks, on_end: Callable[[Load, bool], None]) -> None:
        self._ranks = ranks
        self._on_end = on_end
        self._loads: list[Load] = []  # in the order in which they began, which is the same on all ranks

    def begin(self, load: Load) -> None:
        """Keep a load until it ends."""
        self._loads.append(load)

    def has(self, rid: str | None) -> bool:
        """Return whether a load for the request is under way; None for any request."""
        return any(rid in (None, load.req.rid) for load in self._loads)

    def bring(self, page: str) -> bool:
        """Return whether a load under way brings the page of this name."""
        return any(page in load.names for load in self._loads)

    def wait(self, seconds: float) -> bool:
        """Wait for the oldest load, at most `seconds`. Return whether there is a load."""
        for load in self._loads[:1]:
            if load.job is not None:
                with contextlib.suppress(TimeoutError):
                    load.job.result(seconds)
        return bool(self._loads)

    def end(self) -> None:
        """Give the pages of loads that have ended to SGLang's tree, or free their slots."""
        if not self._loads:
            return
        ended = [load.has_ended() for load in self._loads]
        landed = [is_ended and load.has_landed() for is_ended, load in zip(ended, self._loads, strict=True)]
        told = self._ranks.all_agree([*ended, *landed])
        loads, self._loads = self._loads, []
        for load, has_ended, has_landed in zip(loads, told, told[len(loads) :], strict=False):
            if not has_ended:
                self._loads.append(load)
                continue
            if has_landed:
                _insert(load)
            else:
                load.cache.token_to_kv_pool_allocator.free(load.slots)
            load.cache.unlock(load.lock)
            self._on_end(load, has_landed)

    def reset(self) -> None:
        """Wait for all loads, and forget them: SGLang empties its tree and its pools."""
        for load in self._loads:
            if load.job is not None:
                load.job.result()
        self._loads.clear()


@never_raises(type(None))
def _insert(load: Load) -> None:
    """Insert the pages of a load into SGLang's tree, which frees the slots of pages that it has by now."""
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    req, cache, first, num_tokens = load.req, load.cache, load.first, len(load.slots)
    tokens = req.full_untruncated_fill_ids[: first + num_tokens]
    before = cache.path_device_indices(load.lock.node)[:first] if first else load.slots[:0]
    cache.insert(
        InsertParams(
            key=RadixKey(tokens, req.extra_key, cache_salt=req.cache_salt),
            value=torch.cat([before, load.slots]),
            prev_prefix_len=first,
            component_evicted_seqlens=load.evicted,
            priority=req.priority or 0,
            session_id=req.session_id,
        )
    )
    req.storage_hit_start, req.storage_hit_length = first, num_tokens  # for SGLang's report of cached tokens
