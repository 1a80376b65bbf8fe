"""The contract of a tier, for its author: storage below the pool."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kvdepot.counting import tier_counter

EVICTED: Final = tier_counter("evicted", "Entries removed to make room")

Extents = Sequence[tuple[int, int]]
"""Places in the pool: `(offset, payload bytes)` of each; offsets are multiples of 4 KiB, and so is the space behind."""


@dataclass(frozen=True, slots=True)
class TierPool:
    """The pool, as a tier sees it; valid until the tier is closed."""

    fd: int  # the pool's file, to map it in another process
    view: memoryview  # all of it, writable


@dataclass(frozen=True, slots=True)
class TierUsage:
    """The contents of a tier, as far as it knows without asking the storage. Sizes are bytes; 0 stands for unknown.

    A tier that evicts on its own counts the removed entries as `EVICTED`. `/metrics` shows all
    counters of a tier, with a sentence for those that `kvdepot.counting.tier_counter` declares.
    """

    num_entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    counters: Mapping[str, int] = field(default_factory=dict[str, int])


class Tier(Protocol):
    """Storage below the pool. Derive from this class and write eight plain calls, which may wait for the storage.

    Two more, `touch` and `outdate`, are for storage that evicts what is not used.

    A key of `kvdepot.tiers.keys.KEY_BYTES` bytes names an entry: a payload, and a trailer of 120 bytes. Payloads move
    straight between the pool's extents and the storage. The tier keeps each trailer beside its payload and returns it.
    The depot makes and verifies the trailers, removes entries that do not match, and counts them. So a tier may always
    miss, and storage that returns other bytes costs misses only.

    The depot calls from several threads at a time (`TierQueue`). A call may take long, hang or raise: its operation
    ends at its deadline, and repeated failures suspend the tier until `probe` returns. A call owns its extents until it
    returns.

    The entry point group `kvdepot.tiers` names the opener of each URL scheme:
    `open_tier(url: kvdepot.tiers.url.TierUrl, pool: TierPool) -> Tier`. It raises `ConfigError` for a URL that cannot
    work, and returns within a second even if the storage does not answer.
    """

    batch_entries: int = 16
    """The most entries of one call. Calls run concurrently."""

    keeps_runs: bool = False
    """Whether the tier keeps runs. It wants places, too.

    Questions then have all chunks of a prefix from the run's first one on, and a call reads or writes entries of one
    run.
    """

    wants_places: bool = False
    """Whether keys have the entry's run and the depth of its chunk behind them (`keys.run_of`, `keys.depth_of`)."""

    @property
    def writer_pid(self) -> int:
        """The pid of the process that touches the pool for this tier; 0 for the depot's own."""
        return 0

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """Return which keys are probably here; a hint."""
        ...

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bool]:
        """Return which entries are here, and note a use of each: the pool has them, and engines ask for them.

        The depot asks about a used prefix once a second, its first chunk first, and writes the missing entries again.
        So this should find out whether all of an entry is here, if that is cheap.

        Args:
            keys: of entries.
            sizes: bytes of their payloads.
        """
        del sizes
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """Store entries; return True for each that is here afterwards, which it may have been before."""
        ...

    def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
        """Fill extents and return the trailer stored beside each payload; None for an entry that is not here.

        Return b"" for an entry that cannot be the one written, for example because it has another size. The depot
        removes it. The extents of such entries and of misses may hold anything.
        """
        ...

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove the entries that are here."""
        ...

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """Remove the entries with these labels in their keys (None: any), in steps with a deadline each.

        Yield after each step how many entries it removed, as far as that is known.
        """
        ...

    def outdate(self, generations: Container[bytes]) -> None:
        """Let the entries of these generations (`keys.generation_of`) leave first, as no engine uses their weights.

        Storage that does not choose what it evicts ignores that.
        """

    def probe(self) -> None:
        """Return if the storage answers, and raise if it does not. Must be cheap."""
        ...

    def usage(self) -> TierUsage:
        """Return the contents. Must not wait."""
        ...

    def close(self) -> None:
        """Stop within a bounded time, even while other calls run. A second call does nothing."""
        ...
