"""What the parts ask of each other: contexts and futures of an accelerator, backends, tiers, eviction policies."""

import argparse
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

from kvdepot.keys import KeyRun
from kvdepot.layout import GroupKind
from kvdepot.messages import CacheSpec

T_co = TypeVar("T_co", covariant=True)

BlockIds = Sequence[Sequence[int]]
"""Block ids of a run of chunks, one sequence for each layer group, in token order.

A sequence may cover fewer chunks than the run: then it covers the run's *last* chunks (a sliding window holds only the
end of a prefix, a recurrent group one state for its last chunks). Always whole chunks. In a retrieve `NO_BLOCK` stands
for a block that is not wanted (before the window, in the first chunk that it reaches)."""

NO_BLOCK: Final = -1


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One layer group of an engine's KV cache, as a backend gets it.

    `tensors` has one tensor for each layer (or two, keys and values), each `(num_blocks, ...)` with the blocks as first
    dimension, on the backend's device: anything with `data_ptr`, `stride`, `element_size` and `shape`, in host memory
    also with `__array_interface__`. Blocks may be padded or interleaved with other layers', but the bytes of one block
    of one tensor are contiguous; where they do not lie in the order of the tensor's dimensions, the context's `format`
    names the order. The rest describes the group to the depot and its operator.
    """

    tensors: Sequence[Any]
    block_tokens: int
    kind: GroupKind = GroupKind.FULL_ATTENTION
    window_tokens: int = 0
    shard: int = 0
    num_shards: int = 1
    num_layers: int = 0  # 0: one a tensor
    physical_block_tokens: int = 0  # 0: the same as the logical block
    compress_ratio: int = 1
    hidden_dims: tuple[int, ...] = ()
    is_mla: bool = False
    attention_backend: str = ""


@runtime_checkable
class TransferFuture(Protocol[T_co]):
    """The outcome of one store or retrieve. The adapter that submitted it owns it and polls it.

    Until it is done the engine must neither write nor free the blocks of the transfer.
    """

    @property
    def num_chunks(self) -> int:
        """Once done: leading chunks of the run that are in place (retrieve) or in the depot (store)."""
        ...

    @property
    def num_bytes(self) -> int:
        """Once done: bytes that this transfer moved."""
        ...

    @property
    def seconds(self) -> float:
        """Once done: how long it took, waiting in the queue left out."""
        ...

    def query(self) -> bool:
        """Return whether it is done. Never waits."""
        ...

    def result(self, timeout_seconds: float | None = None) -> T_co:
        """Wait for and return the outcome: True if the whole run was moved, False if the depot had or took less.

        A depot that is away is a False, not an exception.

        Raises:
            TimeoutError: not done within `timeout_seconds`.
        """
        ...


class ReadyEvent(Protocol):
    """What a device records when the blocks of a store are written, for example `torch.cuda.Event`."""

    def synchronize(self) -> None:
        """Wait until the work before the event is done."""
        ...


class TransferContext(Protocol):
    """Moves blocks between one worker's paged KV cache and the depot.

    Submitting never waits for the device or the depot. A context keeps no list of what is pending: the caller owns the
    futures. Several transfers of one request are several futures.
    """

    @property
    def spec(self) -> CacheSpec:
        """What decides who can share; the scheduler of the same engine looks up with an equal one."""
        ...

    @property
    def is_connected(self) -> bool:
        """Whether a depot is there now."""
        ...

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: none within `timeout_seconds`; the text says why.
        """
        ...

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """Store the chunks of `key` that the depot lacks, once `ready` has happened.

        The blocks are read at any time until the future is done.

        Raises:
            LayoutError: `block_ids` do not fit the key or the cache.
        """
        ...

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """Fill the blocks with the chunks of `key`.

        The blocks of the first `skip_tokens` tokens of the run (whole blocks of every group) are left as they are.
        After a False the blocks behind the first `num_chunks` chunks hold nothing of use.

        Raises:
            LayoutError: `block_ids` or `skip_tokens` do not fit the key or the cache.
        """
        ...

    def close(self) -> None:
        """Finish what is running and leave the depot. Twice is harmless."""
        ...


class Capability(enum.StrEnum):
    """What a backend can do beyond store and retrieve."""

    ASYNCHRONOUS = "asynchronous"  # transfers run beside the caller
    COMPILED_COPY = "compiled_copy"  # the backend's own copy was built; without it copies are slower
    DEPOT_DRIVEN = "depot_driven"  # a mover of the depot can copy


