"""What the parts ask of each other: contexts and futures of an accelerator, backends, tiers, eviction policies."""

import enum
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from kvdepot.keys import KeyRun

T_co = TypeVar("T_co", covariant=True)

BlockIds = Sequence[Sequence[int]]
"""Block ids of a run of chunks, one sequence for each layer group, in token order.

A sequence may cover fewer chunks than the run: then it covers the run's *last* chunks (a sliding window holds only the
end of a prefix, a recurrent group one state for its last chunks). Always whole chunks."""


@runtime_checkable
class TransferFuture(Protocol[T_co]):
    """The outcome of one store or retrieve. The adapter that submitted it owns it and polls it.

    Until it is done the engine must neither write nor free the blocks of the transfer.
    """

    @property
    def num_chunks(self) -> int:
        """Once done: leading chunks of the run that are in place (retrieve) or in the depot (store)."""
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

    def create_context(self, *args: Any, **kwargs: Any) -> TransferContext:
        """Return a context; the arguments are the backend's own.

        Raises:
            BackendUnavailable: `why_unavailable` is not None.
        """
        ...


class Tier(Protocol):
    """Storage below the pool. Moves `(key, extent)` descriptors; extents are offsets and bytes in the pool.

    Every call returns at once; results come by `poll`. A tier may always miss.
    """

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Say which keys are probably here; a hint."""
        ...

    def submit_write(self, job: int, keys: Sequence[bytes], extents: Sequence[tuple[int, int]]) -> bool:
        """Write extents; False if the queue is full. The extents stay pinned until the job is reported."""
        ...

    def submit_read(self, job: int, keys: Sequence[bytes], extents: Sequence[tuple[int, int]]) -> bool:
        """Read into extents; False if the queue is full."""
        ...

    def poll(self) -> Iterable[tuple[int, Sequence[bool]]]:
        """Return the jobs that ended, with what became of each key."""
        ...

    def close(self) -> None:
        """Stop within a bounded time. Twice is harmless."""
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
