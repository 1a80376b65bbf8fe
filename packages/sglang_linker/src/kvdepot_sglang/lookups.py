"""Lookups: keeps at most one answer per request, with the lease of its chunks, and reuses it for a while.

SGLang matches all waiting requests in every step, so an answer is reused until half of its lease has passed, and a miss
for a moment. All calls come from the scheduler's thread. If the depot dies, every lookup is a miss.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.keys import KeyRun, digest_at

_MISS_SECONDS: Final = 0.2  # a miss is reused for this long: waiting requests ask at each step
_MOST_REQUESTS: Final = 4096  # remembered requests; when there are more, the oldest or its lease has ended


@dataclass(frozen=True, slots=True)
class Answer:
    """The depot's answer for a request.

    Attributes:
        key: the request's whole pages.
        first: the number of leading pages on the device.
        found: the number of pages behind those that the depot has.
        lease: keeps those pages; a miss if there are none.
        until: the time until which the answer may be reused.
    """

    key: KeyRun
    first: int
    found: int
    lease: Lease
    until: float


class Lookups:
    """The lookups of one rank.

    Args:
        client: asks the depot. It is not closed here.
        tier_seconds: the longest wait of the depot for its tiers.
        clock: returns monotonic seconds.

    Attributes:
        num_undescribed: the leading pages that the last question found, if routers do not know them all; else 0.
    """

    def __init__(
        self, client: SchedulerClient, tier_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._tier_seconds = tier_seconds
        self._clock = clock
        self.num_undescribed = 0
        self._answers: dict[str, Answer] = {}  # by request, oldest first
        self._gaps: dict[bytes, None] = {}  # pages on the device at which the depot's prefix ended in a lookup

    def ask(self, request_id: str, key: KeyRun, first: int) -> int:
        """Return the number of pages behind the first `first` that the depot has. They stay while the answer is kept.

        The whole `key` is looked up, so that the depot also keeps a prefix that is always on the device.
        """
        now, self.num_undescribed = self._clock(), 0
        known = self._answers.get(request_id)
        if known is not None:
            if (known.first, known.key.digests) == (first, key.digests) and now < known.until:
                return known.found
            self.drop(request_id)
        self._drop_ended(now)
        lease = self._client.submit_lookup(request_id, key, wait_seconds=self._tier_seconds).result()
        self.num_undescribed = lease.num_chunks if lease.wants_tokens else 0
        found = max(0, lease.num_chunks - first)
        seconds = lease.lease_seconds / 2 if lease.num_chunks else _MISS_SECONDS
        if lease.num_chunks < first:
            self._gaps[digest_at(key.digests, lease.num_chunks)] = None
            if len(self._gaps) > _MOST_REQUESTS:
                del self._gaps[next(iter(self._gaps))]
        if lease.num_chunks and not found:  # no more than the device has
            self._client.release(lease)
            lease = MISS
        self._answers[request_id] = Answer(key, first, found, lease, now + seconds)
        if len(self._answers) > _MOST_REQUESTS:
            self.drop(next(iter(self._answers)))
        return found

    def first_to_store(self, key: KeyRun, first: int) -> int:
        """Return the first page to store of `key`, for a store of the pages from `first` on.

        This is an earlier page if the depot lacks pages before `first`, because it evicted them or started empty.
        Without these, lookups would not find the later pages.
        """
        if not self._gaps:
            return first
        digests = (digest_at(key.digests, page) for page in range(first))
        page = next((page for page, digest in enumerate(digests) if digest in self._gaps), first)
        if page < first:
            del self._gaps[digest_at(key.digests, page)]
        return page

    def key_of(self, request_id: str, num_pages: int) -> KeyRun | None:
        """Return the key of the first `num_pages` pages found for a request, None if no answer covers them."""
        answer = self._answers.get(request_id)
        if answer is None or num_pages > answer.found:
            return None
        return answer.key.slice(answer.first, answer.first + num_pages)

    def refuse(self, request_id: str) -> None:
        """Answer a request with a miss for a moment, because its load failed: then it is computed."""
        answer = self._answers.get(request_id)
        if answer is not None:
            self.drop(request_id)
            self._answers[request_id] = replace(answer, found=0, lease=MISS, until=self._clock() + _MISS_SECONDS)

    def drop(self, request_id: str) -> None:
        """Forget the answer for a request, and release its lease. Does nothing if there is none."""
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.lease.num_chunks:
            self._client.release(answer.lease)

    def _drop_ended(self, now: float) -> None:
        """Forget the oldest answers whose leases have ended, and misses: requests that never load leave them behind.

        An answer is not dropped at its `until`, because its request may load in the step that began before.
        """
        while self._answers:
            request_id, answer = next(iter(self._answers.items()))
            if now < answer.until + answer.lease.lease_seconds / 2:
                return
            self.drop(request_id)

    def drop_all(self) -> None:
        """Forget all answers, and release their leases."""
        self._gaps.clear()
        for request_id in list(self._answers):
            self.drop(request_id)
