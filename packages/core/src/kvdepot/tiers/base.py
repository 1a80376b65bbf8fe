"""What a tier is: storage below the pool, as its author writes it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

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
    """Storage below the pool. Derive from this class and write seven plain calls, which may wait for the storage.

    Keys of `kvdepot.tiers.keys.KEY_BYTES` bytes name the entries. Their bytes move straight between the pool's extents
    and the storage. The depot calls from several threads at a time (`TierQueue`). A call may take long, hang or raise:
    its operation ends at its deadline, and repeated failures suspend the tier until `probe` returns. A call owns its
    extents until it returns. A tier may always miss. It compares what it reads with the checksum in its seal
    (`kvdepot.tiers.seal`), removes what does not match, and counts it as "corrupt" in `usage().counters`.

    The entry point group `kvdepot.tiers` names the opener of each URL scheme:
    `open_tier(url: kvdepot.tiers.url.TierUrl, pool: TierPool) -> Tier`. It raises `ConfigError` for a URL that cannot
    work, and returns within a second even if the storage does not answer.
    """

    batch_entries: int = 16
    """How many entries one call takes at most; calls run side by side."""

    @property
    def writer_pid(self) -> int:
        """The process that touches the pool for this tier, 0 for the depot's own."""
        return 0

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
