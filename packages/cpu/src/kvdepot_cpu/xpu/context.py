"""`XpuTransferContext`: the transfers of a worker whose KV cache is in the memory of an Intel GPU.

Other processes cannot open memory handles of such a device, so the worker copies by itself: `kvdepot.copying.staged`
copies blocks through host memory to and from the depot's pool. `kvdepot.client.transfers` communicates with the depot.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.backends import KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import device_index_of, flattened, page_layout_of
from kvdepot.copying.staged import Bridge, StagedCopier

STAGING_BYTES: Final = 32 << 20  # four on the host and two on the device: 192 MiB for each worker
MAX_BLOCKS: Final = 256  # per move


@dataclass(frozen=True, kw_only=True)
class XpuOptions(TransferOptions):
    """Options of an `XpuTransferContext`."""

    # Limit of a staging slot: there are four on the host, and two such buffers on the device.
    staging_bytes: int = STAGING_BYTES
    max_blocks: int = MAX_BLOCKS  # limit per move
    device_type: str = "xpu"  # torch's name of the device; tests use a simulated one


class XpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an Intel GPU and the depot.

    Construct it when the cache is registered: after its allocation, on the thread and stream of the computation, and
    before the first request. Block 0 of each tensor is overwritten and restored. The groups of the cache may have a
    `(keys, values)` tuple per layer. A store without `ready`, and each retrieve, comes after the work that the
    submitting thread's stream has at the time of the call.

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
        super().__init__(cache.registration(layout, f"{options.device_type}:{index}"), layout, copier, options)
