"""Agent sessions: named conversations, each with the prefix that it used last.

When a request's chunks are stored, its engine reports the session and its prefix (`Hint`). From then on, the name is
enough to pin, promote, demote or forget the prefix: no keys and no running request are needed. Names outlive the server
(`kvdepot.pool.prefixes`). Pins do not.
"""

import logging
from collections.abc import Callable, Generator, Iterator
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode, printable
from kvdepot.index.pins import AgentSession, Pin, PinTable
from kvdepot.index.tree import Space
from kvdepot.index.visibility import NO_MATCH, Match
from kvdepot.keys import slice_digests
from kvdepot.pool.prefixes import MAXIMUM_TENANTS, PrefixFile
from kvdepot.server.contexts import ContextTable
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Refused, Wait
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_SESSIONS_NOT_REMEMBERED: Final = depot_counter(
    "sessions_not_remembered", "Prefixes of sessions not remembered: too many tenants have sessions, or memory is full"
)
_MOST_RETAINED: Final = 0.5  # share of a tenant's quota; the rest is left for its stores

Counting = Generator[Wait, bool, int]
"""Part of a handler. It takes turns, and returns the number of chunks or entries that it affected."""


class Agents:
    """All agent sessions.

    Args:
        state: the depot's state.
        contexts: the depot's contexts.
        prefixes: the last prefix of each session; the caller closes the file.
    """

    def __init__(self, state: DepotState, contexts: ContextTable, prefixes: PrefixFile) -> None:
        self.prefixes = prefixes
        self.pins = PinTable(state.index)
        self._state = state
        self._index = state.index
        self._contexts = contexts
        self._turns = state.background.operators

    def hinted(self, space: Space, hint: m.Hint) -> None:
        """Note the last prefix of a session, unless an earlier server's sessions are still being read."""
        if self._state.is_restoring:
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
            Refused: the tenant has no such session.
        """
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
        num_ended = yield from self._end(named, digests, self._index.priorities.end_session)
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
