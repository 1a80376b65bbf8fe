"""The conformance suite of tiers: storage below the pool that moves `(key, extent)` descriptors.

A tier's tests inherit `TierSuite` and open a tier over a given pool, through the queue that the depot drives it with. A
tier may always miss; it may never read other bytes than were written under a key. `FaultyTier` stands between a queue
and a tier and does what storage does on bad days.
"""

import enum
import random
import threading
from collections.abc import Iterator, Sequence
from mmap import mmap
from typing import Final

import pytest

from kvdepot.keys import DIGEST_BYTES
from kvdepot.protocols import Extents, Tier, TierPool, TierUsage
from kvdepot.testing.processes import wait_until
from kvdepot.tiers.keys import label_of, place_of, tier_key
from kvdepot.tiers.queue import Job, Operation, TierQueue

EXTENT_BYTES: Final = 8192
NUM_EXTENTS: Final = 96
SIZES: Final = (8192, 4096, 5000, 1)  # payloads; the space behind a payload belongs to its extent

PLACE: Final = place_of(b"a spec", 0, 0, 7, EXTENT_BYTES)


class Damage(enum.Enum):
    """What happened to a stored entry behind the tier's back."""

    FLIPPED = "one bit of its payload"
    TRUNCATED = "its end is missing"
    SWAPPED = "another entry's bytes lie in its place"


