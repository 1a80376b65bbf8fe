"""Single flight: a lookup waits for chunks that another engine is computing, instead of computing them again.

A flight begins when a lookup that announces is answered with a miss: its engine is about to compute the missing chunks.
Another lookup of the same tenant that misses the same chunk can join the flight. It is answered once the chunks that
the two have in common are here, when the flight ends without them, or at its own deadline. A flight ends when its
chunks are here, its request ends, its engine leaves, or nothing of it arrives in time.

The first chunk of a flight that is not here yet finds it, because a lookup that shares this chunk misses it, too. Only
models whose groups are all full attention have flights: only there, each chunk follows the one before it.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from kvdepot.index.index import ChunkIndex, Space
from kvdepot.keys import DIGEST_BYTES
from kvdepot.server.contexts import Context

MAXIMUM_FLIGHTS: Final = 1024
MAXIMUM_WAITING: Final = 64  # lookups of one flight
MAXIMUM_DIGEST_BYTES: Final = 32 << 20  # of all flights

_LEAST_TOKENS: Final = 256  # fewer are computed again sooner than they are waited for
_PATIENCE: Final = 2.0  # times what computing would take: estimates of two equal engines differ that much
_GRACE_SECONDS: Final = 1.0  # that a flight may take beside twice its estimate
_UNKNOWN_SECONDS: Final = 5.0  # that it may take without an estimate


@dataclass(slots=True, eq=False)
class _Waiting:
    """A lookup that has joined a flight."""

    context: Context
    stop: int  # it waits for the chunks before this one
    until: float
    on_end: Callable[[], None]
    flight: "Flight | None"  # None once it has been answered


@dataclass(slots=True, eq=False)
class Flight:
    """Chunks that one request is computing: those from `position` to `stop`."""

    context: Context
    request_id: str
    tenant: str
    digests: bytes  # from chunk 0 on
    position: int  # the first chunk that is not here
    stop: int
    ahead_tokens: int  # that the engine computes before these; 0 once the first of these is here
    token_seconds: float  # 0: unknown
    moved_at: float
    due: float = 0.0
    waiting: list[_Waiting] = field(default_factory=list["_Waiting"])

    def seconds_to(self, chunk: int, now: float) -> float:
        """Return how long the engine will probably take for the chunks before `chunk`; 0.0 if that is unknown."""
        tokens = self.ahead_tokens + (chunk - self.position) * self.context.space.spec.chunk_tokens
        return max(0.0, self.moved_at + tokens * self.token_seconds - now)


class FlightTable:
    """Every flight.

    Args:
        index: says which chunks are here.
        clock: seconds, monotonic.
        counters: `flights`, `flights_failed`, `flights_joined`.
    """

    def __init__(self, index: ChunkIndex, clock: Callable[[], float], counters: Counter[str]) -> None:
        self._index = index
        self._clock = clock
        self._counters = counters
        self._by_request: dict[tuple[int, str], Flight] = {}  # by context and request
        self._by_chunk: dict[tuple[int, bytes], dict[str, Flight]] = {}  # by space and first missing chunk, by tenant
        self._deadlines: list[tuple[float, int, Flight | _Waiting]] = []  # a heap; some are of what has ended
        self._numbers = count()
        self._num_digest_bytes = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, ahead_tokens: int,
        token_seconds: float,
    ) -> None:  # fmt: skip
        """Begin a flight for the chunks from `found` on, unless they are few or somebody else has begun one."""
        space, stop = context.space, len(digests) // DIGEST_BYTES
        flight = self._by_request.get((context.number, request_id))
        if flight is not None and (flight.digests, flight.position) == (digests, found):
            flight.ahead_tokens, flight.moved_at = ahead_tokens, self._clock()  # it has asked again
            self._expect(flight)
            return
        self.end_request(context, request_id)
        if (stop - found) * space.spec.chunk_tokens < _LEAST_TOKENS or space.windows:
            return
        if len(self._by_request) >= MAXIMUM_FLIGHTS or self._num_digest_bytes + len(digests) > MAXIMUM_DIGEST_BYTES:
            return
        flight = Flight(context, request_id, tenant, digests, found, stop, ahead_tokens, token_seconds, self._clock())
        if self._enter(flight):
            self._by_request[context.number, request_id] = flight
            self._num_digest_bytes += len(digests)
            self._expect(flight)
            self._counters["flights"] += 1

    def join(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, token_seconds: float,
        until: float, on_end: Callable[[], None],
    ) -> bool:  # fmt: skip
        """Wait for a flight that has the chunk `found`; False if there is none, or waiting takes longer than computing.

        Args:
            context: of the lookup.
            request_id: of the lookup, which does not wait for its own flight.
            tenant: of the lookup.
            digests: of the lookup.
            found: its chunks that are here.
            token_seconds: its engine's time for a token, 0 for unknown.
            until: the lookup's deadline.
            on_end: called once, when the lookup is to be answered with what is here then.
        """
        flight = self._find(context.space, tenant, digests, found)
        if flight is None or len(flight.waiting) >= MAXIMUM_WAITING or until <= self._clock():
            return False
        num_chunks = self.pending(context, request_id, tenant, digests, found=found, token_seconds=token_seconds)
        if not num_chunks:
            return False
        waiting = _Waiting(context, found + num_chunks, until, on_end, flight)
        flight.waiting.append(waiting)
        heapq.heappush(self._deadlines, (until, next(self._numbers), waiting))
        self._counters["flights_joined"] += 1
        return True

    def pending(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, token_seconds: float
    ) -> int:
        """Return how many chunks from `found` on come sooner from another request's flight than from computing them."""
        flight = self._find(context.space, tenant, digests, found)
        if flight is None or (flight.context is context and flight.request_id == request_id):
            return 0
        stop = common_chunks(flight.digests, digests, found)
        own_seconds = (stop - found) * context.space.spec.chunk_tokens * token_seconds
        if token_seconds and flight.seconds_to(stop, self._clock()) > _PATIENCE * own_seconds:
            return 0
        return stop - found

    def arrived(self, nodes: Iterable[int]) -> None:
        """Take note that the chunks of some nodes may be here now."""
        for node in nodes:
            flights = self._by_chunk.get((self._index.space_of(node).number, self._index.key_of(node)))
            for flight in list(flights.values()) if flights else ():
                self._advance(flight)

    def _advance(self, flight: Flight) -> None:
        index, space, began = self._index, flight.context.space, flight.position
        position = began
        while position < flight.stop and index.visible(space, _digest(flight.digests, position), position) is not None:
            position += 1
        if position == began:
            return
        if position == flight.stop:
            self._end(flight)
            return
        self._leave(flight)
        flight.position, flight.ahead_tokens, flight.moved_at = position, 0, self._clock()
        if not self._enter(flight):
            self._end(flight)  # another request brings the same
            return
        self._expect(flight)
        for waiting in [each for each in flight.waiting if each.stop <= position]:
            flight.waiting.remove(waiting)
            self._answer(waiting)

    def end_request(self, context: Context, request_id: str) -> None:
        """End the flight of a request, if it has one."""
        flight = self._by_request.get((context.number, request_id))
        if flight is not None:
            self._counters["flights_failed"] += 1
            self._end(flight)

    def end_context(self, context: Context) -> None:
        """End the flights of a scheduler that leaves, and answer its lookups."""
        for flight in list(self._by_request.values()):
            for waiting in [each for each in flight.waiting if each.context is context]:
                flight.waiting.remove(waiting)
                self._answer(waiting)
            if flight.context is context:
                self.end_request(context, flight.request_id)

    def expire(self, now: float) -> None:
        """Answer lookups whose time is over, and end flights that are late."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, _, late = heapq.heappop(deadlines)
            if isinstance(late, _Waiting):
                if late.flight is not None and late in late.flight.waiting:
                    late.flight.waiting.remove(late)
                    self._answer(late)
            elif late.due <= now and self._by_request.get((late.context.number, late.request_id)) is late:
                self._counters["flights_failed"] += 1
                self._end(late)

    def next_deadline(self) -> float | None:
        """Return when `expire` has something to do, None if there is nothing to wait for."""
        return self._deadlines[0][0] if self._deadlines else None

    def _expect(self, flight: Flight) -> None:
        now = self._clock()
        seconds = 2 * flight.seconds_to(flight.stop, now) if flight.token_seconds else _UNKNOWN_SECONDS
        flight.due = now + _GRACE_SECONDS + seconds
        heapq.heappush(self._deadlines, (flight.due, next(self._numbers), flight))

    def _end(self, flight: Flight) -> None:
        del self._by_request[flight.context.number, flight.request_id]
        self._leave(flight)
        self._num_digest_bytes -= len(flight.digests)
        waiting, flight.waiting = flight.waiting, []
        for each in waiting:
            self._answer(each)

    def _answer(self, waiting: _Waiting) -> None:
        waiting.flight = None
        waiting.on_end()

    def _find(self, space: Space, tenant: str, digests: bytes, chunk: int) -> Flight | None:
        flights = self._by_chunk.get((space.number, _digest(digests, chunk)))
        return None if flights is None else flights.get(tenant)

    def _enter(self, flight: Flight) -> bool:
        """Let a flight be found by its first missing chunk; False if another one is."""
        key = flight.context.space.number, _digest(flight.digests, flight.position)
        return self._by_chunk.setdefault(key, {}).setdefault(flight.tenant, flight) is flight

    def _leave(self, flight: Flight) -> None:
        key = flight.context.space.number, _digest(flight.digests, flight.position)
        flights = self._by_chunk.get(key, {})
        if flights.get(flight.tenant) is flight:
            del flights[flight.tenant]
            if not flights:
                del self._by_chunk[key]


def common_chunks(one: bytes, other: bytes, least: int) -> int:
    """Return how many leading chunks two prefixes have in common; the first `least` are known to be."""
    low, high = least, min(len(one), len(other)) // DIGEST_BYTES
    while low < high:  # a digest names all chunks before it, too
        middle = (low + high + 1) // 2
        if _digest(one, middle - 1) == _digest(other, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def _digest(digests: bytes, chunk: int) -> bytes:
    return digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
