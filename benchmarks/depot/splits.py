"""Times retrieves of entries that were stored by workers with other heads: `python benchmarks/depot/splits.py`.

Measures only the copies of `packages/cpu` with their planning, without a depot: 256 MiB of an 8B model (32 layers, 8 KV
heads x 128, bf16, keys and values in one page) from shared memory into scattered blocks of 4 KiB pages. Prints the
median ratio to one memcpy of the same bytes in the same round, by one thread, and its extremes. A worker retrieves with
all cores by default, at most four: `--threads 2` is what it does on two.
"""

import argparse
import mmap
import os
import random
import statistics
import time
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.kvcache import CopyBatch
from kvdepot.lab.bench import describe_machine
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, Part, Plane
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import EXTENT
from kvdepot_cpu.context import PageCopier
from kvdepot_cpu.kernels import memcpy_runs

HEADS: Final = 8
LAYERS: Final = 32
TOKEN_BYTES: Final = 2 * 128 * 2  # one token's bytes of one head in one layer
CHUNK_TOKENS: Final = 256
NUM_BYTES: Final = 256 << 20
BATCH_BYTES: Final = 64 << 20
TORCH_OFFSET_BYTES: Final = 64  # torch's large tensors begin this far behind a page; glibc's memcpy is slow there


@dataclass(frozen=True)
class Case:
    """An engine of `stored` ranks stores, rank 0 of an engine of `read` ranks reads."""

    block_tokens: int
    heads_outermost: bool
    stored: int
    read: int

    def __str__(self) -> str:
        order = "heads" if self.heads_outermost else "tokens"
        return f"blocks of {self.block_tokens:3}, {order:6} outermost, TP {self.stored} -> TP {self.read}"


def parts(ranks: int) -> list[Part]:
    """Return the parts of an engine."""
    return [Part(0, 1, rank * HEADS // ranks, HEADS // ranks) for rank in range(ranks)]


class Reader:
    """Rank 0 of the reading engine, with batches that cover its memory's first half in random order."""

    def __init__(self, case: Case, pool: PoolMemory, num_threads: int) -> None:
        mine = parts(case.read)[0]
        page = case.block_tokens * mine.num_heads * TOKEN_BYTES
        chunk_bytes = LAYERS * CHUNK_TOKENS * mine.num_heads * TOKEN_BYTES
        num_chunks, per_chunk = NUM_BYTES // chunk_bytes, CHUNK_TOKENS // case.block_tokens
        num_blocks = 2 * num_chunks * per_chunk
        self.memory = anonymous(TORCH_OFFSET_BYTES + num_blocks * LAYERS * page)
        first = self.memory.ctypes.data + TORCH_OFFSET_BYTES
        pages = tuple(PageLayout(first + layer * num_blocks * page, num_blocks, page, page) for layer in range(LAYERS))
        rows = 1 if case.heads_outermost else case.block_tokens
        group = LayerGroup(
            GroupKind.FULL_ATTENTION, case.block_tokens, pages, part=mine, plane=Plane(1, HEADS), rows=rows
        )
        self._copier = PageCopier(CacheLayout((group,), CHUNK_TOKENS, "bfloat16"), (1, num_threads), self.memory)
        self._num_blocks, self._step = num_blocks, BATCH_BYTES // chunk_bytes
        self._pool, self._case, self._mine = pool, case, mine
        self._num_chunks, self._chunk_bytes = num_chunks, chunk_bytes

    def retrieve(self) -> float:
        """Retrieve everything once. Return the seconds."""
        block_ids = random.sample(range(self._num_blocks), self._num_blocks // 2)
        batches: list[CopyBatch] = []
        sources = [part for part in parts(self._case.stored) if part.first_head < self._mine.num_heads]
        offset, per_chunk = 0, len(block_ids) // self._num_chunks
        for start in range(0, self._num_chunks, self._step):
            extents = b""
            for chunk in range(min(self._step, self._num_chunks - start)):
                for part in sources:
                    size = self._chunk_bytes // self._mine.num_heads * part.num_heads
                    heads, layers = part.number & 0xFFFF, part.number >> 16
                    extents += EXTENT.pack(chunk, 0, heads, 0, layers, 0, offset % self._pool.size_bytes, size)
                    offset += size
            blocks = block_ids[start * per_chunk : (start + self._step) * per_chunk]
            batches.append(CopyBatch(self._pool, extents, [blocks], (0,), (0,)))
        began = time.perf_counter()
        for batch in batches:
            self._copier.retrieve(batch)
        return time.perf_counter() - began


def anonymous(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Return touched memory without huge pages, like an engine's cache."""
    memory: Any = np.frombuffer(mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
    memory[::4096] = 1
    return memory


def main() -> None:
    """Print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    print(describe_machine())
    descriptor = os.memfd_create("pool")
    os.ftruncate(descriptor, 2 * NUM_BYTES)
    pool = PoolMemory(descriptor, 2 * NUM_BYTES)
    np.frombuffer(pool.pool, np.uint8)[::4096] = 1
    for block_tokens in (16, 128):
        for heads_outermost in (True, False):
            for stored, read in ((2, 2), (1, 2), (2, 1), (1, 4), (4, 1)):
                case = Case(block_tokens, heads_outermost, stored, read)
                reader = Reader(case, pool, options.threads)
                whole = [np.array([each], np.uint64) for each in (pool.address, reader.memory.ctypes.data, NUM_BYTES)]
                ratios: list[float] = []
                for number in range(options.rounds + 1):
                    began = time.perf_counter()
                    memcpy_runs(*whole)
                    memcpy = time.perf_counter() - began
                    seconds = reader.retrieve()
                    if number:  # the first round warms up
                        ratios.append(memcpy / seconds)
                print(f"{case}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
