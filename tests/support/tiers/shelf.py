"""Entries by number, for tests of a tier that need no queue."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from kvdepot.testing.tier_traffic import EXTENT_BYTES, NUM_EXTENTS, content, make_key, make_pool
from kvdepot.tiers.base import Extents, Tier, TierPool
from support.tiers.direct import read_from, write_to

_HALF = NUM_EXTENTS // 2
T = TypeVar("T", bound=Tier)


class Shelf(Generic[T]):
    """A tier with a pool. Entry `n` has the key `make_key(n)`. Calls run on their thread, and errors propagate.

    Args:
        open_tier: opens the tier over a pool.
        size: bytes of each payload.
        pool: the pool; None makes one.
    """

    def __init__(
        self, open_tier: Callable[[TierPool], T], size: int = EXTENT_BYTES, pool: TierPool | None = None
    ) -> None:
        self.pool = pool or make_pool(NUM_EXTENTS * size)
        self.size = size
        self.tier = open_tier(self.pool)

    def put(self, *numbers: int) -> list[bool]:
        """Write entries from extents of their own, which hold their bytes."""
        keys, extents = self._places(numbers, 0)
        for key, (offset, size) in zip(keys, extents, strict=True):
            self.pool.view[offset : offset + size] = content(key, size)
        return write_to(self.tier, self.pool, keys, extents)

    def get(self, *numbers: int) -> list[bool]:
        """Read entries into other extents and check the bytes of those that arrive."""
        keys, extents = self._places(numbers, _HALF)
        for offset, size in extents:
            self.pool.view[offset : offset + size] = bytes(size)
        found = read_from(self.tier, self.pool, keys, extents)
        for key, (offset, size), is_here in zip(keys, extents, found, strict=True):
            assert not is_here or self.pool.view[offset : offset + size] == content(key, size), "wrong bytes"
        return found

    def has(self, *numbers: int) -> list[bool]:
        """Ask for entries."""
        return list(self.tier.contains([make_key(number) for number in numbers]))

    def clear(self) -> int:
        """Remove all entries. Return their number."""
        return sum(self.tier.clear(None, None))

    def close(self) -> None:
        self.tier.close()

    def __enter__(self) -> "Shelf[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _places(self, numbers: tuple[int, ...], first: int) -> tuple[list[bytes], Extents]:
        extents = [((first + number % _HALF) * self.size, self.size) for number in numbers]
        return [make_key(number) for number in numbers], extents


AnyShelf = Shelf[Any]
Shelve = Callable[..., AnyShelf]
