"""One copy per block and layer between a paged cache and extents of the pool.

numpy computes the addresses of a whole batch. `copy_runs.c` moves the bytes: it copies four runs side by side with
stores that bypass the caches, and releases the GIL for the batch. Where it could not be built, a loop of libc's memcpy
does the same, slower (`docs/performance.md`).
"""

import ctypes
import importlib.util
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from kvdepot.backends import Copier, CopyBatch
from kvdepot.copying.runs import Addresses, BatchRuns
from kvdepot.layout import CacheLayout

_BYTES_WORTH_A_THREAD: Final = 8 << 20
_BYTES_WORTH_STREAMING: Final = 1 << 20  # smaller copies stay in the caches for the next reader

CopyRuns = Callable[[Addresses, Addresses, Addresses], None]
"""Copies runs: sources, targets and sizes in bytes, each `(num_runs,)`; no two targets overlap."""


def native_copy_runs() -> CopyRuns | None:
    """Return the compiled copy, None if it was not built here."""
    spec = importlib.util.find_spec("kvdepot_cpu.kernels._copy_runs")
    if spec is None or spec.origin is None:
        return None
    function = ctypes.CDLL(spec.origin).kvdepot_copy_runs
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = None

    def copy_runs(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        streamed = int(sizes.sum()) >= _BYTES_WORTH_STREAMING
        function(sources.ctypes.data, targets.ctypes.data, sizes.ctypes.data, len(sizes), streamed)

    return copy_runs


def memcpy_runs() -> CopyRuns:
    """Return a copy by libc's memcpy, run by run. It needs no compiler."""
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
        layout: where the blocks are.
        num_threads: how many threads share a large store, and a large retrieve. An engine waits for its retrieves, not
            for its stores.
        keep_alive: owns the memory of the blocks.
        copy_runs: moves the bytes; None for the fastest function available.
    """

    def __init__(
        self, layout: CacheLayout, num_threads: tuple[int, int], keep_alive: object, copy_runs: CopyRuns | None = None
    ) -> None:
        self._keep_alive = keep_alive
        self._copy_runs = copy_runs or native_copy_runs() or memcpy_runs()
        self._runs = BatchRuns(layout)
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(num_threads), "kvdepot-copy") if max(num_threads) > 1 else None

    def store(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        runs = self._runs.of(batch)
        self._copy(runs.blocks, runs.offsets + np.uint64(batch.mapping.address), runs.sizes, self._num_threads[0])

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        runs = self._runs.of(batch)
        self._copy(runs.offsets + np.uint64(batch.mapping.address), runs.blocks, runs.sizes, self._num_threads[1])

    def close(self) -> None:
        """See `Copier`."""
        if self._pool is not None:
            self._pool.shutdown()

    def _copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, num_threads: int) -> None:
        parts = min(num_threads, len(sizes), 1 + int(sizes.sum()) // _BYTES_WORTH_A_THREAD)
        if self._pool is None or parts <= 1:
            self._copy_runs(sources, targets, sizes)
            return
        bounds = [len(sizes) * part // parts for part in range(parts + 1)]
        jobs = [
            self._pool.submit(self._copy_runs, sources[start:stop], targets[start:stop], sizes[start:stop])
            for start, stop in itertools.pairwise(bounds)
        ]
        for job in jobs:
            job.exception()  # wait for all of them before raising
        for job in jobs:
            job.result()
