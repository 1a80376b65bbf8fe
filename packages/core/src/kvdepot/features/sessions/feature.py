"""Agent sessions: named conversations, each with the prefix that it used last.

When a request's chunks are stored, its engine reports the session and its prefix (`Hint`). From then on, the name is
enough to pin, promote, demote or forget the prefix: no keys and no running request are needed. Names outlive the server
(`prefixes`). Pins do not.
"""

import logging
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode, printable
from kvdepot.features.sessions import operations as o
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.pins import AgentSession, Pin, PinTable
from kvdepot.features.sessions.prefixes import MAXIMUM_TENANTS, SESSIONS_FILE, PrefixFile
from kvdepot.index.tree import Space
from kvdepot.index.visibility import NO_MATCH, Match
from kvdepot.keys import slice_digests
from kvdepot.server.contexts import Context
from kvdepot.server.depot import Depot
from kvdepot.server.feature import Feature, Handler, OperationHandler
from kvdepot.server.state import ENDS_CUT
from kvdepot.server.turns import Refused, Steps, Wait
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest
from kvdepot.wire.status import DepotStatus

logger = logging.getLogger(__name__)

_SESSIONS_NOT_REMEMBERED: Final = depot_counter(
    "sessions_not_remembered", "Prefixes of sessions not remembered: too many tenants have sessions, or memory is full"
)
_HINTS: Final = depot_counter("hints", "Hints from clients")

_ENDED_AT_ONCE: Final = 2  # steps of a hint before its first wait: the end of a prefix is evicted first
_MOST_RETAINED: Final = 0.5  # share of a tenant's quota; the rest is left for its stores

Counting = Generator[Wait, bool, int]
"""Part of a handler. It takes turns, and returns the number of chunks or entries that it affected."""


