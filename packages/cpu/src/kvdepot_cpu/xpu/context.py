"""`XpuTransferContext`: a worker whose KV cache lies in the memory of an Intel GPU.

No memory handle of such a device can be opened in another process, so the worker copies: `kvdepot.copying.staged`
stages blocks in host memory and moves them on to the depot's pool. `kvdepot.client.transfers` speaks with the depot.
"""

import importlib
import logging
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.backends import KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import device_index_of, page_layout_of
from kvdepot.copying.staged.arrays import flattened
from kvdepot.copying.staged.bridge import Bridge
from kvdepot.copying.staged.copy import StagedCopier

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 32 << 20
MAX_BLOCKS: Final = 256  # moved at once


@dataclass(frozen=True, kw_only=True)
class XpuOptions(TransferOptions):
    """Options of an `XpuTransferContext`."""

    staging_bytes: int = STAGING_BYTES  # limit of one staging slot: four on the host, two such buffers on the device
    max_blocks: int = MAX_BLOCKS  # staged at once, at most
    device_type: str = "xpu"  # torch's name of the device; another one for tests on a pretend device


class XpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an Intel GPU and the depot.

    Construct it where the cache is registered: after it is allocated, on the thread and stream that compute, before the
    first request. Block 0 of each tensor is written and restored. The groups of the cache may have a `(keys, values)`
    tuple for each layer. Without `ready` a store reads after the work that the submitting thread's stream has at the
    call; so does every retrieve.

    Raises:
        LayoutError: the tensors do not fit their description, cannot be viewed as bytes, or are on several devices.
    """

    def __init__(self, cache: KVCache, options: XpuOptions = XpuOptions()) -> None:  # frozen
        cache = flattened(cache)
        layout = cache.layout(lambda tensor: page_layout_of(tensor, options.device_type, has_address=False))
        index = device_index_of(tensor for group in cache.groups for tensor in group.tensors)
        torch: Any = importlib.import_module("torch")
        bridge = Bridge(torch, options.device_type, getattr(torch, options.device_type), index=index)
        with bridge.module.device(index):
            copier = StagedCopier(
                bridge,
                layout,
                [group.tensors for group in cache.groups],
                max_blocks=options.max_blocks,
                staging_bytes=options.staging_bytes,
            )
        self.is_pinned: Final = copier.is_pinned
        if not self.is_pinned:
            logger.warning("staging memory for the XPU could not be pinned, each copy is waited for")
        super().__init__(cache.registration(layout, f"{options.device_type}:{index}"), layout, copier, options)
