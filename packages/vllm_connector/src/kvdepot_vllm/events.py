# pyright: basic, reportMissingImports=false
"""KV cache events for vLLM's own publisher: what this engine stored in the depot, under vLLM's block hashes."""

from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    resolve_block_hashes,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache, EngineGroup
from kvdepot_vllm.stores import EndedStore


def stored_events(cache: EngineCache, kv_cache_config: Any, store: EndedStore) -> list[BlockStored]:
    """Return one event for each KV cache group that a store covers.

    Args:
        cache: the engine's cache.
        kv_cache_config: vLLM's `KVCacheConfig`.
        store: a store that every worker has reported.
    """
    events: list[BlockStored] = []
    stop = (store.first_chunk + store.num_chunks) * cache.chunk_tokens
    for group, count in zip(cache.groups, store.covered, strict=True):
        start = stop - count * cache.chunk_tokens
        if group.kind is GroupKind.RECURRENT:
            start = stop - group.block_tokens if count else stop
        event = _stored_event(group, kv_cache_config, store.request, start, stop)
        if event is not None:
            events.append(event)
    return events


def _stored_event(group: EngineGroup, kv_cache_config: Any, request: Any, start: int, stop: int) -> BlockStored | None:
    """Return the event for tokens `start` to `stop` of a group, None without a whole block that has a hash."""
    size = group.block_tokens
    hashes = resolve_block_hashes(request.block_hashes, kv_cache_config.hash_block_size, size)
    first, last = start // size, min(stop // size, len(hashes))
    if first >= last:
        return None
    spec = kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
    adapter, item, extra_keys = request.lora_request, 0, []
    for begin in range(first * size, last * size, size):
        keys, item = generate_block_hash_extra_keys(request, begin, begin + size, item)
        extra_keys.append(keys)
    return BlockStored(
        block_hashes=[maybe_convert_block_hash(hashes[block]) for block in range(first, last)],
        parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
        token_ids=list(request.all_token_ids[first * size : last * size]),
        block_size=size,
        lora_id=adapter.adapter_id if adapter else None,
        lora_name=adapter.name if adapter else None,
        medium=MEDIUM_CPU,
        extra_keys=to_event_extra_keys(extra_keys),
        group_idx=group.number,
        kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
        kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
        locality="LOCAL",
        session_id=request.session_id,
    )
