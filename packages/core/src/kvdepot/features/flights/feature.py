"""Single flight: a lookup waits for chunks that another engine is computing, instead of computing them again.

A flight begins when an announcing lookup is answered with a miss: its engine is about to compute the missing chunks.
Another lookup of the same tenant that misses the same chunk can join the flight. It is answered once the chunks that
the two have in common are in the pool, when the flight ends without them, or at its own deadline. A flight ends when
its chunks have arrived, its request ends, one of its stores is aborted, its engine or a worker detaches, stores are
declined, or no chunk of it arrives in time.

Regardless of announcements, a lookup waits at most until its own deadline, and at most twice as long as its own
engine would compute the chunks, if that is known. Answers are sent in background steps, so that the end of many waits
is spread over many turns of the loop.

A remote flight is computed by an engine of another node and comes through a tier. It is not announced here: it begins
when a lookup names its chunks (`Lookup.awaits`). While a lookup waits for it, the tiers are polled for the next chunk.
Only lookups that name its chunks join it.

A flight is found by its first missing chunk, because a lookup that shares this chunk misses it, too. Only models with a
full-attention group have flights, because only there each chunk follows the one before it. Beside windows or recurrent
states, a chunk has arrived when its full attention is in the pool; the last chunk, when everything that a lookup needs
is. A shorter part of such a flight may be unusable, so only a lookup that shares all of its chunks joins it.
"""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

from msgspec import structs

from kvdepot.counting import depot_counter
from kvdepot.errors import require
from kvdepot.keys import digest_at, num_digests
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature
from kvdepot.server.query import Query, Rank
from kvdepot.server.sources import Source
from kvdepot.server.stores import Ticket
from kvdepot.server.turns import Wait
from kvdepot.wire.status import DepotStatus

_FLIGHTS: Final = depot_counter("flights", "Prefixes that a lookup announced as being computed")
_FLIGHTS_JOINED: Final = depot_counter(
    "flights_joined", "Lookups that waited for chunks that another request was computing"
)
_FLIGHTS_FAILED: Final = depot_counter("flights_failed", "Announced prefixes that did not arrive whole")
_FLIGHTS_CUT: Final = depot_counter("flights_cut", "Announced prefixes whose end found no room in the pool")

MAXIMUM_FLIGHTS: Final = 1024  # shared fairly by all owners: the requests that a node computes at one time
MAXIMUM_WAITING: Final = 4096  # lookups in total: four for each flight
MAXIMUM_WAITING_FOR_ONE: Final = 64  # lookups per flight: all are answered in the background when it ends
MAXIMUM_DIGEST_BYTES: Final = 32 << 20  # in total: 1,024 flights of 1,024 chunks each
MAXIMUM_SECONDS: Final = 60.0  # without a new chunk; no lookup may wait longer (`Lookup.wait_seconds`)

LEAST_TOKENS: Final = 256  # computing fewer again is faster than waiting
_PATIENCE: Final = 2.0  # times the time to compute: estimates of two equal engines differ that much
GRACE_SECONDS: Final = 1.0  # allowed for a flight beyond twice its estimate
_UNKNOWN_SECONDS: Final = 5.0  # allowed for a flight without an estimate: a prefill of 50,000 tokens at 10,000 a second
# A lookup may wait this much beyond twice its own time: copying a store, committing it and a step of each engine take
# tens of milliseconds, however few the tokens are.
SLACK_SECONDS: Final = 0.05
_TIERS_SECONDS: Final = 60.0  # the maximum of `--promote-seconds`, so that only that setting bounds the wait
_POLL_SECONDS: Final = 0.02  # between two polls of the tiers for one remote flight: little beside a prefill
_MOST_POLLS: Final = 400  # per second, for all remote flights together: eight poll at the full rate


