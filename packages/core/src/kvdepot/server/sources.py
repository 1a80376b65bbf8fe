"""Sources: where the missing chunks of a lookup may come from. A lookup asks them one after the other."""

from collections.abc import Callable, Generator, Sequence
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.keys import num_digests
from kvdepot.server.contexts import Context, ContextTable
from kvdepot.server.query import Query, Rank
from kvdepot.server.state import DepotState
from kvdepot.server.turns import Awaited, Refused, Wait
from kvdepot.tiers.reading import Prefix
from kvdepot.tiers.tier_state import TierState

_LOOKUPS_WITHOUT_NAME: Final = depot_counter(
    "lookups_without_name", "Lookups that did not ask the tiers because the name of their tenant or model found no room"
)

_PATIENT_SECONDS: Final = 60.0  # the longest wait of an operator for tiers


class Source:
    """A place that may complete a match."""

    rank: Rank

    def complete(self, query: Query, on_end: Callable[[], None]) -> bool:
        """Begin to bring the chunks that a query misses into the pool.

        Call `on_end` once, when no more can come, or at `query.until` at the latest. Return False if this source has
        none, or computing them is faster; then `on_end` is never called.
        """
        raise NotImplementedError

    def cut(self, context: Context, request_id: str, stop: int) -> None:
        """Note that a request stores no chunk from `stop` on: wait for none of these.

        Args:
            context: the worker that declined or aborted a store, or the scheduler whose request ended.
            request_id: the engine's name of the request.
            stop: the first chunk that will not come.
        """


class TierSource(Source):
    """The depot's tiers."""

    rank = Rank.TIERS

    def __init__(self, state: DepotState, contexts: ContextTable) -> None:
        self._state = state
        self._contexts = contexts

    def complete(self, query: Query, on_end: Callable[[], None]) -> bool:
        """See `Source`. Promotes the rest of a prefix."""
        return self.ask(query, on_end, self.rank, "the tiers")

    def ask(
        self, query: Query, on_end: Callable[[], None], rank: Rank, who: str, guests: Sequence[TierState] = ()
    ) -> bool:
        """Promote the rest of a prefix from the tiers, or only from `guests`: see `Source.complete`."""
        state, context, request = self._state, query.context, query.request
        tiering = state.tiering
        if tiering is None:
            query.why = "there is no tier"
            return False
        if not state.accepts_stores:
            query.why = "the tiers are not asked while stores are declined"
            return False
        places, model = self._contexts.places(context.space, context.instance)
        if not places:
            query.why = "the tiers are not asked without a worker for each layer and head"
            return False
        try:
            label = state.labels.number_of(request.tenant, model, self._contexts.weights_of(context.instance))
        except Refused:  # too many tenants, or no room for the name
            state.counters[_LOOKUPS_WITHOUT_NAME] += 1
            query.why = "the tiers are not asked as the name of its tenant or model found no room"
            return False
        wait_seconds = min(request.wait_seconds, query.until - state.clock(), tiering.settings.promotion_seconds)
        if wait_seconds <= 0:
            return False
        prefix = Prefix(
            context.space, query.digests, places, label, request.token_seconds, request.request_id, query.brought
        )
        is_awaited = query.found < request.awaits
        query.waited_for[rank] = who  # first, as a tier may answer at once
        if tiering.promote(
            prefix, query.match, on_end, wait_seconds=wait_seconds, is_awaited=is_awaited, guests=guests
        ):
            return True
        del query.waited_for[rank]
        query.why = (
            "the tiers are not asked for so few tokens or by so many lookups"
            if tiering.is_usable
            else "every tier is suspended"
        )
        return False

    def bring_up(self, tenant: str, digests: bytes, guests: Sequence[TierState] = ()) -> Generator[Wait, bool, None]:
        """Promote a prefix for an operator, in every space with engines and for each of their models.

        With `guests`, only from these.
        """
        state, turns = self._state, self._state.background.operators
        num_chunks, promoted = num_digests(digests), list[Awaited[()]]()
        for space in list(state.index.spaces):
            yield turns.again
            for model, weights in self._contexts.owners(space):
                match = state.index.visibility.match(space, digests)
                places, _ = self._contexts.places(space)
                tiering = state.tiering
                if tiering is None or not places or match.num_chunks == num_chunks:
                    break
                answer = Awaited[()]()
                prefix = Prefix(space, digests, places, state.labels.number_of(tenant, model, weights))
                if tiering.promote(prefix, match, answer.set, wait_seconds=_PATIENT_SECONDS, guests=guests):
                    promoted.append(answer)
                yield turns.again
        for answer in promoted:
            yield from answer.wait()