class TierSuite:
    """Inherit it, name the class `Test...`, and implement `open_tier`, and `damage` where that can be done."""

    def open_tier(self, pool: TierPool) -> Tier:
        """Return a tier over the storage of this test: empty the first time, the same storage when called again.

        It holds at least 64 entries of 8 KiB.
        """
        raise NotImplementedError

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        """Damage the stored entry `key`; for `SWAPPED` put what is stored for `other` in its place."""
        pytest.skip("this tier's storage cannot be damaged from here")

    survives_restart: bool = True  # whether a tier opened again finds what the one before wrote

    @pytest.fixture
    def pool(self) -> TierPool:
        """Memory that stands for the pool."""
        return make_pool()

    @pytest.fixture
    def queue(self, pool: TierPool) -> Iterator[TierQueue]:
        """The tier under test, with its queue."""
        queue = TierQueue(self.open_tier(pool), pool, "test", deadline_seconds=10.0)
        yield queue
        queue.close()

    def test_what_was_written_is_read_back_into_other_extents(self, queue: TierQueue, pool: TierPool) -> None:
        """Byte for byte, for payloads of any size."""
        keys = [make_key(number) for number in range(8)]
        sizes = [SIZES[number % len(SIZES)] for number in range(8)]
        fill(pool, 0, keys, sizes)
        assert write(queue, keys, extents_of(0, sizes)) == [True] * 8
        assert read(queue, keys, extents_of(16, sizes)) == [True] * 8
        for number, (key, size) in enumerate(zip(keys, sizes, strict=True)):
            start = (16 + number) * EXTENT_BYTES
            assert pool.view[start : start + size] == content(key, size)

    def test_nothing_outside_the_extents_is_touched(self, queue: TierQueue, pool: TierPool) -> None:
        """Neither by a hit nor by a miss."""
        keys = [make_key(number) for number in range(4)]
        fill(pool, 0, keys, list(SIZES))
        write(queue, keys, extents_of(0, SIZES))
        before = bytes(pool.view)
        read(queue, [*keys, make_key(9)], extents_of(32, [*SIZES, 4096]))
        after = bytearray(pool.view)
        for place in range(32, 37):
            after[place * EXTENT_BYTES : (place + 1) * EXTENT_BYTES] = before[
                place * EXTENT_BYTES : (place + 1) * EXTENT_BYTES
            ]
        assert bytes(after) == before

    def test_what_was_never_written_is_a_miss(self, queue: TierQueue) -> None:
        """And is not said to be there."""
        assert read(queue, [make_key(1)], extents_of(0, [4096])) == [False]
        assert contains(queue, [make_key(1), make_key(2)]) == [False, False]

    def test_one_miss_does_not_cost_the_others(self, queue: TierQueue, pool: TierPool) -> None:
        """Each key has an outcome of its own."""
        keys = [make_key(0), make_key(2)]
        fill(pool, 0, keys, [4096] * 2)
        write(queue, keys, extents_of(0, [4096] * 2))
        wanted = [make_key(0), make_key(1), make_key(2)]
        assert read(queue, wanted, extents_of(8, [4096] * 3)) == [True, False, True]

    def test_existence_is_known_after_a_write(self, queue: TierQueue, pool: TierPool) -> None:
        """A hint, but not a useless one."""
        fill(pool, 0, [make_key(0)], [4096])
        write(queue, [make_key(0)], extents_of(0, [4096]))
        assert contains(queue, [make_key(0), make_key(1)]) == [True, False]

    def test_an_entry_of_another_size_is_a_miss(self, queue: TierQueue, pool: TierPool) -> None:
        """The payload's size is part of what is asked for."""
        fill(pool, 0, [make_key(0)], [4096])
        write(queue, [make_key(0)], extents_of(0, [4096]))
        assert read(queue, [make_key(0)], extents_of(1, [8192])) == [False]
        assert read(queue, [make_key(0)], extents_of(1, [2048])) == [False]

    def test_writing_twice_is_harmless(self, queue: TierQueue, pool: TierPool) -> None:
        """The same key has the same bytes."""
        fill(pool, 0, [make_key(0)], [4096])
        assert write(queue, [make_key(0)], extents_of(0, [4096])) == [True]
        assert write(queue, [make_key(0), make_key(0)], extents_of(0, [4096]) * 2) == [True, True]
        assert read(queue, [make_key(0)], extents_of(1, [4096])) == [True]

    @pytest.mark.promise(30)
    @pytest.mark.parametrize("how", Damage)
    def test_a_damaged_entry_is_a_miss_counted_and_gone(self, queue: TierQueue, pool: TierPool, how: Damage) -> None:
        """Also with checksums that are right for something else; the others are served."""
        keys = [make_key(0), make_key(1), make_key(2)]
        fill(pool, 0, keys, [8192] * 3)
        write(queue, keys, extents_of(0, [8192] * 3))
        self.damage(keys[0], keys[1], how)
        assert read(queue, keys, extents_of(8, [8192] * 3)) == [False, True, True]
        assert queue.tier.usage().counters["corrupt"] == 1
        wait_until(lambda: contains(queue, keys) == [False, True, True], what="the damaged entry's removal")
        fill(pool, 0, keys, [8192] * 3)
        assert write(queue, keys[:1], extents_of(0, [8192])) == [True]
        assert read(queue, keys[:1], extents_of(8, [8192])) == [True]

    def test_clear_removes_a_tenant_or_a_model_and_nothing_else(self, queue: TierQueue, pool: TierPool) -> None:
        """By the labels in the keys."""
        keys = [make_key(0, "a", "m"), make_key(1, "a", "n"), make_key(2, "b", "m"), make_key(3, "b", "n")]
        fill(pool, 0, keys, [4096] * 4)
        write(queue, keys, extents_of(0, [4096] * 4))
        clear(queue, label_of("a"), label_of("n"))
        assert contains(queue, keys) == [True, False, True, True]
        clear(queue, label_of("a"), None)
        assert contains(queue, keys) == [False, False, True, True]
        clear(queue, None, label_of("m"))
        assert contains(queue, keys) == [False, False, False, True]
        clear(queue, None, None)
        assert contains(queue, keys) == [False] * 4

    def test_a_tier_that_is_opened_again_finds_what_was_written(self, pool: TierPool) -> None:
        """If its storage outlives it."""
        if not self.survives_restart:
            pytest.skip("this storage ends with the tier")
        keys = [make_key(number) for number in range(4)]
        fill(pool, 0, keys, [8192] * 4)
        queue = TierQueue(self.open_tier(pool), pool, "test")
        write(queue, keys, extents_of(0, [8192] * 4))
        queue.close()
        queue = TierQueue(self.open_tier(pool), pool, "test")
        try:
            wait_until(lambda: all(contains(queue, keys)), what="the entries of before")
            assert read(queue, keys, extents_of(8, [8192] * 4)) == [True] * 4
            assert pool.view[8 * EXTENT_BYTES : 12 * EXTENT_BYTES] == pool.view[: 4 * EXTENT_BYTES]
        finally:
            queue.close()

    def test_random_traffic_is_right_bytes_or_a_miss(self, queue: TierQueue, pool: TierPool) -> None:
        """Keys written again, several jobs at a time."""
        rng = random.Random(3)
        hits = 0
        for _ in range(60):
            keys = [make_key(number) for number in rng.sample(range(48), 8)]
            sizes = [SIZES[key[-1] % len(SIZES)] for key in keys]
            fill(pool, 0, keys[:4], sizes[:4])
            jobs = [
                Job(Operation.WRITE, keys[:4], extents_of(0, sizes[:4])),
                Job(Operation.READ, keys[4:], extents_of(32, sizes[4:])),
            ]
            outcomes = run(queue, *jobs)
            for place, (key, size, is_here) in enumerate(zip(keys[4:], sizes[4:], outcomes[1], strict=True), 32):
                if is_here:
                    start = place * EXTENT_BYTES
                    assert pool.view[start : start + size] == content(key, size), "wrong bytes were read"
                    hits += 1
        assert hits > 0

    def test_the_storage_answers_a_probe(self, queue: TierQueue) -> None:
        """Cheaply, by not raising."""
        queue.tier.probe()

    def test_closing_twice_is_harmless(self, pool: TierPool) -> None:
        """No exception, no hang."""
        tier = self.open_tier(pool)
        tier.close()
        tier.close()


