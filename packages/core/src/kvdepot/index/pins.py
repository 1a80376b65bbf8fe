"""Pins: keep the prefixes of agent sessions in the pool for a time. There may be very many."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from kvdepot.index.index import ChunkIndex
from kvdepot.timers import Timers

AgentSession = tuple[str, str]  # tenant, name


@dataclass(frozen=True, slots=True)
class Pin:
    """The pinned nodes of one prefix."""

    nodes: tuple[int, ...]
    share: int  # the share of the pool that its chunks count against
    num_bytes: int  # of the whole prefix, even if other sessions share parts of it
    timer: int  # ends it


class PinTable:
    """At most one pin per agent session."""

    def __init__(self, index: ChunkIndex, timers: Timers) -> None:
        self._index = index
        self._timers = timers
        self._pins: dict[AgentSession, Pin] = {}
        self._share_bytes: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def bytes_of(self, share: int) -> int:
        """Return the bytes that the pins of a share keep."""
        return self._share_bytes.get(share, 0)

    def put(self, session: AgentSession, nodes: tuple[int, ...], share: int, num_bytes: int, until: float) -> None:
        """Pin the nodes of a prefix until a time of the depot's clock, in place of an earlier pin of the session.

        Args:
            session: names the pin.
            nodes: the chunks.
            share: the share of the pool that they count against.
            num_bytes: the size of the prefix, even if other sessions share parts of it.
            until: monotonic seconds.
        """
        self._index.evictor.pin(nodes)
        self.end(session)
        self._pins[session] = Pin(nodes, share, num_bytes, self._timers.call_at(until, partial(self.end, session)))
        self._share_bytes[share] = self.bytes_of(share) + num_bytes

    def end(self, session: AgentSession) -> bool:
        """End the pin of a session. Return False if it has none."""
        pin = self._pins.pop(session, None)
        if pin is None:
            return False
        self._timers.cancel(pin.timer)
        self._share_bytes[pin.share] -= pin.num_bytes
        if not self._share_bytes[pin.share]:
            del self._share_bytes[pin.share]
        self._index.evictor.unpin(pin.nodes)
        return True

    def clear(self) -> None:
        """End all pins."""
        for session in [*self._pins]:
            self.end(session)
