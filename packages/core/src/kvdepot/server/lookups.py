"""Lookups, hints and retrieves: what engines ask of prefixes that the depot may have."""

from collections.abc import Iterator
from typing import Final

from kvdepot.errors import ErrorCode
from kvdepot.index.index import Space, pack_extent
from kvdepot.keys import DIGEST_BYTES
from kvdepot.server.background import Kind, Task
from kvdepot.server.contexts import Context, ContextTable, check_covered
from kvdepot.server.flights import FlightTable
from kvdepot.server.replies import Deferred, Refused, count_digests
from kvdepot.server.state import DepotState
from kvdepot.tiers.tiering import Tiering
from kvdepot.wire import frames
from kvdepot.wire import messages as m

_OBSERVED_AT_ONCE: Final = 2048  # chunks, of which an eighth is sampled at most
_RANKED_AT_ONCE: Final = 2  # steps of a hint that its request does itself: the end of the prefix is what leaves first
_DEFAULT_TENANT: Final = "default"


class Lookups:
    """Serves what schedulers ask, and the retrieves of workers."""

    def __init__(self, state: DepotState, contexts: ContextTable, flights: FlightTable) -> None:
        self._state = state
        self._index = state.index
        self._leases = state.leases
        self._counters = state.counters
        self._usage = state.usage
        self._contexts = contexts
        self._flights = flights

    def lookup(self, context: Context, request: m.Lookup) -> frames.Reply | Deferred:
        """Lease the prefix that is there; wait for more of it that is being computed, or ask the tiers for more."""
        num_chunks, space = count_digests(request.digests), context.space
        found, nodes = self._index.longest_prefix(space, request.digests)
        if request.token_seconds != context.token_seconds:
            context.token_seconds = self._contexts.token_seconds[context.instance] = request.token_seconds
        counters = self._counters
        counters["lookups"] += 1
        counters["lookup_chunks"] += num_chunks
        counters["lookup_chunks_pool_hit"] += found
        self._observe(request.digests, space)
        tokens = self._usage.tokens_of(request.tenant or _DEFAULT_TENANT)
        tokens[0] += num_chunks * space.spec.chunk_tokens
        tokens[1] += found * space.spec.chunk_tokens
        if found < num_chunks:
            if self._flights and request.joins:
                deferred = Deferred()
                if self._join(context, request, found, self._state.clock(), deferred):
                    return deferred
            tiering = self._state.tiering
            if tiering is not None and self._state.accepts_stores:
                deferred = self._promote(tiering, context, request, found, nodes, tokens)
                if deferred is not None:
                    return deferred.reply or deferred
        return self._found(context, request, found, nodes)

    def _join(self, context: Context, request: m.Lookup, found: int, began: float, deferred: Deferred) -> bool:
        """Wait for chunks that another request is computing; False if there are none."""

        def answer() -> None:
            here, nodes = self._index.longest_prefix(context.space, request.digests)
            deferred.send(self._found(context, request, here, nodes, self._state.clock() - began))

        return self._flights.join(
            context, request.request_id, request.tenant, request.digests, found=found,
            token_seconds=request.token_seconds, until=began + request.wait_seconds, on_end=answer,
        )  # fmt: skip

    def _promote(
        self, tiering: Tiering, context: Context, request: m.Lookup, found: int, nodes: tuple[int, ...],
        tokens: list[int],
    ) -> Deferred | None:  # fmt: skip
        """Ask the tiers for the rest of a prefix; None if they cannot have it."""
        space, state = context.space, self._state
        places, model = self._contexts.places(space, context.instance)
        if not places:
            return None
        try:
            label = state.labels.number_of(request.tenant, model)
        except (Refused, OSError):  # a tenant too many, or no room for its name
            self._counters["lookups_without_name"] += 1
            return None
        deferred = Deferred()
        began = state.clock()

        def answer() -> None:
            if self._contexts.by_number.get(context.number) is not context:
                gone = f"context {context.number} ended while its lookup waited for tiers: register again"
                deferred.send(m.ErrorReply(state.epoch, ErrorCode.UNKNOWN_CONTEXT, gone))
                return
            here, nodes = self._index.longest_prefix(space, request.digests)
            tokens[2] += max(0, here - found) * space.spec.chunk_tokens
            is_waiting = (
                self._flights and request.joins and here * DIGEST_BYTES < len(request.digests)
                and self._join(context, request, here, began, deferred)
            )  # fmt: skip
            if not is_waiting:
                deferred.send(self._found(context, request, here, nodes, state.clock() - began))

        is_asking = tiering.promote(
            space, request.digests, places, label, found=found, pins=nodes,
            wait_seconds=min(request.wait_seconds, tiering.settings.promotion_seconds), on_answer=answer,
            token_seconds=request.token_seconds,
        )  # fmt: skip
        return deferred if is_asking else None

    def _observe(self, digests: bytes, space: Space) -> None:
        """Count a lookup for the estimates, the end of a long prompt first; not while another long one is counted."""
        chunk_bytes = self._contexts.chunk_bytes.get(space.number)
        if chunk_bytes is None:
            return
        if len(digests) <= _OBSERVED_AT_ONCE * DIGEST_BYTES:
            self._usage.shadow.looked_up(digests, chunk_bytes)
        elif not self._state.background.add(self._observing(digests, chunk_bytes), Kind.SAMPLE):
            self._counters["lookups_not_sampled"] += 1

    def _observing(self, digests: bytes, chunk_bytes: int) -> Task:
        step = _OBSERVED_AT_ONCE * DIGEST_BYTES
        for start in range((len(digests) - 1) // step * step, -1, -step):
            self._usage.shadow.looked_up(digests[start : start + step], chunk_bytes)
            yield

    def _found(
        self, context: Context, request: m.Lookup, found: int, nodes: tuple[int, ...], waited_seconds: float = 0.0
    ) -> m.LookupReply:
        epoch, leases = self._state.epoch, self._leases
        self._counters["lookup_chunks_hit"] += found
        num_pending = 0
        if found * DIGEST_BYTES < len(request.digests):
            if self._flights and request.joins:
                num_pending = self._pending(context, request, found)
            if request.announces and not num_pending:
                self._flights.begin(
                    context, request.request_id, request.tenant, request.digests, found=found,
                    ahead_tokens=request.ahead_tokens, token_seconds=request.token_seconds,
                )  # fmt: skip
        if not found:
            return m.LookupReply(epoch, 0, 0, 0.0, waited_seconds, num_pending)
        lease = leases.grant(context.number, request.request_id, nodes, self._state.clock())
        self._state.used(nodes[-1])
        if self._state.tiering is not None:
            self._state.tiering.used(nodes[-1])
        return m.LookupReply(epoch, found, lease, leases.lease_seconds, waited_seconds, num_pending)

    def _pending(self, context: Context, request: m.Lookup, found: int) -> int:
        """Return how many of the chunks that are not here another request is bringing."""
        return self._flights.pending(
            context, request.request_id, request.tenant, request.digests, found=found,
            token_seconds=request.token_seconds,
        )  # fmt: skip

    def release(self, context: Context, request: m.Release) -> frames.Reply:
        """End leases; the reply counts them."""
        return m.Done(self._state.epoch, sum(self._leases.release(context.number, lease) for lease in request.leases))

    def end_request(self, context: Context, request: m.EndRequest) -> frames.Reply:
        """End every lease of a request, and its flight; the reply counts leases."""
        self._flights.end_request(context, request.request_id)
        count = self._leases.count_of_request(context.number, request.request_id)
        self._state.background.add_urgent(self._leases.end_request(context.number, request.request_id), count)
        return m.Done(self._state.epoch, count)

    def hint(self, context: Context, request: m.Hint) -> frames.Reply | Deferred:
        """Change when a prefix is evicted; the reply counts chunks."""
        count_digests(request.digests)
        index, names = self._index, self._state.labels.names
        found, nodes = index.longest_prefix(context.space, request.digests)
        self._counters["hints"] += 1
        if not found:
            return m.Done(self._state.epoch, 0)
        tenant = request.tenant  # a task must not keep the request's digests

        def is_own(label: int) -> bool:
            return names[label][0] == tenant

        if request.session_ended:
            return self._rank(index.end_session(nodes[-1], is_own))
        steps = index.set_priority(nodes[-1], is_own, request.priority)
        if request.ttl_seconds:
            index.end_session_at(nodes[-1], is_own, self._state.clock() + request.ttl_seconds)
        return self._rank(steps)

    def _rank(self, steps: Iterator[int]) -> frames.Reply | Deferred:
        """Rank the end of a prefix now and the rest of a long one later, unless very many wait."""
        epoch, count = self._state.epoch, 0
        for _ in range(_RANKED_AT_ONCE):
            more = next(steps, None)
            if more is None:
                return m.Done(epoch, count)
            count += more

        def task() -> Iterator[frames.Reply | None]:
            total = count
            for each in steps:
                total += each
                yield None
            yield m.Done(epoch, total)

        deferred = Deferred()
        if self._state.background.answer(task(), Kind.HINT, deferred):
            return deferred
        self._counters["hints_cut"] += 1
        return m.Done(epoch, count)

    def prepare_retrieve(self, context: Context, request: m.PrepareRetrieve) -> frames.Reply:
        """Lease the chunks that a worker can read now, and say where they are."""
        num_chunks = count_digests(request.digests)
        check_covered(context, request.covered, num_chunks, m.MAXIMUM_RETRIEVE_ENTRIES)
        state, usage = self._state, self._usage
        extents, nodes, found, num_bytes = self._readable(context, request, num_chunks)
        self._counters["retrieves"] += 1
        self._counters["retrieve_chunks"] += num_chunks
        self._counters["retrieve_chunks_hit"] += found
        usage.bytes_of(context.device)[1] += num_bytes
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
        self._state.used(nodes[-1])
        return m.RetrievePlan(state.epoch, lease, found, packed)

    def _readable(
        self, context: Context, request: m.PrepareRetrieve, num_chunks: int
    ) -> tuple[list[bytes], list[int], int, int]:
        """Return packed extents, nodes, the number of chunks and of bytes that a worker can read."""
        index, space, groups = self._index, context.space, context.groups
        extents: list[bytes] = []
        nodes: list[int] = []
        found = num_bytes = 0
        for chunk in range(num_chunks):
            key = request.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            node = index.visible(space, key, request.first_chunk + chunk)
            needed = [g for g in range(len(groups)) if num_chunks - chunk <= request.covered[g]]
            if node is None:
                if needed or space.full_mask:
                    break
                continue
            here: list[bytes] = []
            for number in needed:
                extent = index.extent_of(node, number, groups[number].shard, groups[number].layout)
                if extent is not None:
                    here.append(pack_extent(chunk, number, extent))
                    num_bytes += extent[3]
            if len(here) < len(needed):
                break
            extents += here
            nodes.append(node)
            found = chunk + 1
        return extents, nodes, found, num_bytes
