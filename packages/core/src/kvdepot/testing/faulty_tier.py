"""A tier that hangs, raises, lies, reports too little and recovers at a test's command, and a queue over it."""

import enum
import threading
from collections.abc import Container, Iterator, Sequence
from typing import Final, TypeVar

from kvdepot.lab.processes import wait_until
from kvdepot.testing.tier_traffic import content, extents_of, fill, make_key
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.breaker import ERRORS_TO_SUSPEND
from kvdepot.tiers.jobs import Job, JobKind, JobPart
from kvdepot.tiers.queue import TierQueue

T = TypeVar("T")

NUM_THREADS: Final = 4  # as of real tiers (`url.DEFAULT_THREADS`)
PATIENCE_SECONDS: Final = 10.5  # by then every call of `FaultyBench` is late


class Wrong(enum.Enum):
    """How a read goes wrong without an error."""

    BYTES = "one bit differs"
    TOO_FEW = "the second half of the payload does not arrive"
    KEY = "the entry written last arrives instead"


class FaultyTier:
    """A tier with faults at a test's command, for tests of the queue that drives tiers.

    With `hang`, calls wait until it is cleared (`strand` leaves the waiting calls and serves new ones). With `error`,
    calls raise it. With `lie`, the tier claims to have every key. With `forget`, it reports writes that it did not
    make. With `short`, it reports one outcome too few. With `wrong`, it reads other bytes.

    Args:
        inner: the tier that makes the calls.
        pool: the pool of `inner`; `wrong` needs it.
    """

    def __init__(self, inner: Tier, pool: TierPool | None = None) -> None:
        self.inner = inner
        self.pool = pool
        self.batch_entries = inner.batch_entries
        self.reads_apart = inner.reads_apart
        self.ends_stalled_reads = False  # they may hang here
        self.most_writes = inner.most_writes
        self.writer_pid = inner.writer_pid
        self.contains_is_instant = False  # it may hang here
        self.keeps_runs = inner.keeps_runs
        self.gathers_stores = inner.gathers_stores
        self.wants_places = inner.wants_places
        self.declines_writes = inner.declines_writes
        self.is_overloaded = inner.is_overloaded
        self.error: Exception | None = None
        self.lie = False
        self.forget = False
        self.short = False
        self.wrong: Wrong | None = None
        self.last_written = b""
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
        """Let the calls that wait now wait until `close`, and serve new ones."""
        self._stranded.append(self._go_on)
        self._go_on = threading.Event()
        self._go_on.set()

    def _suffer(self) -> None:
        self.num_calls += 1
        self._go_on.wait()
        if self.error is not None:
            raise self.error

    def _cut(self, outcomes: Sequence[T]) -> Sequence[T]:
        return outcomes[:-1] if self.short else outcomes

    def contains(self, keys: Sequence[bytes]) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        return self._cut([True] * len(keys) if self.lie else self.inner.contains(keys))

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        return self._cut([True] * len(keys) if self.lie else self.inner.touch(keys, sizes))

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        """See `Tier`."""
        self._suffer()
        self.last_written = keys[-1]
        return self._cut([True] * len(keys) if self.forget else self.inner.write(keys, trailers, extents))

    def read(self, keys: Sequence[bytes], extents: Extents) -> Sequence[bytes | None]:
        """See `Tier`."""
        self._suffer()
        if self.wrong is Wrong.KEY:
            keys = [self.last_written] * len(keys)
        trailers = self.inner.read(keys, extents)
        if self.wrong in (Wrong.BYTES, Wrong.TOO_FEW):
            assert self.pool is not None
            for offset, num_bytes in extents:
                if self.wrong is Wrong.BYTES:
                    self.pool.view[offset + num_bytes // 3] ^= 1
                else:
                    self.pool.view[offset + num_bytes // 2 : offset + num_bytes] = bytes(num_bytes - num_bytes // 2)
        return self._cut(trailers)

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`."""
        self._suffer()
        self.inner.remove(keys)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        self._suffer()
        yield from self.inner.clear(tenant, model)

    def outdate(self, generations: Container[bytes]) -> None:
        """See `Tier`."""
        self._suffer()
        self.inner.outdate(generations)

    def probe(self) -> None:
        """See `Tier`."""
        self._suffer()
        self.inner.probe()

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return self.inner.usage()

    def close(self) -> None:
        """See `Tier`."""
        self.let_go()
        self.inner.close()

    def let_go(self) -> None:
        """Let every waiting call continue."""
        for event in (*self._stranded, self._go_on):
            event.set()


class Clock:
    """A monotonic clock, in seconds, that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


class FaultyBench:
    """A tier behind a `FaultyTier`, its queue with a deadline of one second, and a clock that a test moves.

    Args:
        tier: closed with this object.
        pool: the pool of `tier`; its first extents get the payloads of `keys`, 4 KiB each.
        num_threads: see `TierQueue`.
        write_bytes: see `TierQueue`.
        batch_entries: replaces the tier's own, unless it is 0.
    """

    def __init__(
        self,
        tier: Tier,
        pool: TierPool,
        num_threads: int = NUM_THREADS,
        write_bytes: int = 1 << 30,  # more than any test writes
        batch_entries: int = 0,
    ) -> None:
        self.pool = pool
        self.clock = Clock()
        self.tier = FaultyTier(tier, pool)
        self.tier.batch_entries = batch_entries or tier.batch_entries
        self.num_threads = num_threads
        self.queue = TierQueue(
            self.tier,
            pool,
            "faulty",
            deadline_seconds=1.0,
            clock=self.clock,
            num_threads=num_threads,
            write_bytes=write_bytes,
        )
        self.keys = [make_key(number) for number in range(16)]
        self.outcomes: dict[int, list[bool]] = {}  # of jobs, by their id
        self._calls_before: dict[int, int] = {}  # calls of the tier when a job was submitted, by the job's id
        fill(pool, 0, self.keys, [4096] * 16)

    def submit(self, operation: JobKind, first: int, last: int, to: int = -1) -> Job:
        """Submit a job for some of the keys and the extents from number `to` on; by default the payloads' extents."""
        extents = extents_of(first if to < 0 else to, [4096] * (last - first))
        job = Job(operation, self.keys[first:last], extents)
        self._calls_before[id(job)] = self.tier.num_calls
        self.outcomes[id(job)] = [False] * len(job.keys)
        assert self.queue.submit(job), f"not taken: {self.queue.breaker.why_suspended}"
        return job

    def take(self) -> list[JobPart]:
        """Collect the calls that ended."""
        parts = self.queue.poll()
        for part in parts:
            if id(part.job) in self.outcomes:
                self.outcomes[id(part.job)][part.first : part.first + len(part.outcomes)] = part.outcomes
        return parts

    def wait_for(self, *jobs: Job) -> None:
        """Wait until every key of the jobs has its outcome."""

        def are_done() -> bool:
            self.take()
            return not any(job.num_left for job in jobs)

        wait_until(are_done, what="the outcomes of jobs")

    def write(self, first: int, last: int) -> list[bool]:
        """Write some of the keys and wait."""
        job = self.submit(JobKind.WRITE, first, last)
        self.wait_for(job)
        return self.outcomes[id(job)]

    def read(self, first: int, last: int) -> list[bool]:
        """Read some of the keys into the extents from 32 on and wait; check the bytes of entries reported as read."""
        self.wipe(32, last - first)
        job = self.submit(JobKind.READ, first, last, to=32)
        self.wait_for(job)
        return self.checked(job)

    def wipe(self, first: int, count: int) -> None:
        """Fill extents with zeros."""
        for offset, size in extents_of(first, [4096] * count):
            self.pool.view[offset : offset + size] = bytes(size)

    def checked(self, job: Job) -> list[bool]:
        """Return the outcomes of a read that ended; check the bytes of entries reported as read."""
        outcomes = self.outcomes[id(job)]
        for key, (offset, size), is_here in zip(job.keys, job.extents, outcomes, strict=True):
            assert not is_here or self.pool.view[offset : offset + size] == content(key, size), "wrong bytes were read"
        return outcomes

    def wait_for_calls(self, count: int) -> None:
        """Wait until the tier has been called `count` times in all."""
        wait_until(lambda: self.tier.num_calls >= count, what=f"{count} calls")

    def wait_for_calls_of(self, *jobs: Job) -> None:
        """Wait until the jobs that were submitted last have begun as many calls as can hang at a time."""
        steps = [
            1 if job.operation is JobKind.READ and self.tier.reads_apart else self.tier.batch_entries for job in jobs
        ]
        num_calls = sum(-(-len(job.keys) // step) for job, step in zip(jobs, steps, strict=True))
        only_writes = all(job.operation is JobKind.WRITE for job in jobs)
        self.wait_for_calls(self._calls_before[id(jobs[0])] + min(self.num_threads - only_writes, num_calls))

    def let_pass(self, seconds: float) -> tuple[list[Job], int]:
        """Move the clock; return the jobs with late calls, and the number of keys whose calls ended."""
        self.clock.now += seconds
        return self.queue.expire(), sum(len(part.outcomes) for part in self.take())

    def probe(self) -> None:
        """Move the clock to the next probe and wait for its end."""
        due = self.queue.next_deadline()
        assert due is not None
        before = self.queue.counters["breaker_opened"], self.queue.breaker.why_suspended
        self.let_pass(max(0.0, due - self.clock.now))

        def is_over() -> bool:
            self.take()
            return self.queue.next_deadline() is not None or not self.queue.is_suspended

        wait_until(is_over, what=f"a probe {before}")

    def break_down(self) -> None:
        """Make the storage raise until the tier is suspended, and fail one probe."""
        self.tier.error = OSError(5, "Input/output error")
        for number in range(ERRORS_TO_SUSPEND):
            assert self.read(number, number + 1) == [False]
        assert self.queue.is_suspended
        self.probe()
        assert self.queue.is_suspended

    def come_back(self) -> None:
        """Make the storage answer again, and probe it if the tier is suspended."""
        self.tier.error = None
        if self.queue.is_suspended:
            self.probe()
        assert not self.queue.is_suspended, self.queue.breaker.why_suspended

    def close(self) -> None:
        """Release all calls and close the queue."""
        self.tier.let_go()
        self.queue.close()
