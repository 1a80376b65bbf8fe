"""Lookups: at most one per request at a time, the lease of its answer, and the announcement to other engines.

`SchedulerSide` sends a lookup when a request arrives, polls it while vLLM schedules, and drops the answer when the load
is decided or has ended. This module plans neither loads nor stores. If the depot dies, each lookup is answered with a
miss.
"""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Final

from kvdepot.client.answers import MISS, Lease
from kvdepot.client.scheduler import PendingLookup, SchedulerClient
from kvdepot.counting import Counts, engine_counter
from kvdepot.wire.messages import MAXIMUM_CHUNKS
from kvdepot_vllm.params import asks_for_hand_over, peer_of
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.state import Outcome, RequestState, end_span, start_span

logger = logging.getLogger(__name__)

_LOOKUPS: Final = engine_counter("lookups", "Prefixes that were looked up")
_HAND_OVERS_MISSED: Final = engine_counter(
    "hand_overs_missed", "Hand-overs whose KV did not come in time: the prompt was computed here"
)

_FRESH_SECONDS: Final = 5.0  # an older answer is not used: the lookup is sent again
_HAND_OVER_SECONDS: Final = 0.005  # between two lookups of a prompt that a prefill engine has not begun
_IDLE_SECONDS: Final = 0.001  # to wait for an answer while nothing is computed; shorter than an empty step
# The same for an answer that waits for a tier or another engine. Busy polling would take a core from
# engines that compute on CPU. A request that arrives in the meantime waits that long.
_LONG_IDLE_SECONDS: Final = 0.010
# To wait for the answer to a new lookup while others are computed: the pool's answer takes 0.1 ms. Without it, the
# request is asked about again only after their step, which takes 5 ms or more.
_NEW_SECONDS: Final = 0.0003
# A request waits for others at most this many times the time that its own engine would take, plus the slack. The depot
# applies the same rule (`kvdepot.features.flights.feature`).
_PATIENCE: Final = 2.0
_SLACK_SECONDS: Final = 0.05  # equal to the server's


