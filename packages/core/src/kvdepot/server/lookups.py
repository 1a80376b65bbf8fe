"""Lookups and retrieves: engines' requests about prefixes that the depot may have."""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.index.tree import NO_NODE
from kvdepot.keys import DIGEST_BYTES, digest_at
from kvdepot.server.contexts import Context, ContextTable, check_run
from kvdepot.server.feature import Features
from kvdepot.server.query import Outcome, Query
from kvdepot.server.sources import Source
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Steps
from kvdepot.tiers.tiering import MOST_USED
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_LOOKUPS: Final = depot_counter("lookups", "Lookups by schedulers")
_LOOKUP_CHUNKS: Final = depot_counter("lookup_chunks", "Chunks looked up")
_LOOKUP_CHUNKS_POOL_HIT: Final = depot_counter("lookup_chunks_pool_hit", "Chunks found in the pool")
_LOOKUP_CHUNKS_HIT: Final = depot_counter(
    "lookup_chunks_hit", "Chunks found, in the pool or loaded from the tiers in time"
)
_RETRIEVES: Final = depot_counter("retrieves", "Retrieves prepared")
_RETRIEVE_CHUNKS: Final = depot_counter("retrieve_chunks", "Chunks requested by workers")
_RETRIEVE_CHUNKS_HIT: Final = depot_counter("retrieve_chunks_hit", "Chunks delivered to workers")

_DEFAULT_TENANT: Final = "default"


