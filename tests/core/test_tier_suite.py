"""The suite of tiers passes on a tier in memory, and fails on ones that are wrong."""

from collections.abc import Iterable, Sequence

import pytest

from kvdepot.protocols import Tier
from kvdepot.testing.tier import EXTENT_BYTES, POOL_BYTES, TierSuite

Extents = Sequence[tuple[int, int]]


class MemoryTier:
    def __init__(self, pool: memoryview, capacity: int = 32) -> None:
        self.pool, self.capacity = pool, capacity
        self.values: dict[bytes, bytes] = {}
        self.done: list[tuple[int, list[bool]]] = []

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.values for key in keys]

    def submit_write(self, job: int, keys: Sequence[bytes], extents: Extents) -> bool:
        for key, (offset, num_bytes) in zip(keys, extents, strict=True):
            self.values[key] = bytes(self.pool[offset : offset + num_bytes])
            if len(self.values) > self.capacity:
                del self.values[next(iter(self.values))]
        self.done.append((job, [True] * len(keys)))
        return True

    def submit_read(self, job: int, keys: Sequence[bytes], extents: Extents) -> bool:
        found = self.contains(keys)
        for key, (offset, num_bytes), is_here in zip(keys, extents, found, strict=True):
            if is_here:
                self.pool[offset : offset + num_bytes] = self.values[key]
        self.done.append((job, found))
        return True

    def poll(self) -> Iterable[tuple[int, Sequence[bool]]]:
        done, self.done = self.done, []
        return done

    def close(self) -> None:
        self.values.clear()


class TestMemoryTier(TierSuite):
    def make_tier(self, pool: memoryview) -> Tier:
        return MemoryTier(pool)


class SwappingTier(MemoryTier):
    """Reads what was written last, whatever the key."""

    def submit_read(self, job: int, keys: Sequence[bytes], extents: Extents) -> bool:
        last = list(self.values)[-1:] or [b""]
        return super().submit_read(job, last * len(keys), extents)


def test_a_tier_that_mixes_keys_up_fails_the_suite() -> None:
    pool = memoryview(bytearray(POOL_BYTES))
    assert POOL_BYTES >= 64 * EXTENT_BYTES
    with pytest.raises(AssertionError):
        TierSuite().test_random_traffic_is_right_bytes_or_a_miss(SwappingTier(pool), pool)
