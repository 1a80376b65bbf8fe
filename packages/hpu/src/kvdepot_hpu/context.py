"""`HpuTransferContext`: a worker whose KV cache lies in the memory of a Gaudi.

No other process can open a Gaudi's memory, so the worker copies: `kvdepot.copying.staged` stages blocks in host memory
and moves them on to the depot's pool. The protocol with the depot is in `kvdepot.client.transfers`.
"""

import logging
from collections.abc import Sequence
from typing import Final

from kvdepot.backends import BlockIds, CacheGroup, ReadyEvent, TransferFuture
from kvdepot.client.transfers import BATCH_BYTES, WorkerTransfers, detail_of, layer_group_of
from kvdepot.copying.staged.arrays import page_layout_of
from kvdepot.copying.staged.copy import STAGING_BYTES, StagedCopier
from kvdepot.keys import KeyRun
from kvdepot.layout import CacheLayout, GroupKind, default_chunk_tokens
from kvdepot.wire import messages as m
from kvdepot_hpu.arrays import tensors_of
from kvdepot_hpu.bridge import load_bridge

logger = logging.getLogger(__name__)

MAX_BLOCKS: Final = 32  # moved at once; each doubling is two more graphs a layer group to compile at the start


class HpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an HPU and the depot.

    Construct it where the cache is registered: after it is allocated, on the thread and stream that compute, before the
    first request, and again when the cache was allocated again (sleep mode). It compiles every shape that it will ever
    use, which takes minutes on a Gaudi without a recipe cache.

    Args as in `Backend.create_context`; `groups` may have a `(keys, values)` tuple for each layer, and:
        synchronous: transfer on the caller's thread; then no device work is issued from any other.
        batch_bytes: how much of a run is asked for at once.
        staging_bytes: of one staging slot, at most; four are on the host, and twice as much on the device.
        max_blocks: how many blocks are moved at once, at most.

    Raises:
        LayoutError: the tensors are not what they are said to be, or cannot be seen as bytes.
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
        batch_bytes: int = BATCH_BYTES,
        staging_bytes: int = STAGING_BYTES,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(g.block_tokens for g in groups if g.kind is not GroupKind.RECURRENT)
        tensors = [tensors_of(group) for group in groups]
        layout = CacheLayout(
            tuple(
                layer_group_of(group, [page_layout_of(tensor, "hpu") for tensor in each])
                for group, each in zip(groups, tensors, strict=True)
            ),
            chunk_tokens, dtype, format,
        )  # fmt: skip
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, "hpu", "worker-driven", model, m.spec_of(layout),
            tuple(
                detail_of(group, layer_group, dtype, each[0].shape)
                for group, layer_group, each in zip(groups, layout.groups, tensors, strict=True)
            ),
        )  # fmt: skip
        self._bridge: Final = load_bridge()
        self._bridge.launch()  # what made the cache may still be accumulated
        copier = StagedCopier(self._bridge, layout, tensors, max_blocks=max_blocks, staging_bytes=staging_bytes)
        self.is_pinned: Final = copier.is_pinned
        if not self.is_pinned:
            logger.warning("staging memory for the HPU could not be pinned: copies will be slower")
        super().__init__(
            registration, layout, copier, url=url, deadline_seconds=deadline_seconds, synchronous=synchronous,
            batch_bytes=batch_bytes,
        )  # fmt: skip

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """See `TransferContext`. Without `ready` it waits for what the engine has given its stream until now."""
        self._bridge.launch()  # only what is launched can be waited for
        return super().submit_store(request_id, key, block_ids, ready)

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """See `TransferContext`. The blocks are written after what the engine has given its stream until now."""
        self._bridge.launch()
        return super().submit_retrieve(request_id, key, block_ids, skip_tokens)