class FaultyTier:
    """A tier that behaves as told: for tests of what drives tiers.

    Set `hang` to make calls wait until it is cleared (`strand` leaves those that wait and serves new ones), `error` to
    make them raise, `lie` to make it claim to have everything.
    """

    def __init__(self, inner: Tier) -> None:
        self.inner = inner
        self.batch_entries = inner.batch_entries
        self.writer_pid = inner.writer_pid
        self.error: Exception | None = None
        self.lie = False
        self.num_calls = 0
        self._go_on = threading.Event()
        self._go_on.set()
        self._stranded: list[threading.Event] = []

    @property
    def hang(self) -> bool:
        """Whether calls wait."""
        return not self._go_on.is_set()

    @hang.setter
    def hang(self, value: bool) -> None:
        (self._go_on.clear if value else self._go_on.set)()

    def strand(self) -> None:
        """Leave the calls that wait now waiting until `close`."""
        self._stranded.append(self._go_on)
        self._go_on = threading.Event()
        self._go_on.set()

    def _suffer(self) -> None:
        self.num_calls += 1
        self._go_on.wait()
        if self.error is not None:
            raise self.error

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        return [True] * len(keys) if self.lie else self.inner.contains(keys)

    def write(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        return self.inner.write(keys, extents)

    def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        return self.inner.read(keys, extents)

    def clear(self, tenant: bytes | None, model: bytes | None) -> int:
        """See `Tier`."""
        self._suffer()
        return self.inner.clear(tenant, model)

    def probe(self) -> None:
        """See `Tier`."""
        self._suffer()
        self.inner.probe()

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return self.inner.usage()

    def close(self) -> None:
        """See `Tier`."""
        for event in (*self._stranded, self._go_on):
            event.set()
        self.inner.close()


def make_pool(num_bytes: int = NUM_EXTENTS * EXTENT_BYTES) -> TierPool:
    """Return memory that stands for a pool, without a file."""
    return TierPool(-1, memoryview(mmap(-1, num_bytes)))


def make_key(number: int, tenant: str = "", model: str = "a model") -> bytes:
    """Return one of many keys."""
    return tier_key(label_of(tenant), label_of(model), PLACE, number.to_bytes(DIGEST_BYTES, "big"))


def content(key: bytes, size: int) -> bytes:
    """Return the payload that belongs to a key."""
    return random.Random(key).randbytes(size)


def extents_of(first: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return extents from number `first` on, with payloads of these sizes."""
    return [((first + place) * EXTENT_BYTES, size) for place, size in enumerate(sizes)]


def fill(pool: TierPool, first: int, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
    """Put the payloads of keys into extents."""
    for key, (offset, size) in zip(keys, extents_of(first, sizes), strict=True):
        pool.view[offset : offset + size] = content(key, size)


def run(queue: TierQueue, *jobs: Job) -> list[list[bool]]:
    """Have jobs done; return the outcomes of their keys."""
    outcomes = {id(job): [False] * len(job.keys) for job in jobs}
    for job in jobs:
        assert queue.submit(job), f"not taken: {queue.why_open}"
    left = {id(job) for job in jobs}

    def is_done() -> bool:
        for part in queue.poll():
            outcomes[id(part.job)][part.first : part.first + len(part.outcomes)] = part.outcomes
            if not part.job.num_left:
                left.discard(id(part.job))
        return not left

    wait_until(is_done, what="the outcomes of jobs")
    return [outcomes[id(job)] for job in jobs]


def write(queue: TierQueue, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    """Write and wait."""
    return run(queue, Job(Operation.WRITE, keys, extents))[0]


def read(queue: TierQueue, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    """Read and wait."""
    return run(queue, Job(Operation.READ, keys, extents))[0]


def contains(queue: TierQueue, keys: Sequence[bytes]) -> list[bool]:
    """Ask and wait."""
    return run(queue, Job(Operation.CONTAINS, keys))[0]


def clear(queue: TierQueue, tenant: bytes | None, model: bytes | None) -> int:
    """Clear and wait."""
    job = Job(Operation.CLEAR, labels=(tenant, model))
    run(queue, job)
    return job.num_cleared
