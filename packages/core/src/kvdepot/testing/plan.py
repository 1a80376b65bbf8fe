"""Workers under test: their layouts, the bytes of their blocks, and stores and retrieves that check these bytes.

The oracle is `PagePattern`: bytes derived from the chunk's key, so a retrieve that mixes up any of them fails.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from kvdepot.backends import CacheGroup, KVCache, TransferContext
from kvdepot.keys import KeyRun, Namespace, digest_at, hash_prefix
from kvdepot.lab.pattern import PagePattern
from kvdepot.layout import ONE_CELL, THAT_CELL, GroupKind, Part, Plane, blocks_per_chunk
from kvdepot.wire.messages import CacheSpec

FULL: Final = GroupKind.FULL_ATTENTION
WINDOW: Final = GroupKind.SLIDING_WINDOW
STATE: Final = GroupKind.RECURRENT

CHUNK_TOKENS: Final = 64
WAIT_SECONDS: Final = 20.0  # far beyond a transfer of some KiB on a busy machine: only one that hangs reaches it
FILL: Final = 0xA5  # each byte of a block before a retrieve


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """One layer group of a worker under test: pages are opaque bytes, multiples of 8."""

    kind: GroupKind = FULL
    block_tokens: int = 16
    page_sizes_bytes: tuple[int, ...] = (1024,) * 4  # one tensor each
    padding_bytes: int = 0  # after each block
    window_tokens: int = 0
    part: Part = THAT_CELL
    plane: Plane = ONE_CELL
    rows: int = 1

    def whole_size_bytes(self, page_size_bytes: int) -> int:
        """Return the bytes of a page with all heads of the plane."""
        return page_size_bytes // self.part.num_heads * self.plane.heads


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """A worker under test."""

    groups: tuple[GroupPlan, ...] = (GroupPlan(),)
    num_blocks: int = 64  # of every group
    chunk_tokens: int = CHUNK_TOKENS
    instance: str = "engine"
    rank: int = 0
    world_size: int = 1
    format: str = "test"

    def cache(self, tensors: Sequence[Sequence[Any]]) -> KVCache:
        """Return the cache that has these tensors, one list a group."""
        groups = [
            CacheGroup(each, g.block_tokens, g.kind, g.window_tokens, g.part, g.plane, g.rows)
            for g, each in zip(self.groups, tensors, strict=True)
        ]
        return KVCache(
            groups,
            self.instance,
            "bytes",
            self.rank,
            self.world_size,
            format=self.format,
            chunk_tokens=self.chunk_tokens,
        )

    def blocks_per_chunk(self, group: int) -> int:
        """Return the blocks that one chunk keeps."""
        plan = self.groups[group]
        return blocks_per_chunk(plan.kind, plan.block_tokens, plan.window_tokens, self.chunk_tokens)

    def chunk_size_bytes(self, group: int) -> int:
        """Return the size of one chunk in the pool."""
        return sum(self.groups[group].page_sizes_bytes) * self.blocks_per_chunk(group)


class Worker(Protocol):
    """A worker of the backend under test: its context, and access to its device memory."""

    @property
    def context(self) -> TransferContext:
        """The context under test."""
        ...

    @property
    def spec(self) -> CacheSpec:
        """The spec that it registered."""
        ...

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot."""
        ...

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        """Put bytes into blocks of one tensor, one block after the other."""
        ...

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        """Return the bytes of blocks of one tensor, one block after the other."""
        ...


PLANS: Final = {
    "one group": WorkerPlan(),
    "one block a chunk": WorkerPlan((GroupPlan(block_tokens=64),)),
    "one layer": WorkerPlan((GroupPlan(page_sizes_bytes=(4096,)),)),
    "odd page sizes": WorkerPlan((GroupPlan(page_sizes_bytes=(1000, 8, 4104)),)),
    "large pages": WorkerPlan((GroupPlan(page_sizes_bytes=(65536, 65536)),)),
    "padded pages": WorkerPlan((GroupPlan(page_sizes_bytes=(1000, 1000), padding_bytes=24),)),
    "several block sizes": WorkerPlan((GroupPlan(), GroupPlan(block_tokens=32, page_sizes_bytes=(2048,)))),
    "window and full": WorkerPlan((GroupPlan(), GroupPlan(WINDOW, window_tokens=128))),
    "short window": WorkerPlan((GroupPlan(), GroupPlan(WINDOW, page_sizes_bytes=(1000, 8), window_tokens=33))),
    "recurrent and full": WorkerPlan((GroupPlan(), GroupPlan(STATE, page_sizes_bytes=(3000, 720), padding_bytes=376))),
    "only a window": WorkerPlan((GroupPlan(WINDOW, window_tokens=100),)),
    "only states": WorkerPlan((GroupPlan(STATE),)),
}


