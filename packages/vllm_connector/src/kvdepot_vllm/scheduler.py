"""The scheduler's side: looks prefixes up, plans loads and stores, and sends hints.

vLLM calls it in the engine core's loop, so nothing here waits. A lookup is sent when the request arrives, and its
answer is polled.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from kvdepot.client.scheduler import MISS, Lease, PendingLookup, SchedulerClient
from kvdepot.errors import KVDepotError
from kvdepot.keys import KeyRun, Namespace, PrefixHasher
from kvdepot.wire.messages import MAXIMUM_CHUNKS
from kvdepot_vllm.blend.planning import Blends
from kvdepot_vllm.blocks import blocks_to_fill
from kvdepot_vllm.engine import BlockPool, BlockTable, EngineRequest, LoadJob, Step, StepPlan, WorkerReport
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.hand_over import HandOver, asks_for_hand_over, handed_over
from kvdepot_vllm.hints import Hints
from kvdepot_vllm.identity import RequestIdentity
from kvdepot_vllm.pace import PrefillPace
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.stores import EndedStore, RequestKeys, StoreProgress, Stores
from kvdepot_vllm.tracing import end_span, start_span

logger = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 5.0  # an older answer is asked for again before it is used
_HAND_OVER_SECONDS: Final = 0.005  # between two questions for a prompt that a prefill engine has not begun
_IDLE_SECONDS: Final = 0.001  # to wait for an answer while nothing is computed; shorter than an empty step
# The same for an answer that waits for a tier or another engine. Empty steps, one after the other, would take most of a
# core, which on CPU the other engine computes with. A request that arrives meanwhile waits that long.
_LONG_IDLE_SECONDS: Final = 0.010
_SLOWEST_TOKEN_SECONDS: Final = 60.0  # the protocol's limit
_NO_CHUNKS: Final = KeyRun(b"", 0, bytes(32))


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    keys: RequestKeys
    progress: StoreProgress
    may_load: bool
    hints: Hints | None
    lookup: PendingLookup | None = None
    lease: Lease | None = None  # the answer to the last lookup
    asked_at: float = 0.0
    waits_until: float = 0.0  # for chunks that others are computing
    hand_over: HandOver | None = None  # a prefill engine computes the prompt
    began_at: float = 0.0  # when the first question was sent
    ask_at: float = 0.0  # when to ask again
    announced: bool = False  # that it computes chunks: to be withdrawn when it ends
    local_tokens: int = 0  # the hit in vLLM's own cache, as told with the last question
    loaded_at: int = -1  # preemption count when a load was last planned: each admission loads at most once
    load: LoadJob | None = None  # under way
    has_failed: bool = False  # the load under way
    has_noted: bool = False  # the depot knows its contents
    span: Any = None  # of the lookup, then of the load


class SchedulerSide:
    """Connects one engine's scheduler to the depot.

    Args:
        cache: the engine's cache.
        namespace: decides which engines share.
        settings: the user's.
        client: asks the depot; closed with this side.
        num_workers: workers that report each store.
        on_stored: called for each store that brought in chunks.
        can_blend: whether all workers can blend.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: EngineCache,
        namespace: Namespace,
        settings: Settings,
        client: SchedulerClient,
        num_workers: int,
        *,
        on_stored: Callable[[EndedStore], None] | None = None,
        can_blend: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._settings = settings
        self._client = client
        self._on_stored = on_stored
        self._clock = clock
        self._identity = RequestIdentity()
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadJob] = []
        self._stores = Stores(cache, settings, num_workers, self._store_ended, clock)
        self._late_hints: dict[str, tuple[KeyRun, Hints]] = {}  # kept until the last store of the request ends
        self._late_withdrawals: set[str] = set()  # the same
        self._is_idle = True  # the last step computed nothing
        self._has_hit = False  # and the log says so
        self._pace = PrefillPace()
        self.counters = self._stores.counters
        self._blends = Blends(cache, settings, client, num_workers, self.counters, clock) if can_blend else None
        self._late_notes: dict[str, tuple[EngineRequest, Namespace, KeyRun]] = {}  # until the last store has ended

    @property
    def is_connected(self) -> bool:
        """Whether a depot is there now."""
        return self._client.is_connected

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: none within `timeout_seconds`; the text says why.
        """
        self._client.wait_until_connected(timeout_seconds)

    def bind_block_pool(self, pool: BlockPool) -> None:
        """Take the pool whose blocks stores hold."""
        self._stores.pool = pool
        if self._blends is not None:
            self._blends.pool = pool

    # --- admission ------------------------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> None:
        """Send the lookup of a request that arrived, so that the answer is here when it is first scheduled."""
        wishes = _wishes(request)
        chunk_tokens = self._cache.chunk_tokens
        hasher = PrefixHasher(self._namespace, chunk_tokens, self._identity.extra_keys(request))
        keys = RequestKeys(request, hasher, chunk_tokens)
        may_store = self._settings.store != "none" and wishes.get("store") is not False and not request.resumable
        state = _Request(
            request,
            keys,
            StoreProgress(request, keys, may_store),
            may_load=self._settings.load and wishes.get("load") is not False and not request.resumable,
            hints=Hints.parse(wishes),
            hand_over=HandOver.parse(request.kv_transfer_params),
        )
        stale = self._requests.pop(request.request_id, None)
        if stale is not None:
            self._forget(stale)
        self._requests[request.request_id] = state
        if state.may_load and not request.skip_reading_prefix_cache:
            self._ask(state)
            if self._blends is not None:
                self._blends.begin(request, self._namespace, wishes)

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens past the local hit a load would bring; None while the depot has not answered.

        A load is offered once for each admission: after a failed load the request is recomputed.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        state.local_tokens = local_tokens
        state.progress.num_computed = 0
        if not state.may_load or request.skip_reading_prefix_cache or state.loaded_at == request.num_preemptions:
            self._drop_lease(state)
            return 0, False
        if self._num_wanted(request) * self._cache.chunk_tokens <= local_tokens:
            if state.lookup is not None and state.lookup.query():
                state.progress.num_stored = self._take_answer(state, state.lookup).num_chunks
            self._drop_lease(state)
            return 0, False
        lease = self._answer(state)
        if lease is None:
            return None, False
        state.progress.num_stored = lease.num_chunks
        exact = max(local_tokens, lease.num_chunks * self._cache.chunk_tokens)
        end = self._offered(state, exact)
        if end is None:
            return None, False
        if exact == local_tokens:
            self._drop_lease(state)
            state.lease = MISS  # remembered, so that the lookup is not repeated while it is fresh
        return end - local_tokens, end > local_tokens

    def _offered(self, state: _Request, exact_tokens: int) -> int | None:
        """Return the end of what a blend brings behind the exact prefix; None while there is no answer."""
        if self._blends is None:
            return exact_tokens
        end = self._blends.offer(state.request, exact_tokens, self._client.token_seconds)
        if end is not None and end > exact_tokens:
            state.progress.exact_tokens = self._blends.exact_tokens(state.request.request_id)
            self._withdraw(state.request.request_id)  # what it computes from now on is for nobody else
        return end

    def _answer(self, state: _Request) -> Lease | None:
        """Return what the depot has, asking again if the last answer is old; None while there is no answer."""
        if state.lease is not None and self._clock() - state.asked_at <= _FRESH_SECONDS:
            return state.lease
        if state.lookup is None:
            if self._clock() < state.ask_at:
                if self._is_idle:
                    self._is_idle = False
                    time.sleep(_IDLE_SECONDS)
                return None
            self._drop_lease(state)
            self._ask(state)
        if state.lookup is None:
            return state.lease or MISS
        may_wait, self._is_idle = self._is_idle, False  # once a step, however many requests wait
        is_late = self._clock() - state.asked_at > _LONG_IDLE_SECONDS
        seconds = _LONG_IDLE_SECONDS if is_late else _IDLE_SECONDS
        if not (state.lookup.wait(seconds) if may_wait else state.lookup.query()):
            return None
        lease = self._take_answer(state, state.lookup)
        if self._asks_again(state, lease):
            return None
        self.counters["lookups"] += 1
        return lease

    def _asks_again(self, state: _Request, lease: Lease) -> bool:
        """Ask again if others bring more chunks; False if the answer is final."""
        now, hand_over = self._clock(), state.hand_over
        if lease.num_pending and now < state.waits_until:
            state.ask_at = now
        elif hand_over is None or lease.num_chunks >= hand_over.num_chunks(
            self._wanted(state), self._cache.chunk_tokens
        ):
            return False
        elif now < state.began_at + hand_over.wait_seconds:
            state.ask_at = now + _HAND_OVER_SECONDS
        else:
            state.hand_over, state.ask_at = None, now  # this question announces that the engine computes the rest
            self.counters["hand_overs_missed"] += 1
        self._drop_lease(state)
        if state.ask_at <= now:
            self._ask(state)
        return True

    def _num_wanted(self, request: EngineRequest) -> int:
        """Return the chunks worth loading: at least one token is left to compute, as with vLLM's own prefix cache."""
        return min(MAXIMUM_CHUNKS, max(0, request.num_tokens - 1) // self._cache.chunk_tokens)

    def _wanted(self, state: _Request) -> KeyRun:
        return state.keys.run(0, self._num_wanted(state.request))

    def _ask(self, state: _Request) -> None:
        key, now = self._wanted(state), self._clock()
        if not key.num_chunks:
            return
        if state.asked_at + _FRESH_SECONDS < now or not state.waits_until:
            # Waiting for others takes at most as long as computing the prompt, or a deadline.
            seconds = state.request.num_tokens * self._client.token_seconds
            state.began_at, state.waits_until = now, now + max(seconds, self._settings.deadline_seconds)
        state.asked_at = now
        tokens = key.num_chunks * self._cache.chunk_tokens
        state.span = start_span("kvdepot lookup", state.request, wanted_tokens=tokens)
        joins = self._settings.wait_for_others
        announces = joins and state.progress.may_store and state.hand_over is None
        state.announced |= announces
        state.lookup = self._client.submit_lookup(
            state.request.request_id, key, joins=joins, announces=announces, ahead_tokens=self._ahead_tokens(state)
        )

    def _ahead_tokens(self, state: _Request) -> int:
        """Return the tokens of earlier prompts that are still to be computed, as far as that is known."""
        chunk_tokens = self._cache.chunk_tokens
        return sum(
            max(0, other.request.num_prompt_tokens - max(progress.num_computed, progress.num_stored * chunk_tokens))
            for other in self._requests.values()
            if other is not state and other.lookup is None and (progress := other.progress)
        )

    def _take_answer(self, state: _Request, lookup: PendingLookup) -> Lease:
        state.lease, state.lookup = lookup.result(), None
        end_span(state.span, found_tokens=state.lease.num_chunks * self._cache.chunk_tokens)
        state.span = None
        return state.lease

    def _drop_lease(self, state: _Request) -> None:
        if state.lookup is not None:
            state.lookup.cancel()
            state.lookup = None
            end_span(state.span, cancelled=True)
            state.span = None
        if state.lease is not None:
            self._client.release(state.lease)
            state.lease = None

    # --- loads ----------------------------------------------------------------------------------------------------

    def allocated(self, request: EngineRequest, table: BlockTable, external_tokens: int) -> None:
        """Plan the load of `external_tokens` into the blocks that vLLM allocated; it may take fewer than offered."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if not external_tokens:
            if state.load is None:
                self._drop_lease(state)
                if self._blends is not None:
                    self._blends.drop(request.request_id)
            return
        state.loaded_at = request.num_preemptions
        exact_end = self._blends.exact_end(request.request_id) if self._blends is not None else None
        if self._blends is not None and exact_end is not None:
            self._plan_blend(self._blends, state, table, exact_end, external_tokens)
            return
        try:
            load = self._load_job(state, table, external_tokens)
        except Exception:
            logger.exception("request %s cannot be loaded", request.request_id)
            load = None
        state.load = load or LoadJob(request.request_id, _NO_CHUNKS, (), 0)
        state.has_failed = False
        self._loads.append(state.load)
        state.span = start_span("kvdepot load", request, tokens=external_tokens)
        if not self._has_hit:
            self._has_hit = True
            logger.info("first hit: request %s loads %d tokens from the depot", request.request_id, external_tokens)

    def _plan_blend(
        self, blends: Blends, state: _Request, table: BlockTable, exact_end: int, external_tokens: int
    ) -> None:
        """Plan the blend that was offered; vLLM recomputes what it does not bring."""
        request, local_tokens = state.request, state.local_tokens
        try:
            exact = self._load_job(state, table, exact_end - local_tokens) if exact_end > local_tokens else None
            is_planned = (exact is not None or exact_end <= local_tokens) and blends.allocated(
                request, table, local_tokens, local_tokens + external_tokens, exact
            )
        except Exception:
            logger.exception("request %s cannot be blended", request.request_id)
            exact, is_planned = None, False
        blocks = tuple(list(row) for row in table) if is_planned else ()
        key, skip_tokens = (exact.key, exact.skip_tokens) if exact is not None else (_NO_CHUNKS, 0)
        state.load = LoadJob(request.request_id, key, blocks, skip_tokens)
        state.has_failed = False
        state.span = start_span("kvdepot blend", request, tokens=external_tokens)
        if not is_planned:
            self._loads.append(LoadJob(request.request_id, _NO_CHUNKS, (), 0))

    def _load_job(self, state: _Request, table: BlockTable, external_tokens: int) -> LoadJob | None:
        """Return the load job; None, with a log line, if vLLM's blocks do not fit the lease."""
        request_id, stop_tokens = state.request.request_id, state.local_tokens + external_tokens
        first, skip_tokens = divmod(state.local_tokens, self._cache.chunk_tokens)
        stop, rest = divmod(stop_tokens, self._cache.chunk_tokens)
        pool = self._stores.pool
        null_block = pool.null_block.block_id if pool is not None else 0
        block_ids = None if rest else blocks_to_fill(self._cache, table, first, stop, null_block)
        if block_ids is None or state.lease is None or stop > state.lease.num_chunks:
            logger.error(
                "request %s: a load of tokens %d to %d does not fit the %d chunks of %d tokens that were found; they"
                " are recomputed",
                request_id, state.local_tokens, stop_tokens,
                state.lease.num_chunks if state.lease else 0, self._cache.chunk_tokens,
            )  # fmt: skip
            return None
        return LoadJob(request_id, state.keys.run(first, stop), block_ids, skip_tokens)

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> StepPlan:
        """Return this step's jobs for the workers: allocated loads, and stores of the chunks that fill up.

        A chunk is stored in the step that computes its last token, once its ids are known.
        """
        tables = step.kv_connector_block_state
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = (
            tables.boundary_state_offloads if tables is not None else {}
        )
        for request_id in step.preempted_req_ids or ():
            self._withdraw(request_id)
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not num_tokens:
                continue
            progress = state.progress
            progress.num_computed = state.request.num_computed_tokens + num_tokens
            if progress.may_store and tables is not None:
                table_of = partial(tables.get_block_ids, request_id)
                try:
                    self._stores.plan(progress, table_of, offers.get(request_id, ()), progress.num_computed)
                except Exception:
                    logger.exception("the rest of request %s is not stored", request_id)
                    progress.may_store = False
        self._is_idle = not step.num_scheduled_tokens
        self._pace.planned(self._clock(), sum(step.num_scheduled_tokens.values()))
        self._client.token_seconds = min(self._pace.token_seconds, _SLOWEST_TOKEN_SECONDS)
        loads, self._loads = tuple(self._loads), []
        blends, slice_of, given_up = self._blends.take_planned() if self._blends is not None else ((), None, ())
        return StepPlan(loads, self._stores.take_planned(), self._is_idle, blends, slice_of, given_up)

    def workers_reported(
        self, report: WorkerReport, finished: Collection[str], failed: Collection[str], invalid_blocks: set[int]
    ) -> None:
        """Take the workers' reports.

        Args:
            report: stores that ended.
            finished: requests whose load ended on all workers.
            failed: those among them whose load failed (several KV cache groups).
            invalid_blocks: blocks that loads, ended or not, left unfilled (one group).
        """
        self._pace.reported(self._clock())
        self._stores.report(report.ended)
        if self._blends is not None:
            self._blends.loaded(report.blends_loaded)
            self._blends.computed(report.blended)
        if invalid_blocks:
            for state in self._requests.values():
                if state.load is not None and state.load.block_ids:
                    state.has_failed |= not invalid_blocks.isdisjoint(state.load.block_ids[0])
        for request_id in finished:
            state = self._requests.get(request_id)
            has_failed = request_id in failed or (state is not None and state.has_failed)
            if self._blends is not None:
                self._blends.ended(request_id, has_failed=has_failed)
            if state is not None and state.load is not None:
                self._load_ended(state, state.load, has_failed=has_failed)

    def _load_ended(self, state: _Request, load: LoadJob, *, has_failed: bool) -> None:
        state.load = None
        end_span(state.span, failed=has_failed)
        state.span = None
        self._drop_lease(state)
        if has_failed:
            self.counters["failed_loads"] += 1
            state.progress.num_stored = 0
            state.progress.num_computed = 0
        else:
            self.counters["hit_tokens"] += load.key.num_chunks * self._cache.chunk_tokens - load.skip_tokens
            self._note(state)

    def _note(self, state: _Request, *, is_over: bool = False) -> None:
        """Tell the depot what the prompt's chunks hold, once all of them are there or the request `is_over`."""
        if self._blends is None or state.has_noted:
            return
        request, progress = state.request, state.progress
        num_chunks = request.num_prompt_tokens // self._cache.chunk_tokens
        if progress.exact_tokens is not None:
            num_chunks = min(num_chunks, progress.exact_tokens // self._cache.chunk_tokens)
        num_stored = min(num_chunks, progress.num_stored, MAXIMUM_CHUNKS)
        if not num_stored or (num_stored < num_chunks and not is_over):
            return
        if not self._stores.is_storing(request.request_id):
            self._blends.note(request, self._namespace, state.keys.run(0, num_stored))
            state.has_noted = True
        elif is_over:
            self._late_notes[request.request_id] = request, self._namespace, state.keys.run(0, num_stored)

    def _note_late(self, request_id: str) -> None:
        if self._blends is None:
            return
        if request_id in self._late_notes and not self._stores.is_storing(request_id):
            self._blends.note(*self._late_notes.pop(request_id))
        elif request_id in self._requests:
            self._note(self._requests[request_id])

    def _store_ended(self, store: EndedStore) -> None:
        if store.num_chunks and self._on_stored is not None:
            self._on_stored(store)
        self._send_hints(store.request.request_id)
        self._withdraw_late(store.request.request_id)
        self._note_late(store.request.request_id)

    @property
    def has_pending_stores(self) -> bool:
        """Whether blocks are held for stores: the engine has to go on stepping to learn that they ended."""
        return self._stores.num_pending > 0

    @property
    def can_free_blocks_soon(self) -> bool:
        """Whether a store that should end soon holds blocks alone. False once the store exceeds the deadline."""
        return self._stores.can_free_blocks_soon

    # --- end ------------------------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, table: BlockTable, *, has_failed: bool = False) -> dict[str, Any] | None:
        """Store the last full chunks of a request that ended, for whatever reason, and still has its blocks.

        Returns:
            what the engine that decodes is to be told, if the request asks for that.
        """
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return None
        progress = state.progress
        try:
            if progress.may_store and not has_failed and state.load is None:
                computed = min(request.num_computed_tokens - request.num_in_flight_tokens, progress.num_computed)
                self._stores.plan(progress, lambda: table, (), computed)
            if state.hints is not None:
                key = state.keys.run(0, min(progress.num_stored, MAXIMUM_CHUNKS))
                self._late_hints[request.request_id] = key, state.hints
                self._send_hints(request.request_id)
            if state.announced:
                self._late_withdrawals.add(request.request_id)
                self._withdraw_late(request.request_id)
            self._note(state, is_over=True)
            return self._answer_of(state, has_failed=has_failed)
        finally:
            self._forget(state)

    def _answer_of(self, state: _Request, *, has_failed: bool) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of a request's output."""
        request, answer = state.request, dict[str, Any]()
        num_chunks = min(state.progress.num_stored, request.num_prompt_tokens // self._cache.chunk_tokens)
        if num_chunks and not has_failed and asks_for_hand_over(request.kv_transfer_params):
            answer = handed_over(state.keys.run(0, num_chunks), self._cache.chunk_tokens)
        blend = self._blends.answer_of(request.request_id) if self._blends is not None else None
        if blend is not None:
            answer["kvdepot"] = {**answer.get("kvdepot", {}), "blend": blend}
        return answer or None

    def _withdraw_late(self, request_id: str) -> None:
        """Withdraw what an ended request announced, once its last store has ended: nothing more of it comes."""
        if request_id in self._late_withdrawals and not self._stores.is_storing(request_id):
            self._late_withdrawals.discard(request_id)
            if request_id not in self._requests:  # nobody else has the name by now
                self._client.end_request(request_id)

    def _withdraw(self, request_id: str) -> None:
        """Withdraw what a request announced that will not be computed for now."""
        state = self._requests.get(request_id)
        if state is not None and state.announced:
            state.announced = False
            self._client.end_request(request_id)

    def _send_hints(self, request_id: str) -> None:
        """Send the hints of an ended request, once its whole prefix is in the depot."""
        if request_id not in self._late_hints or self._stores.is_storing(request_id):
            return
        key, hints = self._late_hints.pop(request_id)
        self._client.hint(
            key, session_ended=hints.session_ended, priority=hints.priority, ttl_seconds=hints.ttl_seconds
        )

    def _forget(self, state: _Request) -> None:
        end_span(state.span, cancelled=True)
        state.span = None
        with contextlib.suppress(KVDepotError):
            self._drop_lease(state)
            if self._blends is not None:
                self._blends.forget(state.request.request_id)

    def reset(self) -> None:
        """Begin a new generation of keys, as the weights may have changed: none of it is shared with older entries."""
        if self._settings.keep_after_reset:
            return
        extra = tuple(item for item in self._namespace.extra if item[0] != "generation")
        self._namespace = replace(self._namespace, extra=(*extra, ("generation", uuid.uuid4().hex)))
        for state in self._requests.values():
            state.may_load = state.progress.may_store = False
            self._drop_lease(state)
            self._withdraw(state.request.request_id)
            state.has_noted = True  # its chunks are of the generation before
            if self._blends is not None:
                self._blends.forget(state.request.request_id)
        self._late_notes.clear()
        logger.info("the prefix cache was reset: this engine begins a new generation of keys")

    def close(self) -> None:
        """Leave the depot. Twice is harmless."""
        self._client.close()


def _wishes(request: EngineRequest) -> Mapping[str, Any]:
    """Return the request's own settings: `kv_transfer_params={"kvdepot": {"load": false, "store": false}}`."""
    params: Any = request.kv_transfer_params
    wishes: Any = cast("dict[str, Any]", params).get("kvdepot") if isinstance(params, dict) else None
    return cast("dict[str, Any]", wishes) if isinstance(wishes, dict) else {}
