"""`HpuTransferContext`: a worker whose KV cache lies in the memory of a Gaudi.

No other process can open a Gaudi's memory, so the worker copies: `kvdepot.copying.staged` stages blocks in host memory
and moves them on to the depot's pool. `kvdepot.client.transfers` speaks with the depot.
"""

import logging
from dataclasses import dataclass
from typing import Final

from kvdepot.backends import KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import page_layout_of
from kvdepot.copying.staged.arrays import flattened
from kvdepot.copying.staged.copy import STAGING_BYTES, StagedCopier
from kvdepot_hpu.arrays import tensors_of
from kvdepot_hpu.bridge import load_bridge

logger = logging.getLogger(__name__)

MAX_BLOCKS: Final = 32  # moved at once; each doubling is two more graphs a layer group to compile at the start


@dataclass(frozen=True, kw_only=True)
class HpuOptions(TransferOptions):
    """Options of an `HpuTransferContext`. If it is `synchronous`, no other thread issues device work."""

    staging_bytes: int = STAGING_BYTES  # limit of one staging slot; four are on the host, twice as much on the device
    max_blocks: int = MAX_BLOCKS  # moved at once, at most


class HpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an HPU and the depot.

    Construct it where the cache is registered: after it is allocated, on the thread and stream that compute, before the
    first request, and again when the cache was allocated again (sleep mode). It compiles every shape that it will ever
    use, which takes minutes on a Gaudi without a recipe cache.

    The groups of the cache may have a `(keys, values)` tuple for each layer. Without `ready` a store reads after the
    work that the engine's stream has at the call; so does every retrieve.

    Raises:
        LayoutError: the tensors do not fit their description, or cannot be viewed as bytes.
    """

    def __init__(self, cache: KVCache, options: HpuOptions = HpuOptions()) -> None:  # frozen
        cache = flattened(cache, tensors_of)
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "hpu", has_address=False))
        bridge = load_bridge()
        bridge.launch()  # the work that made the cache may still be deferred
        copier = StagedCopier(
            bridge,
            layout,
            [group.tensors for group in cache.groups],
            max_blocks=options.max_blocks,
            staging_bytes=options.staging_bytes,
        )
        self.is_pinned: Final = copier.is_pinned
        if not self.is_pinned:
            logger.warning("staging memory for the HPU could not be pinned: copies will be slower")
        super().__init__(cache.registration(layout, "hpu"), layout, copier, options)