class _FairBound:
    """Counts a bounded resource by owner. An owner gets more only while it holds less than is free.

    So the first owner takes at most half, the next one half of the rest, and there is always some left.
    """

    def __init__(self, bound: int) -> None:
        self.bound = bound
        self.total = 0
        self._of_owner: Counter[Hashable] = Counter()

    def has_room(self, owner: Hashable, amount: int = 1) -> bool:
        """Return whether an owner may take `amount` more."""
        return self._of_owner[owner] + amount <= self.bound - self.total

    def take(self, owner: Hashable, amount: int = 1) -> None:
        """Add `amount` to an owner's count."""
        self.total += amount
        self._of_owner[owner] += amount

    def give_back(self, owner: Hashable, amount: int = 1) -> None:
        """Subtract `amount` from an owner's count."""
        self.total -= amount
        self._of_owner[owner] -= amount
        if not self._of_owner[owner]:
            del self._of_owner[owner]


@dataclass(slots=True, eq=False)
class _Waiting:
    """A lookup that has joined a flight."""

    context: Context
    stop: int  # the end of the chunks that it waits for
    on_end: Callable[[], None]
    timer: int = 0  # ends the wait at its deadline


@dataclass(slots=True, eq=False)
class Flight:
    """The chunks from `position` to `stop`, which one request is computing."""

    query: Query  # of the request, which asks for all chunks up to `stop`
    position: int  # the first missing chunk
    stop: int
    moved_at: float
    ahead_tokens: int = 0  # tokens that the engine computes before these; 0 once the first of these has arrived
    token_seconds: float = 0.0  # 0: unknown
    timer: int = 0  # ends the flight if nothing arrives
    waiting: dict[_Waiting, None] = field(default_factory=dict["_Waiting", None])  # an ordered set
    ask_tiers: Wait | None = None  # of a remote flight: promotes its chunks
    has_moved: bool = False  # whether a chunk has arrived since it began
    is_polled: bool = False  # whether the next poll of the tiers is under way or scheduled

    def expected_at(self, chunk: int, token_seconds: float = 0.0) -> float:
        """Estimate when the chunks before `chunk` arrive. `token_seconds` is used if the engine's own is unknown."""
        tokens = self.ahead_tokens + (chunk - self.position) * self.query.context.space.spec.chunk_tokens
        return self.moved_at + tokens * (self.token_seconds or token_seconds)

    def stop_of(self, digests: bytes, found: int) -> int:
        """Return the end of the chunks that a lookup with `found` chunks in the pool can wait for."""
        stop = max(found, min(self.stop, common_chunks(self.query.digests, digests, found)))
        return found if self.query.context.space.windows and stop < self.stop else stop

    @property
    def is_remote(self) -> bool:
        """Whether an engine of another node computes its chunks."""
        return self.ask_tiers is not None


class _Here(Source):
    """Requests that other engines of this node are computing."""

    rank = Rank.COMPUTED_HERE

    def __init__(self, flights: "FlightTable") -> None:
        self._flights = flights

    def complete(self, query: Query, on_end: Callable[[], None]) -> bool:
        """See `Source`."""
        return self._flights.join(query, on_end)

    def cut(self, context: Context, request_id: str, stop: int) -> None:
        """See `Source`."""
        if not stop:
            self._flights.end_request(context, request_id)
        self._flights.cut(context, request_id, stop)


class _Elsewhere(Source):
    """Requests that other engines are computing: on another node, or here behind the chunks that tiers brought."""

    rank = Rank.COMPUTED_ELSEWHERE

    def __init__(self, flights: "FlightTable") -> None:
        self._flights = flights

    def complete(self, query: Query, on_end: Callable[[], None]) -> bool:
        """See `Source`."""
        # Each wait is as long as the engine's own computing at most, so a second one would be slower than that.
        if Rank.COMPUTED_HERE in query.waited_for:
            return False
        return self._flights.join(query, on_end) or self._flights.await_remote(query, on_end)


