"""Copies between a paged cache and extents of the pool: one per block and layer, or per row of one.

numpy computes the addresses of a whole batch. `copy_runs.c` moves the bytes: it copies four runs side by side with
stores that bypass the caches, and releases the GIL for the batch. `copy_summed.c` also computes the checksums of a
store. Where they could not be built, a loop of libc's memcpy does the same, but slower (`docs/performance.md`).
"""

import ctypes
import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.backends import Copier, CopyBatch
from kvdepot.copying.runs import EXTENT_DTYPE, Addresses, BatchRuns, Rows
from kvdepot.layout import CacheLayout
from kvdepot.wire.messages import CHECKSUM_BYTES

BYTES_WORTH_A_THREAD: Final = 8 << 20  # 0.6 ms at 13 GB/s, many times the cost of waking a thread
_BYTES_WORTH_STREAMING: Final = 1 << 20  # smaller copies stay in the caches for the next reader

CopyRuns = Callable[[Addresses, Addresses, Addresses], None]
"""Copies runs: sources, targets and sizes in bytes, each `(num_runs,)`; no two targets overlap."""

CopyRows = Callable[[Addresses, Addresses, Addresses, Addresses, Addresses, int], None]
"""Copies rows of pages; no two targets overlap.

Args: sources, targets and sizes in bytes of each page's first row, its steps in bytes from row to row at the source and
at the target, `(num_pages,)` each, and how many rows every page has.
"""

CopySummed = Callable[[Addresses, Addresses, Addresses, Addresses], npt.NDArray[np.uint8] | None]
"""Copies runs that fill extents one after the other, and returns the XXH3-128 of each extent, `(num_extents, 16)`.

Returns None and copies nothing if runs or extents are not whole blocks of `SUMMED_BLOCK_BYTES`, targets are not aligned
to `SUMMED_ALIGNMENT_BYTES`, the runs do not fill the extents, or the processor cannot.

Args: sources, targets and sizes of the runs, sizes of the extents.
"""
SUMMED_BLOCK_BYTES: Final = 1024  # the block of XXH3: 16 stripes of 64 bytes
SUMMED_ALIGNMENT_BYTES: Final = 32  # of AVX2's streaming stores


