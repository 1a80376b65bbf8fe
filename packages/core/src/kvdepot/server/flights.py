"""Single flight: a lookup waits for chunks that another engine is computing, instead of computing them again.

A flight begins when a lookup that announces is answered with a miss: its engine is about to compute the missing chunks.
Another lookup of the same tenant that misses the same chunk can join the flight. It is answered once the chunks that
the two have in common are here, when the flight ends without them, or at its own deadline. A flight ends when its
chunks are here, its request ends, its engine leaves, or nothing of it arrives in time.

A remote flight is one that an engine of another node computes and that comes through a tier. Nobody announces it here:
it begins when a lookup names its chunks (`Lookup.awaits`). While a lookup waits for it, the tiers are asked for the
next chunk again and again. Only lookups that name its chunks join it.

The first chunk of a flight that is not here yet finds it, because a lookup that shares this chunk misses it, too. Only
models with a group of full attention have flights: only there, each chunk follows the one before it. If there are
windows or recurrent states beside it, "here" means the full attention of a chunk until the last chunk, and with the
last one all that a lookup needs. Nobody can say whether shorter parts of such a flight will be usable, so only a lookup
that shares all of its chunks joins it.
"""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

from kvdepot.counting import Counts, depot_counter
from kvdepot.index.index import ChunkIndex
from kvdepot.keys import DIGEST_BYTES
from kvdepot.server.contexts import Context

_FLIGHTS: Final = depot_counter("flights", "Prefixes that a lookup announced as being computed")
_FLIGHTS_JOINED: Final = depot_counter(
    "flights_joined", "Lookups that waited for chunks that another request was computing"
)
_FLIGHTS_FAILED: Final = depot_counter("flights_failed", "Announced prefixes that did not arrive whole")

MAXIMUM_FLIGHTS: Final = 1024
MAXIMUM_WAITING: Final = 64  # lookups of one flight
MAXIMUM_DIGEST_BYTES: Final = 32 << 20  # of all flights

_LEAST_TOKENS: Final = 256  # fewer are computed again sooner than they are waited for
_PATIENCE: Final = 2.0  # times what computing would take: estimates of two equal engines differ that much
_GRACE_SECONDS: Final = 1.0  # that a flight may take beside twice its estimate
_UNKNOWN_SECONDS: Final = 5.0  # that it may take without an estimate
_POLL_SECONDS: Final = 0.02  # between two questions to the tiers for one remote flight
_MOST_POLLS: Final = 400  # a second, for all remote flights together


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
    ask_tiers: "AskTiers | None" = None  # of a remote flight
    has_moved: bool = False  # a chunk has arrived since it began
    is_polled: bool = False  # the next question to the tiers is under way or has its time

    def seconds_to(self, chunk: int, now: float) -> float:
        """Return how long the engine will probably take for the chunks before `chunk`; 0.0 if that is unknown."""
        tokens = self.ahead_tokens + (chunk - self.position) * self.context.space.spec.chunk_tokens
        return max(0.0, self.moved_at + tokens * self.token_seconds - now)

    def stop_of(self, digests: bytes, found: int) -> int:
        """Return up to which chunk a lookup, `found` of whose chunks are here, can wait for this flight."""
        stop = common_chunks(self.digests, digests, found)
        return found if self.context.space.windows and stop < self.stop else stop

    @property
    def is_remote(self) -> bool:
        """Whether an engine of another node computes it."""
        return self.ask_tiers is not None


# Promotes the chunks of a flight that the tiers have, then calls the function. False: the tiers cannot be asked now.
AskTiers = Callable[[Flight, Callable[[], None]], bool]


