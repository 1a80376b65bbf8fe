"""Drives one tier from the depot's loop, without ever waiting for the storage there.

The queue divides jobs into calls. Its threads (`TierWorkers`) make the calls through `CheckedTier`, which adds and
verifies trailers. Each call has a deadline, counted from its start. A call that exceeds it is reported as late and
suspends the tier (`Breaker`): waiting calls fail, and the queue takes no jobs until a probe succeeds. A hung call keeps
its extents until it returns, because the storage may still access them. Another thread replaces its thread.
"""

import itertools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvdepot.counting import Counts, tier_counter
from kvdepot.tiers.base import Tier, TierPool, TierUsage
from kvdepot.tiers.breaker import ERRORS_TO_SUSPEND, MAXIMUM_HUNG_CALLS, Breaker
from kvdepot.tiers.jobs import Call, Job, JobKind, JobPart
from kvdepot.tiers.keys import KEY_BYTES, NAME_HASH_BYTES, has_names, run_of
from kvdepot.tiers.url import DEADLINE_SECONDS, DEFAULT_THREADS, PATIENCE
from kvdepot.tiers.workers import TierWorkers
from kvdepot.wire.status import TierStatus

logger = logging.getLogger(__name__)

_DEADLINE_MISSES: Final = tier_counter("deadline_misses", "Calls that took longer than their deadline")
_USAGE_FAILED: Final = tier_counter("usage_failed", "Times the tier could not list its entries")
_WRITTEN_BYTES: Final = tier_counter("written_bytes", "Bytes written from the pool")
_WRITTEN_ENTRIES: Final = tier_counter("written_entries", "Entries written")
_FAILED_WRITES: Final = tier_counter("failed_writes", "Entries that could not be written")
_READ_BYTES: Final = tier_counter("read_bytes", "Bytes read into the pool")
_READ_ENTRIES: Final = tier_counter("read_entries", "Entries read")
_FAILED_READS: Final = tier_counter("failed_reads", "Entries that were missing or unreadable")
_CORRUPT: Final = tier_counter("corrupt", "Entries whose checksum did not match")
_ERRORS: Final = tier_counter("errors", "Failed calls")

_CLOSE_SECONDS: Final = 2.0  # for calls under way; a thread that hangs in the storage is abandoned
_QUESTIONS_A_CALL: Final = 512  # keys per call: several threads share a longer question
_BYTES_A_CALL: Final = 16 << 20  # per call, so that several threads share a long prompt
_DROPPED_A_STEP: Final = 256  # calls examined per step and kind


