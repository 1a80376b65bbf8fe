"""A small engine: a paged KV cache of a real model's geometry, without the model.

It does the work of an inference engine around the forward pass: it finds the prefix that is still in its own cache,
asks the depot for more, retrieves that, "computes" the rest (writes bytes derived from the keys), and stores. So every
byte from the depot can be verified. The demo, the replay and the benchmarks use it. Needs numpy (`kvdepot[cpu]`).
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import msgspec

from kvdepot.backends import CacheGroup, KVCache, get_backend
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.errors import ConfigError
from kvdepot.keys import Namespace, hash_prefix, split_digests
from kvdepot.layout import default_chunk_tokens

_T = TypeVar("_T")

CACHE_ALIGNMENT_BYTES: Final = 4096  # a page, as of extents: numpy promises only 16 bytes


@dataclass(frozen=True, slots=True)
class Geometry:
    """The KV cache of a model with grouped-query attention in bfloat16."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int = 16

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, keys and values."""
        return self.block_tokens * 2 * self.num_kv_heads * self.head_dim * 2

    @property
    def block_size_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return self.page_size_bytes * self.num_layers

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token."""
        return self.block_size_bytes // self.block_tokens


GEOMETRY_8B: Final = Geometry("8B GQA", num_layers=32, num_kv_heads=8, head_dim=128)