def native_copy_runs() -> CopyRuns | None:
    """Return the compiled copy, None if it was not built here."""
    library = library_of_kernels()
    if library is None:
        return None
    function = library.kvdepot_copy_runs
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = None

    def copy_runs(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        streamed = int(sizes.sum()) >= _BYTES_WORTH_STREAMING
        function(sources.ctypes.data, targets.ctypes.data, sizes.ctypes.data, len(sizes), streamed)

    return copy_runs


def native_copy_rows() -> CopyRows | None:
    """Return the compiled copy of rows, None if it was not built here."""
    function = getattr(library_of_kernels(), "kvdepot_copy_rows", None)  # a checkout may have an older build
    if function is None:
        return None
    array = ctypes.c_void_p
    function.argtypes = [array, array, array, ctypes.c_size_t, array, array, ctypes.c_size_t, ctypes.c_int]
    function.restype = None

    def copy_rows(
        sources: Addresses,
        targets: Addresses,
        sizes: Addresses,
        source_steps: Addresses,
        target_steps: Addresses,
        num_rows: int,
    ) -> None:
        first = [each.ctypes.data for each in (sources, targets, sizes)]
        steps = [each.ctypes.data for each in (source_steps, target_steps)]
        function(*first, len(sizes), *steps, num_rows, int(sizes.sum()) * num_rows >= _BYTES_WORTH_STREAMING)

    return copy_rows


def native_copy_summed() -> CopySummed | None:
    """Return the compiled copy with checksums, None if it was not built here."""
    function = getattr(library_of_kernels(), "kvdepot_copy_and_sum", None)  # a checkout may have an older build
    if function is None:
        return None
    array, size = ctypes.c_void_p, ctypes.c_size_t
    function.argtypes = [array, array, array, size, array, size, array]

    def copy_summed(
        sources: Addresses, targets: Addresses, sizes: Addresses, extents: Addresses
    ) -> npt.NDArray[np.uint8] | None:
        digests = np.empty((len(extents), CHECKSUM_BYTES), np.uint8)
        addresses = [each.ctypes.data for each in (sources, targets, sizes)]
        done = function(*addresses, len(sizes), extents.ctypes.data, len(extents), digests.ctypes.data)
        return digests if done else None

    return copy_summed


def library_of_kernels() -> ctypes.CDLL | None:
    """Return the compiled copies and moves, None if they were not built."""
    spec = importlib.util.find_spec("kvdepot_cpu.kernels._copy_runs")
    return None if spec is None or spec.origin is None else ctypes.CDLL(spec.origin)


def memcpy_runs() -> CopyRuns:
    """Return a function that copies run by run with libc's memcpy. It needs no compiler."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p

    def copy_runs(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            memcpy(target, source, size)

    return copy_runs


class PageCopier(Copier):
    """The `Copier` of host memory.

    Args:
        layout: the layout of the blocks.
        num_threads: the numbers of threads for a large store and a large retrieve. Engines wait for retrieves, but not
            for stores.
        keep_alive: the owner of the blocks' memory.
    """

    def __init__(self, layout: CacheLayout, num_threads: tuple[int, int], keep_alive: object) -> None:
        self.keep_alive = keep_alive
        self._copy_runs = native_copy_runs() or memcpy_runs()
        self._copy_rows = native_copy_rows()
        self._copy_summed = native_copy_summed()
        self._runs = BatchRuns(layout)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(num_threads), "kvdepot-copy") if max(num_threads) > 1 else None

    def store(self, batch: CopyBatch) -> bytes | None:
        """See `Copier`."""
        runs = self._runs.of(batch)
        targets = runs.offsets + np.uint64(batch.mapping.address)
        if batch.with_checksums:
            records = np.frombuffer(batch.extents, EXTENT_DTYPE)
            order = np.argsort(records["group"], kind="stable")  # the order of the runs
            digests = self._store_summed(runs.blocks, targets, runs.sizes, records["num_bytes"][order])
            if digests is not None:
                digests[order] = digests.copy()
                return digests.tobytes()
        self._copy(runs.blocks, targets, runs.sizes, self._num_threads[0])
        return None

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        pool = np.uint64(batch.mapping.address)
        pages, cut = self._runs.in_rows(batch)
        self._copy(pages.offsets + pool, pages.blocks, pages.sizes, self._num_threads[1])
        for rows in cut:
            self._retrieve_rows(rows, pool)

    def close(self) -> None:
        """See `Copier`."""
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, num_threads: int) -> None:
        def copy(start: int, stop: int) -> None:
            self._copy_runs(sources[start:stop], targets[start:stop], sizes[start:stop])

        self._in_parts(copy, len(sizes), int(sizes.sum()), num_threads)

    def _retrieve_rows(self, rows: Rows, pool: np.uint64) -> None:
        copy_rows, num_threads = self._copy_rows, self._num_threads[1]
        if copy_rows is None:
            runs = rows.runs()
            self._copy(runs.offsets + pool, runs.blocks, runs.sizes, num_threads)
            return
        first, sources = rows.first, rows.first.offsets + pool

        def copy(start: int, stop: int) -> None:
            part = slice(start, stop)
            steps = rows.offset_steps[part], rows.block_steps[part]
            copy_rows(sources[part], first.blocks[part], first.sizes[part], *steps, rows.num_rows)

        self._in_parts(copy, len(first), int(first.sizes.sum()) * rows.num_rows, num_threads)

    def _store_summed(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, extents: Addresses
    ) -> npt.NDArray[np.uint8] | None:
        """Copy a store, and return the digest of each extent, None if that failed for some."""
        copy_summed, num_bytes, num_threads = self._copy_summed, int(sizes.sum()), self._num_threads[0]
        if copy_summed is None or num_bytes < _BYTES_WORTH_STREAMING:
            return None
        if num_threads == 1:
            return copy_summed(sources, targets, sizes, extents)
        firsts = np.searchsorted(np.cumsum(sizes), np.cumsum(extents)) + 1  # the first run after each extent
        digests = np.empty((len(extents), CHECKSUM_BYTES), np.uint8)
        refused: list[int] = []

        def copy(start: int, stop: int) -> None:
            runs = slice(int(firsts[start - 1]) if start else 0, int(firsts[stop - 1]))
            part = copy_summed(sources[runs], targets[runs], sizes[runs], extents[start:stop])
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
        jobs = [self._pool.submit(copy, start, stop) for start, stop in itertools.pairwise(bounds)]
        for job in jobs:
            job.exception()  # wait for all of them before raising
        for job in jobs:
            job.result()
