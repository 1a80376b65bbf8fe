"""`HpuTransferContext`: the transfers of a worker whose KV cache is in the memory of a Gaudi.

Other processes cannot open a Gaudi's memory, so the worker copies by itself: `kvdepot.copying.staged` stages blocks in
host memory and copies them to and from the depot's pool. `kvdepot.client.transfers` communicates with the depot.
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

MAX_BLOCKS: Final = 32  # per move; each doubling means two more graphs per layer group to compile at the start


@dataclass(frozen=True, kw_only=True)
class HpuOptions(TransferOptions):
    """Options of an `HpuTransferContext`. If `synchronous`, no other thread issues device work."""

    # Limit of a staging slot: there are four on the host, and two such buffers on the device.
    staging_bytes: int = STAGING_BYTES
    max_blocks: int = MAX_BLOCKS  # limit per move


class HpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an HPU and the depot.

    Construct it when the cache is registered: after its allocation, on the thread and stream of the computation, and
    before the first request. Construct it again after the cache was reallocated (sleep mode). It compiles all shapes
    that it will use, which takes minutes on a Gaudi without a recipe cache.

    The groups of the cache may have a `(keys, values)` tuple per layer. A store without `ready`, and each retrieve,
    comes after the work that the engine's stream has at the time of the call.

    Raises:
        LayoutError: the tensors do not fit their description, or cannot be viewed as bytes.
    """

    def __init__(self, cache: KVCache, options: HpuOptions = HpuOptions()) -> None:  # frozen
        cache = flattened(cache, tensors_of)
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "hpu", has_address=False))
        bridge = load_bridge()
        bridge.launch()  # the work that created the cache may still be deferred
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
