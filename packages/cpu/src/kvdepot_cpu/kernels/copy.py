"""One copy per block and layer between a paged cache and extents of the pool.

The addresses of a whole batch are computed with numpy; the bytes are moved by `copy_runs.c`, which bypasses the caches
on the way out and releases the GIL for the batch: 1.0 to 1.5 of one large memcpy's speed for pages of 64 KiB and more.
Where it could not be built, a loop of libc's memcpy does the same at 0.7 to 0.9 (`docs/performance.md`).
"""

import ctypes
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.client.transfers import CopyBatch
from kvdepot.layout import CacheLayout, PageLayout
from kvdepot.messages import EXTENT

EXTENT_DTYPE: Final = np.dtype(
    [
        ("chunk", "<u4"), ("group", "<u2"), ("zero", "<u2"), ("record", "<u4"), ("zero2", "<u4"),
        ("header", "<u8"), ("offset", "<u8"), ("num_bytes", "<u8"),
    ]
)  # fmt: skip
assert EXTENT_DTYPE.itemsize == EXTENT.size

_BYTES_WORTH_A_THREAD: Final = 8 << 20
_BYTES_WORTH_STREAMING: Final = 1 << 20  # less than this stays in the caches for whoever comes next

Addresses = npt.NDArray[np.uint64]
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
    """Return the copy that needs nothing built: libc's memcpy, run by run."""
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p

    def copy_runs(sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
            memcpy(target, source, size)

    return copy_runs


class PageCopier:
    """The `Copier` of host memory.

    Args:
        layout: where the blocks are.
        num_threads: how many threads share a large copy into the pool, and out of it. An engine waits for what it
            retrieves, and for nothing that it stores.
        keep_alive: what owns the memory of the blocks.
        copy_runs: how bytes are moved; None for the best there is.
    """

    def __init__(
        self, layout: CacheLayout, num_threads: tuple[int, int], keep_alive: object, copy_runs: CopyRuns | None = None
    ) -> None:
        self._keep_alive = keep_alive
        self._copy_runs = copy_runs or native_copy_runs() or memcpy_runs()
        self._groups = [
            _GroupAddresses.of(group.pages, group.blocks_per_chunk(layout.chunk_tokens)) for group in layout.groups
        ]
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(max(num_threads), "kvdepot-copy") if max(num_threads) > 1 else None

    def store(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        blocks, extents, sizes = self._addresses(batch)
        self._copy(blocks, extents, sizes, self._num_threads[0])

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        blocks, extents, sizes = self._addresses(batch)
        self._copy(extents, blocks, sizes, self._num_threads[1])

    def close(self) -> None:
        """See `Copier`."""
        if self._pool is not None:
            self._pool.shutdown()

    def _addresses(self, batch: CopyBatch) -> tuple[Addresses, Addresses, Addresses]:
        """Return for every block of every layer of the batch its address, its address in the pool, and its size."""
        records = np.frombuffer(batch.extents, EXTENT_DTYPE)
        parts: list[tuple[Addresses, Addresses, Addresses]] = []
        for number, group in enumerate(self._groups):
            mine = records[records["group"] == number]
            if len(mine):
                chunks = mine["chunk"].astype(np.int64)
                block_ids = np.asarray(batch.block_ids[number], np.int64)
                rows = (chunks - batch.first_covered[number])[:, None] * group.blocks_per_chunk
                ids = block_ids[rows + np.arange(group.blocks_per_chunk)]
                wanted = (chunks > 0)[:, None] | (np.arange(group.blocks_per_chunk) >= batch.skip_blocks[number])
                wanted &= ids >= 0  # not NO_BLOCK
                parts.append(
                    group.runs(ids.astype(np.uint64), mine["offset"] + np.uint64(batch.mapping.address), wanted)
                )
        blocks, extents, sizes = zip(*parts, strict=True)
        return np.concatenate(blocks), np.concatenate(extents), np.concatenate(sizes)

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
            job.exception()  # all of them end before anybody learns of an error
        for job in jobs:
            job.result()


@dataclass(frozen=True, slots=True)
class _GroupAddresses:
    """The pages of one layer group, as columns of numbers."""

    blocks_per_chunk: int
    addresses: Addresses  # (num_pages,), of block 0
    strides: Addresses
    page_sizes: Addresses
    run_offsets: Addresses  # of each page's run within an extent

    @classmethod
    def of(cls, pages: Sequence[PageLayout], blocks_per_chunk: int) -> "_GroupAddresses":
        sizes = np.array([page.page_size_bytes for page in pages], np.uint64)
        return cls(
            blocks_per_chunk,
            np.array([page.address for page in pages], np.uint64),
            np.array([page.stride_bytes for page in pages], np.uint64),
            sizes,
            (np.cumsum(sizes) - sizes) * np.uint64(blocks_per_chunk),
        )

    def runs(
        self, ids: Addresses, extents: Addresses, wanted: npt.NDArray[np.bool_]
    ) -> tuple[Addresses, Addresses, Addresses]:
        """Return addresses of blocks, addresses in the pool, and sizes, in the order of the pool.

        Args:
            ids: block ids, `(num_chunks, blocks_per_chunk)`.
            extents: addresses of the extents, `(num_chunks,)`.
            wanted: which of `ids` to copy.
        """
        places = np.arange(self.blocks_per_chunk, dtype=np.uint64)
        blocks = self.addresses[:, None] + ids[:, None, :] * self.strides[:, None]
        targets = extents[:, None, None] + self.run_offsets[:, None] + places * self.page_sizes[:, None]
        shape: Any = blocks.shape
        chosen = np.broadcast_to(wanted[:, None, :], shape)
        return blocks[chosen], targets[chosen], np.broadcast_to(self.page_sizes[:, None], shape)[chosen]
