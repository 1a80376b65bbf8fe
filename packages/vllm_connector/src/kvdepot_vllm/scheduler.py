"""The scheduler's side: looks up prefixes, plans loads and stores, and sends hints.

vLLM calls it in the engine core's loop, so nothing here waits, except for up to 10 ms in a step that computes nothing.
A lookup is sent when the request arrives, and its answer is polled.
"""

import contextlib
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.counting import engine_counter
from kvdepot.engines.generation import Generation
from kvdepot.errors import KVDepotError
from kvdepot.features.routers.feed import NewsFeed
from kvdepot.features.sessions.client import hint
from kvdepot.keys import Namespace, PrefixHasher
from kvdepot.wire.messages import MAXIMUM_CHUNKS
from kvdepot_vllm.blend.planning import Blends
from kvdepot_vllm.contents import Changes, EngineContents
from kvdepot_vllm.engine import BlockPool, BlockTable, EngineRequest, Step
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.identity import extra_keys
from kvdepot_vllm.jobs import StepPlan, WorkerReport
from kvdepot_vllm.loads import Loads
from kvdepot_vllm.lookups import Lookups
from kvdepot_vllm.params import (
    HandOver,
    Hints,
    SharedHead,
    asks_for_hand_over,
    handed_over,
    request_params,
    session_operations,
)
from kvdepot_vllm.prefill_cost import PrefillCost
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.state import Outcome, RequestState
from kvdepot_vllm.stores import Stores

if TYPE_CHECKING:
    from kvdepot_vllm.events import Announcer, Describer  # it loads vLLM

logger = logging.getLogger(__name__)

_FAILED_LOADS: Final = engine_counter("failed_loads", "Loads that did not bring everything: the rest was recomputed")
_HIT_TOKENS: Final = engine_counter("hit_tokens", "Tokens that were loaded instead of computed")

_SLOWEST_TOKEN_SECONDS: Final = 60.0  # the protocol's limit


