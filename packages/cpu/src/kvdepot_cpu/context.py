"""`CpuTransferContext`: the transfers of a worker whose KV cache is in host memory.

Each byte is copied once, directly between the engine's paged cache and the depot's pool, with the GIL released.
`kvdepot.client.transfers` communicates with the depot. Only `PageCopier` depends on the device. A new backend can start
as a copy of this module.
"""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdepot.backends import Copier, CopyBatch, KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import page_layout_of
from kvdepot.copying.runs import EXTENT_DTYPE, Addresses, BatchRuns, Rows, order_of
from kvdepot.layout import CacheLayout
from kvdepot.wire.messages import CHECKSUM_BYTES
from kvdepot_cpu.kernels import (
    BYTES_WORTH_A_THREAD,
    BYTES_WORTH_STREAMING,
    load_kernels,
    memcpy_runs,
    native_move_tokens,
)


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
        move_tokens: moves tokens within the cache for blends; None if it was not compiled or cannot run here.

    Raises:
        LayoutError: the tensors do not fit their description.
    """

    def __init__(self, cache: KVCache, options: CpuOptions = CpuOptions()) -> None:  # frozen
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "cpu"))
        copier = PageCopier(layout, options.num_threads, keep_alive=cache)
        super().__init__(cache.registration(layout, "cpu"), layout, copier, options)
        self.move_tokens = native_move_tokens(options.num_threads[1])


class PageCopier(Copier):
    """The `Copier` of host memory: one copy per block and layer, or per row of one.

    numpy computes the addresses of a whole batch. The compiled library moves the bytes. Where it was not built, a loop
    of libc's memcpy does the same, but slower (`docs/performance.md`).

    Args:
        layout: the layout of the blocks.
        num_threads: the numbers of threads for a large store and a large retrieve. Engines wait for retrieves, but not
            for stores.
        keep_alive: the owner of the blocks' memory.
    """

    def __init__(self, layout: CacheLayout, num_threads: tuple[int, int], keep_alive: object) -> None:
        self.keep_alive = keep_alive
        self._kernels = load_kernels()
        self._copy_runs = self._kernels.copy_runs if self._kernels is not None else memcpy_runs
        self._runs = BatchRuns(layout)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(num_threads), "kvdepot-copy") if max(num_threads) > 1 else None

    def store(self, batch: CopyBatch) -> bytes | None:
        """See `Copier`."""
        runs = self._runs.of(batch)
        targets = runs.offsets + np.uint64(batch.mapping.address)
        checksums = self._copy_summed(batch, runs.blocks, targets, runs.sizes, self._num_threads[0])
        if checksums is None:
            self._copy(runs.blocks, targets, runs.sizes, self._num_threads[0])
        return checksums

    def retrieve(self, batch: CopyBatch) -> bytes | None:
        """See `Copier`."""
        pool = np.uint64(batch.mapping.address)
        pages, cut = self._runs.in_rows(batch)
        sources = pages.offsets + pool
        checksums = self._copy_summed(batch, sources, pages.blocks, pages.sizes, self._num_threads[1])
        if checksums is None:
            self._copy(sources, pages.blocks, pages.sizes, self._num_threads[1])
        for rows in cut:
            self._retrieve_rows(rows, pool)
        return checksums

    def close(self) -> None:
        """See `Copier`."""
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, num_threads: int) -> None:
        def copy(start: int, stop: int) -> None:
            self._copy_runs(sources[start:stop], targets[start:stop], sizes[start:stop])

        self._in_parts(copy, len(sizes), int(sizes.sum()), num_threads)

    def _retrieve_rows(self, rows: Rows, pool: np.uint64) -> None:
        kernels, num_threads = self._kernels, self._num_threads[1]
        if kernels is None:
            runs = rows.runs()
            self._copy(runs.offsets + pool, runs.blocks, runs.sizes, num_threads)
            return
        first, sources = rows.first, rows.first.offsets + pool

        def copy(start: int, stop: int) -> None:
            part = slice(start, stop)
            steps = rows.offset_steps[part], rows.block_steps[part]
            kernels.copy_rows(sources[part], first.blocks[part], first.sizes[part], *steps, rows.num_rows)

        self._in_parts(copy, len(first), int(first.sizes.sum()) * rows.num_rows, num_threads)

    def _copy_summed(
        self, batch: CopyBatch, sources: Addresses, targets: Addresses, sizes: Addresses, num_threads: int
    ) -> bytes | None:
        """Copy runs and return the checksums of the extents. Return None if the batch wants none, or if some fail."""
        if not batch.with_checksums:
            return None
        records = np.frombuffer(batch.extents, EXTENT_DTYPE)
        order = order_of(records)
        digests = self._sum(sources, targets, sizes, records["num_bytes"][order], num_threads)
        if digests is None:
            return None
        digests[order] = digests.copy()
        return digests.tobytes()

    def _sum(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, extents: Addresses, num_threads: int
    ) -> npt.NDArray[np.uint8] | None:
        """Copy runs and return the digest of each extent, None if that failed for some."""
        kernels, num_bytes = self._kernels, int(sizes.sum())
        # A retrieve may leave parts of extents out. Otherwise only one thread of several would refuse, after the copy.
        if kernels is None or num_bytes < BYTES_WORTH_STREAMING or num_bytes != int(extents.sum()):
            return None
        if num_threads == 1:
            return kernels.copy_and_sum(sources, targets, sizes, extents)
        firsts = np.searchsorted(np.cumsum(sizes), np.cumsum(extents)) + 1  # the first run after each extent
        digests = np.empty((len(extents), CHECKSUM_BYTES), np.uint8)
        refused: list[int] = []

        def copy(start: int, stop: int) -> None:
            runs = slice(int(firsts[start - 1]) if start else 0, int(firsts[stop - 1]))
            part = kernels.copy_and_sum(sources[runs], targets[runs], sizes[runs], extents[start:stop])
            if part is None:
                refused.append(start)
            else:
                digests[start:stop] = part

        self._in_parts(copy, len(extents), num_bytes, num_threads)
        return None if refused else digests

    def _in_parts(self, copy: Callable[[int, int], None], count: int, num_bytes: int, num_threads: int) -> None:
        """Divide `count` items among as many threads as their bytes are worth, and copy each share."""
        parts = min(num_threads, count, 1 + num_bytes // BYTES_WORTH_A_THREAD)
        if self._pool is None or parts <= 1:
            copy(0, count)
            return
        bounds = [count * part // parts for part in range(parts + 1)]
        jobs = [self._pool.submit(copy, start, stop) for start, stop in itertools.pairwise(bounds[1:])]
        try:
            copy(0, bounds[1])  # on this thread, so that one thread fewer has to wake up
        finally:
            wait(jobs)  # for all of them before raising
        for job in jobs:
            job.result()