class FlightTable(Feature):
    """All flights of a depot."""

    name = "flights"

    def __init__(self, depot: Depot) -> None:
        state = depot.state
        self.sources = (_Here(self), _Elsewhere(self))
        self._state = state
        self._tiers = depot.tiers
        self._contexts = depot.contexts
        self._index = state.index
        self._clock = state.clock
        self._counters = state.counters
        self._by_request: dict[tuple[int, str], Flight] = {}  # by context and request
        # By (space, first missing chunk), then by (tenant, is_remote).
        self._by_chunk: dict[tuple[int, bytes], dict[tuple[str, bool], Flight]] = {}
        self._timers = state.timers
        # Shared between processes, not sessions: one process can open many sessions.
        self._num_flights = _FairBound(MAXIMUM_FLIGHTS)
        self._num_waiting = _FairBound(MAXIMUM_WAITING)
        self._digest_bytes = _FairBound(MAXIMUM_DIGEST_BYTES)
        self._num_remote = 0

    def __len__(self) -> int:
        return len(self._by_request)

    def begin(self, query: Query) -> None:
        """Begin a flight for the chunks that a query misses, unless they are few or have a flight already."""
        context, request = query.context, query.request
        stop, position = query.num_chunks, self._position(query)
        flight = self._by_request.get(query.owner)
        if (
            flight is not None
            and not flight.is_remote
            and (flight.query.digests, flight.position) == (query.digests, position)
        ):
            return  # the same lookup asked again: its flight keeps its deadline
        self.end_request(context, request.request_id)
        if (stop - query.found) * context.space.spec.chunk_tokens < LEAST_TOKENS or not self._can_arrive(context):
            return
        flight = Flight(query, position, stop, self._clock(), request.ahead_tokens, request.token_seconds)
        other = self._find(query)
        if other is not None and request.joins and not self._is_timely(other, query):
            self._fail(other)  # otherwise each lookup that gave up on it would compute the same chunks
        if self._begin(flight):
            remote = self._find(query, is_remote=True)
            if remote is not None:
                self._end(remote)  # its lookups ask again and join the local flight

    def _begin(self, flight: Flight) -> bool:
        """Add a flight. Return False if there are too many, its next chunk has one, or the model has no flights."""
        owner, num_bytes = flight.query.context.writer, len(flight.query.digests)
        has_room = self._num_flights.has_room(owner) and self._digest_bytes.has_room(owner, num_bytes)
        if not has_room or not flight.query.context.space.full_mask or not self._enter(flight):
            return False
        self._by_request[flight.query.owner] = flight
        self._num_flights.take(owner)
        self._digest_bytes.take(owner, num_bytes)
        self._num_remote += flight.is_remote
        self._expect(flight)
        self._counters[_FLIGHTS] += 1
        return True

    def _can_arrive(self, context: Context) -> bool:
        state = self._state
        is_stopping = not (state.accepts_stores or state.is_restoring)
        return not (is_stopping or state.is_draining) and self._contexts.can_store(context.space, context.instance)

    def join(self, query: Query, on_end: Callable[[], None]) -> bool:
        """Wait for the flight of a query's next chunk: see `Source.complete`."""
        flight, num_chunks = self._find(query), self.pending(query) if query.request.joins else 0
        if flight is None or not num_chunks:
            return False
        until, own_seconds = query.until, query.own_seconds(num_chunks)
        if own_seconds and query.found >= query.request.awaits:
            until = min(until, self._clock() + _PATIENCE * own_seconds + SLACK_SECONDS)
        return self._wait_for(flight, query, query.found + num_chunks, until, on_end)

    def await_remote(self, query: Query, on_end: Callable[[], None]) -> bool:
        """Wait for chunks that the query names and an engine of another node stores in a tier: see `Source.complete`.

        Meanwhile, ask the tiers for them at a bounded rate. False if too many lookups wait.
        """
        tiering = self._state.tiering
        # Without a tier there is no way for them, and each question would be in vain until the lookup's deadline.
        is_possible = tiering is not None and tiering.is_usable and self._state.accepts_stores
        if not (is_possible and query.request.joins) or query.found >= query.request.awaits:
            return False
        # Give the tiers their full time and do not compare them with computing: the chunks are on their way.
        request = structs.replace(query.request, digests=b"", wait_seconds=_TIERS_SECONDS, token_seconds=0.0)
        query = query.first(query.request.awaits)
        asking = replace(query, request=request, until=math.inf)

        def ask_tiers(on_answer: Callable[[], None]) -> bool:
            asking.refresh(self._index)
            return self._tiers.complete(asking, on_answer)

        return self._await(query, on_end, ask_tiers)

    def _await(self, query: Query, on_end: Callable[[], None], ask_tiers: Wait) -> bool:
        own = self._by_request.get(query.owner)
        if own is not None and own.is_remote:
            self._advance(own)  # the lookup's own promotion may have brought chunks already
        flight = self._find(query, is_remote=True)
        if flight is None:
            self.end_request(query.context, query.request.request_id)
            flight = Flight(query, self._position(query), query.num_chunks, self._clock(), ask_tiers=ask_tiers)
            if not self._begin(flight):
                return False
        stop = flight.stop_of(query.digests, query.found)
        return stop > query.found and self._wait_for(flight, query, stop, query.until, on_end)

    def _wait_for(self, flight: Flight, query: Query, stop: int, until: float, on_end: Callable[[], None]) -> bool:
        owner = query.context.writer
        has_room = len(flight.waiting) < MAXIMUM_WAITING_FOR_ONE and self._num_waiting.has_room(owner)
        if not has_room or until <= self._clock():
            return False
        waiting = _Waiting(query.context, stop, on_end)
        flight.waiting[waiting] = None
        self._num_waiting.take(owner)
        waiting.timer = self._timers.call_at(until, partial(self._answer, flight, waiting))
        self._counters[_FLIGHTS_JOINED] += 1
        is_first = Rank.COMPUTED_HERE not in query.waited_for and Rank.TIERS not in query.waited_for
        by = "an engine of another node" if flight.is_remote else f"request {flight.query.request.request_id}"
        query.waited_for[Rank.COMPUTED_HERE if is_first else Rank.COMPUTED_ELSEWHERE] = by
        if flight.is_remote and not flight.is_polled:
            self._poll_soon(flight)
        return True

    def _poll_soon(self, flight: Flight) -> None:
        flight.is_polled = True
        # At the full rate for each of them, 1,024 flights would ask every tier 50,000 times a second.
        seconds = max(_POLL_SECONDS, self._num_remote / _MOST_POLLS)
        self._timers.call_at(self._clock() + seconds, partial(self._poll, flight))

    def _poll(self, flight: Flight) -> None:
        """Promote chunks of a remote flight from the tiers, and repeat that after they have answered."""
        flight.is_polled = False
        self._advance_if_under_way(flight)
        if flight.waiting and flight.ask_tiers is not None:
            flight.is_polled = True
            if not flight.ask_tiers(partial(self._polled, flight)):
                self._poll_soon(flight)

    def _polled(self, flight: Flight) -> None:
        self._advance_if_under_way(flight)
        if flight.waiting:
            self._poll_soon(flight)
        else:
            flight.is_polled = False

    def _advance_if_under_way(self, flight: Flight) -> None:
        if self._by_request.get(flight.query.owner) is flight:
            self._advance(flight)

    def pending(self, query: Query) -> int:
        """Return how many of the next chunks arrive sooner by another request's flight than by computing them.

        A lookup that `awaits` chunks does not compare. It counts the chunks of a remote flight once one has arrived.
        """
        flight, found, request = self._find(query), query.found, query.request
        if flight is None and found < request.awaits:
            flight = self._find(query, is_remote=True)
            return 0 if flight is None or not flight.has_moved else flight.stop_of(query.digests, found) - found
        if flight is None or flight.query.owner == query.owner:
            return 0
        return flight.stop_of(query.digests, found) - found if self._is_timely(flight, query) else 0

    def missed(self, query: Query) -> None:
        """See `Feature`. Begins a flight for the missing chunks if the lookup announces them."""
        query.num_pending = self.pending(query) if query.request.joins else 0
        if query.num_pending:
            flight = self._find(query) or self._find(query, is_remote=True)
            by = "" if flight is None else flight.query.request.request_id
            query.why = f"request {by} computes the next {query.num_pending}"
        elif query.request.announces:
            self.begin(query)

    def _is_timely(self, flight: Flight, query: Query) -> bool:
        """Return whether a flight should arrive within twice the time that the lookup's engine needs for its chunks.

        A flight that is late by that much does not count either. Otherwise lookups could wait for it again and again.
        """
        stop = flight.stop_of(query.digests, query.found)
        own_seconds = query.own_seconds(stop - query.found)
        if not own_seconds or query.found < query.request.awaits:
            return True
        seconds = flight.expected_at(stop, query.request.token_seconds) - self._clock()
        return abs(seconds) <= _PATIENCE * own_seconds + SLACK_SECONDS

    def stored(self, ticket: Ticket, nodes: Sequence[int]) -> None:
        """See `Feature`. Advances the flights of chunks that may have become complete."""
        for node in nodes if self._by_chunk else ():
            flights = self._by_chunk.get((self._index.nodes.space_of(node).number, self._index.nodes.key_of(node)))
            for flight in list(flights.values()) if flights else ():
                self._advance(flight)

    def _advance(self, flight: Flight) -> None:
        index, space, began = self._index, flight.query.context.space, flight.position
        position = began
        while (
            position < flight.stop
            and index.visibility.find(space, digest_at(flight.query.digests, position), position) is not None
        ):
            position += 1
        if (
            position == flight.stop
            and space.windows
            and index.visibility.match(space, flight.query.digests).num_chunks < position
        ):
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
            self._end(flight)  # another request's flight has the next chunk
            return
        self._expect(flight)
        for waiting in [each for each in flight.waiting if each.stop <= position]:
            self._answer(flight, waiting)

    def end_request(self, context: Context, request_id: str) -> None:
        """End the flight of a request, if it has one."""
        flight = self._by_request.get((context.number, request_id))
        if flight is not None:
            self._fail(flight)

    def cut(self, worker: Context, request_id: str, stop: int = 0) -> None:
        """Shorten the flight of a request to end at `stop`: a worker stores no chunk from there on."""
        for flight in list(self._by_request.values()):
            of = flight.query.context
            is_same = (
                flight.query.request.request_id == request_id
                and of.instance == worker.instance
                and of.space is worker.space
            )
            if not is_same or flight.is_remote or flight.stop <= stop:
                continue
            if flight.position >= stop or of.space.windows:  # windows are complete only at the end of the prefix
                self._fail(flight)
                continue
            flight.stop = stop  # lookups that wait for more are answered when it ends
            self._counters[_FLIGHTS_CUT] += 1

    def detached(self, context: Context) -> None:
        """See `Feature`. Ends a scheduler's flights, answers its lookups, and ends flights that lost a worker."""
        for flight in list(self._by_request.values()):
            for waiting in [each for each in flight.waiting if each.context is context]:
                self._answer(flight, waiting)
            if flight.query.context is context:
                self._fail(flight)
        self._end_stranded()

    def swept(self, now: float) -> None:
        """See `Feature`. Ends the flights of engines whose stores are declined from now on."""
        if self._state.is_draining or not self._state.accepts_stores:
            self._end_stranded()

    def _end_stranded(self) -> None:
        for flight in list(self._by_request.values()):
            if not flight.is_remote and not self._can_arrive(flight.query.context):
                self._fail(flight)

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        status.num_flights = len(self)

    def _expect(self, flight: Flight) -> None:
        now = self._clock()
        seconds = 2 * (flight.expected_at(flight.stop) - now) if flight.token_seconds else _UNKNOWN_SECONDS
        if flight.query.context.space.windows:
            seconds = max(seconds, _UNKNOWN_SECONDS)  # vLLM offers a recurrent state one step after computing it
        self._timers.cancel(flight.timer)
        due = now + min(GRACE_SECONDS + seconds, MAXIMUM_SECONDS)
        flight.timer = self._timers.call_at(due, partial(self._fail, flight))

    def check_integrity(self) -> None:
        """Check the counts and lists against the flights under way and their waiting lookups.

        Raises:
            IntegrityError: they disagree.
        """
        flights = list(self._by_request.values())
        require(self._num_flights.total == len(flights), "flights are miscounted")
        require(self._digest_bytes.total == sum(len(each.query.digests) for each in flights), "digests are miscounted")
        require(self._num_waiting.total == sum(len(each.waiting) for each in flights), "lookups are miscounted")
        require(self._num_remote == sum(each.is_remote for each in flights), "flights of other nodes are miscounted")
        listed = {each for by_tenant in self._by_chunk.values() for each in by_tenant.values()}
        require(listed <= set(flights), "a flight that has ended can be found")

    def _fail(self, flight: Flight) -> None:
        self._counters[_FLIGHTS_FAILED] += 1
        self._end(flight)

    def _end(self, flight: Flight) -> None:
        del self._by_request[flight.query.owner]
        self._leave(flight)
        self._timers.cancel(flight.timer)
        self._num_flights.give_back(flight.query.context.writer)
        self._digest_bytes.give_back(flight.query.context.writer, len(flight.query.digests))
        self._num_remote -= flight.is_remote
        for each in list(flight.waiting):
            self._answer(flight, each)

    def _answer(self, flight: Flight, waiting: _Waiting) -> None:
        del flight.waiting[waiting]
        self._timers.cancel(waiting.timer)
        self._num_waiting.give_back(waiting.context.writer)
        self._state.background.urgent.enter(waiting.on_end)

    def _find(self, query: Query, *, is_remote: bool = False) -> Flight | None:
        if not self._by_chunk:
            return None
        flights = self._by_chunk.get((query.context.space.number, digest_at(query.digests, self._position(query))))
        return None if flights is None else flights.get((query.request.tenant, is_remote))

    def _position(self, query: Query) -> int:
        """Return the first chunk whose full attention is missing, at most the last chunk. The first `found` are usable.

        If all groups are full attention, that is `found`.
        """
        space = query.context.space
        if not space.windows:
            return query.found
        return min(self._index.visibility.full_prefix(space, query.digests), query.num_chunks - 1)

    def _enter(self, flight: Flight) -> bool:
        """List a flight under its first missing chunk. Return False if another flight is listed there."""
        key = flight.query.context.space.number, digest_at(flight.query.digests, flight.position)
        return (
            self._by_chunk.setdefault(key, {}).setdefault((flight.query.request.tenant, flight.is_remote), flight)
            is flight
        )

    def _leave(self, flight: Flight) -> None:
        key = flight.query.context.space.number, digest_at(flight.query.digests, flight.position)
        flights = self._by_chunk.get(key, {})
        if flights.get((flight.query.request.tenant, flight.is_remote)) is flight:
            del flights[flight.query.request.tenant, flight.is_remote]
            if not flights:
                del self._by_chunk[key]


def common_chunks(one: bytes, other: bytes, least: int) -> int:
    """Return how many leading chunks two prefixes have in common, by bisection.

    The first `least` are known to be equal.
    """
    low, high = least, min(num_digests(one), num_digests(other))
    while low < high:  # equal digests mean that all chunks before them are equal, too
        middle = (low + high + 1) // 2
        if digest_at(one, middle - 1) == digest_at(other, middle - 1):
            low = middle
        else:
            high = middle - 1
    return low
