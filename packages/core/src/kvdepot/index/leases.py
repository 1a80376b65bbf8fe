"""Leases: keep chunks in the pool while a reader reads them.

A lease pins nodes of the index for one request of one context. It ends when it is released, when its request or its
context ends, or when it expires. A reader that continues after the end notices it by the generation of the records.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import require
from kvdepot.index.index import ChunkIndex

LEASES_EXPIRED: Final = depot_counter("leases_expired", "Leases not released in time")


@dataclass(frozen=True, slots=True)
class Lease:
    """Pinned nodes, owned by a context and one of its requests."""

    number: int
    context: int
    request_id: str
    nodes: tuple[int, ...]
    expiry_seconds: float  # on the server's monotonic clock
    extents: bytes = b""  # packed; a mover may read only these


class LeaseTable:
    """All leases in the order of expiry. All live equally long."""

    def __init__(self, index: ChunkIndex, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.num_expired = 0  # `LEASES_EXPIRED`
        self._index = index
        self._leases: OrderedDict[int, Lease] = OrderedDict()  # unlike `dict`, it finds its first item in O(1)
        self._of_context: dict[int, set[int]] = {}
        self._of_request: dict[tuple[int, str], set[int]] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def grant(self, context: int, request_id: str, nodes: tuple[int, ...], now: float, extents: bytes = b"") -> int:
        """Pin `nodes`, and return the number of the new lease."""
        number = self._next
        self._next += 1
        self._index.evictor.pin(nodes)
        self._leases[number] = Lease(number, context, request_id, nodes, now + self.lease_seconds, extents)
        self._of_context.setdefault(context, set()).add(number)
        self._of_request.setdefault((context, request_id), set()).add(number)
        return number

    def find(self, context: int, number: int) -> Lease | None:
        """Return a lease of a context, None if the context does not have it (any more)."""
        lease = self._leases.get(number)
        return lease if lease is not None and lease.context == context else None

    def release(self, context: int, number: int) -> bool:
        """End one lease of a context. Return False if the context does not have it (any more)."""
        lease = self.find(context, number)
        if lease is None:
            return False
        del self._leases[number]
        own = self._of_context[context]
        own.remove(number)
        if not own:
            del self._of_context[context]
        request = context, lease.request_id
        own = self._of_request.get(request)
        if own is not None:
            own.discard(number)
            if not own:
                del self._of_request[request]
        self._index.evictor.unpin(lease.nodes)
        return True

    def end_request(self, context: int, request_id: str) -> Iterator[int]:
        """End the present leases of a request. Yield the number ended in each step."""
        return self._end(context, self._of_request.pop((context, request_id), ()))

    def end_context(self, context: int) -> Iterator[int]:
        """End the present leases of a context. Yield the number ended in each step."""
        return self._end(context, list(self._of_context.get(context, ())))

    def _end(self, context: int, numbers: Iterable[int]) -> Iterator[int]:
        for number in numbers:
            yield self.release(context, number)

    def has_expired(self, now: float) -> bool:
        """Return whether `expire` has work."""
        return bool(self._leases) and next(iter(self)).expiry_seconds <= now

    def expire(self, now: float) -> Iterator[int]:
        """End expired leases. Yield the number ended in each step."""
        while self.has_expired(now):
            lease = next(iter(self))
            self.release(lease.context, lease.number)
            self.num_expired += 1
            yield 1

    def count_of(self, context: int) -> int:
        """Return how many leases a context has."""
        return len(self._of_context.get(context, ()))

    def count_of_request(self, context: int, request_id: str) -> int:
        """Return the number of a request's leases, without leases that `end_request` is ending."""
        return len(self._of_request.get((context, request_id), ()))

    def check_integrity(self) -> None:
        """Check that the tables by lease and by context agree.

        Raises:
            IntegrityError: the tables disagree.
        """
        by_context = {(context, number) for context, numbers in self._of_context.items() for number in numbers}
        require(by_context == {(lease.context, lease.number) for lease in self}, "leases of contexts are miscounted")
        require(all(self._of_context.values()) and all(self._of_request.values()), "an owner without leases is kept")
        for (context, request_id), numbers in self._of_request.items():
            for number in numbers:
                lease = self.find(context, number)
                is_own = lease is not None and lease.request_id == request_id
                require(is_own, f"lease {number} is not of request {request_id!r}")
        times = [lease.expiry_seconds for lease in self]
        require(times == sorted(times), "leases are not in the order of expiry")