class Lookups:
    """All lookups of one engine, the leases of their answers, and its announcements.

    Args:
        requests: the engine's requests by vLLM's name, a mapping that the caller keeps up to date.
        settings: the user's settings.
        client: asks the depot; not closed here.
        counters: counts, declared by `engine_counter`.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        requests: Mapping[str, RequestState],
        settings: Settings,
        client: SchedulerClient,
        counters: Counts,
        clock: Callable[[], float],
    ) -> None:
        self.may_idle = True  # whether the last step computed nothing, so that `poll` may wait for one answer
        self._requests = requests
        self._settings = settings
        self._client = client
        self._counters = counters
        self._clock = clock

    def wanted_tokens(self, state: RequestState) -> int:
        """Return how many tokens are worth loading. At least one is left to compute, as by vLLM's own prefix cache."""
        tokens = max(0, state.request.num_tokens - 1)
        return min(
            MAXIMUM_CHUNKS * state.chunk_tokens,
            min(tokens, state.tail_end) or tokens - tokens % state.chunk_tokens,
        )

    def poll(self, state: RequestState) -> Outcome:
        """Return whether the depot has chunks of a request, which `lease` then keeps. Ask again if the answer is old.

        Waits at most 10 ms, once for each idle step, however many requests wait, and otherwise at most 0.3 ms for a new
        lookup.
        """
        if state.lease is not None and self._clock() - state.asked_at <= _FRESH_SECONDS:
            return Outcome.HIT if state.lease.num_chunks else Outcome.MISS
        if state.lookup is None:
            if self._clock() < state.ask_at:
                if self.may_idle:
                    self.may_idle = False
                    time.sleep(_IDLE_SECONDS)
                return Outcome.PENDING
            if state.lease is not None:  # too old: everything begins again
                state.waits_until = 0.0
            self.drop(state)
            self.ask(state)
        if state.lookup is None:
            return Outcome.MISS
        may_wait, self.may_idle = self.may_idle, False
        is_late = self._clock() - state.asked_at > _LONG_IDLE_SECONDS
        seconds = _LONG_IDLE_SECONDS if is_late else _IDLE_SECONDS
        if not may_wait:
            seconds = state.asked_at + _NEW_SECONDS - self._clock()
        if not (state.lookup.wait(seconds) if seconds > 0 else state.lookup.query()):
            return Outcome.PENDING
        lease = self._take(state, state.lookup)
        if self._asks_again(state, lease):
            return Outcome.PENDING
        self._counters[_LOOKUPS] += 1
        logger.debug("request %s: the depot has %d of %d chunks", state.request_id, lease.num_chunks, state.num_wanted)
        return Outcome.HIT if lease.num_chunks else Outcome.MISS

    def conclude(self, state: RequestState) -> None:
        """Drop a lookup that no load needs. If its answer is here, note which chunks need no store."""
        if state.lookup is not None and state.lookup.query():
            state.found(self._take(state, state.lookup).num_chunks)
        self.drop(state)

    def drop(self, state: RequestState) -> None:
        """Cancel the lookup under way, and release the last answer."""
        if state.lookup is not None:
            state.lookup.cancel()
            state.lookup = None
            end_span(state.lookup_span, cancelled=True)
            state.lookup_span = None
        if state.lease is not None:
            self._client.release(state.lease)
            state.lease = None

    def remember_miss(self, state: RequestState) -> None:
        """Replace the answer by a miss, so that no lookup is sent while the miss is fresh."""
        self.drop(state)
        state.lease = MISS

    def withdraw(self, state: RequestState) -> None:
        """Withdraw the announcement of a request that will not be computed for now."""
        if state.has_announced:
            state.has_announced = False
            self._client.end_request(state.request_id)

    def withdraw_ended(self, request_id: str) -> None:
        """Withdraw the announcement of a request that has ended, unless a new one has its name by now."""
        if request_id not in self._requests:
            self._client.end_request(request_id)

    def ask(self, state: RequestState) -> None:
        """Send the lookup of a request, unless its prompt is shorter than a chunk."""
        wanted_tokens, now = self.wanted_tokens(state), self._clock()
        key = state.run_to(0, wanted_tokens)
        if not key.num_chunks:
            return
        wait_seconds, state.num_wanted = None, key.num_chunks
        if not state.waits_until:
            state.began_at, state.waits_until = now, now + self._patience_seconds(state)
        elif state.hand_over is None:
            wait_seconds = max(0.0, state.waits_until - now)
        state.asked_at = now
        state.lookup_span = start_span("kvdepot lookup", state.request, wanted_tokens=wanted_tokens)
        joins = self._settings.wait_for_others
        announces = joins and state.may_store and state.hand_over is None
        hand_over = state.hand_over
        end_tokens = state.tail_end or state.request.num_prompt_tokens
        state.awaits = 0 if hand_over is None else hand_over.num_chunks(key, end_tokens, state.chunk_tokens)
        hands_over = state.may_store and asks_for_hand_over(state.request.kv_transfer_params)
        state.has_announced |= announces or hands_over
        logger.debug(
            "request %s: lookup of %d chunks (announces them: %s, awaits %d of a prefill engine)",
            state.request_id,
            key.num_chunks,
            announces,
            state.awaits,
        )
        state.lookup = self._client.submit_lookup(
            state.request_id,
            key,
            joins=joins,
            announces=announces,
            ahead_tokens=self._ahead_tokens(state),
            awaits=state.awaits,
            hands_over=hands_over,
            peer=peer_of(state.request.kv_transfer_params),
            wait_seconds=wait_seconds,
        )

    def _asks_again(self, state: RequestState, lease: Lease) -> bool:
        """Ask again if others bring more chunks; False if the answer is final."""
        now, hand_over = self._clock(), state.hand_over
        if hand_over is not None and lease.num_chunks > state.num_found:
            state.waits_until = now + self._patience_seconds(state)  # the prefill engine is at work
        state.num_found = lease.num_chunks
        if lease.num_pending and now < state.waits_until:
            state.ask_at = now
            logger.debug(
                "request %s: pending, the depot has %d of %d chunks and others bring up to %d: waits %.3f s at most",
                state.request_id,
                lease.num_chunks,
                state.num_wanted,
                lease.num_pending,
                state.waits_until - now,
            )
        elif hand_over is None or lease.num_chunks >= state.awaits:
            return False
        elif now < state.began_at + hand_over.wait_seconds:
            state.ask_at = now + _HAND_OVER_SECONDS
        else:
            state.hand_over, state.ask_at = None, now  # this lookup announces that the engine computes the rest
            self._counters[_HAND_OVERS_MISSED] += 1
            logger.debug(
                "request %s: the prefill engine brought %d of %d chunks in time, the rest is computed here",
                state.request_id,
                lease.num_chunks,
                state.awaits,
            )
        self.drop(state)
        if state.ask_at <= now:
            self.ask(state)
        return True

    def _patience_seconds(self, state: RequestState) -> float:
        """Return how long a request may wait for others in total: one deadline while the cost of a token is unknown."""
        own_seconds = state.request.num_tokens * self._client.token_seconds
        return _PATIENCE * own_seconds + _SLACK_SECONDS if own_seconds else self._settings.deadline_seconds

    def _ahead_tokens(self, state: RequestState) -> int:
        """Return the tokens of earlier prompts that are still to be computed, as far as that is known."""
        return sum(
            max(0, other.request.num_prompt_tokens - max(other.num_computed, other.num_stored * other.chunk_tokens))
            for other in self._requests.values()
            if other is not state and other.lookup is None
        )

    def _take(self, state: RequestState, lookup: PendingLookup) -> Lease:
        state.lease, state.lookup = lookup.result(), None
        end_span(state.lookup_span, found_tokens=state.lease.num_chunks * state.chunk_tokens)
        state.lookup_span = None
        return state.lease