class Backend(Protocol):
    """An accelerator, as found under the entry point group `kvdepot.backends`. Finding it imports nothing heavy."""

    @property
    def name(self) -> str:
        """The entry point's name."""
        ...

    @property
    def device_type(self) -> str:
        """The device type as in `torch.device`."""
        ...

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What it can do."""
        ...

    def why_unavailable(self) -> str | None:
        """Return None if it can be used here, else a sentence with the way out."""
        ...

    def create_context(
        self,
        groups: Sequence[CacheGroup],
        instance: str,
        *,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        format: str = "",  # noqa: A002  # the field's word
        chunk_tokens: int | None = None,
        url: str | None = None,
        deadline_seconds: float = 2.0,
        **options: Any,
    ) -> TransferContext:
        """Return a context for one worker.

        Args:
            groups: the cache; its tensors are kept alive until `close`.
            instance: the engine's name.
            dtype: of the cache, for example "bfloat16".
            rank: of this worker.
            world_size: workers of the engine.
            model: for the operator.
            format: how the bytes inside a block are arranged; caches that differ in it never share.
            chunk_tokens: None for the default (`default_chunk_tokens`). All workers and the scheduler say the same.
            url: the depot, None for the one in the default directory.
            deadline_seconds: of each request to the depot.
            options: the backend's own.

        Raises:
            BackendUnavailable: `why_unavailable` is not None.
            LayoutError: the tensors are not what they are said to be.
        """
        ...


class DeviceBench(Protocol):
    """A bench of one accelerator, named by its entry point under `kvdepot.benches`: `kvdepot bench NAME`.

    Finding it imports nothing heavy.
    """

    @property
    def help(self) -> str:
        """One line for the list of benches."""
        ...

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add its own options; `--json` is there."""
        ...

    def run(self, options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
        """Measure, say a line for people now and then, and return all of it for JSON.

        Raises:
            BackendUnavailable: no such device here.
        """
        ...


Extents = Sequence[tuple[int, int]]
"""Places in the pool: `(offset, payload bytes)` of each; offsets are multiples of 4 KiB, and so is the space behind."""


@dataclass(frozen=True, slots=True)
class TierPool:
    """The pool, as storage below it gets it: valid until the tier is closed."""

    fd: int  # the pool's file, for who maps it in another process
    view: memoryview  # all of it, writable


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a tier holds, as far as it knows without asking; sizes are bytes, 0 stands for unknown.

    One that makes room by itself counts the entries that left as "evicted".
    """

    num_entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=dict[str, int])


class Tier(Protocol):
    """Storage below the pool, as its author writes it: plain calls that wait for the storage.

    Entries are named by keys of `kvdepot.tiers.keys.KEY_BYTES` bytes, and their bytes are moved straight between the
    pool's extents and the storage. The depot calls from threads of its own, several at a time (`TierQueue`): a call may
    take long, hang or raise, which ends that operation at its deadline and, if it happens again, the use of the tier
    until `probe` returns. The extents of a call belong to it until it returns. A tier may always miss; what it reads is
    compared with its checksum before it is believed (`kvdepot.tiers.seal`), and what does not verify is removed and
    counted as "corrupt" in `usage().counters`.

    A tier is opened by an object under the entry point group `kvdepot.tiers`, named by the URL's scheme:
    `open_tier(url: kvdepot.tiers.url.TierUrl, pool: TierPool) -> Tier`. It raises `ConfigError` for a URL that cannot
    work, and returns within a second even if the storage does not answer.
    """

    @property
    def batch_entries(self) -> int:
        """How many entries one call takes at most; calls run side by side."""
        ...

    @property
    def writer_pid(self) -> int:
        """The process that touches the pool for this tier, 0 for the depot's own."""
        ...

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Say which keys are probably here; a hint."""
        ...

    def write(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """Store entries; True for each that is here afterwards, which it may have been before."""
        ...

    def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """Fill extents; True for each that holds what was written under its key. The others may hold anything."""
        ...

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """Remove the entries with these labels in their keys (None: any), in steps; each has a deadline of its own.

        Yields after each how many it removed, as far as that is known.
        """
        ...

    def probe(self) -> None:
        """Return if the storage answers, raise if not; cheap."""
        ...

    def usage(self) -> TierUsage:
        """Return what it holds. Never waits."""
        ...

    def close(self) -> None:
        """Stop within a bounded time. Twice is harmless; other calls may be under way."""
        ...


class EvictionPolicy(Protocol):
    """Chooses which chunk leaves next. Nodes are small integers of the index; a parent outlives its children.

    The index tells it what happens; `victim` only proposes nodes for which `evictable` is true.
    """

    def added(self, node: int) -> None:
        """A chunk is complete and may be found from now on."""
        ...

    def used(self, node: int) -> None:
        """A prefix that ends with this chunk was used: it and its ancestors, deepest first."""
        ...

    def unpinned(self, node: int) -> None:
        """A node became evictable again: its last lease ended or its last child left."""
        ...

    def removed(self, node: int) -> None:
        """A chunk left, evicted or cleared. The number may come again for another chunk."""
        ...

    def victim(self) -> int | None:
        """Return the next chunk to evict without removing it, None if nothing can be."""
        ...
