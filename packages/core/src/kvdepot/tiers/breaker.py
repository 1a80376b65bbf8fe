"""Decides when a tier is suspended and when it is resumed.

A call that exceeds its deadline suspends the tier. So do several consecutive calls that raise. **Probes**, each on its
own thread, decide when to resume it. A hung probe is abandoned. The first probe runs when the tier is added, so that a
wrong port or missing credentials show at the start.

Storage that answers probes may still hang on other calls. So a resumed tier is **on trial**: until the operation that
failed succeeds, a single failing question or read suspends it again, for twice as long as before. A tier that keeps its
deadlines but is too slow for lookups is treated in the same way, until it serves a lookup in time.
"""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from kvdepot.counting import Counts, tier_counter
from kvdepot.tiers.base import Tier
from kvdepot.tiers.jobs import Call, JobKind

logger = logging.getLogger(__name__)

_BREAKER_OPENED: Final = tier_counter("breaker_opened", "Times the tier was suspended after failures")

ERRORS_TO_SUSPEND: Final = 3  # consecutive calls that raise: a single one may concern its entries, not the storage
MAXIMUM_HUNG_CALLS: Final = 16  # at least the number of threads: with more, the tier stays suspended, as each keeps one
_MOST_HUNG_PROBES: Final = MAXIMUM_HUNG_CALLS  # each keeps a thread, too
_FIRST_RETRY_SECONDS: Final = 0.5  # a restarting server is back soon
_LAST_RETRY_SECONDS: Final = 30.0  # until a recovered tier is used again; a probe in 30 s costs a dead one nothing
_LATE_TO_SUSPEND: Final = 3  # consecutive lookups that got no entry in time: each costs a request --promote-seconds


# The operations that a timely success proves to work. Storage may answer questions while its reads hang.
_SHOWS: Final = {
    JobKind.CLEAR: {JobKind.CLEAR},
    JobKind.CONTAINS: {JobKind.CLEAR, JobKind.CONTAINS, JobKind.WRITE, JobKind.TOUCH},
    JobKind.READ: {*JobKind},
    JobKind.WRITE: {JobKind.WRITE, JobKind.TOUCH},
    JobKind.TOUCH: {JobKind.TOUCH},
    JobKind.OUTDATE: {JobKind.OUTDATE},
}


