"""The conformance suite of tiers: storage below the pool that moves `(key, extent)` descriptors.

A tier's tests inherit `TierSuite` and open a tier over a given pool. The suite uses it through the depot's own queue.
It also puts each tier behind a `FaultyTier`, which stands between queue and tier and fails like real storage: it
hangs, raises, claims entries that it lacks, reports too few outcomes, returns wrong bytes, and recovers.

A tier may always miss. It may never read bytes other than those written under the key.
"""

import enum
import random
from collections.abc import Iterator
from typing import Final

import pytest

from kvdepot.lab.processes import wait_until
from kvdepot.testing.faulty_tier import NUM_THREADS, PATIENCE_SECONDS, FaultyBench, Wrong
from kvdepot.testing.tier_traffic import (
    EXTENT_BYTES,
    clear,
    contains,
    content,
    extents_of,
    fill,
    make_key,
    make_pool,
    read,
    run,
    write,
)
from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.keys import name_hash
from kvdepot.tiers.queue import TierQueue

SIZES: Final = (8192, 4096, 5000, 1)  # of payloads; the rest of an extent after its payload belongs to it, too


class Damage(enum.Enum):
    """Damage to a stored entry behind the tier's back."""

    FLIPPED = "one bit of its payload"
    TRUNCATED = "its end is missing"
    SWAPPED = "another entry's bytes lie in its place"


