"""`CpuTransferContext`: the transfers of a worker whose KV cache is in host memory.

Each byte is copied once, directly between the engine's paged cache and the depot's pool, with the GIL released.
`kvdepot.client.transfers` communicates with the depot. Only the copies in `kernels.copy` depend on the device. A new
backend can start as a copy of this module.
"""

import os
from dataclasses import dataclass

from kvdepot.backends import KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import page_layout_of
from kvdepot_cpu.kernels.copy import PageCopier
from kvdepot_cpu.kernels.move import native_move_tokens


@dataclass(frozen=True, kw_only=True)
class CpuOptions(TransferOptions):
    """Options of a `CpuTransferContext`."""

    # A copy of 64 MiB takes 7 ms and empties the caches, and the code between two copies then takes .7 ms. So larger
    # batches than elsewhere: a store with checksums has .87 of a large memcpy with them, .84 with 64 MiB (Intel Xeon).
    batch_bytes: int = 128 << 20
    copy_threads: int | None = None  # per large copy; None: half of the cores for stores, all for retrieves, at most 4

    @property
    def num_threads(self) -> tuple[int, int]:
        """The numbers of threads of a store and of a retrieve."""
        if self.copy_threads is not None:
            return self.copy_threads, self.copy_threads
        cores = os.cpu_count() or 1
        return max(1, min(4, cores // 2)), min(4, cores)


class CpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache in host memory and the depot.

    Attributes:
        move_tokens: moves tokens within the cache for blends (`kernels.move`), None if it was not compiled.

    Raises:
        LayoutError: the tensors do not fit their description.
    """

    def __init__(self, cache: KVCache, options: CpuOptions = CpuOptions()) -> None:  # frozen
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "cpu"))
        copier = PageCopier(layout, options.num_threads, keep_alive=cache)
        super().__init__(cache.registration(layout, "cpu"), layout, copier, options)
        self.move_tokens = native_move_tokens(options.num_threads[1])
