"""The contract of a tier, for its author: storage below the pool."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvdepot.counting import tier_counter

EVICTED: Final = tier_counter("evicted", "Entries removed to make room")

Extents = Sequence[tuple[int, int]]
"""Places in the pool: `(offset, payload bytes)` of each. Extents begin and end at multiples of 4 KiB."""


@dataclass(frozen=True, slots=True)
class TierPool:
    """A tier's view of the pool, valid until the tier is closed."""

    fd: int  # the pool's file, for mapping it in another process
    view: memoryview  # the whole pool, writable


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The contents of a tier, as far as it knows them without asking the storage. Sizes are bytes; 0 means unknown.

    A tier that evicts by itself counts the evicted entries as `EVICTED`. `/metrics` exports all counters of a tier,
    with a description if they are declared by `kvdepot.counting.tier_counter`.
    """

    num_entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=dict[str, int])


class Tier(Protocol):
    """Storage below the pool. Derive from this class and implement eight plain calls, which may wait for the storage.

    Two more, `touch` and `outdate`, are for storage that evicts unused entries.

    A key of `kvdepot.tiers.keys.KEY_BYTES` bytes identifies an entry: a payload, and a trailer of 120 bytes. Payloads
    move directly between the pool's extents and the storage. The tier keeps each trailer beside its payload and returns
    it. The depot creates and verifies the trailers, and removes and counts entries that do not match. So a tier may
    always miss, and storage that returns wrong bytes causes only misses.

    The depot calls the tier from several threads (`TierQueue`). A call may take long, hang or raise: its operation ends
    at its deadline, and repeated failures suspend the tier until `probe` succeeds. A call owns its extents until it
    returns.

    The entry point group `kvdepot.tiers` names the opener of each URL scheme:
    `open_tier(url: kvdepot.tiers.url.TierUrl, pool: TierPool) -> Tier`. It raises `ConfigError` for a URL that cannot
    work, and returns within a second even if the storage does not answer.
    """

    batch_entries: int = 16
    """The maximum number of entries per call. Calls run concurrently."""

    reads_apart: bool = False
    """Whether each entry is read by a call of its own, so that all threads read the entries that a lookup waits for."""

    ends_stalled_reads: bool = False
    """Whether a read raises when no byte arrives within a deadline. Then one that goes on may take ten deadlines."""

    most_writes: int = 255
    """The maximum number of concurrent writes. There are fewer if the tier has no more threads than that."""

    keeps_runs: bool = False
    """Whether the tier keeps runs (`kvdepot.tiers.runs`). A tier with runs must also set `wants_places`.

    A question then contains all chunks of a prefix from the first one of a run on, and each call that reads or writes
    has entries of a single run.
    """

    gathers_stores: bool = False
    """Whether each call costs a request or a round trip. Then stores wait for those that continue them
    (`kvdepot.tiers.gathering`), and the tier is asked before they are written, as another node may have written them.
    """

    contains_is_instant: bool = False
    """Whether `contains` only reads memory. Then the depot's loop calls it, so that lookups wait for no thread."""

    wants_places: bool = False
    """Whether the entry's run and the depth of its chunk follow each key (`keys.run_of`, `keys.depth_of`)."""

    @property
    def declines_writes(self) -> bool:
        """Whether the storage refuses all writes now, while reads go on. Then the depot writes nothing there."""
        return False

    @property
    def is_overloaded(self) -> bool:
        """Whether the storage refuses many requests because there are too many. Then the depot suspends the tier.

        A probe that succeeds makes this False.
        """
        return False

    @property
    def writer_pid(self) -> int:
        """The pid of the process that accesses the pool for this tier; 0 for the depot's own."""
        return 0

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return which keys the tier probably has. This is only a hint."""
        ...

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bool]:
        """Return which entries the tier has, and count a use of each, as engines use them from the pool.

        The depot asks about a used prefix once a second, from its first chunk on, and writes missing entries again. So
        this should check that an entry is complete, if that is cheap.

        Args:
            keys: the keys of the entries.
            sizes: the sizes of their payloads in bytes.
        """
        del sizes
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """Store entries. Return True for each entry that the tier has afterwards, even if it had it before."""
        ...

    def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
        """Fill extents. Return the trailer stored beside each payload, None for a missing entry.

        Return b"" for an entry that cannot be the written one, for example because its size differs. The depot removes
        it. The extents of such entries and of misses may contain anything.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove entries, if the tier has them."""
        ...

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """Remove the entries whose keys have these hashes of names (None: any), in steps with a deadline each.

        Yield the number of removed entries after each step, as far as it is known.
        """
        ...

    def outdate(self, generations: Container[bytes]) -> None:
        """Evict the entries of these generations (`keys.generation_of`) first: no engine uses their weights now.

        Storage that does not choose what it evicts ignores this.
        """

    def probe(self) -> None:
        """Raise if the storage does not answer. Must be cheap."""
        ...

    def usage(self) -> TierUsage:
        """Return the contents. Must not wait."""
        ...

    def close(self) -> None:
        """Stop within a bounded time, even while other calls run. Idempotent."""
        ...