class FlightTable:
    """Every flight.

    Args:
        index: says which chunks are here.
        clock: seconds, monotonic.
        counters: `flights`, `flights_failed`, `flights_joined`.
    """

    def __init__(self, index: ChunkIndex, clock: Callable[[], float], counters: Counts) -> None:
        self._index = index
        self._clock = clock
        self._counters = counters
        self._by_request: dict[tuple[int, str], Flight] = {}  # by context and request
        # By space and first missing chunk, then by tenant and whether it is remote.
        self._by_chunk: dict[tuple[int, bytes], dict[tuple[str, bool], Flight]] = {}
        # A heap of functions to call with the time; some belong to flights and lookups that have ended.
        self._deadlines: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._num_digest_bytes = 0
        self._num_remote = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, ahead_tokens: int,
        token_seconds: float,
    ) -> None:  # fmt: skip
        """Begin a flight for the chunks from `found` on, unless they are few or somebody else has begun one."""
        space, stop, position = context.space, len(digests) // DIGEST_BYTES, self._position(context, digests, found)
        flight = self._by_request.get((context.number, request_id))
        if flight is not None and not flight.is_remote and (flight.digests, flight.position) == (digests, position):
            flight.ahead_tokens, flight.moved_at = ahead_tokens, self._clock()  # it has asked again
            self._expect(flight)
            return
        self.end_request(context, request_id)
        if (stop - found) * space.spec.chunk_tokens < _LEAST_TOKENS:
            return
        flight = Flight(
            context, request_id, tenant, digests, position, stop, ahead_tokens, token_seconds, self._clock()
        )
        if self._begin(flight):
            remote = self._find(context, tenant, digests, found, is_remote=True)
            if remote is not None:
                self._end(remote)  # its lookups ask again and join this one, whose end they notice

    def _begin(self, flight: Flight) -> bool:
        """Add a flight; False if it is one too many, another one has its next chunk, or the model has none."""
        num_bytes = self._num_digest_bytes + len(flight.digests)
        is_full = len(self._by_request) >= MAXIMUM_FLIGHTS or num_bytes > MAXIMUM_DIGEST_BYTES
        if is_full or not flight.context.space.full_mask or not self._enter(flight):
            return False
        self._by_request[flight.context.number, flight.request_id] = flight
        self._num_digest_bytes = num_bytes
        self._num_remote += flight.is_remote
        self._expect(flight)
        self._counters[_FLIGHTS] += 1
        return True

    def join(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, token_seconds: float,
        until: float, on_end: Callable[[], None], awaits: int = 0,
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
            on_end: called once, when the lookup must be answered with the chunks that are here then.
            awaits: chunks that its request was told to wait for, however long computing them would take.
        """
        flight = self._find(context, tenant, digests, found)
        if flight is None:
            return False
        num_chunks = self.pending(
            context, request_id, tenant, digests, found=found, token_seconds=token_seconds, awaits=awaits
        )
        return num_chunks > 0 and self._wait_for(flight, _Waiting(context, found + num_chunks, until, on_end, flight))

    def await_remote(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, until: float,
        on_end: Callable[[], None], ask_tiers: AskTiers,
    ) -> bool:  # fmt: skip
        """Wait for chunks that an engine of another node brings to a tier; False if too many do, or it is too late.

        Args:
            context: of the lookup.
            request_id: of the lookup.
            tenant: of the lookup.
            digests: of the chunks that come, from chunk 0 on.
            found: those that are here.
            until: the lookup's deadline.
            on_end: called once, when the lookup must be answered with the chunks that are here then.
            ask_tiers: called at a bounded pace while a lookup waits.
        """
        own = self._by_request.get((context.number, request_id))
        if own is not None and own.is_remote:
            self._advance(own)  # the lookup's own promotion may have brought chunks
        flight = self._find(context, tenant, digests, found, is_remote=True)
        if flight is None:
            self.end_request(context, request_id)
            position, stop = self._position(context, digests, found), len(digests) // DIGEST_BYTES
            flight = Flight(
                context, request_id, tenant, digests, position, stop, 0, token_seconds=0.0, moved_at=self._clock(),
                ask_tiers=ask_tiers,
            )  # fmt: skip
            if not self._begin(flight):
                return False
        stop = flight.stop_of(digests, found)
        return stop > found and self._wait_for(flight, _Waiting(context, stop, until, on_end, flight))

    def _wait_for(self, flight: Flight, waiting: _Waiting) -> bool:
        if len(flight.waiting) >= MAXIMUM_WAITING or waiting.until <= self._clock():
            return False
        flight.waiting.append(waiting)
        self._call_at(waiting.until, partial(self._is_late, waiting))
        self._counters[_FLIGHTS_JOINED] += 1
        if flight.is_remote and not flight.is_polled:
            self._poll_soon(flight)
        return True

    def _call_at(self, when: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._deadlines, (when, next(self._numbers), call))

    def _poll_soon(self, flight: Flight) -> None:
        flight.is_polled = True
        seconds = max(_POLL_SECONDS, self._num_remote / _MOST_POLLS)
        self._call_at(self._clock() + seconds, partial(self._poll, flight))

    def _poll(self, flight: Flight, _: float) -> None:
        """Ask the tiers for the chunks of a remote flight, and again when they have answered."""
        flight.is_polled = False
        self._advance_if_under_way(flight)
        if flight.waiting and flight.ask_tiers is not None:
            flight.is_polled = True
            if not flight.ask_tiers(flight, partial(self._polled, flight)):
                self._poll_soon(flight)

    def _polled(self, flight: Flight) -> None:
        self._advance_if_under_way(flight)
        if flight.waiting:
            self._poll_soon(flight)
        else:
            flight.is_polled = False

    def _advance_if_under_way(self, flight: Flight) -> None:
        if self._by_request.get((flight.context.number, flight.request_id)) is flight:
            self._advance(flight)

    def pending(
        self, context: Context, request_id: str, tenant: str, digests: bytes, *, found: int, token_seconds: float,
        awaits: int = 0,
    ) -> int:  # fmt: skip
        """Return how many chunks from `found` on come sooner from another request's flight than from computing them.

        A lookup that `awaits` chunks does not compare. It counts those of a remote flight once one of them has arrived.
        """
        flight = self._find(context, tenant, digests, found)
        if flight is None and found < awaits:
            flight = self._find(context, tenant, digests, found, is_remote=True)
            return 0 if flight is None or not flight.has_moved else flight.stop_of(digests, found) - found
        if flight is None or (flight.context is context and flight.request_id == request_id):
            return 0
        stop = flight.stop_of(digests, found)
        own_seconds = (stop - found) * context.space.spec.chunk_tokens * token_seconds
        if token_seconds and found >= awaits and flight.seconds_to(stop, self._clock()) > _PATIENCE * own_seconds:
            return 0
        return stop - found

    def arrived(self, nodes: Iterable[int]) -> None:
        """Note that the chunks of some nodes may be here now."""
        for node in nodes:
            flights = self._by_chunk.get((self._index.space_of(node).number, self._index.key_of(node)))
            for flight in list(flights.values()) if flights else ():
                self._advance(flight)

    def _advance(self, flight: Flight) -> None:
        index, space, began = self._index, flight.context.space, flight.position
        position = began
        while position < flight.stop and index.visible(space, _digest(flight.digests, position), position) is not None:
            position += 1
        if position == flight.stop and space.windows and index.longest_prefix(space, flight.digests)[0] < position:
            position -= 1
        if position == began:
            return
        if position == flight.stop:
            self._end(flight)
            return
        self._leave(flight)
        flight.position, flight.ahead_tokens, flight.moved_at = position, 0, self._clock()
        flight.has_moved = True
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
            self._counters[_FLIGHTS_FAILED] += 1
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
        """Answer lookups at their deadlines, end flights that are late, and ask the tiers for remote ones."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            _, _, call = heapq.heappop(deadlines)
            call(now)

    def _is_late(self, waiting: _Waiting, _: float) -> None:
        if waiting.flight is not None and waiting in waiting.flight.waiting:
            waiting.flight.waiting.remove(waiting)
            self._answer(waiting)

    def _is_due(self, flight: Flight, now: float) -> None:
        if flight.due <= now and self._by_request.get((flight.context.number, flight.request_id)) is flight:
            self._counters[_FLIGHTS_FAILED] += 1
            self._end(flight)

    def next_deadline(self) -> float | None:
        """Return when `expire` has work, None if there is nothing to wait for."""
        return self._deadlines[0][0] if self._deadlines else None

    def _expect(self, flight: Flight) -> None:
        now = self._clock()
        seconds = 2 * flight.seconds_to(flight.stop, now) if flight.token_seconds else _UNKNOWN_SECONDS
        if flight.context.space.windows:
            seconds = max(seconds, _UNKNOWN_SECONDS)  # vLLM gives a state away one step after the step that computes it
        flight.due = now + _GRACE_SECONDS + seconds
        self._call_at(flight.due, partial(self._is_due, flight))

    def _end(self, flight: Flight) -> None:
        del self._by_request[flight.context.number, flight.request_id]
        self._leave(flight)
        self._num_digest_bytes -= len(flight.digests)
        self._num_remote -= flight.is_remote
        waiting, flight.waiting = flight.waiting, []
        for each in waiting:
            self._answer(each)

    def _answer(self, waiting: _Waiting) -> None:
        waiting.flight = None
        waiting.on_end()

    def _find(
        self, context: Context, tenant: str, digests: bytes, found: int, *, is_remote: bool = False
    ) -> Flight | None:
        position = self._position(context, digests, found)
        flights = self._by_chunk.get((context.space.number, _digest(digests, position)))
        return None if flights is None else flights.get((tenant, is_remote))

    def _position(self, context: Context, digests: bytes, found: int) -> int:
        """Return the first chunk whose full attention is missing, the last one at most. The first `found` are usable.

        Where all groups are full attention, it is `found`.
        """
        if not context.space.windows:
            return found
        return min(self._index.full_prefix(context.space, digests), len(digests) // DIGEST_BYTES - 1)

    def _enter(self, flight: Flight) -> bool:
        """Let a flight be found by its first missing chunk; False if another one is."""
        key = flight.context.space.number, _digest(flight.digests, flight.position)
        return self._by_chunk.setdefault(key, {}).setdefault((flight.tenant, flight.is_remote), flight) is flight

    def _leave(self, flight: Flight) -> None:
        key = flight.context.space.number, _digest(flight.digests, flight.position)
        flights = self._by_chunk.get(key, {})
        if flights.get((flight.tenant, flight.is_remote)) is flight:
            del flights[flight.tenant, flight.is_remote]
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
