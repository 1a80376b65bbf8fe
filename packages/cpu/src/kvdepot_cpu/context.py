"""`CpuTransferContext`: a worker whose KV cache lies in host memory.

Each byte is copied once, straight between the engine's paged cache and the depot's pool, by numpy with the GIL
released. The protocol with the depot is in `kvdepot.client.transfers`; what is particular to the device, here and in
`kernels.copy`. A new worker-driven backend starts as a copy of this module.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdepot import messages as m
from kvdepot.client.transfers import BATCH_BYTES, WorkerTransfers
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, default_chunk_tokens
from kvdepot_cpu.arrays import page_layout_of
from kvdepot_cpu.kernels.copy import PageCopier


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One layer group of an engine's KV cache.

    `tensors` has one tensor for each layer (or two, keys and values), each `(num_blocks, ...)` with the blocks as first
    dimension; anything with `data_ptr`, `stride`, `element_size` and `shape`, or with `__array_interface__`. Blocks may
    be padded or interleaved with other layers', but the bytes of one block of one tensor are contiguous. The rest
    describes the group to the depot and its operator.
    """

    tensors: Sequence[Any]
    block_tokens: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    shard: int = 0
    num_shards: int = 1
    num_layers: int = 0  # 0: one a tensor
    physical_block_tokens: int = 0  # 0: the same as the logical block
    compress_ratio: int = 1
    hidden_dims: tuple[int, ...] = ()
    is_mla: bool = False
    attention_backend: str = ""


class CpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache in host memory and the depot.

    Args:
        groups: the cache; its tensors are kept alive until `close`.
        instance: the engine's name.
        dtype: of the cache, for example "bfloat16".
        rank: of this worker.
        world_size: workers of the engine.
        model: for the operator.
        format: how the bytes inside a block are arranged; caches that differ in it never share.
        chunk_tokens: None for the default (`default_chunk_tokens`). All workers and the scheduler say the same.
        url: the depot, None for the one in the default directory.
        deadline_seconds: of each request to the depot.
        synchronous: transfer on the caller's thread.
        copy_threads: threads that share one large copy; None for half of the cores, at most 4.
        batch_bytes: how much of a run is asked for at once.

    Raises:
        LayoutError: the tensors are not what they are said to be.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        instance: str,
        *,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        format: str = "",  # noqa: A002  # the field's word
        chunk_tokens: int | None = None,
        url: str | None = None,
        deadline_seconds: float = 2.0,
        synchronous: bool = False,
        copy_threads: int | None = None,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(g.block_tokens for g in groups if g.kind is not GroupKind.RECURRENT)
        layout = CacheLayout(tuple(_layer_group(group) for group in groups), chunk_tokens, dtype, format)
        self.spec = m.spec_of(layout)
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, "cpu", "worker-driven", model, self.spec,
            tuple(_detail(group, layer_group, dtype) for group, layer_group in zip(groups, layout.groups, strict=True)),
        )  # fmt: skip
        threads = max(1, min(4, (os.cpu_count() or 1) // 2)) if copy_threads is None else copy_threads
        super().__init__(
            registration, layout, PageCopier(layout, threads, keep_alive=[list(group.tensors) for group in groups]),
            url=url, deadline_seconds=deadline_seconds, synchronous=synchronous, batch_bytes=batch_bytes,
        )  # fmt: skip


def _layer_group(group: CacheGroup) -> LayerGroup:
    pages: tuple[PageLayout, ...] = tuple(page_layout_of(tensor) for tensor in group.tensors)
    return LayerGroup(group.kind, group.block_tokens, pages, group.window_tokens, group.shard, group.num_shards)


def _detail(group: CacheGroup, layer_group: LayerGroup, dtype: str) -> m.GroupDetail:
    return m.GroupDetail(
        page_sizes_bytes=tuple(page.page_size_bytes for page in layer_group.pages),
        num_blocks=layer_group.num_blocks,
        shard=group.shard,
        physical_block_tokens=group.physical_block_tokens,
        compress_ratio=group.compress_ratio,
        num_layers=group.num_layers or len(group.tensors),
        hidden_dims=group.hidden_dims,
        dtype=dtype,
        is_mla=group.is_mla,
        shape=tuple(int(size) for size in group.tensors[0].shape)[:8],
        attention_backend=group.attention_backend,
    )
