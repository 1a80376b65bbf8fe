"""Copies a worker's blocks to the pool and back. `WorkerTransfers` talks to the depot."""

from collections.abc import Callable
from typing import Any

from kvdepot.backends import Copier, CopyBatch, KVCache
from kvdepot.client import TransferOptions, WorkerTransfers
from kvdepot.copying import BatchRuns, merge
from kvdepot.errors import LayoutError
from kvdepot.layout import CacheLayout, PageLayout
from kvdepot_toy import device


class ToyCopier(Copier):
    """Copies on the calling thread. The device has no streams, so the hooks are not overridden."""

    def __init__(self, layout: CacheLayout) -> None:
        self._runs = BatchRuns(layout)

    def store(self, batch: CopyBatch) -> None:
        """Copy blocks to extents. The bytes are in the pool on return."""
        self._each(batch, device.copy_out)

    def retrieve(self, batch: CopyBatch) -> None:
        """Copy extents to blocks. On return the bytes are on the device, and the pool is no longer read."""
        self._each(batch, lambda address, source: device.copy_in(source, address))

    def close(self) -> None:
        """Do nothing: the copier holds no resources."""

    def _each(self, batch: CopyBatch, copy: Callable[[int, memoryview], None]) -> None:
        runs = merge(self._runs.of(batch))
        pool = memoryview(batch.mapping.pool)
        columns = zip(runs.blocks.tolist(), runs.offsets.tolist(), runs.sizes.tolist(), strict=True)
        for address, offset, size in columns:
            copy(address, pool[offset : offset + size])


def pages_of(tensor: Any) -> PageLayout:
    """Return the layout of a tensor's blocks."""
    if not isinstance(tensor, device.ToyTensor):
        raise LayoutError(f"{type(tensor).__name__} is not on a toy device: use the backend of its device")
    return PageLayout(tensor.address, tensor.num_blocks, tensor.page_size_bytes, tensor.stride_bytes)


def create_context(cache: KVCache, options: TransferOptions) -> WorkerTransfers:
    """Return a context for one worker."""
    layout = cache.layout(pages_of)
    return WorkerTransfers(cache.registration(layout, "toy"), layout, ToyCopier(layout), options)
