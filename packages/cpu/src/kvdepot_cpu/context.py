"""`CpuTransferContext`: a worker whose KV cache lies in host memory.

Each byte is copied once, straight between the engine's paged cache and the depot's pool, by numpy with the GIL
released. The protocol with the depot is in `kvdepot.client.transfers`; what is particular to the device, here and in
`kernels.copy`. A new worker-driven backend starts as a copy of this module.
"""

import os
from collections.abc import Sequence

from kvdepot.backends import CacheGroup
from kvdepot.client.transfers import BATCH_BYTES, WorkerTransfers, detail_of, layer_group_of
from kvdepot.layout import CacheLayout, GroupKind, default_chunk_tokens
from kvdepot.wire import messages as m
from kvdepot_cpu.arrays import page_layout_of
from kvdepot_cpu.kernels.copy import PageCopier


class CpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache in host memory and the depot.

    Args as in `Backend.create_context`, and:
        synchronous: transfer on the caller's thread.
        copy_threads: threads that share one large copy; None for half of the cores to store and all to retrieve, at
            most 4.
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
        layer_groups = [layer_group_of(group, list(map(page_layout_of, group.tensors))) for group in groups]
        layout = CacheLayout(tuple(layer_groups), chunk_tokens, dtype, format)
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, "cpu", "worker-driven", model, m.spec_of(layout),
            tuple(detail_of(*each, dtype, each[0].tensors[0].shape) for each in zip(groups, layer_groups, strict=True)),
        )  # fmt: skip
        cores = os.cpu_count() or 1
        threads = (max(1, min(4, cores // 2)), min(4, cores)) if copy_threads is None else (copy_threads, copy_threads)
        super().__init__(
            registration, layout, PageCopier(layout, threads, keep_alive=[list(group.tensors) for group in groups]),
            url=url, deadline_seconds=deadline_seconds, synchronous=synchronous, batch_bytes=batch_bytes,
        )  # fmt: skip