def prompt(num_chunks: int, *, salt: int = 0) -> KeyRun:
    """Return the key of a prompt; prompts of one salt are prefixes of each other."""
    return hash_prefix(Namespace("test", tenant_salt=str(salt)), CHUNK_TOKENS, range(num_chunks * CHUNK_TOKENS))


class Cache:
    """A worker and the oracle that checks its bytes."""

    def __init__(self, worker: Worker, plan: WorkerPlan) -> None:
        self.worker = worker
        self.plan = plan
        self.context = worker.context
        self._pattern = PagePattern(max(group.whole_size_bytes(max(group.page_sizes_bytes)) for group in plan.groups))

    def blocks(self, run: KeyRun, *, rotate: int = 0, covered: Sequence[int] | None = None) -> list[list[int]]:
        """Return distinct blocks for a run, one list a group, different for each `rotate`."""
        found: list[list[int]] = []
        for group in range(len(self.plan.groups)):
            count = (run.num_chunks if covered is None else covered[group]) * self.plan.blocks_per_chunk(group)
            assert count <= self.plan.num_blocks, "the plan has too few blocks"
            order = random.Random(rotate * 31 + group).sample(range(self.plan.num_blocks), count)
            found.append(order)
        return found

    def fill(self, run: KeyRun, block_ids: Sequence[Sequence[int]]) -> None:
        """Write the bytes of the run into its blocks."""
        for group, page, blocks, data in self._expected(run, block_ids):
            self.worker.write_blocks(group, page, blocks, data)

    def wipe(self) -> None:
        """Fill every block with `FILL`."""
        blocks = range(self.plan.num_blocks)
        for group, plan in enumerate(self.plan.groups):
            for page, size in enumerate(plan.page_sizes_bytes):
                self.worker.write_blocks(group, page, blocks, bytes([FILL]) * size * len(blocks))

    def holds(self, run: KeyRun, block_ids: Sequence[Sequence[int]]) -> bool:
        """Return whether the blocks hold exactly the bytes of the run."""
        return all(
            self.worker.read_blocks(group, page, blocks) == data
            for group, page, blocks, data in self._expected(run, block_ids)
        )

    def untouched(self, but: Sequence[Sequence[int]]) -> bool:
        """Return whether every block except `but` is as `wipe` left it."""
        others = [sorted(set(range(self.plan.num_blocks)) - set(named)) for named in but]
        return all(
            self.worker.read_blocks(group, page, others[group]) == bytes([FILL]) * size * len(others[group])
            for group, plan in enumerate(self.plan.groups)
            for page, size in enumerate(plan.page_sizes_bytes)
        )

    def store(self, run: KeyRun, *, rotate: int = 0) -> bool:
        """Fill blocks and store them."""
        block_ids = self.blocks(run, rotate=rotate)
        self.fill(run, block_ids)
        return self.context.submit_store("request", run, block_ids).result(WAIT_SECONDS)

    def retrieve(self, run: KeyRun, *, rotate: int = 1) -> int:
        """Retrieve into wiped blocks, check every byte, and return the number of retrieved chunks."""
        block_ids = self.blocks(run, rotate=rotate)
        self.wipe()
        future = self.context.submit_retrieve("request", run, block_ids)
        complete = future.result(WAIT_SECONDS)
        assert complete == (future.num_chunks == run.num_chunks)
        count = future.num_chunks
        kept = [ids[: count * self.plan.blocks_per_chunk(group)] for group, ids in enumerate(block_ids)]
        assert self.holds(run.slice(0, count), kept), "wrong bytes were served"
        assert self.untouched(block_ids), "blocks that nobody named were written"
        return count

    def _expected(
        self, run: KeyRun, block_ids: Sequence[Sequence[int]]
    ) -> Iterator[tuple[int, int, Sequence[int], bytes]]:
        """Yield the bytes of the run's last blocks for each group and page, one block after the other."""
        for group, (plan, blocks) in enumerate(zip(self.plan.groups, block_ids, strict=True)):
            if not blocks:
                continue
            step, num_pages = self.plan.blocks_per_chunk(group), len(plan.page_sizes_bytes)
            before = plan.part.first_layer * num_pages // plan.part.num_layers
            keys = [digest_at(run.digests, run.num_chunks - number) for number in range(len(blocks) // step, 0, -1)]
            # A row has the same bytes in blocks of any size.
            seeds = np.concatenate(
                [self._pattern.seeds(key, before + num_pages, step * plan.rows, tag=group)[before:] for key in keys],
                axis=1,
            )
            for page, size in enumerate(plan.page_sizes_bytes):
                words: npt.NDArray[Any] = np.empty(
                    (len(blocks) * plan.rows, plan.whole_size_bytes(size) // plan.rows // 8), np.uint64
                )
                self._pattern.write(words, seeds[page])
                whole = words.view(np.uint8).reshape(len(words), plan.plane.heads, -1)
                mine = whole[:, plan.part.first_head : plan.part.first_head + plan.part.num_heads]
                yield group, page, blocks, mine.tobytes()
