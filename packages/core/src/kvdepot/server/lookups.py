"""Lookups, hints and retrieves: engines' requests about prefixes that the depot may have."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from msgspec import structs

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.index.entries import pack_extent
from kvdepot.keys import DIGEST_BYTES, digest_at, num_digests, slice_digests
from kvdepot.server.agents import Agents
from kvdepot.server.contexts import Context, ContextTable, check_run
from kvdepot.server.flights import FlightTable
from kvdepot.server.query import Query
from kvdepot.server.state import HINTS_CUT, DepotState
from kvdepot.server.turns import Refused, Steps, Task
from kvdepot.tiers.reading import Prefix
from kvdepot.tiers.tiering import MOST_USED
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_LOOKUPS: Final = depot_counter("lookups", "Lookups by schedulers")
_LOOKUP_CHUNKS: Final = depot_counter("lookup_chunks", "Chunks looked up")
_LOOKUP_CHUNKS_POOL_HIT: Final = depot_counter("lookup_chunks_pool_hit", "Chunks found in the pool")
_LOOKUPS_WITHOUT_NAME: Final = depot_counter(
    "lookups_without_name", "Lookups that did not ask the tiers because the name of their tenant or model found no room"
)
_LOOKUPS_NOT_SAMPLED: Final = depot_counter(
    "lookups_not_sampled", "Very long lookups left out of the estimates while another one was being counted"
)
_LOOKUP_CHUNKS_HIT: Final = depot_counter(
    "lookup_chunks_hit", "Chunks found, in the pool or loaded from the tiers in time"
)
_BLENDS: Final = depot_counter("blends", "Prompts that were blended")
_BLEND_REUSED_TOKENS: Final = depot_counter("blend_reused_tokens", "Tokens of blends whose KV was reused as it was")
_BLEND_RECOMPUTED_TOKENS: Final = depot_counter(
    "blend_recomputed_tokens", "Tokens of blends that were reused and computed again"
)
_HINTS: Final = depot_counter("hints", "Hints from clients")
_RETRIEVES: Final = depot_counter("retrieves", "Retrieves prepared")
_RETRIEVE_CHUNKS: Final = depot_counter("retrieve_chunks", "Chunks requested by workers")
_RETRIEVE_CHUNKS_HIT: Final = depot_counter("retrieve_chunks_hit", "Chunks delivered to workers")

_OBSERVED_AT_ONCE: Final = 2048  # chunks per step; the sample takes at most an eighth of them
REMEMBERED_CHUNKS: Final = 512  # of a promoted prefix, for the lists of the hottest: 4 MiB of all
_RANKED_AT_ONCE: Final = 2  # steps of a hint before its first wait: the end of a prefix is evicted first
_MOST_BROKEN: Final = 128  # chunks removed as corrupt that a lookup considers, in 0.02 ms; nearly always there is none
_TIERS_SECONDS: Final = 60.0  # the maximum of `--promote-seconds`, so that only that setting bounds the wait
_DEFAULT_TENANT: Final = "default"


class Lookups:
    """Serves the lookups and hints of schedulers, and the retrieves of workers."""

    def __init__(self, state: DepotState, contexts: ContextTable, flights: FlightTable, agents: Agents) -> None:
        self._state = state
        self._index = state.index
        self._leases = state.leases
        self._counters = state.counters
        self._usage = state.usage
        self._contexts = contexts
        self._flights = flights
        self._agents = agents

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
        chunk_bytes = self._contexts.chunk_bytes.get(space.number)
        if chunk_bytes is not None and num_chunks <= _OBSERVED_AT_ONCE:
            index.hit_rates.looked_up(request.digests, chunk_bytes)
        elif chunk_bytes is not None:
            self._observe_later(request.digests, chunk_bytes)
        if request.hands_over:
            self._contexts.begin_hand_over(context.instance, request.request_id)
        tokens = self._usage.tenant_tokens[request.tenant or _DEFAULT_TENANT]
        tokens[0] += num_chunks * space.spec.chunk_tokens
        tokens[1] += match.num_chunks * space.spec.chunk_tokens
        query = Query(context, request, request.digests, match)
        if match.num_chunks == num_chunks:
            return self._grant(query)
        if not request.joins and self._state.tiering is None:
            return self._found(query)  # nobody can bring more
        return self._complete(query, tokens)

    def _complete(self, query: Query, tokens: list[int]) -> Steps:
        """Complete a partial hit: first from a flight, then from the tiers, then from a flight again."""
        context, request, began, before = query.context, query.request, self._state.clock(), query.found
        query.until = began + request.wait_seconds
        # Other requests before tiers: chunks that are being computed arrive without a read, and no tier has them yet.
        if (yield partial(self._join, query)):
            query.waited_for = "request {joined}"
        elif (yield partial(self._promote, query)):
            query.waited_for = "tier {tiers}"
            if self._is_gone(context):
                return self._gone(context)
            query.refresh(self._index)
            if request.joins and not query.is_whole:
                if (yield partial(self._join, query)):
                    query.waited_for = "tier {tiers}, then request {joined}"
                elif (yield partial(self._await, query.first(request.awaits))):
                    query.waited_for = "tier {tiers}, then an engine of another node"
        else:
            return self._found(query)
        if self._is_gone(context):
            return self._gone(context)
        query.refresh(self._index)
        query.num_promoted = len(query.brought.intersection(range(before, query.found)))
        tokens[2] += query.num_promoted * context.space.spec.chunk_tokens
        if query.num_promoted:
            digests = slice_digests(query.digests, 0, min(query.found, REMEMBERED_CHUNKS))
            label = self._index.nodes.label[query.match.nodes[-1]]
            self._state.promoted.append(Prefix(context.space, digests, (), label))
        if self._state.holdings is not None and not query.is_whole:
            self._state.holdings.missed(context.space, query.digests, query.found)
        return self._found(query, self._state.clock() - began)

    def _is_gone(self, context: Context) -> bool:
        return self._contexts.by_number.get(context.number) is not context

    def _gone(self, context: Context) -> m.ErrorReply:
        text = f"context {context.number} ended while its lookup waited: register again"
        return m.ErrorReply(self._state.epoch, ErrorCode.UNKNOWN_CONTEXT, text)

    def _join(self, query: Query, on_end: Callable[[], None]) -> bool:
        """Wait for chunks that another request is computing. Return False if there are none."""
        return query.request.joins and self._flights.join(query, on_end)

    def _await(self, query: Query, on_end: Callable[[], None]) -> bool:
        """Wait for chunks that an engine of another node stores in a tier. Return False if the lookup names none."""
        if query.is_whole:
            return False
        # Give the tiers their full time and do not compare them with computing: the chunks are on their way.
        request = structs.replace(query.request, digests=b"", wait_seconds=_TIERS_SECONDS, token_seconds=0.0)
        asking = replace(query, request=request)

        def ask_tiers(on_answer: Callable[[], None]) -> bool:
            asking.refresh(self._index)
            return self._promote(asking, on_answer)

        return self._flights.await_remote(query, on_end, ask_tiers)

    def _promote(self, query: Query, on_answer: Callable[[], None]) -> bool:
        """Promote the rest of a prefix from the tiers. Return False if that is impossible."""
        tiering, context, request = self._state.tiering, query.context, query.request
        if tiering is None or not self._state.accepts_stores:
            return False
        places, model = self._contexts.places(context.space, context.instance)
        if not places:
            return False
        try:
            weights = self._contexts.generations.weights_of(context.instance)
            label = self._state.labels.number_of(request.tenant, model, weights)
        except Refused:  # too many tenants, or no room for the name
            self._counters[_LOOKUPS_WITHOUT_NAME] += 1
            query.why_not_promoted = "as the name of its tenant or model found no room"
            return False
        token_seconds, request_id = request.token_seconds, request.request_id
        prefix = Prefix(context.space, query.digests, places, label, token_seconds, request_id, query.brought)
        return tiering.promote(
            prefix,
            query.match,
            on_answer,
            wait_seconds=min(request.wait_seconds, tiering.settings.promotion_seconds),
            is_awaited=query.found < request.awaits,
        )

    def _observe_later(self, digests: bytes, chunk_bytes: int) -> None:
        """Count a very long lookup for the estimates in steps, from its end. Only one at a time."""

        def observing() -> Task:
            step = _OBSERVED_AT_ONCE
            for start in range((num_digests(digests) - 1) // step * step, -1, -step):
                self._index.hit_rates.looked_up(slice_digests(digests, start, start + step), chunk_bytes)
                yield

        if not self._state.background.samples.add(observing()):
            self._counters[_LOOKUPS_NOT_SAMPLED] += 1

    def _found(self, query: Query, waited_seconds: float = 0.0) -> m.LookupReply:
        """Answer with the chunks that are in the pool, and begin a flight for the others if the lookup announces."""
        request, num_pending = query.request, 0
        if not query.is_whole:
            if request.joins:
                num_pending = self._flights.pending(query)
            if request.announces and not num_pending:
                self._flights.begin(query)
        return self._grant(query, waited_seconds, num_pending)

    def _grant(self, query: Query, waited_seconds: float = 0.0, num_pending: int = 0) -> m.LookupReply:
        """Lease the chunks that are in the pool, and count them as used."""
        context, request, match = query.context, query.request, query.match
        epoch, leases = self._state.epoch, self._leases
        self._counters[_LOOKUP_CHUNKS_HIT] += match.num_chunks
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "lookup %s of %s: %d of %d chunks, waited %.3f s for %s; %s",
                request.request_id,
                context.instance,
                match.num_chunks,
                query.num_chunks,
                waited_seconds,
                self._waited_for(query),
                self._why_not_more(query, num_pending),
            )
        if not match.nodes:
            return m.LookupReply(epoch, 0, 0, 0.0, waited_seconds, num_pending)
        lease = leases.grant(context.number, request.request_id, match.nodes, self._state.clock())
        rest = self._index.priorities.used(match.nodes[-1])
        if rest is not None:
            self._state.rank_later(rest)
        tiering = self._state.tiering
        if tiering is not None and len(tiering.used) < MOST_USED:
            tiering.used.add(match.nodes[-1])
        return m.LookupReply(
            epoch,
            match.num_chunks,
            lease,
            leases.lease_seconds,
            waited_seconds,
            num_pending,
            query.num_promoted,
            self._wants_tokens(query),
        )

    def _wants_tokens(self, query: Query) -> bool:
        """Return whether the engine should describe the found chunks, as routers do not know all of them."""
        holdings, nodes, space = self._state.holdings, self._index.nodes, query.context.space
        if holdings is None or not query.context.served_model:
            return False
        if not holdings.is_described(query.match.nodes[-1]):
            return True
        # A chunk that was removed as corrupt and came back has no description, although those after it have theirs.
        for node in islice(holdings.broken, _MOST_BROKEN):
            depth = nodes.depth[node]
            is_of_space = depth < query.found and nodes.space_number[node] == space.number
            if is_of_space and nodes.tree.keys[node] == digest_at(query.digests, depth):
                return True
        return False

    def _waited_for(self, query: Query) -> str:
        tiering = self._state.tiering
        names = [] if tiering is None else [queue.name for queue in tiering.queues if not queue.is_retired]
        return query.waited_for.format(joined=query.joined, tiers=" and ".join(names)) or "nothing"

    def _why_not_more(self, query: Query, num_pending: int) -> str:
        """Explain for the log why a lookup found no more chunks."""
        state, tiering = self._state, self._state.tiering
        if query.is_whole:
            return "none is missing"
        if num_pending:
            return f"request {self._flights.computed_by(query)} computes the next {num_pending}"
        missing = f"chunk {query.found} ({digest_at(query.digests, query.found)[:4].hex()})"
        if query.waited_for:
            return f"{missing} did not arrive within {query.request.wait_seconds:g} s, or no tier or engine has it"
        if tiering is None:
            return f"the pool lacks {missing}, and there is no tier"
        if not state.accepts_stores:
            return f"the pool lacks {missing}, and the tiers are not asked while stores are declined"
        if not self._contexts.places(query.context.space, query.context.instance)[0]:
            return f"the pool lacks {missing}, and the tiers are not asked without a worker for each layer and head"
        if all(queue.is_suspended for queue in tiering.queues):
            return f"the pool lacks {missing}, and every tier is suspended"
        return f"the pool lacks {missing}, and the tiers are not asked {query.why_not_promoted}"

    def release(self, context: Context, request: m.Release) -> frames.Reply:
        """End leases. The reply counts them."""
        if request.reused_tokens or request.recomputed_tokens:
            counters = self._state.counters
            counters[_BLENDS] += 1
            counters[_BLEND_REUSED_TOKENS] += request.reused_tokens
            counters[_BLEND_RECOMPUTED_TOKENS] += request.recomputed_tokens
        return m.Done(self._state.epoch, sum(self._leases.release(context.number, lease) for lease in request.leases))

    def end_request(self, context: Context, request: m.EndRequest) -> frames.Reply:
        """End all leases of a request, and its flight. The reply counts leases."""
        self._flights.end_request(context, request.request_id)
        self._contexts.handing_over.discard((context.instance, request.request_id))
        count = self._leases.count_of_request(context.number, request.request_id)
        self._state.background.add_urgent(self._leases.end_request(context.number, request.request_id), count)
        return m.Done(self._state.epoch, count)

    def hint(self, context: Context, request: m.Hint) -> frames.Reply | Steps:
        """Change the eviction order of a prefix. The reply counts chunks."""
        index, names = self._index, self._state.labels.names
        nodes = index.visibility.match(context.space, request.digests).nodes
        if request.session:
            self._agents.hinted(context.space, request)
        self._counters[_HINTS] += 1
        if not nodes:
            return m.Done(self._state.epoch, 0)
        tenant = request.tenant  # not `request`: the task would keep its digests in memory

        def is_own(label: int) -> bool:
            return names[label][0] == tenant

        if request.session_ended:
            return self._rank(index.priorities.end_session(nodes[-1], is_own))
        steps = index.priorities.set_priority(nodes[-1], is_own, request.priority)
        if request.ttl_seconds:
            index.priorities.end_session_at(nodes[-1], is_own, self._state.clock() + request.ttl_seconds)
        return self._rank(steps)

    def _rank(self, steps: Iterator[int]) -> Steps:
        """Rank the end of a prefix now. Rank the rest of a long one later, unless too many wait."""
        epoch, hints, count = self._state.epoch, self._state.background.hints, 0
        for _ in range(_RANKED_AT_ONCE):
            more = next(steps, None)
            if more is None:
                return m.Done(epoch, count)
            count += more
        if not (yield hints.enter):
            self._counters[HINTS_CUT] += 1
            return m.Done(epoch, count)
        count += yield from hints.total(steps)
        return m.Done(epoch, count)

    def prepare_retrieve(self, context: Context, request: m.PrepareRetrieve) -> frames.Reply:
        """Lease the chunks that a worker can read now, and return their extents."""
        num_chunks = check_run(context, request.digests, request.covered, m.MAXIMUM_RETRIEVE_ENTRIES)
        state, usage = self._state, self._usage
        extents, nodes, found, num_bytes = self._readable(context, request, num_chunks)
        self._counters[_RETRIEVES] += 1
        self._counters[_RETRIEVE_CHUNKS] += num_chunks
        self._counters[_RETRIEVE_CHUNKS_HIT] += found
        usage.moved_bytes[context.device][1] += num_bytes
        if not nodes:
            return m.RetrievePlan(state.epoch, 0, found, b"")
        if context.registration is not None and not context.registration.rank:
            tokens = found * context.space.spec.chunk_tokens
            usage.saved_seconds += tokens * self._contexts.token_seconds.get(context.instance, 0.0)
        pins = (nodes[-1],) if context.space.full_mask else tuple(nodes)
        packed = b"".join(extents)
        lease = self._leases.grant(
            context.number, request.request_id, pins, state.clock(), packed if context.has_mover else b""
        )
        rest = self._index.priorities.used(nodes[-1])
        if rest is not None:
            state.rank_later(rest)
        return m.RetrievePlan(state.epoch, lease, found, packed)

    def _readable(
        self, context: Context, request: m.PrepareRetrieve, num_chunks: int
    ) -> tuple[list[bytes], list[int], int, int]:
        """Return the packed extents, the nodes, and the numbers of chunks and bytes that a worker can read."""
        index, space, groups = self._index, context.space, context.groups
        extents: list[bytes] = []
        nodes: list[int] = []
        found = num_bytes = 0
        for chunk in range(num_chunks):
            key = digest_at(request.digests, chunk)
            node = index.visibility.find(space, key, request.first_chunk + chunk)
            needed = [g for g in range(len(groups)) if num_chunks - chunk <= request.covered[g]]
            if node is None:
                if needed or space.full_mask:
                    break
                continue
            here: list[bytes] = []
            for number in needed:
                place = groups[number]
                extent = index.entries.extent_of(node, place)
                if extent is not None:
                    here.append(pack_extent(chunk, number, place.part, extent))
                else:
                    parts = index.entries.cover(node, place)
                    if not parts or len(extents) + len(here) + len(parts) > m.MAXIMUM_RETRIEVE_EXTENTS:
                        return extents, nodes, found, num_bytes
                    here += [pack_extent(chunk, number, *each) for each in parts]
            extents += here
            num_bytes += sum(groups[number].num_bytes for number in needed)
            nodes.append(node)
            found = chunk + 1
        return extents, nodes, found, num_bytes
