"""Leases: who may read which chunks, and until when.

A lease pins nodes of the index for one request of one context. It ends when it is released, when its request or its
context ends, or when it expires; whoever reads on after that finds out by the generation of the records.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from kvdepot.index import ChunkIndex


@dataclass(frozen=True, slots=True)
class Lease:
    """Some pinned nodes; the owner is a context and one of its requests."""

    number: int
    context: int
    request_id: str
    nodes: tuple[int, ...]
    expiry_seconds: float  # of the server's monotonic clock
    extents: bytes = b""  # packed, where a mover may be asked to read


class LeaseTable:
    """Every lease, in the order of expiry (all live equally long)."""

    def __init__(self, index: ChunkIndex, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.num_expired = 0
        self._index = index
        self._leases: OrderedDict[int, Lease] = OrderedDict()
        self._by_context: dict[int, dict[str, set[int]]] = {}
        self._counts: Counter[int] = Counter()  # by context
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, context: int, request_id: str, nodes: tuple[int, ...], now: float, extents: bytes = b"") -> int:
        """Pin `nodes` and return the lease's number."""
        number = self._next
        self._next += 1
        self._index.pin(nodes)
        self._leases[number] = Lease(number, context, request_id, nodes, now + self.lease_seconds, extents)
        self._by_context.setdefault(context, {}).setdefault(request_id, set()).add(number)
        self._counts[context] += 1
        return number

    def find(self, context: int, number: int) -> Lease | None:
        """Return a lease of a context, None if it has no such lease (any more)."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.context == context else None

    def release(self, context: int, number: int) -> bool:
        """End one lease of a context; False if it has no such lease (any more)."""
        lease = self.find(context, number)
        if lease is None:
            return False
        del self._leases[number]
        self._counts[context] -= 1
        if not self._counts[context]:
            del self._counts[context]
        requests = self._by_context.get(context, {})
        numbers = requests.get(lease.request_id)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del requests[lease.request_id]
            if not requests:
                del self._by_context[context]
        self._index.unpin(lease.nodes)
        return True

    def end_request(self, context: int, request_id: str) -> Iterator[int]:
        """End every lease that a request has now; yields how many at each step."""
        requests = self._by_context.get(context, {})
        numbers = requests.pop(request_id, set())
        if not requests:
            self._by_context.pop(context, None)
        return self._end(context, numbers)

    def end_context(self, context: int) -> Iterator[int]:
        """End every lease that a context has now; yields how many at each step."""
        requests = self._by_context.pop(context, {})
        return chain.from_iterable(self._end(context, numbers) for numbers in requests.values())

    def _end(self, context: int, numbers: set[int]) -> Iterator[int]:
        while numbers:
            yield self.release(context, numbers.pop())

    def has_expired(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        return bool(self._leases) and next(iter(self._leases.values())).expiry_seconds <= now

    def expire(self, now: float) -> Iterator[int]:
        """End the leases whose time is over; yields how many at each step."""
        while self.has_expired(now):
            lease = next(iter(self._leases.values()))
            self.release(lease.context, lease.number)
            self.num_expired += 1
            yield 1

    def count_of(self, context: int) -> int:
        """Return how many leases a context has."""
        return self._counts[context]

    def count_of_request(self, context: int, request_id: str) -> int:
        """Return how many leases a request has; none of those that are being ended."""
        return len(self._by_context.get(context, {}).get(request_id, ()))
