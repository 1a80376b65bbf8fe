"""A staged copier with a cache on the device and a pool in plain memory, without a depot."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvdepot.backends import CopyBatch
from kvdepot.copying.arrays import page_layout_of
from kvdepot.copying.staged import Bridge, StagedCopier
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup
from kvdepot.pool.files import PoolMapping
from kvdepot.wire.messages import EXTENT

BLOCK_TOKENS = 16
BLOCKS_PER_CHUNK = 2
NUM_BLOCKS = 64
NUM_LAYERS = 3
HEAD = (2, 8)  # heads, elements


def torch() -> Any:
    return importlib.import_module("torch")


def write_blocks(pages: Any, blocks: Sequence[int], data: bytes) -> None:
    """Put bytes into blocks of a tensor on a device, one block after the other, and wait until they are there."""
    values = torch().frombuffer(bytearray(data), dtype=pages.dtype).view(len(blocks), *pages.shape[1:])
    if blocks == range(len(pages)):  # one operation; an index takes six
        pages.copy_(values)
    else:
        pages[torch().tensor(list(blocks))] = values.to(pages.device)
    pages[blocks[-1]].to("cpu")  # waits on every device, and launches what a lazy one has recorded


def read_blocks(pages: Any, blocks: Sequence[int]) -> bytes:
    """Return the bytes of blocks of a tensor on a device, one block after the other."""
    on_host = pages.to("cpu")[torch().tensor(list(blocks), dtype=torch().long)]
    return on_host.view(torch().uint8).numpy().tobytes()


@dataclass
class Pool:
    """The attribute of `PoolMapping` that a copier needs."""

    pool: bytearray = field(default_factory=lambda: bytearray(4 << 20))


class Bench:
    """A copier, and one group of `NUM_LAYERS` layers: separate flat keys and values that end in a block of padding."""

    def __init__(self, bridge: Bridge, *, dtype: str = "bfloat16", max_blocks: int = 8, **options: Any) -> None:
        self.bridge = bridge
        self.flat = [
            torch().zeros(
                ((NUM_BLOCKS + 1) * BLOCK_TOKENS, *HEAD), dtype=getattr(torch(), dtype), device=bridge.device_type
            )
            for _ in range(2 * NUM_LAYERS)
        ]
        self.tensors = [flat.view(NUM_BLOCKS + 1, BLOCK_TOKENS, *HEAD)[:-1] for flat in self.flat]
        pages = tuple(page_layout_of(tensor, bridge.device_type, has_address=False) for tensor in self.tensors)
        group = LayerGroup(GroupKind.FULL_ATTENTION, BLOCK_TOKENS, pages)
        self.chunk_bytes = group.chunk_size_bytes(BLOCK_TOKENS * BLOCKS_PER_CHUNK)
        self.pool = Pool()
        self.layout = CacheLayout((group,), BLOCK_TOKENS * BLOCKS_PER_CHUNK, dtype)
        self.copier = StagedCopier(bridge, self.layout, [self.tensors], max_blocks=max_blocks, **options)

    def copy_again(self) -> None:
        """Make another copier on the cache and close it."""
        StagedCopier(self.bridge, self.layout, [self.tensors], max_blocks=8).close()

    def batch(self, block_ids: list[int], pool: Pool | None = None) -> CopyBatch:
        """Return a batch of whole chunks. Their extents lie in reverse order in the pool."""
        num_chunks = len(block_ids) // BLOCKS_PER_CHUNK
        extents = b"".join(
            EXTENT.pack(chunk, 0, 0, 0, 0, 0, (num_chunks - 1 - chunk) * self.chunk_bytes, self.chunk_bytes)
            for chunk in range(num_chunks)
        )
        return CopyBatch(cast("PoolMapping", pool or self.pool), extents, [block_ids], (0,), (0,))

    def write(self, tensors: list[Any], rng: np.random.Generator) -> list[Any]:
        """Fill whole tensors with random bytes, including NaNs of every kind. Return their contents."""
        contents: list[Any] = []
        for tensor in tensors:
            num_bytes = tensor.numel() * tensor.element_size()
            raw = torch().from_numpy(rng.integers(0, 256, num_bytes, np.uint8))
            contents.append(raw.view(tensor.dtype).view(tensor.shape))
            with torch().inference_mode():  # as an engine does
                tensor.copy_(contents[-1])
        return contents

    def read(self) -> list[npt.NDArray[np.uint8]]:
        """Return the bytes of every tensor, `(num_blocks, page_size_bytes)`."""
        return [t.to("cpu").view(torch().uint8).numpy().reshape(NUM_BLOCKS, -1) for t in self.tensors]


def round_trip(bench: Bench, num_blocks: int, seed: int = 0) -> bool:
    """Store blocks, overwrite them, retrieve them into others. Return whether every byte of every block is right."""
    rng = np.random.default_rng(seed)
    bench.write(bench.flat, rng)
    before = bench.read()
    stored, loaded = (rng.permutation(NUM_BLOCKS)[:num_blocks].tolist() for _ in range(2))
    bench.pool.pool[:] = b"\xee" * len(bench.pool.pool)
    bench.copier.store(bench.batch(stored))
    bench.write(bench.flat, rng)
    expected = bench.read()
    bench.copier.retrieve(bench.batch(loaded))
    for page, kept in zip(expected, before, strict=True):
        page[loaded] = kept[stored]
    return all(np.array_equal(*pair) for pair in zip(bench.read(), expected, strict=True))
