"""Drives one tier from the depot's loop. Nothing here ever waits for the storage.

The queue cuts jobs into calls, and its threads (`Workers`) make them. Each call has a deadline from its start. A call
that overruns it is reported as late and suspends the tier (`Breaker`): waiting calls fail, and no new job is taken
until a probe succeeds. A hanging call keeps its extents until it returns, because the storage may still touch them; its
thread is replaced.
"""

import itertools
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.breaker import ERRORS_TO_OPEN, MAXIMUM_HUNG_CALLS, Breaker
from kvdepot.tiers.jobs import Call, Job, Operation, Part
from kvdepot.tiers.keys import has_labels
from kvdepot.tiers.url import DEFAULT_THREADS, PATIENCE
from kvdepot.tiers.workers import Workers
from kvdepot.wire.operations import TierStatus

logger = logging.getLogger(__name__)

_CLOSE_SECONDS: Final = 2.0
_QUESTIONS_A_CALL: Final = 512
_DROPPED_A_STEP: Final = 256  # calls that are looked at, of each kind


class TierQueue:
    """One tier with its threads. Everything but the tier's calls is done on the thread that owns this object.

    Args:
        tier: owned by this object from now on.
        pool: the one that the tier was opened with.
        name: for logs and status.
        deadline_seconds: of one call that somebody waits for; writes have ten times as much.
        num_threads: calls at a time.
        write_bytes: payload bytes of writes that may wait; more are refused.
        wake: called from other threads when `poll` has something.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        tier: Tier,
        pool: TierPool,
        name: str,
        *,
        deadline_seconds: float = 2.0,
        num_threads: int = DEFAULT_THREADS,
        write_bytes: int = 1 << 30,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.name = name
        self._pool = pool
        self.deadline_seconds = deadline_seconds
        self.write_bytes = write_bytes
        self.queued_write_bytes = 0
        self.counters: Counter[str] = Counter()
        self._num_threads = max(2, num_threads)
        self._wake = wake
        self._clock = clock
        self._workers = Workers(name, self._num_threads - 1, self._make, self._on_ended, clock)
        most_hung = max(MAXIMUM_HUNG_CALLS, self._num_threads)
        self.breaker = Breaker(name, tier, self.counters, most_hung, wake, clock)
        self._done: deque[Call] = deque()
        self.num_calls = 0  # that were handed in and not reported
        self._num_workers = 0
        self._usage = TierUsage()
        self._closing = False
        self._hire()

    @property
    def is_open(self) -> bool:
        """Whether the breaker is open: nothing is taken."""
        return bool(self.breaker.why_open)

    @property
    def why_open(self) -> str:
        """Why the breaker is open; empty if it is not."""
        return self.breaker.why_open

    @property
    def is_retired(self) -> bool:
        """Whether `retire` was called."""
        return self.breaker.is_retired

    def retire(self) -> None:
        """Stop using the tier: no job is taken, no probe is made, and it is closed when its calls have ended."""
        self.breaker.retire()
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self.num_calls and not self._closing:
            self._closing = True  # nobody else closes it
            self._workers.end()
            threading.Thread(target=self.tier.close, name=f"kvdepot-{self.name}-close", daemon=True).start()

    def submit(self, job: Job) -> bool:
        """Begin a job; False if it is not taken: the breaker is open, or too many bytes wait to be written."""
        num_bytes = job.num_bytes if job.operation is Operation.WRITE else 0
        if self.is_open or self._closing or (num_bytes and self.queued_write_bytes + num_bytes > self.write_bytes):
            return False
        step = max(1, self.tier.batch_entries)
        if job.operation is Operation.CONTAINS:
            step = max(step, _QUESTIONS_A_CALL)
        self.queued_write_bytes += num_bytes
        job.num_left = len(job.keys)
        firsts = range(0, max(1, len(job.keys)), step)
        self.num_calls += len(firsts)
        self._workers.hand_in(Call(job, first, min(first + step, len(job.keys))) for first in firsts)
        return True

    def drop_writes(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """Let writes that wait now fail if they are of this tenant and this model (None: any).

        Yields how many calls were dropped since it last did; between two steps the queue may be used for anything.
        """

        def is_meant(call: Call) -> bool:
            return has_labels(call.job.keys[call.first], tenant, model)

        num_left = self._workers.num_waiting(Operation.WRITE)
        while num_left > 0:
            dropped = self._workers.take_back(Operation.WRITE, min(_DROPPED_A_STEP, num_left), is_meant)
            num_left -= _DROPPED_A_STEP
            self._done.extend(dropped)
            self._wake()
            yield len(dropped)

    @property
    def has_results(self) -> bool:
        """Whether `poll` has something."""
        return bool(self._done)

    def poll(self, most: int = sys.maxsize) -> list[Part]:
        """Return what has ended, at most so many parts. Every key of every job is reported once."""
        parts: list[Part] = []
        while self._done and len(parts) < most:
            parts.append(self._report(self._done.popleft()))
        if self.breaker.take_probes(self.deadline_seconds):
            self._hire()
        if self.is_retired:
            self._close_if_idle()
        return parts

    def expire(self) -> list[Job]:
        """Look at the time: return the jobs that are late by now. Where the breaker is open, calls that wait fail."""
        now, late, suspects = self._clock(), list[Job](), set[Operation]()
        for call in self._workers.running():
            if not call.is_late and self._due_at(call) <= now:
                call.is_late = True
                self.breaker.num_hung += 1
                suspects.add(call.operation)
                self.counters["deadline_misses"] += 1
                if not call.job.is_late:
                    call.job.is_late = True
                    late.append(call.job)
        if suspects:  # also if all of them are of jobs that were late already
            what = min(suspects).name.lower()
            self.breaker.open(f"a {what} overran its deadline ({self.deadline_seconds:g} s)", *suspects)
        if self.is_open:
            self._fail_waiting()
        self.breaker.expire(self.deadline_seconds)
        return late

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do at the latest, of the clock; None for never.

        A probe that is late does not count: nobody waits for it.
        """
        if self.is_open and any(map(self._workers.num_waiting, Operation)):
            return self._clock()
        times = [self._due_at(call) for call in self._workers.running() if not call.is_late]
        if self.breaker.next_probe is not None:
            times.append(self.breaker.next_probe)
        return min(times, default=None)

    def _due_at(self, call: Call) -> float:
        """Nobody waits for a write: it may take longer before it counts as hung."""
        return call.started_at + self.deadline_seconds * (1 if call.is_urgent else PATIENCE)

    def was_in_time(self) -> None:
        """Hear that a lookup waited for entries and got them in time."""
        self.breaker.was_in_time()

    def was_too_late(self, waited_seconds: float) -> None:
        """Hear that a lookup waited so long for entries and got none."""
        self.breaker.was_too_late(waited_seconds)

    def usage(self) -> TierUsage:
        """Return what the tier holds; its last answer if it cannot say."""
        try:
            self._usage = self.tier.usage()
        except Exception:
            if not self.counters["usage_failed"]:
                logger.exception("tier %s cannot say what it holds", self.name)
            self.counters["usage_failed"] += 1
        return self._usage

    def status(self) -> TierStatus:
        """Return what an operator wants to see."""
        usage = self.usage()
        return TierStatus(
            name=self.name,
            state="open" if self.is_open else "closed",
            why_open=self.why_open,
            num_entries=usage.num_entries,
            used_bytes=usage.used_bytes,
            capacity_bytes=usage.capacity_bytes,
            queued_write_bytes=self.queued_write_bytes,
            num_waiting_reads=self._workers.num_waiting(Operation.READ),
            num_waiting_writes=self._workers.num_waiting(Operation.WRITE),
            num_hung_calls=self.breaker.num_hung,
            counters={**self.counters, **usage.counters},
        )

    def close(self, drain_seconds: float = 0.0) -> None:
        """Stop: give writes that wait `drain_seconds`, then drop them. Bounded, whatever the storage does."""
        if self._closing:
            return
        self._closing = True
        self._workers.close(0.0 if self.is_open else drain_seconds, _CLOSE_SECONDS, self.breaker.num_hung)
        closer = threading.Thread(target=self.tier.close, name=f"kvdepot-{self.name}-close", daemon=True)
        closer.start()
        closer.join(_CLOSE_SECONDS)

    def _fail_waiting(self) -> None:
        for operation in Operation:
            self._done.extend(self._workers.take_back(operation, _DROPPED_A_STEP, lambda _: True))

    def _report(self, call: Call) -> Part:
        self.breaker.judge(call)
        self.num_calls -= 1
        if call.is_late:
            self.breaker.num_hung -= 1
            self._dismiss()
        job, num_keys = call.job, call.last - call.first
        outcomes = call.outcomes or [False] * num_keys
        job.num_left -= num_keys
        sizes = [size for _, size in job.extents[call.first : call.last]]
        was_here = call.was_here or itertools.repeat(False)
        moved = sum(size for size, ok, here in zip(sizes, outcomes, was_here, strict=False) if ok and not here)
        if job.operation is Operation.WRITE:
            self.queued_write_bytes -= sum(sizes)
            self.counters["written_bytes"] += moved
            self.counters["written_entries"] += sum(outcomes) - sum(call.was_here)
            self.counters["failed_writes"] += num_keys - sum(outcomes)
        elif job.operation is Operation.READ:
            self.counters["read_bytes"] += moved
            self.counters["read_entries"] += sum(outcomes)
            self.counters["failed_reads"] += num_keys - sum(outcomes)
        return Part(job, call.first, outcomes, not job.num_left, call.corrupt, call.checksums)

    # --- workers --------------------------------------------------------------------------------------------------

    def _hire(self) -> None:
        """Have as many threads that do not hang as there should be."""
        while self._num_workers - self.breaker.num_hung < self._num_threads:
            self._num_workers += 1
            self._workers.hire()

    def _dismiss(self) -> None:
        """Have no more threads than there should be, once one that was replaced came back."""
        if self._num_workers - self.breaker.num_hung > self._num_threads:
            self._num_workers -= 1
            self._workers.dismiss()

    def _on_ended(self, call: Call) -> None:
        self._done.append(call)
        self._wake()

    def _make(self, call: Call) -> None:
        call.outcomes = self._outcomes_of(call)

    def _outcomes_of(self, call: Call) -> Sequence[bool] | None:
        job = call.job
        keys, extents = job.keys[call.first : call.last], job.extents[call.first : call.last]
        try:
            match job.operation:
                case Operation.CLEAR:
                    self._clear(call)
                    return ()
                case Operation.CONTAINS:
                    return _whole(self.tier.contains(keys), len(keys))
                case Operation.READ:
                    outcomes = _whole(self.tier.read(keys, extents), len(keys))
                    if job.makes_checksums:
                        call.checksums = self._checksums(extents, outcomes)
                    return outcomes
                case Operation.WRITE:
                    return self._write(call, keys, extents)
        except Exception as error:
            level = logging.WARNING if self.breaker.num_errors < ERRORS_TO_OPEN else logging.DEBUG
            logger.log(level, "tier %s: a %s failed: %r", self.name, job.operation.name.lower(), error)
            self.counters["errors"] += 1
            return None

    def _clear(self, call: Call) -> None:
        num_cleared = 0
        for count in self.tier.clear(*call.job.labels):
            if self._closing:
                raise OSError("the tier is being closed")
            num_cleared += count
            call.started_at = self._clock()  # however many steps it takes
        call.job.num_cleared = num_cleared

    def _checksums(self, extents: Extents, outcomes: Sequence[bool]) -> list[bytes]:
        try:
            from kvdepot.tiers.seal import checksum_of
        except ImportError:
            return []  # no xxhash, which engines complain about, too
        return [
            checksum_of(self._pool.view[offset : offset + num_bytes]) if ok else b""
            for (offset, num_bytes), ok in zip(extents, outcomes, strict=True)
        ]

    def _write(self, call: Call, keys: Sequence[bytes], extents: Extents) -> Sequence[bool]:
        checksums = call.job.checksums[call.first : call.last]
        if call.job.asks_first:
            call.was_here = _whole(self.tier.contains(keys), len(keys))
        outcomes = list(call.was_here) or [False] * len(keys)
        places = [place for place, is_here in enumerate(outcomes) if not is_here]
        if any(map(any, checksums)):
            from kvdepot.tiers.seal import checksum_of  # xxhash is not everybody's

            def is_broken(place: int) -> bool:
                (offset, size), checksum = extents[place], checksums[place]
                return any(checksum) and checksum_of(self._pool.view[offset : offset + size]) != checksum

            broken = set(filter(is_broken, places))
            call.corrupt = [call.first + place for place in sorted(broken)]
            places = [place for place in places if place not in broken]
        if places:
            written = self.tier.write([keys[place] for place in places], [extents[place] for place in places])
            for place, ok in zip(places, _whole(written, len(places)), strict=True):
                outcomes[place] = ok
        return outcomes


def _whole(outcomes: Sequence[bool], num_keys: int) -> list[bool]:
    """Return one outcome for each key: what a tier did not report is a miss."""
    whole = [bool(ok) for ok in outcomes][:num_keys]
    return whole + [False] * (num_keys - len(whole))