class TierSuite:
    """Inherit it, name the class `Test...`, and implement `open_tier`, and `damage` if possible."""

    def open_tier(self, pool: TierPool) -> Tier:
        """Return a tier over the storage of this test: empty the first time, the same storage when called again.

        It holds at least 64 entries of 8 KiB.
        """
        raise NotImplementedError

    def damage(self, key: bytes, other: bytes, how: Damage) -> None:
        """Damage the stored entry `key`; for `SWAPPED` put the entry of `other` in its place."""
        pytest.skip("this tier's storage cannot be damaged from here")

    survives_restart: bool = True  # whether a reopened tier finds its entries again

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

    def test_written_entries_are_read_into_other_extents(self, queue: TierQueue, pool: TierPool) -> None:
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

    def test_a_key_that_was_never_written_is_a_miss(self, queue: TierQueue) -> None:
        """`contains` does not report it either."""
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
        """`contains` is a hint, but a useful one."""
        fill(pool, 0, [make_key(0)], [4096])
        write(queue, [make_key(0)], extents_of(0, [4096]))
        assert contains(queue, [make_key(0), make_key(1)]) == [True, False]

    def test_an_entry_of_another_size_is_a_miss(self, queue: TierQueue, pool: TierPool) -> None:
        """The payload's size is part of the request."""
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
        """Even bytes with the right checksum of another entry are a miss; the other entries are served."""
        keys = [make_key(0), make_key(1), make_key(2)]
        fill(pool, 0, keys, [8192] * 3)
        write(queue, keys, extents_of(0, [8192] * 3))
        self.damage(keys[0], keys[1], how)
        assert read(queue, keys, extents_of(8, [8192] * 3)) == [False, True, True]
        assert queue.counters["corrupt"] == 1
        wait_until(lambda: contains(queue, keys) == [False, True, True], what="the damaged entry's removal")
        fill(pool, 0, keys, [8192] * 3)
        assert write(queue, keys[:1], extents_of(0, [8192])) == [True]
        assert read(queue, keys[:1], extents_of(8, [8192])) == [True]

    def test_clear_removes_a_tenant_or_a_model_and_nothing_else(self, queue: TierQueue, pool: TierPool) -> None:
        """The tier selects entries by the hashes of names in their keys."""
        keys = [make_key(0, "a", "m"), make_key(1, "a", "n"), make_key(2, "b", "m"), make_key(3, "b", "n")]
        fill(pool, 0, keys, [4096] * 4)
        write(queue, keys, extents_of(0, [4096] * 4))
        clear(queue, name_hash("a"), name_hash("n"))
        assert contains(queue, keys) == [True, False, True, True]
        clear(queue, name_hash("a"), None)
        assert contains(queue, keys) == [False, False, True, True]
        clear(queue, None, name_hash("m"))
        assert contains(queue, keys) == [False, False, False, True]
        clear(queue, None, None)
        assert contains(queue, keys) == [False] * 4

    def test_a_tier_that_is_opened_again_finds_what_was_written(self, pool: TierPool) -> None:
        """Skipped if the storage ends with the tier."""
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
        """Keys are written again, and several jobs run at a time."""
        rng = random.Random(3)
        hits = 0
        for _ in range(60):
            keys = [make_key(number) for number in rng.sample(range(48), 8)]
            sizes = [SIZES[key[-1] % len(SIZES)] for key in keys]
            fill(pool, 0, keys[:4], sizes[:4])
            jobs = [
                Job(JobKind.WRITE, keys[:4], extents_of(0, sizes[:4])),
                Job(JobKind.READ, keys[4:], extents_of(32, sizes[4:])),
            ]
            outcomes = run(queue, *jobs)
            for place, (key, size, is_here) in enumerate(zip(keys[4:], sizes[4:], outcomes[1], strict=True), 32):
                if is_here:
                    start = place * EXTENT_BYTES
                    assert pool.view[start : start + size] == content(key, size), "wrong bytes were read"
                    hits += 1
        assert hits > 0

    @pytest.fixture
    def faulty(self, pool: TierPool) -> Iterator[FaultyBench]:
        """The tier under test behind a `FaultyTier`; the payloads of 16 keys are in the pool's first extents."""
        bench = FaultyBench(self.open_tier(pool), pool)
        yield bench
        bench.close()

    @pytest.mark.promise(31)
    def test_a_storage_that_hangs_costs_one_deadline_until_it_comes_back(self, faulty: FaultyBench) -> None:
        """No call is accepted in the meantime, and extents that a call may still touch are not freed."""
        assert faulty.write(0, 8) == [True] * 8
        faulty.tier.hang = True
        job = faulty.submit(JobKind.READ, 0, 8, to=32)
        faulty.wait_for_calls_of(job)
        assert faulty.let_pass(0.5) == ([], 0)
        late, _ = faulty.let_pass(0.6)
        assert late == [job]
        assert faulty.queue.is_suspended
        assert not faulty.queue.submit(Job(JobKind.READ, faulty.keys[:1], extents_of(32, [4096])))
        assert faulty.let_pass(0.1)[0] == []
        assert job.num_left > 0, "its extents are still the storage's"
        faulty.tier.hang = False
        faulty.wait_for(job)
        faulty.come_back()
        assert faulty.read(0, 8) == [True] * 8

    @pytest.mark.promise(31)
    def test_calls_that_never_come_back_are_left_behind(self, faulty: FaultyBench) -> None:
        """Other calls are served in the meantime."""
        assert faulty.write(0, 8) == [True] * 8
        faulty.tier.hang = True
        for operation in (JobKind.READ, JobKind.WRITE):
            job = faulty.submit(operation, 0, 2, to=64)
            faulty.wait_for_calls_of(job)
            faulty.let_pass(PATIENCE_SECONDS)
            faulty.tier.strand()
            faulty.come_back()
            assert faulty.queue.status().num_hung_calls > 0
            assert faulty.read(0, 8) == [True] * 8
            faulty.tier.hang = True

    @pytest.mark.promise(31)
    def test_a_probe_that_never_comes_back_is_left_behind(self, faulty: FaultyBench) -> None:
        """The next probe ends the suspension."""
        assert faulty.write(0, 8) == [True] * 8
        faulty.tier.hang = True
        faulty.wait_for_calls_of(faulty.submit(JobKind.READ, 0, 1, to=64))
        faulty.let_pass(1.1)
        num_calls = faulty.tier.num_calls
        faulty.let_pass(0.5)
        faulty.wait_for_calls(num_calls + 1)
        faulty.tier.strand()
        faulty.let_pass(1.1)
        faulty.come_back()
        assert faulty.read(0, 8) == [True] * 8

    @pytest.mark.promise(31)
    def test_errors_in_a_row_suspend_the_tier_until_the_storage_is_back(self, faulty: FaultyBench) -> None:
        """Each error is a miss."""
        assert faulty.write(0, 8) == [True] * 8
        faulty.break_down()
        assert "Input/output error" in faulty.queue.breaker.why_suspended
        faulty.come_back()
        assert faulty.read(0, 16) == [True] * 8 + [False] * 8
        assert faulty.queue.counters["breaker_opened"] == 1

    def test_one_error_costs_one_call(self, faulty: FaultyBench) -> None:
        """Unwritten entries are not found, written ones are read the next time."""
        faulty.tier.error = OSError(5, "Input/output error")
        assert faulty.write(0, 1) == [False]
        faulty.tier.error = None
        assert contains(faulty.queue, faulty.keys[:1]) == [False]
        assert faulty.write(0, 1) == [True]
        faulty.tier.error = OSError(5, "Input/output error")
        assert faulty.read(0, 1) == [False]
        faulty.tier.error = None
        assert faulty.read(0, 1) == [True]
        assert not faulty.queue.is_suspended

    def test_lies_about_existence_are_misses(self, faulty: FaultyBench) -> None:
        """Reads miss keys that were never written or only reported as written. Entries that exist are served."""
        assert faulty.write(0, 2) == [True] * 2
        faulty.tier.lie = faulty.tier.forget = True
        assert faulty.write(2, 4) == [True] * 2
        assert contains(faulty.queue, faulty.keys[:6]) == [True] * 6
        assert faulty.read(0, 6) == [True] * 2 + [False] * 4
        faulty.tier.lie = faulty.tier.forget = False
        assert contains(faulty.queue, faulty.keys[:6]) == [True] * 2 + [False] * 4
        assert faulty.write(2, 6) == [True] * 4
        assert faulty.read(0, 6) == [True] * 6

    @pytest.mark.promise(30)
    @pytest.mark.parametrize("wrong", Wrong)
    def test_wrong_bytes_are_misses_counted_and_gone(self, faulty: FaultyBench, wrong: Wrong) -> None:
        """The depot compares the bytes, even if the tier calls them right; the tier only removes the entries."""
        assert faulty.write(0, 3) == [True] * 3
        faulty.tier.wrong = wrong
        assert faulty.read(0, 2) == [False] * 2
        assert faulty.queue.status().counters["corrupt"] == 2
        faulty.tier.wrong = None
        wait_until(lambda: contains(faulty.queue, faulty.keys[:3]) == [False, False, True], what="their removal")
        assert faulty.read(0, 3) == [False, False, True]
        assert faulty.write(0, 2) == [True] * 2
        assert faulty.read(0, 3) == [True] * 3
        assert faulty.queue.counters["errors"] == 0

    def test_outcomes_that_are_missing_are_misses(self, faulty: FaultyBench) -> None:
        """Each call reports one outcome too few."""
        assert faulty.write(0, 8) == [True] * 8
        faulty.tier.short = True
        most = 1 if faulty.queue.keeps_runs else faulty.tier.batch_entries

        def expected(step: int) -> list[bool]:
            return [(place + 1) % step > 0 and place < 7 for place in range(8)]

        assert faulty.read(0, 8) == expected(1 if faulty.tier.reads_apart else most)
        assert faulty.write(0, 8) == expected(most)
        assert contains(faulty.queue, faulty.keys[:8]) == [True] * 7 + [False]

    @pytest.mark.promise(30, 31)
    @pytest.mark.parametrize("how", Damage)
    def test_an_entry_damaged_while_the_storage_was_away_is_a_miss(self, faulty: FaultyBench, how: Damage) -> None:
        """The damage is counted, and the other entries are served."""
        assert faulty.write(0, 3) == [True] * 3
        faulty.break_down()
        self.damage(faulty.keys[0], faulty.keys[1], how)
        faulty.come_back()
        assert faulty.read(0, 3) == [False, True, True]
        assert faulty.queue.counters["corrupt"] == 1
        assert not faulty.queue.is_suspended

    def test_a_storage_that_comes_back_empty_is_misses_and_is_filled_again(self, faulty: FaultyBench) -> None:
        """The empty storage causes no error."""
        assert faulty.write(0, 4) == [True] * 4
        faulty.break_down()
        num_errors = faulty.queue.counters["errors"]
        sum(faulty.tier.inner.clear(None, None))
        faulty.come_back()
        assert contains(faulty.queue, faulty.keys[:4]) == [False] * 4
        assert faulty.read(0, 4) == [False] * 4
        assert faulty.write(0, 4) == [True] * 4
        assert faulty.read(0, 4) == [True] * 4
        assert faulty.queue.counters["errors"] == num_errors

    @pytest.mark.promise(31)
    def test_faults_in_any_order_are_right_bytes_or_a_miss(self, faulty: FaultyBench) -> None:
        """Reads and writes run side by side. The storage recovers after each fault, maybe without its hung calls."""
        rng = random.Random(5)
        hits = 0
        for _ in range(40):
            faulty.tier.lie, faulty.tier.forget, faulty.tier.short = (rng.random() < 0.2 for _ in range(3))
            faulty.tier.hang = rng.random() < 0.15
            faulty.tier.error = OSError(5, "Input/output error") if rng.random() < 0.15 else None
            first, other = rng.randrange(14), rng.randrange(14)
            faulty.wipe(32 + first, 2)
            jobs = [faulty.submit(JobKind.READ, first, first + 2, to=32 + first)]
            jobs += [faulty.submit(JobKind.WRITE, other, other + 2)]
            if faulty.tier.hang:
                faulty.wait_for_calls_of(*jobs)
                faulty.let_pass(PATIENCE_SECONDS)
                if faulty.queue.status().num_hung_calls <= NUM_THREADS and rng.random() < 0.5:
                    faulty.tier.strand()
                    jobs.clear()
            faulty.tier.hang = False
            faulty.wait_for(*jobs)
            faulty.tier.error = None
            faulty.come_back()
            for job in jobs[:1]:
                hits += sum(faulty.checked(job))
        assert hits > 0

    def test_the_storage_answers_a_probe(self, queue: TierQueue) -> None:
        """The probe does not raise."""
        queue.tier.probe()

    def test_closing_twice_is_harmless(self, pool: TierPool) -> None:
        """No exception, no hang."""
        tier = self.open_tier(pool)
        tier.close()
        tier.close()