class Breaker:
    """Suspends and resumes one tier. Everything except probes runs on the thread of its owner.

    Args:
        name: the name of the tier.
        tier: its `probe` is called, which may hang.
        counters: the counters of the queue.
        most_hung: with more hung calls than this, no probe resumes the tier.
        wake: called from another thread when a probe has ended.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        tier: Tier,
        counters: Counts,
        most_hung: int,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.why_suspended = ""
        self.is_retired = False
        self.num_hung = 0  # late calls that have not returned
        self.num_errors = 0  # consecutive
        self._name = name
        self._tier = tier
        self._counters = counters
        self._most_hung = most_hung
        self._wake = wake
        self._clock = clock
        self._num_too_late = 0  # consecutive lookups
        # Operations on trial: they suspended the tier and have not succeeded since.
        self._suspects: set[JobKind] = set()
        self._resumed_at = -math.inf  # when a probe last resumed the tier
        self._retry_seconds = _FIRST_RETRY_SECONDS
        self._probe_at: float | None = None
        self._probe_started_at: float | None = None
        self._probe_number = 0  # of the current or the last probe
        self._num_hung_probes = 0
        self._probed: deque[tuple[int, BaseException | None]] = deque()

    def begin(self) -> None:
        """Schedule a first probe, so that a tier that does not work is suspended before it is used."""
        self._probe_at = self._clock()

    def retire(self) -> None:
        """Suspend the tier for good, without probes."""
        self.is_retired = True
        self.why_suspended = "it was removed"
        self._probe_at = None

    def suspend(self, why: str, *suspects: JobKind) -> None:
        """Suspend the tier until a probe succeeds. Then it is on trial until `suspects` succeed."""
        if self.is_retired:
            return
        if not self.why_suspended:
            logger.error("tier %s is suspended: %s", self._name, why)
            self._counters[_BREAKER_OPENED] += 1
        self.why_suspended = why
        self._suspects.update(suspects)
        # A probe under way schedules the next one if it fails. Otherwise one more would follow its success, and could
        # suspend the tier again.
        if self._probe_started_at is None:
            self._probe_at = self._clock() + self._retry_seconds

    def was_in_time(self) -> None:
        """Note that a lookup got the entries that it waited for in time."""
        self._num_too_late = 0

    def was_too_late(self, waited_seconds: float) -> None:
        """Note that a lookup waited this long and got nothing. A few in a row suspend the tier; on trial, one does."""
        if self.why_suspended:
            return
        self._num_too_late += 1
        if self._num_too_late >= _LATE_TO_SUSPEND:
            self.suspend(
                f"{self._num_too_late} lookups in a row waited {waited_seconds:g} s for it in vain", JobKind.READ
            )

    def judge(self, call: Call) -> None:
        """Learn from a call that has ended, unless it was late or began before the last probe."""
        operation = call.operation
        # Calls that began before the storage was back would suspend it again for its past, and the hung ones that
        # return now would pass for proof that it works.
        if not call.has_run or call.is_late or call.started_at < self._resumed_at:
            return
        if call.outcomes is not None:
            self.num_errors = 0
            self._suspects -= _SHOWS[operation]
            if not self._suspects and self._num_too_late < _LATE_TO_SUSPEND:
                self._retry_seconds = _FIRST_RETRY_SECONDS
            return
        self.num_errors += 1
        if self.why_suspended:
            return
        if self.num_errors >= ERRORS_TO_SUSPEND:
            self.suspend(f"{self.num_errors} calls in a row failed", operation)
        elif self._suspects and call.is_urgent:
            self.suspend(f"a {operation.name.lower()} failed after a probe had succeeded", operation)

    # --- probes ---------------------------------------------------------------------------------------------------

    @property
    def next_probe(self) -> float | None:
        """The time of the next probe; None for never."""
        may_probe = self._probe_started_at is None and self._num_hung_probes < _MOST_HUNG_PROBES
        return self._probe_at if may_probe else None

    def expire(self, deadline_seconds: float) -> None:
        """Abandon a late probe, and begin one that is due."""
        now = self._clock()
        if self._probe_started_at is not None and now - self._probe_started_at > deadline_seconds:
            self._num_hung_probes += 1
            self._end_probe(TimeoutError(f"a probe exceeded its deadline ({deadline_seconds:g} s)"), deadline_seconds)
        if self.next_probe is not None and now >= self.next_probe:
            self._probe_started_at = now
            self._probe_at = None
            self._probe_number += 1
            self._begin_probe(self._probe_number)

    def take_probes(self, deadline_seconds: float) -> bool:
        """Handle the ended probes. Return whether one of them resumed the tier."""
        was_suspended = bool(self.why_suspended)
        while self._probed:
            number, error = self._probed.popleft()
            if number == self._probe_number and self._probe_started_at is not None:
                self._end_probe(error, deadline_seconds)
            else:
                self._num_hung_probes -= 1
        return was_suspended and not self.why_suspended

    def _begin_probe(self, number: int) -> None:
        threading.Thread(
            target=self._make_probe, args=(number,), name=f"kvdepot-{self._name}-probe", daemon=True
        ).start()

    def _make_probe(self, number: int) -> None:
        error: BaseException | None = None
        try:
            self._tier.probe()
        except BaseException as caught:  # as in `TierQueue`
            error = caught
        self._probed.append((number, error))
        self._wake()

    def _end_probe(self, error: BaseException | None, deadline_seconds: float) -> None:
        assert self._probe_started_at is not None
        seconds = self._clock() - self._probe_started_at
        self._probe_started_at = None
        if self.is_retired:
            return
        self._retry_seconds = min(2 * self._retry_seconds, _LAST_RETRY_SECONDS)
        if error is None and seconds > deadline_seconds:
            error = TimeoutError(f"a probe took {seconds:.1f} s")
        if error is None and self.num_hung > self._most_hung:
            error = TimeoutError(f"{self.num_hung} calls have not returned")
        if error is not None:
            why = f"{type(error).__name__}: {error}"
            if not self.why_suspended:  # the first probe
                logger.warning("tier %s does not work and is suspended: %s", self._name, why)
                self._counters[_BREAKER_OPENED] += 1
            self.why_suspended = why
            self._probe_at = self._clock() + self._retry_seconds
            return
        if not self.why_suspended:
            return
        logger.warning("tier %s is in use again", self._name)
        self.why_suspended = ""
        self.num_errors = 0
        self._resumed_at = self._clock()