class Agents(Feature):
    """All agent sessions.

    Args:
        depot: the depot.
        prefixes: the last prefix of each session; the caller closes the file.
    """

    name = "sessions"

    def __init__(self, depot: Depot, prefixes: PrefixFile | None = None) -> None:
        if prefixes is None:
            prefixes = PrefixFile.in_memory() if depot.files is None else depot.files.keep(SESSIONS_FILE, PrefixFile)
        self.prefixes = prefixes
        self.pins = PinTable(depot.index)
        self._state = depot.state
        self._index = depot.index
        self._contexts = depot.contexts
        self._tiers = depot.tiers
        self._turns = depot.background.operators
        self._reading = depot.background.queue(1)
        self._unpinnings = depot.background.queue(1)
        self._is_reading = False

    def handlers(self) -> Mapping[type[m.ContextRequest], Handler]:
        """See `Feature`."""
        return {Hint: self._hint}

    def operations(self) -> Mapping[type[OperatorRequest], OperationHandler]:
        """See `Feature`."""
        return {
            o.RetainSession: self._retain_session,
            o.PrefetchSession: self._prefetch_session,
            o.DemoteSession: self._demote_session,
            o.ForgetSession: self._forget_session,
        }

    def restored(self) -> None:
        """See `Feature`. Reads the sessions of an earlier server."""
        self._is_reading = True
        self._reading.add(self._read())

    def _read(self) -> Iterator[None]:
        try:
            yield from self.prefixes.restore()
        finally:
            self._is_reading = False

    def swept(self, now: float) -> None:
        """See `Feature`."""
        if self.pins.has_expired(now):
            self._unpinnings.add(self.pins.expire(now))

    def report(self, status: DepotStatus) -> None:
        """See `Feature`."""
        status.num_pins = len(self.pins)
        status.num_agent_sessions = len(self.prefixes)
        for name, (share, _, _) in self._index.quotas.usage().items():
            status.tenants[name].retained_bytes = self.pins.bytes_of(share)

    def _hint(self, context: Context, request: Hint) -> frames.Reply | Steps:
        """Note a session's prefix, or end one. The reply counts the chunks that ended."""
        state, names = self._state, self._state.labels.names
        state.counters[_HINTS] += 1
        if request.session:
            self._hinted(context.space, request)
        nodes = self._index.visibility.match(context.space, request.digests).nodes if request.session_ended else ()
        if not nodes:
            return m.Done(state.epoch, 0)
        tenant = request.tenant  # `request` would keep its digests in memory
        return self._end_prefix(self._index.shares.end_session(nodes[-1], lambda label: names[label][0] == tenant))

    def _end_prefix(self, steps: Iterator[int]) -> Steps:
        """End the last chunks of a prefix now. End the rest of a long one later, unless too many wait."""
        epoch, later, count = self._state.epoch, self._state.background.ends, 0
        for _ in range(_ENDED_AT_ONCE):
            more = next(steps, None)
            if more is None:
                return m.Done(epoch, count)
            count += more
        if not (yield later.enter):
            self._state.counters[ENDS_CUT] += 1
            return m.Done(epoch, count)
        count += yield from later.total(steps)
        return m.Done(epoch, count)

    def _hinted(self, space: Space, hint: Hint) -> None:
        # The sessions of an earlier server, still being read, would overwrite a note made meanwhile.
        if self._state.is_restoring or self._is_reading:
            return
        named = hint.tenant, hint.session
        if hint.session_ended:
            self.prefixes.forget(*named)
            self.pins.end(named)
            return
        if not self.prefixes.remember(*named, hint.digests) and hint.digests:
            self._not_remembered(named)
        if hint.retain_seconds:
            self._pin(space, named, hint.digests, hint.retain_seconds)

    def _retain_session(self, request: o.RetainSession) -> Steps:
        named = request.tenant, request.session
        digests = self.prefix_of(named)
        yield from self._turns.first()
        return m.Done(self._state.epoch, (yield from self.retain(named, digests, request.retain_seconds)))

    def _prefetch_session(self, request: o.PrefetchSession) -> Steps:
        named = request.tenant, request.session
        digests = self.prefix_of(named)
        yield from self._turns.first()
        yield from self._tiers.bring_up(request.tenant, digests)
        return m.Done(self._state.epoch, (yield from self.retain(named, digests, request.retain_seconds)))

    def _demote_session(self, request: o.DemoteSession) -> Steps:
        named = request.tenant, request.session
        digests = self.prefix_of(named)
        yield from self._turns.first()
        return m.Done(self._state.epoch, (yield from self.demote(named, digests)))

    def _forget_session(self, request: o.ForgetSession) -> Steps:
        named = request.tenant, request.session
        digests = self.prefix_of(named)
        yield from self._turns.first()
        return m.Done(self._state.epoch, (yield from self.forget(named, digests, at_once=request.at_once)))

    def _not_remembered(self, named: AgentSession) -> None:
        counters = self._state.counters
        if not counters[_SESSIONS_NOT_REMEMBERED]:
            why = (
                "memory is full" if self.prefixes.has_room(named[0]) else f"{MAXIMUM_TENANTS:,} other tenants have some"
            )
            text = "sessions of tenant %s are not remembered, as %s; further ones are only counted"
            logger.warning(text, printable(named[0]), why)
        counters[_SESSIONS_NOT_REMEMBERED] += 1

    def prefix_of(self, named: AgentSession) -> bytes:
        """Return the digests of a session's last prefix.

        Raises:
            Refused: the tenant has no such session, or those of an earlier server are being read.
        """
        if self._is_reading:
            raise Refused(ErrorCode.DRAINING, "the sessions of an earlier server are being read: ask again")
        digests = self.prefixes.find(*named)
        if not digests:
            tenant, session = map(printable, named)
            why = "no engine named it, or it was forgotten"
            if not self.prefixes.has_room(named[0]):
                why = (
                    f"{MAXIMUM_TENANTS:,} other tenants have sessions, and those of further tenants are not remembered"
                )
            raise Refused(ErrorCode.OUT_OF_RANGE, f"tenant {tenant} has no session {session}: {why}")
        return digests

    def retain(self, named: AgentSession, digests: bytes, seconds: float) -> Counting:
        """Pin the part of a prefix that is in the pool, and return its number of chunks. 0 seconds unpin it.

        The sessions of a tenant can pin half of its quota together. If a prefix does not fit, its beginning is pinned.
        """
        found, best = 0, None
        for space in list(self._index.spaces):
            yield self._turns.again
            here = self._match(space, named, digests).num_chunks
            if here > found:
                found, best = here, space
        if best is None or not seconds:
            self.pins.end(named)
            return found
        return self._pin(best, named, digests, seconds)

    def _match(self, space: Space, named: AgentSession, digests: bytes) -> Match:
        """Find the longest usable prefix in a space, as `Visibility.match` does.

        Prefixes of other tenants do not count.
        """
        match = self._index.visibility.match(space, digests)
        is_own = match.nodes and self._state.labels.names[self._index.nodes.label[match.nodes[-1]]][0] == named[0]
        return match if is_own else NO_MATCH

    def _pin(self, space: Space, named: AgentSession, digests: bytes, seconds: float) -> int:
        """Pin the session's prefix in one space. Return the number of pinned chunks."""
        index = self._index
        self.pins.end(named)
        match = self._match(space, named, digests)
        places, _ = self._contexts.places(space)
        if not match.nodes or not places:
            return 0  # part of it was evicted meanwhile, or no attached engine could use it
        share = index.nodes.tree.share[match.nodes[-1]]
        in_each = sum(place.num_bytes for place in places if space.full_mask & 1 << place.group)
        at_end = sum(place.num_bytes * space.chunks_needed[place.group] for place in places)
        room = int(index.quotas.quota_bytes[share] * _MOST_RETAINED) - self.pins.bytes_of(share) - at_end
        fitting = max(0, room // in_each) if in_each else match.num_chunks * (room >= 0)
        match = index.visibility.match(space, slice_digests(digests, 0, min(match.num_chunks, fitting)))
        if match.nodes:
            num_bytes = match.num_chunks * in_each + at_end
            self.pins.put(named, Pin(match.nodes, share, num_bytes, self._state.clock() + seconds))
        return match.num_chunks

    def demote(self, named: AgentSession, digests: bytes) -> Counting:
        """Evict the chunks that only this prefix needs as soon as a tier has them. Return their number.

        Raises:
            Refused: no tier is in use.
        """
        tiering = self._state.tiering
        if tiering is None or not tiering.is_usable:
            raise Refused(ErrorCode.TIER_UNAVAILABLE, "no tier is in use: nothing was changed")
        return (yield from self._end(named, digests, tiering.leave))

    def forget(self, named: AgentSession, digests: bytes, *, at_once: bool) -> Counting:
        """Forget a session. Evict the chunks that only its prefix needs: now if `at_once`, else before all others.

        Chunks that a request holds are evicted before all others when it ends. Return the number of entries evicted, or
        of chunks that will be.
        """
        self.prefixes.forget(*named)
        # First, also if at once: what a request holds stays, and its name, by which it could be ended later, is gone.
        num_ended = yield from self._end(named, digests, self._index.shares.end_session)
        if not at_once:
            return num_ended
        count = 0
        for space in list(self._index.spaces):
            yield self._turns.again
            nodes = self._match(space, named, digests).nodes
            if nodes:
                if self._state.tiering is not None:
                    self._state.tiering.let_go(space, digests)
                count += yield from self._turns.total(self._index.evictor.clear_end(nodes[-1]))
        return count

    def _end(
        self, named: AgentSession, digests: bytes, end: Callable[[int, Callable[[int], bool]], Iterator[int]]
    ) -> Counting:
        """End a session's pin, and end its prefix in each space by `end(last node, is own label)`.

        Return the number of chunks that only this prefix needs.
        """
        names, tenant, count = self._state.labels.names, named[0], 0

        def is_own(label: int) -> bool:
            return names[label][0] == tenant

        self.pins.end(named)
        for space in list(self._index.spaces):
            yield self._turns.again
            nodes = self._match(space, named, digests).nodes
            if nodes:
                count += yield from self._turns.total(end(nodes[-1], is_own))
        return count
