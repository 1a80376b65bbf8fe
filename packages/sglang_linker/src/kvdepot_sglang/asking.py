"""Lookups: at most one answer for each request, the lease that keeps its chunks, and how long it is repeated.

SGLang matches every waiting request in every step, so an answer is repeated until half of its lease has passed, and a
miss for a moment. All calls come from the scheduler's thread. If the depot dies, every lookup is a miss.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.keys import KeyRun, digest_at

_MISS_SECONDS: Final = 0.2  # a miss is repeated so long
_MOST_REQUESTS: Final = 4096  # that are remembered; the oldest has ended, or its lease has


@dataclass(frozen=True, slots=True)
class Answer:
    """The depot's answer for a request.

    Attributes:
        key: the request's whole pages.
        first: of them, the device has so many leading ones.
        found: pages behind those that the depot has.
        lease: keeps them; a miss if there are none.
        until: the answer may be repeated so long.
    """

    key: KeyRun
    first: int
    found: int
    lease: Lease
    until: float


class Asking:
    """The lookups of one rank.

    Args:
        client: asks the depot; not closed here.
        tier_seconds: the depot may wait so long for its tiers.
        clock: seconds, monotonic.
    """

    def __init__(
        self, client: SchedulerClient, tier_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._tier_seconds = tier_seconds
        self._clock = clock
        self._answers: dict[str, Answer] = {}  # by request, the oldest first
        self._gaps: dict[bytes, None] = {}  # pages of the device where a lookup found the depot's prefix to end

    def ask(self, request_id: str, key: KeyRun, first: int) -> int:
        """Return how many pages behind the first `first` the depot has. They stay there while the answer is kept.

        The whole `key` is looked up: that keeps a prefix in the depot which is always on the device.
        """
        now = self._clock()
        known = self._answers.get(request_id)
        if known is not None:
            if (known.first, known.key.digests) == (first, key.digests) and now < known.until:
                return known.found
            self.drop(request_id)
        lease = self._client.submit_lookup(request_id, key, wait_seconds=self._tier_seconds).result()
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
        """Return the page of `key` with which a store of pages `first` on begins.

        It is an earlier one if the depot lacks pages before them, which it would need to find these: it has evicted
        them, or began empty.
        """
        if not self._gaps:
            return first
        digests = (digest_at(key.digests, page) for page in range(first))
        page = next((page for page, digest in enumerate(digests) if digest in self._gaps), first)
        if page < first:
            del self._gaps[digest_at(key.digests, page)]
        return page

    def key_of(self, request_id: str, num_pages: int) -> KeyRun | None:
        """Return the key of the first pages that were found for a request, None if nothing promises so many."""
        answer = self._answers.get(request_id)
        if answer is None or num_pages > answer.found:
            return None
        return answer.key.slice(answer.first, answer.first + num_pages)

    def drop(self, request_id: str) -> None:
        """Forget the answer for a request and release its lease. Harmless if there is none."""
        answer = self._answers.pop(request_id, None)
        if answer is not None and answer.lease.num_chunks:
            self._client.release(answer.lease)

    def drop_all(self) -> None:
        """Forget everything."""
        self._gaps.clear()
        for request_id in list(self._answers):
            self.drop(request_id)