class Lookups:
    """Serves the lookups of schedulers, and the retrieves of workers.

    Args:
        state: the depot's state.
        contexts: the depot's contexts.
        sources: in the order in which a lookup asks them; the list may grow.
        features: told of each lookup.
    """

    def __init__(
        self, state: DepotState, contexts: ContextTable, sources: Sequence[Source], features: Features
    ) -> None:
        self._state = state
        self._index = state.index
        self._leases = state.leases
        self._counters = state.counters
        self._usage = state.usage
        self._contexts = contexts
        self._sources = sources
        self._features = features

    def lookup(self, context: Context, request: m.Lookup) -> frames.Reply | Steps:
        """Lease the prefix that the pool has.

        Wait for chunks that are being computed, or promote more from the tiers.
        """
        index, space = self._index, context.space
        match = index.visibility.match(space, request.digests)
        num_chunks = len(request.digests) // DIGEST_BYTES  # whole ones: `match` has checked them
        if request.token_seconds != context.token_seconds:
            context.token_seconds = self._contexts.token_seconds[context.instance] = request.token_seconds
        counters = self._counters
        counters[_LOOKUPS] += 1
        counters[_LOOKUP_CHUNKS] += num_chunks
        counters[_LOOKUP_CHUNKS_POOL_HIT] += match.num_chunks
        if request.hands_over:
            self._contexts.begin_hand_over(context.instance, request.request_id)
        tokens = self._usage.tenant_tokens[request.tenant or _DEFAULT_TENANT]
        tokens[0] += num_chunks * space.spec.chunk_tokens
        tokens[1] += match.num_chunks * space.spec.chunk_tokens
        query = Query(context, request, request.digests, match)
        if match.num_chunks == num_chunks:
            return self._answer(query, is_whole=True)
        return self._complete(query, tokens)

    def _complete(self, query: Query, tokens: list[int]) -> Steps:
        """Ask one source after the other for the missing chunks, until none is missing."""
        context, began, before = query.context, self._state.clock(), query.found
        query.until = began + query.request.wait_seconds
        for source in self._sources:
            if (yield partial(source.complete, query)):
                # While it waited, its engine may have detached, and its leases would never end.
                if self._contexts.by_number.get(context.number) is not context:
                    text = f"context {context.number} ended while its lookup waited: register again"
                    return m.ErrorReply(self._state.epoch, ErrorCode.UNKNOWN_CONTEXT, text)
                query.refresh(self._index)
                if query.is_whole:
                    break
        num_promoted = len(query.brought.intersection(range(before, query.found)))
        tokens[2] += num_promoted * context.space.spec.chunk_tokens
        waited_seconds = self._state.clock() - began if query.waited_for else 0.0
        return self._answer(query, waited_seconds, num_promoted, is_whole=query.is_whole)

    def _answer(
        self, query: Query, waited_seconds: float = 0.0, num_promoted: int = 0, *, is_whole: bool
    ) -> m.LookupReply:
        """Lease the chunks that are in the pool, and count them as used."""
        context, request, match, features = query.context, query.request, query.match, self._features
        epoch, leases = self._state.epoch, self._leases
        for looked_up in features.looked_up:
            looked_up(query)
        if not is_whole:
            for missed in features.missed:
                missed(query)
        self._counters[_LOOKUP_CHUNKS_HIT] += match.num_chunks
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "lookup %s of %s: %d of %d chunks, waited %.3f s for %s; %s",
                request.request_id,
                context.instance,
                match.num_chunks,
                query.num_chunks,
                waited_seconds,
                ", then ".join(query.waited_for.values()) or "nothing",
                _why_not_more(query),
            )
        if not match.nodes:
            return m.LookupReply(epoch, 0, 0, 0.0, waited_seconds, query.num_pending)
        lease = leases.grant(context.number, request.request_id, match.nodes, self._state.clock())
        rest = self._index.shares.used(match.nodes[-1])
        if rest is not None:
            self._state.revoke_later(rest)
        tiering = self._state.tiering
        if tiering is not None and len(tiering.used) < MOST_USED:
            tiering.used.add(match.nodes[-1])
        return m.LookupReply(
            epoch,
            match.num_chunks,
            lease,
            leases.lease_seconds,
            waited_seconds,
            query.num_pending,
            num_promoted,
            query.wants_tokens,
        )

    def release(self, context: Context, request: m.Release) -> frames.Reply:
        """End leases. The reply counts them."""
        return m.Done(self._state.epoch, sum(self._leases.release(context.number, lease) for lease in request.leases))

    def end_request(self, context: Context, request: m.EndRequest) -> frames.Reply:
        """End all leases of a request. The reply counts leases."""
        for source in self._sources:
            source.cut(context, request.request_id, 0)
        self._contexts.handing_over.discard((context.instance, request.request_id))
        count = self._leases.count_of_request(context.number, request.request_id)
        self._state.background.add_urgent(self._leases.end_request(context.number, request.request_id), count)
        return m.Done(self._state.epoch, count)

    def prepare_retrieve(self, context: Context, request: m.PrepareRetrieve) -> frames.Reply:
        """Lease the chunks that a worker can read now, and return their extents."""
        num_chunks = check_run(context, request.digests, request.covered, m.MAXIMUM_RETRIEVE_ENTRIES)
        state, usage = self._state, self._usage
        index, space = self._index, context.space
        nodes = index.visibility.find_nodes(space, request.digests, request.first_chunk)
        starts = [num_chunks - count for count in request.covered]
        packed, found = index.entries.readable(nodes, context.groups, starts, m.MAXIMUM_RETRIEVE_EXTENTS)
        while found and nodes[found - 1] == NO_NODE:  # without full attention, of chunks that it does not need
            found -= 1
        nodes = [node for node in nodes[:found] if node != NO_NODE]
        num_bytes = sum(
            place.num_bytes * max(0, found - start) for place, start in zip(context.groups, starts, strict=True)
        )
        self._counters[_RETRIEVES] += 1
        self._counters[_RETRIEVE_CHUNKS] += num_chunks
        self._counters[_RETRIEVE_CHUNKS_HIT] += found
        usage.moved_bytes[context.device][1] += num_bytes
        if not nodes:
            return m.RetrievePlan(state.epoch, 0, found, b"")
        if context.registration is not None and not context.registration.rank:
            tokens = found * space.spec.chunk_tokens
            usage.saved_seconds += tokens * self._contexts.token_seconds.get(context.instance, 0.0)
        pins = (nodes[-1],) if space.full_mask else tuple(nodes)
        lease = self._leases.grant(
            context.number, request.request_id, pins, state.clock(), packed if context.has_mover else b""
        )
        rest = self._index.shares.used(nodes[-1])
        if rest is not None:
            state.revoke_later(rest)
        return m.RetrievePlan(state.epoch, lease, found, packed)


def _why_not_more(query: Query) -> str:
    """Explain for the log why a lookup found no more chunks."""
    outcome = query.outcome
    if outcome is Outcome.HIT:
        return "none is missing"
    if outcome is Outcome.PENDING:
        return query.why
    missing = f"chunk {query.found} ({digest_at(query.digests, query.found)[:4].hex()})"
    if query.waited_for:
        return f"no tier or engine has {missing}, or it did not arrive within {query.request.wait_seconds:g} s"
    return f"the pool lacks {missing}, and {query.why}"