class RequestReport(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one request. Found and retrieved tokens are tokens of whole chunks."""

    prompt_tokens: int
    device_tokens: int = 0  # found in the engine's own cache
    own_tokens: int = 0  # retrieved, stored earlier by this engine
    shared_tokens: int = 0  # retrieved, stored by another engine
    computed_tokens: int = 0
    lookup_seconds: float = 0.0
    retrieve_seconds: float = 0.0
    compute_seconds: float = 0.0
    retrieved_bytes: int = 0
    store_seconds: float = 0.0
    stored_bytes: int = 0
    verified_bytes: int = 0
    wrong_bytes: int = 0

    @property
    def first_token_seconds(self) -> float:
        """Time until the whole prompt is in the engine's cache, without the comparison of bytes."""
        return self.lookup_seconds + self.retrieve_seconds + self.compute_seconds


class EngineModel:
    """One engine with one worker.

    Args:
        instance: the name of the engine.
        geometry: the KV cache of its model.
        num_blocks: the number of blocks of its cache.
        namespace: the identity of its model.
        url: the URL of the depot.
        chunk_tokens: None for the default.
        copy_threads: as in `CpuTransferContext`.
        tokens_per_second: the speed of the model to imitate: after writing its bytes, the engine pauses for the rest
            of the time that the model would take. None for no pause.

    Raises:
        BackendUnavailable: the CPU backend is not installed.
    """

    def __init__(
        self,
        instance: str,
        geometry: Geometry,
        num_blocks: int,
        namespace: Namespace,
        *,
        url: str | None = None,
        chunk_tokens: int | None = None,
        copy_threads: int | None = None,
        tokens_per_second: float | None = None,
    ) -> None:
        backend = get_backend("cpu")
        import numpy as np  # after `get_backend`, which reports a missing one

        from kvdepot.lab.pattern import PagePattern

        self.geometry = geometry
        self.chunk_tokens = chunk_tokens or default_chunk_tokens([geometry.block_tokens])
        self._tokens_per_second = tokens_per_second
        self.blocks_per_chunk = self.chunk_tokens // geometry.block_tokens
        self._namespace = namespace
        words = geometry.page_size_bytes // 8
        flat = np.empty(geometry.num_layers * num_blocks * words + CACHE_ALIGNMENT_BYTES // 8, np.uint64)
        skip = -flat.ctypes.data % CACHE_ALIGNMENT_BYTES // 8
        self.cache: Any = flat[skip : skip + geometry.num_layers * num_blocks * words].reshape(
            geometry.num_layers, num_blocks, words
        )
        self.cache.fill(0)  # the first touch of memory is slow; do it before anything is measured
        self._pattern = PagePattern(geometry.page_size_bytes)
        self.blocks = BlockTable(num_blocks // self.blocks_per_chunk, self.blocks_per_chunk)
        self._stored: set[bytes] = set()
        groups = [
            CacheGroup(
                list(self.cache),
                geometry.block_tokens,
                hidden_dims=(geometry.num_kv_heads * geometry.head_dim,) * 2,
                attention_backend="model",
            )
        ]
        cache = KVCache(
            groups, instance, "bfloat16", model=geometry.name, format="model", chunk_tokens=self.chunk_tokens
        )
        self.context: Any = backend.create_context(cache, url=url, copy_threads=copy_threads)
        self.scheduler = SchedulerClient(
            self.context.spec, instance, model=geometry.name, url=url, weights=namespace.weights
        )

    def wait_until_connected(self, timeout_seconds: float = 10.0) -> None:  # a depot starts in 0.3 s
        """Wait for the depot.

        Raises:
            DepotUnavailable: no depot answered within `timeout_seconds`.
        """
        self.context.wait_until_connected(timeout_seconds)
        self.scheduler.wait_until_connected(timeout_seconds)

    def serve(self, request_id: str, tokens: Sequence[int]) -> RequestReport:
        """Serve one request: afterwards the whole chunks of `tokens` are in the engine's cache and in the depot.

        Raises:
            ConfigError: the prompt does not fit into the engine's cache.
        """
        key = hash_prefix(self._namespace, self.chunk_tokens, tokens)
        chunks = split_digests(key.digests)
        local = self.blocks.pin_prefix(chunks)
        lookup = partial(self.scheduler.submit_lookup, request_id, key, joins=True, announces=True)
        lease, lookup_seconds = _timed(lambda: lookup().result())
        try:
            self.blocks.pin_new(chunks, local)
            retrieved = chunks[local : lease.num_chunks]
            retrieved_bytes, retrieve_seconds = 0, 0.0
            if retrieved:
                run, blocks = key.slice(local, lease.num_chunks), self.blocks.of(retrieved)
                retrieve = self.context.submit_retrieve(request_id, run, [blocks])
                _, retrieve_seconds = _timed(retrieve.result)
                retrieved, retrieved_bytes = retrieved[: retrieve.num_chunks], retrieve.num_bytes
            wrong_bytes = sum(map(self.count_wrong_bytes, retrieved))
            own = sum(chunk in self._stored for chunk in retrieved)
            missing = chunks[local + len(retrieved) :]
            num_computed = len(tokens) - (len(chunks) - len(missing)) * self.chunk_tokens
            _, compute_seconds = _timed(lambda: self._compute_all(missing, num_computed))
            store = self.context.submit_store(request_id, key, [self.blocks.of(chunks)])
            _, store_seconds = _timed(store.result)
            self._stored.update(missing)
        finally:
            self.scheduler.end_request(request_id)
            self.blocks.unpin(chunks)
        return RequestReport(
            prompt_tokens=len(tokens),
            device_tokens=local * self.chunk_tokens,
            own_tokens=own * self.chunk_tokens,
            shared_tokens=(len(retrieved) - own) * self.chunk_tokens,
            computed_tokens=num_computed,
            lookup_seconds=lookup_seconds,
            retrieve_seconds=retrieve_seconds,
            compute_seconds=compute_seconds,
            retrieved_bytes=retrieved_bytes,
            store_seconds=store_seconds,
            stored_bytes=store.num_bytes,
            verified_bytes=len(retrieved) * self.chunk_tokens * self.geometry.bytes_per_token,
            wrong_bytes=wrong_bytes,
        )

    def abandon(self, request_id: str, tokens: Sequence[int]) -> RequestReport:
        """Look up a prompt and drop the request, without a further message to the depot."""
        key = hash_prefix(self._namespace, self.chunk_tokens, tokens)
        started = time.perf_counter()
        pending = self.scheduler.submit_lookup(request_id, key, joins=True, announces=True)
        pending.query()
        pending.cancel()
        self.scheduler.end_request(request_id)
        return RequestReport(prompt_tokens=0, lookup_seconds=time.perf_counter() - started)

    def compute(self, chunk: bytes) -> None:
        """Fill the chunk's blocks as a forward pass would, but with bytes derived from its key."""
        for page, seed in self._pages(chunk):
            self._pattern.write(page, seed)

    def count_wrong_bytes(self, chunk: bytes) -> int:
        """Return how many bytes of the chunk's blocks differ from the bytes derived from its key."""
        return sum(self._pattern.count_wrong_bytes(page, seed) for page, seed in self._pages(chunk))

    def _compute_all(self, chunks: Sequence[bytes], num_tokens: int) -> None:
        """Compute chunks; pause for the rest of the time that the model would take for `num_tokens`."""
        started = time.perf_counter()
        for chunk in chunks:
            self.compute(chunk)
        if self._tokens_per_second:
            time.sleep(max(0.0, started + num_tokens / self._tokens_per_second - time.perf_counter()))

    def _pages(self, chunk: bytes) -> Iterator[tuple[Any, Any]]:
        """Yield the pages of the chunk's blocks with the seeds of their bytes."""
        blocks = self.blocks.of([chunk])
        seeds = self._pattern.seeds(chunk, len(self.cache), len(blocks))
        for layer, of_layer in zip(self.cache, seeds, strict=True):
            yield from zip((layer[block] for block in blocks), of_layer, strict=True)

    def close(self) -> None:
        """Leave the depot."""
        self.context.close()
        self.scheduler.close()


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Return the result of `work` and the seconds that it took."""
    started = time.perf_counter()
    return work(), time.perf_counter() - started


class BlockTable:
    """Maps each chunk to its blocks. Chunks that no request uses stay until their blocks are needed, oldest first."""

    def __init__(self, num_slots: int, blocks_per_chunk: int) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._free = list(range(num_slots))
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by chunk, least recently used first
        self._pins: dict[bytes, int] = {}

    def pin_prefix(self, chunks: Sequence[bytes]) -> int:
        """Pin the leading chunks that are here; return how many."""
        count = 0
        for chunk in chunks:
            if chunk not in self._slots:
                break
            self._pin(chunk)
            count += 1
        return count

    def pin_new(self, chunks: Sequence[bytes], start: int) -> None:
        """Give blocks to chunks from `start` on, and pin them.

        Raises:
            ConfigError: too few blocks; the pins made so far stay.
        """
        for chunk in chunks[start:]:
            if chunk not in self._slots:
                self._slots[chunk] = self._take(len(chunks))
            self._pin(chunk)

    def unpin(self, chunks: Sequence[bytes]) -> None:
        """Undo the pins of a request; deeper chunks will be evicted first."""
        for chunk in reversed(chunks):
            count = self._pins.get(chunk, 0)
            if count > 1:
                self._pins[chunk] = count - 1
            elif count:
                del self._pins[chunk]
                self._slots.move_to_end(chunk)

    def of(self, chunks: Sequence[bytes]) -> list[int]:
        """Return the blocks of chunks, in token order."""
        step = self._blocks_per_chunk
        return [slot * step + place for slot in (self._slots[chunk] for chunk in chunks) for place in range(step)]

    def _pin(self, chunk: bytes) -> None:
        self._pins[chunk] = self._pins.get(chunk, 0) + 1

    def _take(self, needed: int) -> int:
        if self._free:
            return self._free.pop()
        for chunk in self._slots:
            if chunk not in self._pins:
                return self._slots.pop(chunk)
        raise ConfigError(f"the engine's cache is too small for a prompt of {needed} chunks")