class SchedulerSide:
    """Connects one engine's scheduler to the depot.

    Args:
        cache: the engine's cache.
        generation: its namespace decides which engines share.
        settings: the user's settings.
        client: asks the depot; closed with this side.
        num_workers: the number of workers, which all report each store.
        announcer: tells routers what the depot holds; None if the engine publishes no events.
        describer: describes the chunks that this engine stores or finds; None without `announcer`.
        can_blend: whether all workers can blend.
        version: returns the version that people gave the engine's weights, "" if they gave none.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        cache: EngineCache,
        generation: Generation,
        settings: Settings,
        client: SchedulerClient,
        num_workers: int,
        *,
        announcer: "Announcer | None" = None,
        describer: "Describer | None" = None,
        can_blend: bool = False,
        version: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache = cache
        self._generation = generation
        self._version = version
        self._unnamed: dict[str, EngineRequest] = {}  # requests that wait for a name of the weights
        self._needs_name = False  # whether vLLM would run one of them
        self._settings = settings
        self._client = client
        self._describer = describer
        self._feed: NewsFeed | None = None
        if announcer is not None:
            digest = generation.namespace.digest(cache.chunk_tokens)
            self._feed = NewsFeed(client.connection, digest, announcer.on_news, announcer.on_lost, announcer.wants_all)
        self._clock = clock
        self._contents = EngineContents(lambda: self._stores.pool, keeps_names=settings.keep_after_reset)
        self.requests: dict[str, RequestState] = {}
        self._stores = Stores(cache, settings, num_workers, self._store_planned, self._store_ended, clock)
        self._prefill_cost = PrefillCost()
        self.counters = self._stores.counters
        self._lookups = Lookups(self.requests, settings, client, self.counters, clock)
        self._blends = Blends(cache, settings, client, num_workers, self.counters, clock, can_blend=can_blend)
        self._loads = Loads(cache, self._blends, self._null_block)

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: the depot was not usable within `timeout_seconds`; the text gives the reason.
        """
        self._client.wait_until_connected(timeout_seconds)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the pool whose blocks stores hold."""
        self._stores.pool = self._blends.pool = pool

    def _null_block(self) -> int:
        return self._stores.pool.null_block.block_id if self._stores.pool is not None else 0

    # --- admission ------------------------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> None:
        """Send the lookup of a new request, so that the answer is here when the request is first scheduled.

        After a reset, the lookup waits until the weights have a name.
        """
        self._look_at_version()
        if not self._generation.is_known:
            self._unnamed[request.request_id] = request
            return
        params = request_params(request)
        chunk_tokens = self.cache.chunk_tokens
        hand_over = HandOver.parse(request.kv_transfer_params)
        hands_over = hand_over is not None or asks_for_hand_over(request.kv_transfer_params)
        contents = self._contents.of(request)
        keys = extra_keys(request, contents.adapter, SharedHead.parse(params))
        state = RequestState(
            request,
            PrefixHasher(self._namespace, chunk_tokens, keys),
            chunk_tokens,
            prompt_tail_end=self.cache.tail_end(request.num_prompt_tokens) if hands_over else 0,
            contents=contents,
            may_load=self._settings.load and params.get("load") is not False and not request.resumable,
            may_store=self._settings.store != "none" and params.get("store") is not False and not request.resumable,
            must_note=self._blends.can_blend,
            hints=Hints.parse(params, request.session_id),
            hand_over=hand_over,
        )
        stale = self.requests.pop(state.request_id, None)
        if stale is not None:
            self._forget(stale)
        self.requests[state.request_id] = state
        operations = session_operations(params, self._namespace.tenant)
        self._client.post(lambda _context: operations)
        if state.may_load and not request.skip_reading_prefix_cache:
            self._lookups.ask(state)
            self._blends.begin(state, self._namespace, params)
        else:
            logger.debug("request %s: no lookup, as it may not load", state.request_id)

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens past the local hit a load would bring; None while the depot has not answered.

        A load is offered once for each admission: after a failed load the request is recomputed.
        """
        self._look_at_version()  # before this request has blocks, so that those of its step count as new
        state = self.requests.get(request.request_id)
        is_outdated = self._contents.admit(state.contents if state is not None else self._contents.of(request))
        if request.request_id in self._unnamed:
            self._needs_name = True
            may_load = self._settings.load and not request.skip_reading_prefix_cache and not request.resumable
            return (None if may_load else 0), False
        if state is None:
            return 0, False
        if local_tokens and is_outdated:
            # Other engines would find these blocks, and the KV that is computed after them, under the newer keys.
            logger.debug("request %s: %d tokens in vLLM's own cache may be outdated", state.request_id, local_tokens)
            self._end_use(state)
        state.local_tokens, state.num_computed = local_tokens, 0
        if local_tokens and request.prompt_embeds is not None:
            # vLLM's names of blocks do not tell token 0 from an embedding, so this hit may be another prompt's KV.
            state.may_store = False
            self._lookups.withdraw(state)
        if not state.may_load or request.skip_reading_prefix_cache or state.was_loaded:
            self._lookups.drop(state)
            return 0, False
        wanted_tokens = self._lookups.wanted_tokens(state)
        if wanted_tokens <= local_tokens:
            self._lookups.conclude(state)
            return 0, False
        if self._lookups.poll(state) is Outcome.PENDING:
            return None, False
        state.found(state.num_leased)
        if state.lease is not None:
            state.num_promoted = state.lease.num_promoted
            if state.lease.wants_tokens:
                state.lease = replace(state.lease, wants_tokens=False)
                self._describe(state, 0, state.num_leased)
        exact = max(local_tokens, min(state.num_leased * self.cache.chunk_tokens, wanted_tokens))
        if self._blends.offer(state, exact, self._client.token_seconds) is Outcome.PENDING:
            return None, False
        if exact == local_tokens:
            self._lookups.remember_miss(state)
        end = state.offer.end if state.offer is not None else exact
        return end - local_tokens, end > local_tokens

    # --- loads ----------------------------------------------------------------------------------------------------

    def allocated(self, request: EngineRequest, table: BlockTable, external_tokens: int) -> None:
        """Plan the load of `external_tokens` into the blocks that vLLM allocated; it may take fewer than offered."""
        state = self.requests.get(request.request_id)
        if state is None:
            return
        if external_tokens:
            self._loads.plan(state, table, external_tokens)
        elif state.load is None:
            self._drop(state)

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> StepPlan:
        """Return this step's jobs for the workers: allocated loads, and stores of the chunks that fill up.

        A chunk is stored in the step that computes its last token, once its token ids are known.
        """
        tables = step.kv_connector_block_state
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = (
            tables.boundary_state_offloads if tables is not None else {}
        )
        for request_id in step.preempted_req_ids or ():
            if request_id in self.requests:
                self._lookups.withdraw(self.requests[request_id])
        self._stores.plan_put_off()  # before other stores fill the room: vLLM may take these blocks in any step
        self._look_at_version()
        asks_for_weights, self._needs_name = self._generation.ask() if self._needs_name else 0, False
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            state = self.requests.get(request_id)
            if state is None or not num_tokens:
                continue
            state.num_computed = state.request.num_computed_tokens + num_tokens
            if state.may_store and tables is not None:
                table_of = partial(tables.get_block_ids, request_id)
                try:
                    self._stores.plan(state, table_of, offers.get(request_id, ()), state.num_computed)
                except Exception:
                    logger.exception("the rest of request %s is not stored", request_id)
                    state.may_store = False
        is_idle = self._lookups.may_idle = not step.num_scheduled_tokens
        self._prefill_cost.planned(self._clock(), sum(step.num_scheduled_tokens.values()))
        self._client.token_seconds = min(self._prefill_cost.token_seconds, _SLOWEST_TOKEN_SECONDS)
        return StepPlan(
            self._loads.take_planned(),
            self._stores.take_planned(),
            is_idle,
            *self._blends.take_planned(),
            asks_for_weights=asks_for_weights,
            step=self._contents.next_step(),
        )

    def workers_reported(
        self, report: WorkerReport, finished: Collection[str], failed: Collection[str], invalid_blocks: set[int]
    ) -> None:
        """Take the workers' reports.

        Args:
            report: the ended stores, the progress of blends, digests of weights, and changes of contents.
            finished: requests whose load ended on all workers.
            failed: the ones among them whose load failed (several KV cache groups).
            invalid_blocks: blocks that loads, ended or not, left unfilled (one group).
        """
        self._prefill_cost.reported(self._clock())
        if report.changes is not None:
            self._take_changes(report.changes)
        if self._generation.tell(report.weights, has_slept=report.has_slept):
            self._named()
        self._stores.report(report.ended)
        self._blends.loaded(report.blends_loaded)
        self._blends.computed(report.blended)
        if invalid_blocks:
            self._loads.mark_invalid(self.requests.values(), invalid_blocks)
        for request_id in finished:
            state = self.requests.get(request_id)
            has_failed = request_id in failed or (state is not None and state.load_has_failed)
            self._blends.ended(request_id, has_failed=has_failed)
            if state is not None and state.load is not None:
                self._load_ended(state, has_failed=has_failed)

    def _load_ended(self, state: RequestState, *, has_failed: bool) -> None:
        num_tokens = self._loads.end(state, has_failed=has_failed)
        self._drop(state)
        if has_failed:
            self.counters[_FAILED_LOADS] += 1
            logger.debug("request %s: the load failed, its tokens are recomputed", state.request_id)
            state.found(0)
            state.num_computed = 0
            return
        self.counters[_HIT_TOKENS] += num_tokens
        logger.debug("request %s: loaded %d tokens under exact keys", state.request_id, num_tokens)
        if state.exact_tokens is not None:  # other engines cannot use the KV that it computes now
            self._lookups.withdraw(state)
        self._note(state)

    def _note(self, state: RequestState, *, is_over: bool = False) -> None:
        """Tell the depot which segments the prompt's chunks hold, once all are stored or the request has ended."""
        if not state.must_note:
            return
        num_chunks = state.request.num_prompt_tokens // self.cache.chunk_tokens
        if state.exact_tokens is not None:
            num_chunks = min(num_chunks, state.exact_tokens // self.cache.chunk_tokens)
        num_stored = min(num_chunks, state.num_stored, MAXIMUM_CHUNKS)
        if not num_stored or (num_stored < num_chunks and not is_over):
            return
        key, namespace = state.run(0, num_stored), self._namespace
        if is_over:
            self._stores.once_stored(
                state,
                # After a reset, the chunks belong to the previous generation.
                lambda: self._blends.note(state, namespace, key) if namespace == self._namespace else None,
            )
        elif not state.num_storing:
            self._blends.note(state, namespace, key)
            state.must_note = False

    def _store_planned(self, state: RequestState, chunks: range) -> None:
        # Before the store: an engine that falls idle afterwards would describe its last prompt with the next one.
        self._describe(state, chunks.start, chunks.stop)

    def _store_ended(self, state: RequestState) -> None:
        if not state.has_ended:
            self._note(state)

    def _describe(self, state: RequestState, first: int, stop: int) -> None:
        """Send the tokens of chunks to a depot that publishes events."""
        if self._describer is not None and self._client.wants_tokens:
            root = state.run(0, 0).parent
            key, description = self._describer.describe(state.request, root, state.run(first, stop))
            self._client.post(lambda context: description.requests(context, key))

    def promoted_tokens(self, request: EngineRequest, num_tokens: int) -> int:
        """Return how many of the last `num_tokens` tokens of a hit came from tiers."""
        state = self.requests.get(request.request_id)
        return 0 if state is None else min(num_tokens, state.num_promoted * self.cache.chunk_tokens)

    def audit(self) -> dict[str, int]:
        """Return the numbers of things held: requests, their blocks, stores, blends. All are 0 in an idle engine."""
        return {
            "requests": len(self.requests),
            "held_blocks": self._stores.num_held_blocks,
            "stores": self._stores.num_pending,
            "blends": self._blends.num_pending,
        }

    @property
    def has_pending_stores(self) -> bool:
        """Whether blocks are held for stores: the engine must keep stepping to learn that they ended."""
        return self._stores.num_pending > 0

    @property
    def can_free_blocks_soon(self) -> bool:
        """Whether a store that should end soon is the only holder of blocks. False once it exceeds the deadline."""
        return self._stores.can_free_blocks_soon

    # --- end ------------------------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, table: BlockTable, *, has_failed: bool = False) -> dict[str, Any] | None:
        """Store the last full chunks of a request that ended, for any reason, and still has its blocks.

        Returns:
            `kv_transfer_params` for the decode engine, if the request asks for them.
        """
        self._unnamed.pop(request.request_id, None)
        state = self.requests.pop(request.request_id, None)
        if state is None:
            return None
        try:
            if state.may_store and not has_failed and state.load is None:
                computed = min(request.num_computed_tokens - request.num_in_flight_tokens, state.num_computed)
                self._stores.plan_last(state, table, computed)
            if state.hints is not None:
                key = state.run(0, min(state.num_stored, MAXIMUM_CHUNKS))
                self._stores.once_stored(state, partial(hint, self._client, key, **asdict(state.hints)))
            if state.has_announced:
                self._stores.once_stored(state, partial(self._lookups.withdraw_ended, state.request_id))
            self._note(state, is_over=True)
            return self._answer_of(state, has_failed=has_failed)
        finally:
            self._forget(state)

    def _answer_of(self, state: RequestState, *, has_failed: bool) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of a request's output."""
        request, answer = state.request, dict[str, Any]()
        if not has_failed and asks_for_hand_over(request.kv_transfer_params):
            num_chunks = min(state.num_stored, request.num_prompt_tokens // self.cache.chunk_tokens)
            if state.is_tail_stored:
                answer = handed_over(state.run_with_tail(0), state.prompt_tail_end)
            elif num_chunks:
                answer = handed_over(state.run(0, num_chunks), num_chunks * self.cache.chunk_tokens)
        blend = self._blends.answer_of(state)
        if blend is not None:
            answer["kvdepot"] = {**answer.get("kvdepot", {}), "blend": blend}
        return answer or None

    def _drop(self, state: RequestState) -> None:
        """Release the leases of a request whose load is decided or has ended."""
        self._lookups.drop(state)
        self._blends.drop(state)

    def _forget(self, state: RequestState) -> None:
        state.has_ended = True
        self._loads.forget(state)
        with contextlib.suppress(KVDepotError):
            self._lookups.drop(state)
            self._blends.forget(state)

    def reset(self) -> None:
        """Begin a new generation of keys, because the weights may have changed. The workers report digests of them.

        Requests under way are neither loaded nor stored any more.
        """
        if self._settings.keep_after_reset:
            return
        self._generation.reset()
        self._contents.reset()
        for state in self.requests.values():
            self._end_use(state)

    def _take_changes(self, changes: Changes) -> None:
        """End the loads and stores of requests that compute with other contents by now, and name new weights."""
        # A worker that is asked in the step after an update answers with that update's digest: it needs no other name.
        if self._contents.take(changes) and self._generation.is_known:
            self._generation.reset()
        for state in self.requests.values():
            if self._contents.concern(changes, state.contents):
                self._end_use(state)

    def _end_use(self, state: RequestState) -> None:
        """Neither load nor store for a request any more, as its keys do not name the contents that compute it."""
        state.may_load = state.may_store = False
        self._lookups.drop(state)
        self._lookups.withdraw(state)
        state.must_note = False
        self._blends.forget(state)

    def _look_at_version(self) -> None:
        if self._generation.set_version(self._version()):
            self.reset()

    def _named(self) -> None:
        """Begin the requests that waited for a name of the weights."""
        self._client.change_weights(self._namespace.weights)
        self.log_namespace()
        if self._feed is not None:
            self._feed.namespace = self._namespace.digest(self.cache.chunk_tokens)
        unnamed, self._unnamed = self._unnamed, {}
        for request in unnamed.values():
            self.begin(request)

    def log_namespace(self) -> None:
        """Log how operators name the prompts of this engine."""
        if self._settings.tenant_salt:  # others could compute the tenant's keys from the digest of a salted namespace
            return
        chunk_tokens = self.cache.chunk_tokens
        digest = self._namespace.digest(chunk_tokens).hex()
        named = {"namespace": digest, "chunk_tokens": chunk_tokens, "tenant": self._settings.tenant}
        logger.info('for "kvdepot warm" and "kvdepot find", beside "tokens": %s', json.dumps(named))

    @property
    def _namespace(self) -> Namespace:
        return self._generation.namespace

    def close(self) -> None:
        """Leave the depot. Idempotent."""
        if self._feed is not None:
            self._feed.close()
        self._client.close()
