"""Leases: who may read which chunks, and until when.

A lease pins nodes of the index for one request of one context. It ends when it is released, when its request or its
context ends, or when it expires; whoever reads on after that finds out by the generation of the records.
"""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Final, TypeVar

from kvdepot.index.index import ChunkIndex
from kvdepot.pool.spread import SpreadMap

_BLOCK: Final = 256  # leases

K = TypeVar("K", bound=Hashable)


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
        # In blocks of numbers in a row: one mapping of 90,000 that nobody released takes 7 ms to grow.
        self._blocks: dict[int, dict[int, Lease]] = {}
        self._of_context: dict[int, dict[int, set[int]]] = {}  # numbers, by context and block
        self._of_request: SpreadMap[tuple[int, str], set[int]] = SpreadMap()
        self._counts: Counter[int] = Counter()  # by context
        self._next = 1

    def __len__(self) -> int:
        return self._counts.total()

    def grant(self, context: int, request_id: str, nodes: tuple[int, ...], now: float, extents: bytes = b"") -> int:
        """Pin `nodes` and return the lease's number."""
        number = self._next
        self._next += 1
        self._index.pin(nodes)
        block = number // _BLOCK
        lease = Lease(number, context, request_id, nodes, now + self.lease_seconds, extents)
        self._blocks.setdefault(block, {})[number] = lease
        self._of_context.setdefault(context, {}).setdefault(block, set()).add(number)
        numbers = self._of_request.get((context, request_id))
        if numbers is None:
            numbers = self._of_request[context, request_id] = set()
        numbers.add(number)
        self._counts[context] += 1
        return number

    def find(self, context: int, number: int) -> Lease | None:
        """Return a lease of a context, None if it has no such lease (any more)."""
        lease = self._blocks.get(number // _BLOCK, {}).get(number)
        return lease if lease is not None and lease.context == context else None

    def release(self, context: int, number: int) -> bool:
        """End one lease of a context; False if it has no such lease (any more)."""
        lease = self.find(context, number)
        if lease is None:
            return False
        block = number // _BLOCK
        del self._blocks[block][number]
        if not self._blocks[block]:
            del self._blocks[block]
        self._counts[context] -= 1
        if not self._counts[context]:
            del self._counts[context]
        blocks = self._of_context.get(context, {})
        self._leave(blocks, block, number)
        if not blocks:
            self._of_context.pop(context, None)
        self._leave(self._of_request, (context, lease.request_id), number)
        self._index.unpin(lease.nodes)
        return True

    def end_request(self, context: int, request_id: str) -> Iterator[int]:
        """End every lease that a request has now; yields how many at each step."""
        return self._end(context, self._of_request.pop((context, request_id)) or set())

    def end_context(self, context: int) -> Iterator[int]:
        """End every lease that a context has now; yields how many at each step."""
        blocks = self._of_context.pop(context, {})
        return chain.from_iterable(self._end(context, numbers) for numbers in blocks.values())

    def _end(self, context: int, numbers: set[int]) -> Iterator[int]:
        while numbers:
            yield self.release(context, numbers.pop())

    def has_expired(self, now: float) -> bool:
        """Whether `expire` has something to do."""
        first = self._first()
        return first is not None and first.expiry_seconds <= now

    def expire(self, now: float) -> Iterator[int]:
        """End the leases whose time is over; yields how many at each step."""
        while (lease := self._first()) is not None and lease.expiry_seconds <= now:
            self.release(lease.context, lease.number)
            self.num_expired += 1
            yield 1

    def count_of(self, context: int) -> int:
        """Return how many leases a context has."""
        return self._counts[context]

    def count_of_request(self, context: int, request_id: str) -> int:
        """Return how many leases a request has; none of those that are being ended."""
        return len(self._of_request.get((context, request_id)) or ())

    def _first(self) -> Lease | None:
        """Return the lease that expires first."""
        block = next(iter(self._blocks.values()), None)
        return None if block is None else next(iter(block.values()))

    @staticmethod
    def _leave(sets: dict[K, set[int]] | SpreadMap[K, set[int]], key: K, number: int) -> None:
        """Take a number out of one of many sets, and that away if it was the last."""
        numbers = sets.get(key)
        if numbers is not None:
            numbers.discard(number)
            if not numbers:
                del sets[key]