class TierQueue:
    """One tier with its threads, which make the calls. Everything else runs on the thread that owns this object.

    Args:
        tier: this object takes ownership of it.
        pool: the pool that the tier was opened with.
        name: the tier's name in logs and status.
        deadline_seconds: the limit of a call that a lookup waits for. Writes have ten times as much.
        num_threads: the number of concurrent calls.
        write_bytes: the payload bytes of writes that may wait. The queue refuses more.
        wake: called from other threads when `poll` has results.
        clock: returns monotonic seconds.

    Attributes:
        keeps_runs: whether the tier keeps runs, and so needs the chunks before a chunk that it is asked for.
        gathers_stores: whether stores wait for stores that continue them, so that the tier gets few large calls.
    """

    def __init__(
        self,
        tier: Tier,
        pool: TierPool,
        name: str,
        *,
        deadline_seconds: float = DEADLINE_SECONDS,
        num_threads: int = DEFAULT_THREADS,
        write_bytes: int = 1 << 30,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.name = name
        self.deadline_seconds = deadline_seconds
        self.write_bytes = write_bytes
        self.keeps_runs = tier.keeps_runs
        self.gathers_stores = tier.gathers_stores
        self.queued_write_bytes = 0
        self.counters = Counts()
        self._num_threads = max(2, num_threads)
        self._wake = wake
        self._clock = clock
        from kvdepot.tiers.checked import CheckedTier  # needs xxhash, which is installed only with tiers

        self._checked = CheckedTier(tier, pool, name)
        most_writes = min(tier.most_writes, self._num_threads - 1)
        self._workers = TierWorkers(name, most_writes, self._make, self._on_ended, clock)
        most_hung = max(MAXIMUM_HUNG_CALLS, self._num_threads)
        self.breaker = Breaker(name, tier, self.counters, most_hung, wake, clock)
        self._done: deque[Call] = deque()
        self.num_calls = 0  # submitted and not reported yet
        self._num_workers = 0
        self._usage = TierUsage()
        self._closing = False
        self._hire()

    @property
    def is_suspended(self) -> bool:
        """Whether the tier is suspended, so that the queue takes no jobs."""
        return bool(self.breaker.why_suspended)

    @property
    def is_retired(self) -> bool:
        """Whether `retire` was called."""
        return self.breaker.is_retired

    def retire(self) -> None:
        """Stop using the tier: take no jobs, make no probes, and close it when its calls have ended."""
        self.breaker.retire()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.num_calls and not self._closing:
            self._closing = True  # no one else closes it
            self._workers.end()
            threading.Thread(target=self.tier.close, name=f"kvdepot-{self.name}-close", daemon=True).start()

    def submit(self, job: Job) -> bool:
        """Submit a job. Return False if the tier is suspended or too many bytes wait to be written."""
        num_bytes = job.num_bytes if job.operation is JobKind.WRITE else 0
        if self.is_suspended or self._closing or (num_bytes and self.queued_write_bytes + num_bytes > self.write_bytes):
            return False
        self.queued_write_bytes += num_bytes
        job.num_left = len(job.keys)
        cuts = self._cuts(job)
        self.num_calls += len(cuts) - 1
        calls = [Call(job, first, last) for first, last in itertools.pairwise(cuts)]
        self._workers.hand_in(calls)
        return True

    def ask_now(self, keys: Sequence[bytes]) -> Sequence[bool] | None:
        """Return which keys the tier has, if it knows without asking its storage. None: submit a job instead."""
        if not self.tier.contains_is_instant or self.is_suspended:
            return None
        try:
            return self.tier.contains(keys if self.tier.wants_places else [key[:KEY_BYTES] for key in keys])
        except Exception:  # the job will fail, too, and is logged and judged
            return None

    def _cuts(self, job: Job) -> list[int]:
        """Return the boundaries of the calls of a job: their starts, and the end of the last.

        A call has at most 16 MiB, all of one tenant and model. For a tier that keeps runs, a question is one call, and
        other calls have one run each, of up to 64 MiB.
        """
        keys, cuts, num_bytes, run, names = job.keys, [0], 0, b"", b""
        is_question = job.operation in (JobKind.CONTAINS, JobKind.TOUCH)
        # With runs, a question is whole: the tier asks for a sample of the runs, concurrently.
        most = sys.maxsize if self.keeps_runs else _QUESTIONS_A_CALL if is_question else self.tier.batch_entries
        if job.operation is JobKind.READ and self.tier.reads_apart:
            most = 1
        for place, key in enumerate(keys):
            size = 0 if is_question else job.extents[place][1]
            is_full = place - cuts[-1] >= most or num_bytes + size > _BYTES_A_CALL
            if self.keeps_runs and not is_question:
                before, run = run, run_of(key)
                is_full = run != before
            elif not is_question:  # so that `drop_writes` drops whole calls
                before, names = names, key[: 2 * NAME_HASH_BYTES]
                is_full = is_full or names != before
            if is_full and place > cuts[-1]:
                cuts.append(place)
                num_bytes = 0
            num_bytes += size
        return [*cuts, len(keys)]

    def drop_writes(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """Drop the waiting writes of a tenant and a model (None: any). They fail.

        Yield the number of dropped calls after each step. Between steps, the queue may be used freely.
        """

        def is_meant(call: Call) -> bool:
            return has_names(call.job.keys[call.first], tenant, model)

        num_left = self._workers.num_waiting(JobKind.WRITE)
        while num_left > 0:
            dropped = self._workers.take_back(JobKind.WRITE, min(_DROPPED_A_STEP, num_left), is_meant)
            num_left -= _DROPPED_A_STEP
            self._done.extend(dropped)
            self._wake()
            yield len(dropped)

    @property
    def has_results(self) -> bool:
        """Whether `poll` has results."""
        return bool(self._done) or (self.is_suspended and any(map(self._workers.num_waiting, JobKind)))

    def poll(self, most: int = sys.maxsize) -> list[JobPart]:
        """Return at most `most` new parts with outcomes. Each key of each job is reported once.

        While the tier is suspended, fail its waiting calls.
        """
        parts: list[JobPart] = []
        if self.is_suspended:
            # Their lookups would wait for a tier that does not work, up to the deadline of each call.
            for operation in JobKind:
                self._done.extend(self._workers.take_back(operation, _DROPPED_A_STEP, lambda _: True))
        while self._done and len(parts) < most:
            parts.append(self._report(self._done.popleft()))
        if self.breaker.take_probes(self.deadline_seconds):
            self._hire()
        if self.is_retired:
            self._close_if_idle()
        return parts

    def expire(self) -> list[Job]:
        """Return the jobs that have become late. If there are any, suspend the tier: `poll` fails its waiting calls."""
        now, late, suspects = self._clock(), list[Job](), set[JobKind]()
        for call in self._workers.running():
            if not call.is_late and self._due_at(call) <= now:
                call.is_late = True
                self.breaker.num_hung += 1
                suspects.add(call.operation)
                self.counters[_DEADLINE_MISSES] += 1
                if not call.job.is_late:
                    call.job.is_late = True
                    late.append(call.job)
        if suspects:  # even if all of their jobs were late already
            what = min(suspects).name.lower()
            self.breaker.suspend(f"a {what} exceeded its deadline ({self.deadline_seconds:g} s)", *suspects)
        self.breaker.expire(self.deadline_seconds)
        return late

    def next_deadline(self) -> float | None:
        """Return the time by which `expire` must be called, by the queue's clock; None for never.

        A late probe does not count, as no request waits for it.
        """
        times = [self._due_at(call) for call in self._workers.running() if not call.is_late]
        if self.breaker.next_probe is not None:
            times.append(self.breaker.next_probe)
        return min(times, default=None)

    def _due_at(self, call: Call) -> float:
        """Return when a call becomes late. A write may take longer, as no request waits for it."""
        is_patient = not call.is_urgent or (call.operation is JobKind.READ and self.tier.ends_stalled_reads)
        return call.started_at + self.deadline_seconds * (PATIENCE if is_patient else 1)

    def usage(self) -> TierUsage:
        """Return the tier's contents; if that raises, the last known ones."""
        try:
            self._usage = self.tier.usage()
        except Exception:
            if not self.counters[_USAGE_FAILED]:
                logger.exception("tier %s cannot report its contents", self.name)
            self.counters[_USAGE_FAILED] += 1
        return self._usage

    def status(self) -> TierStatus:
        """Return the state of the tier for operators."""
        usage = self.usage()
        return TierStatus(
            name=self.name,
            state="open" if self.is_suspended else "closed",
            why_open=self.breaker.why_suspended,
            num_entries=usage.num_entries,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            queued_write_bytes=self.queued_write_bytes,
            num_waiting_reads=self._workers.num_waiting(JobKind.READ),
            num_waiting_writes=self._workers.num_waiting(JobKind.WRITE),
            num_hung_calls=self.breaker.num_hung,
            counters={**usage.counters, **self.counters},
        )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop. Give waiting writes `drain_seconds`, then drop them. The time is bounded even if the storage hangs."""
        if self._closing:
            return
        self._closing = True
        # The storage of a suspended tier would most likely hang until the time is up.
        self._workers.close(0.0 if self.is_suspended else drain_seconds, _CLOSE_SECONDS, self.breaker.num_hung)
        closer = threading.Thread(target=self.tier.close, name=f"kvdepot-{self.name}-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_SECONDS)

    def _report(self, call: Call) -> JobPart:
        self.breaker.judge(call)
        if self.tier.is_overloaded and not self.is_suspended:
            self.breaker.suspend("its storage asks for fewer requests", call.operation)
        self.num_calls -= 1
        # Its thread was replaced and is back now. Without this, each hang would leave one thread more.
        if call.is_late:
            self.breaker.num_hung -= 1
            self._dismiss()
        job, num_keys = call.job, call.last - call.first
        outcomes = call.outcomes or [False] * num_keys
        job.has_failed |= call.outcomes is None
        job.num_left -= num_keys
        sizes = [size for _, size in call.extents]
        moved = [size for size, ok in zip(sizes, outcomes, strict=False) if ok]
        if job.operation is JobKind.WRITE:
            self.queued_write_bytes -= sum(sizes)
            self.counters[_WRITTEN_BYTES] += sum(moved)
            self.counters[_WRITTEN_ENTRIES] += len(moved)
            self.counters[_FAILED_WRITES] += num_keys - sum(outcomes)
        elif job.operation is JobKind.READ:
            self.counters[_READ_BYTES] += sum(moved)
            self.counters[_READ_ENTRIES] += len(moved)
            self.counters[_FAILED_READS] += num_keys - sum(outcomes)
            self.counters[_CORRUPT] += len(call.corrupt)
        return JobPart(job, call.first, outcomes, not job.num_left, call.corrupt, call.checksums)

    # --- workers --------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Start threads until `num_threads` are not hung."""
        while self._num_workers - self.breaker.num_hung < self._num_threads:
            self._num_workers += 1
            self._workers.hire()

    def _dismiss(self) -> None:
        """End one thread if a replaced one has returned."""
        if self._num_workers - self.breaker.num_hung > self._num_threads:
            self._num_workers -= 1
            self._workers.dismiss()

    def _on_ended(self, call: Call) -> None:
        self._done.append(call)
        self._wake()

    def _make(self, call: Call) -> None:
        try:
            match call.operation:
                case JobKind.CLEAR:
                    self._clear(call)
                case JobKind.CONTAINS:
                    call.outcomes = self._checked.contains(call.keys)
                case JobKind.READ:
                    self._checked.read(call)
                case JobKind.WRITE:
                    self._checked.write(call)
                case JobKind.TOUCH:
                    call.outcomes = self._checked.touch(call.keys, [num_bytes for _, num_bytes in call.extents])
                case JobKind.OUTDATE:
                    self.tier.outdate(call.job.generations)
                    call.outcomes = ()
        except BaseException as error:  # a panic of a library in Rust is no `Exception`
            level = logging.WARNING if self.breaker.num_errors < ERRORS_TO_SUSPEND else logging.DEBUG
            logger.log(level, "tier %s: a %s failed: %r", self.name, call.operation.name.lower(), error)
            self.counters[_ERRORS] += 1

    def _clear(self, call: Call) -> None:
        num_cleared = 0
        for count in self.tier.clear(*call.job.names):
            # A clear of very many entries would still use the storage when `close` closes it.
            if self._closing:
                raise OSError("the tier is being closed")
            num_cleared += count
            call.started_at = self._clock()  # each step has its own deadline
        call.job.num_cleared = num_cleared
        call.outcomes = ()
