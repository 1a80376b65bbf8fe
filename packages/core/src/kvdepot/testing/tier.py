"""The conformance suite of tiers: storage below the pool that moves `(key, extent)` descriptors.

A tier's tests inherit `TierSuite` and make a tier over a given piece of memory, which stands for the pool. A tier may
always miss; it may never read other bytes than were written under a key.
"""

import random
from collections.abc import Iterator, Sequence

import pytest

from kvdepot.protocols import Tier
from kvdepot.testing.processes import wait_until

EXTENT_BYTES = 4096
POOL_BYTES = 64 * EXTENT_BYTES


class TierSuite:
    """Inherit it, name the class `Test...`, and implement `make_tier`."""

    def make_tier(self, pool: memoryview) -> Tier:
        """Return an empty tier that reads and writes extents of `pool`, and holds at least 32 of 4 KiB."""
        raise NotImplementedError

    @pytest.fixture
    def pool(self) -> memoryview:
        """Memory that stands for the pool."""
        return memoryview(bytearray(POOL_BYTES))

    @pytest.fixture
    def tier(self, pool: memoryview) -> Iterator[Tier]:
        """The tier under test."""
        tier = self.make_tier(pool)
        yield tier
        tier.close()

    def test_what_was_written_is_read_back_into_other_extents(self, tier: Tier, pool: memoryview) -> None:
        """Byte for byte."""
        keys = [_key(number) for number in range(8)]
        _fill(pool, 0, keys)
        assert _write(tier, 1, keys, _extents(0, 8)) == [True] * 8
        assert _read(tier, 2, keys, _extents(16, 8)) == [True] * 8
        assert pool[16 * EXTENT_BYTES : 24 * EXTENT_BYTES] == pool[: 8 * EXTENT_BYTES]

    def test_what_was_never_written_is_a_miss(self, tier: Tier, pool: memoryview) -> None:
        """And writes nothing."""
        assert _read(tier, 1, [_key(1)], _extents(0, 1)) == [False]
        assert not any(tier.contains([_key(1), _key(2)]))

    def test_one_miss_does_not_cost_the_others(self, tier: Tier, pool: memoryview) -> None:
        """Each key has an outcome of its own."""
        _fill(pool, 0, [_key(0), _key(2)])
        _write(tier, 1, [_key(0), _key(2)], _extents(0, 2))
        assert _read(tier, 2, [_key(0), _key(1), _key(2)], _extents(8, 3)) == [True, False, True]

    def test_existence_is_known_after_a_write(self, tier: Tier, pool: memoryview) -> None:
        """A hint, but not a useless one."""
        _fill(pool, 0, [_key(0)])
        _write(tier, 1, [_key(0)], _extents(0, 1))
        assert list(tier.contains([_key(0), _key(1)])) == [True, False]

    def test_random_traffic_is_right_bytes_or_a_miss(self, tier: Tier, pool: memoryview) -> None:
        """Keys written again, more of them than have to fit."""
        rng = random.Random(3)
        hits = 0
        for job in range(100):
            keys = [_key(number) for number in rng.sample(range(48), 4)]
            if rng.random() < 0.5:
                _fill(pool, 0, keys)
                _write(tier, job, keys, _extents(0, 4))
                continue
            for place, is_here in enumerate(_read(tier, job, keys, _extents(32, 4))):
                if is_here:
                    start = (32 + place) * EXTENT_BYTES
                    assert pool[start : start + EXTENT_BYTES] == _content(keys[place]), "wrong bytes were read"
                    hits += 1
        assert hits > 0

    def test_closing_twice_is_harmless(self, tier: Tier) -> None:
        """No exception, no hang."""
        tier.close()
        tier.close()


def _key(number: int) -> bytes:
    return number.to_bytes(32, "little")


def _content(key: bytes) -> bytes:
    return random.Random(key).randbytes(EXTENT_BYTES)


def _extents(first: int, count: int) -> list[tuple[int, int]]:
    return [((first + place) * EXTENT_BYTES, EXTENT_BYTES) for place in range(count)]


def _fill(pool: memoryview, first: int, keys: Sequence[bytes]) -> None:
    for place, key in enumerate(keys, first):
        pool[place * EXTENT_BYTES : (place + 1) * EXTENT_BYTES] = _content(key)


def _write(tier: Tier, job: int, keys: Sequence[bytes], extents: Sequence[tuple[int, int]]) -> list[bool]:
    assert tier.submit_write(job, keys, extents)
    return _outcome(tier, job)


def _read(tier: Tier, job: int, keys: Sequence[bytes], extents: Sequence[tuple[int, int]]) -> list[bool]:
    assert tier.submit_read(job, keys, extents)
    return _outcome(tier, job)


def _outcome(tier: Tier, job: int) -> list[bool]:
    found: dict[int, list[bool]] = {}

    def is_done() -> bool:
        found.update((number, list(outcome)) for number, outcome in tier.poll())
        return job in found

    wait_until(is_done, what=f"the outcome of job {job}")
    assert set(found) == {job}
    return found[job]
