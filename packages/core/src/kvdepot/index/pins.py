"""Pins, with which operators keep prefixes in the pool for a time. There may be very many, so all work is in steps."""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from kvdepot.index.index import ChunkIndex


@dataclass(frozen=True, slots=True)
class Pin:
    """The pinned nodes of one prefix."""

    tenant: str
    nodes: tuple[int, ...]


class PinTable:
    """All pins. The number of an ended pin stays in the heap until its expiry."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._pins: dict[int, Pin] = {}
        self._by_expiry: list[tuple[float, int]] = []  # heap
        self._next = 0

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, pin: Pin, expiry_seconds: float) -> None:
        """Pin nodes until a time on the server's monotonic clock."""
        self._index.pin(pin.nodes)
        self._pins[self._next] = pin
        heappush(self._by_expiry, (expiry_seconds, self._next))
        self._next += 1

    def has_expired(self, now: float) -> bool:
        """Whether `expire` has work."""
        return bool(self._by_expiry) and self._by_expiry[0][0] <= now

    def expire(self, now: float) -> Iterator[int]:
        """End the expired pins. Yield the number of each step."""
        while self.has_expired(now):
            yield self._end(heappop(self._by_expiry)[1], None)

    def end(self, tenant: str | None) -> Iterator[int]:
        """End the present pins of a tenant (None: of all tenants). Yield the number of each step."""
        for number in list(self._pins):
            yield self._end(number, tenant)

    def _end(self, number: int, tenant: str | None) -> int:
        pin = self._pins.get(number)
        if pin is None or tenant not in (None, pin.tenant):
            return 0
        del self._pins[number]
        self._index.release(pin.nodes)
        return 1
