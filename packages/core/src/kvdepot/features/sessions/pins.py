"""Pins: keep the prefixes of agent sessions in the pool for a time.

There may be very many, so work is done in steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Final

from kvdepot.index.index import ChunkIndex

AgentSession = tuple[str, str]  # tenant, name

_SPARE_EXPIRIES: Final = 1024  # stale heap entries to tolerate: clearing 1,024 takes 0.3 ms


@dataclass(frozen=True, slots=True)
class Pin:
    """The pinned nodes of one prefix."""

    nodes: tuple[int, ...]
    share: int  # the share of the pool that its chunks count against
    num_bytes: int  # of the whole prefix, even if other sessions share parts of it
    expiry_seconds: float  # on the server's monotonic clock


class PinTable:
    """At most one pin per agent session."""

    def __init__(self, index: ChunkIndex) -> None:
        self._index = index
        self._pins: dict[AgentSession, Pin] = {}
        self._by_expiry: list[
            tuple[float, AgentSession]
        ] = []  # heap; an item is stale if its pin expires at another time
        self._share_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def bytes_of(self, share: int) -> int:
        """Return the bytes that the pins of a share keep."""
        return self._share_bytes.get(share, 0)

    def put(self, session: AgentSession, pin: Pin) -> None:
        """Pin nodes until their expiry, in place of an earlier pin of the session."""
        self._index.evictor.pin(pin.nodes)
        self.end(session)
        self._pins[session] = pin
        self._share_bytes[pin.share] = self.bytes_of(pin.share) + pin.num_bytes
        heappush(self._by_expiry, (pin.expiry_seconds, session))
        if len(self._by_expiry) > 2 * len(self._pins) + _SPARE_EXPIRIES:
            self._by_expiry = [(pin.expiry_seconds, session) for session, pin in self._pins.items()]
            heapify(self._by_expiry)

    def end(self, session: AgentSession) -> bool:
        """End the pin of a session. Return False if it has none."""
        pin = self._pins.pop(session, None)
        if pin is None:
            return False
        self._share_bytes[pin.share] -= pin.num_bytes
        if not self._share_bytes[pin.share]:
            del self._share_bytes[pin.share]
        self._index.evictor.unpin(pin.nodes)
        return True

    def has_expired(self, now: float) -> bool:
        """Return whether `expire` has work."""
        return bool(self._by_expiry) and self._by_expiry[0][0] <= now

    def expire(self, now: float) -> Iterator[int]:
        """End expired pins. Yield the number ended in each step."""
        while self.has_expired(now):
            expiry_seconds, session = heappop(self._by_expiry)
            pin = self._pins.get(session)
            # A session that was retained again has another item: ended by this one, its prefix would be evicted early.
            yield int(pin is not None and pin.expiry_seconds == expiry_seconds and self.end(session))
