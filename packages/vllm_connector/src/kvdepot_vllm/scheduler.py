"""The scheduler's side: what is in the depot, what to load, what to store, and the references that hold blocks.

vLLM calls it in the engine core's loop, so nothing here waits: a lookup is sent when the request arrives and its answer
is polled. The source blocks of a store are held by references on vLLM's block pool, taken when the store is planned and
given back when every worker has reported it; so they survive the end, abort and preemption of their request.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

from kvdepot.backends import NO_BLOCK
from kvdepot.client.scheduler import MISS, Lease, PendingLookup, SchedulerClient
from kvdepot.errors import KVDepotError
from kvdepot.keys import KeyRun, Namespace, PrefixHasher
from kvdepot.layout import GroupKind
from kvdepot.wire.messages import MAXIMUM_CHUNKS
from kvdepot_vllm.engine import BlockPool, BlockTable, EngineRequest, LoadJob, Step, StepPlan, StoreJob, WorkerReport
from kvdepot_vllm.groups import EngineCache, EngineGroup
from kvdepot_vllm.hints import Hints
from kvdepot_vllm.identity import RequestIdentity
from kvdepot_vllm.pace import PrefillPace
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.tracing import end_span, start_span

logger = logging.getLogger(__name__)

_FRESH_SECONDS: Final = 5.0  # an answer older than this is asked for again before it is used
_IDLE_SECONDS: Final = 0.001  # for an answer while nothing else is computed: less than an empty step takes
_SLOWEST_TOKEN_SECONDS: Final = 60.0  # that the depot can be told
_NO_CHUNKS: Final = KeyRun(b"", 0, bytes(32))

OnStored = Callable[[EngineRequest, int, int, tuple[int, ...]], None]
"""Told what a store brought in: request, first chunk, number of chunks, and how many of the last each group covers."""


@dataclass(slots=True)
class _Request:
    request: EngineRequest
    hasher: PrefixHasher
    may_load: bool
    may_store: bool
    hints: Hints | None
    lookup: PendingLookup | None = None
    lease: Lease | None = None  # the answer to the last lookup
    asked_at: float = 0.0
    local_tokens: int = 0  # what vLLM had itself when it asked last
    loaded_at: int = -1  # the preemption count at which a load was planned: one load for each admission
    load: LoadJob | None = None  # under way
    has_failed: bool = False  # that load
    num_stored: int = 0  # chunks that are in the depot or on their way
    num_computed: int = 0  # tokens whose KV is known to be computed once the steps sent so far have run
    span: Any = None  # of the lookup, then of the load


@dataclass(slots=True)
class _PinnedStore:
    request: EngineRequest
    first_chunk: int
    num_chunks: int
    covered: tuple[int, ...]
    blocks: list[Any]
    planned_at: float
    span: Any = None
    num_reports: int = 0
    num_stored: int = 1 << 31


class SchedulerSide:
    """One engine's scheduler and the depot.

    Args:
        cache: the engine's cache.
        namespace: who may share.
        settings: the user's.
        instance: the engine's name, as its workers give it.
        num_workers: how many report each store.
        model: for the operator.
        on_stored: see `OnStored`.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: EngineCache,
        namespace: Namespace,
        settings: Settings,
        instance: str,
        num_workers: int,
        *,
        model: str = "",
        on_stored: OnStored | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._namespace = namespace
        self._settings = settings
        self._num_workers = num_workers
        self._on_stored = on_stored
        self._clock = clock
        self._identity = RequestIdentity()
        self._requests: dict[str, _Request] = {}
        self._loads: list[LoadJob] = []
        self._stores: list[StoreJob] = []
        self._pinned: dict[int, _PinnedStore] = {}
        self._num_pinned_blocks = 0
        self._late_hints: dict[str, tuple[KeyRun, Hints]] = {}  # until the last store of their request has ended
        self._next_job = 1
        self._is_idle = True  # nothing was computed in the last step
        self._pace = PrefillPace()
        self._pool: BlockPool | None = None
        self.counters: dict[str, int] = {}
        self._client = SchedulerClient(
            cache.spec, instance, model=model, url=settings.url, deadline_seconds=settings.deadline_seconds
        )

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
        self._pool = pool

    # --- admission ------------------------------------------------------------------------------------------------

    def begin(self, request: EngineRequest) -> None:
        """A request arrived: ask for it at once, so that the answer is there when it is first scheduled."""
        wishes = _wishes(request)
        hasher = PrefixHasher(self._namespace, self._cache.chunk_tokens, self._identity.extra_keys(request))
        state = _Request(
            request,
            hasher,
            may_load=self._settings.load and wishes.get("load") is not False and not request.resumable,
            may_store=self._settings.store != "none" and wishes.get("store") is not False and not request.resumable,
            hints=Hints.parse(wishes),
        )
        stale = self._requests.pop(request.request_id, None)
        if stale is not None:
            self._forget(stale)
        self._requests[request.request_id] = state
        if state.may_load and not request.skip_reading_prefix_cache:
            self._ask(state)

    def matched_tokens(self, request: EngineRequest, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens past the local hit a load would bring; None while the depot has not answered.

        Never claims again what was claimed at this admission: after a failed load the request is recomputed.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        state.local_tokens = local_tokens
        state.num_computed = 0
        if not state.may_load or request.skip_reading_prefix_cache or state.loaded_at == request.num_preemptions:
            self._drop_lease(state)
            return 0, False
        if self._num_wanted(request) * self._cache.chunk_tokens <= local_tokens:
            if state.lookup is not None and state.lookup.query():
                self._take_answer(state, state.lookup)
                state.num_stored = state.lease.num_chunks if state.lease else 0
            self._drop_lease(state)
            return 0, False
        if state.lease is None or self._clock() - state.asked_at > _FRESH_SECONDS:
            if state.lookup is None:
                self._drop_lease(state)
                self._ask(state)
            if state.lookup is not None:
                may_wait, self._is_idle = self._is_idle, False  # once a step, however many requests wait
                if not (state.lookup.wait(_IDLE_SECONDS) if may_wait else state.lookup.query()):
                    return None, False
                self._take_answer(state, state.lookup)
                self._count("lookups")
        lease = state.lease or MISS
        state.num_stored = lease.num_chunks
        external = lease.num_chunks * self._cache.chunk_tokens - local_tokens
        if external <= 0:
            self._drop_lease(state)
            state.lease = MISS  # remembered: the answer is not asked for again while it is fresh
            return 0, False
        return external, True

    def _num_wanted(self, request: EngineRequest) -> int:
        """Chunks worth loading: at least one token is left to compute, as with vLLM's own prefix cache."""
        return min(MAXIMUM_CHUNKS, max(0, request.num_tokens - 1) // self._cache.chunk_tokens)

    def _ask(self, state: _Request) -> None:
        wanted = self._num_wanted(state.request)
        if not wanted:
            return
        self._hash(state, wanted)
        state.asked_at = self._clock()
        tokens = wanted * self._cache.chunk_tokens
        state.span = start_span("kvdepot lookup", state.request, wanted_tokens=tokens)
        state.lookup = self._client.submit_lookup(state.request.request_id, state.hasher.run(0, wanted))

    def _take_answer(self, state: _Request, lookup: PendingLookup) -> None:
        state.lease, state.lookup = lookup.result(), None
        end_span(state.span, found_tokens=state.lease.num_chunks * self._cache.chunk_tokens)
        state.span = None

    def _hash(self, state: _Request, num_chunks: int) -> None:
        done, wanted = state.hasher.num_tokens, num_chunks * self._cache.chunk_tokens
        if done < wanted:
            state.hasher.extend(state.request.all_token_ids[done:wanted])

    def _drop_lease(self, state: _Request) -> None:
        if state.lookup is not None:
            state.lookup.cancel()
            state.lookup = None
            end_span(state.span, cancelled=True)
            state.span = None
        if state.lease is not None:
            self._client.release(state.lease)
            state.lease = None

    def allocated(self, request: EngineRequest, table: BlockTable, external_tokens: int) -> None:
        """VLLM allocated blocks; load `external_tokens` into them (it may have chosen fewer than were offered)."""
        state = self._requests.get(request.request_id)
        if state is None:
            return
        if not external_tokens:
            if state.load is None:
                self._drop_lease(state)
            return
        state.loaded_at = request.num_preemptions
        try:
            load = self._load_job(state, table, external_tokens)
        except Exception:
            logger.exception("request %s cannot be loaded", request.request_id)
            load = None
        state.load = load or LoadJob(request.request_id, _NO_CHUNKS, (), 0)
        state.has_failed = False
        self._loads.append(state.load)
        state.span = start_span("kvdepot load", request, tokens=external_tokens)

    def _load_job(self, state: _Request, table: BlockTable, external_tokens: int) -> LoadJob | None:
        """Return the load of what was offered; None, with a line in the log, if it does not fit."""
        request_id, stop_tokens = state.request.request_id, state.local_tokens + external_tokens
        first, skip_tokens = divmod(state.local_tokens, self._cache.chunk_tokens)
        stop, rest = divmod(stop_tokens, self._cache.chunk_tokens)
        block_ids = None if rest else self._blocks_to_fill(table, first, stop)
        if block_ids is None or state.lease is None or stop > state.lease.num_chunks:
            logger.error(
                "request %s: a load of tokens %d to %d does not fit what was found (%d chunks of %d): recomputed",
                request_id, state.local_tokens, stop_tokens,
                state.lease.num_chunks if state.lease else 0, self._cache.chunk_tokens,
            )  # fmt: skip
            return None
        return LoadJob(request_id, state.hasher.run(first, stop), block_ids, skip_tokens)

    # --- block tables ---------------------------------------------------------------------------------------------

    def _blocks_to_fill(self, table: BlockTable, first: int, stop: int) -> tuple[list[int], ...] | None:
        """Return the blocks of chunks `first` to `stop` in the form of `BlockIds`; None if one is missing."""
        null = self._null_block_id
        result: list[list[int]] = []
        for group in self._cache.groups:
            if group.kind is GroupKind.RECURRENT:
                place = stop * self._cache.chunk_tokens // group.block_tokens - 1
                ids = list(table[group.number][place : place + 1])
                if ids in ([], [null]):
                    return None
                result.append(ids)
                continue
            step = self._cache.chunk_tokens // group.block_tokens
            ids = list(table[group.number][first * step : stop * step])
            if len(ids) != (stop - first) * step:
                return None
            if group.kind is GroupKind.FULL_ATTENTION:
                if null in ids:
                    return None
            else:
                while ids and all(block == null for block in ids[:step]):
                    del ids[:step]
                ids = [NO_BLOCK if block == null else block for block in ids]
            result.append(ids)
        return tuple(result)

    def _blocks_to_store(
        self, table: BlockTable, first: int, stop: int, states: Mapping[int, int]
    ) -> tuple[list[int], ...]:
        """Return the blocks of chunks `first` to `stop`; groups that hold less cover only the last chunks.

        `states` has the block with the state at the end of the run for each recurrent group, if there is one.
        """
        return tuple(self._stored_blocks(group, table, first, stop, states) for group in self._cache.groups)

    def _stored_blocks(
        self, group: EngineGroup, table: BlockTable, first: int, stop: int, states: Mapping[int, int]
    ) -> list[int]:
        null = self._null_block_id
        if group.kind is GroupKind.RECURRENT:
            if not group.states_by_position:
                return [states[group.number]] if group.number in states else []
            stride = self._cache.chunk_tokens // group.block_tokens
            ids = list(table[group.number][(first + 1) * stride - 1 : stop * stride : stride])
            step = 1
        else:
            step = self._cache.chunk_tokens // group.block_tokens
            ids = list(table[group.number][first * step : stop * step])
        for chunk in reversed(range(len(ids) // step)):
            if null in ids[chunk * step : (chunk + 1) * step]:
                return ids[(chunk + 1) * step :]
        return ids

    @property
    def _null_block_id(self) -> int:
        return self._pool.null_block.block_id if self._pool is not None else 0

    # --- steps ----------------------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> StepPlan:
        """Return what the workers have to do in this step: the loads that were allocated, the stores that fill up.

        A chunk is stored in the step that computes its last token, once its ids are known.
        """
        tables = step.kv_connector_block_state
        offers: Mapping[str, Sequence[tuple[int, int, int]]] = (
            tables.boundary_state_offloads if tables is not None else {}
        )
        for request_id, num_tokens in step.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is None or not num_tokens:
                continue
            state.num_computed = state.request.num_computed_tokens + num_tokens
            if state.may_store and tables is not None:
                try:
                    self._plan_stores(state, partial(tables.get_block_ids, request_id), offers.get(request_id, ()))
                except Exception:
                    logger.exception("request %s is not stored any further", request_id)
                    state.may_store = False
        self._is_idle = not step.num_scheduled_tokens
        self._pace.planned(self._clock(), sum(step.num_scheduled_tokens.values()))
        self._client.token_seconds = min(self._pace.token_seconds, _SLOWEST_TOKEN_SECONDS)
        plan = StepPlan(tuple(self._loads), tuple(self._stores), self._is_idle)
        self._loads, self._stores = [], []
        return plan

    def _plan_stores(
        self,
        state: _Request,
        table_of: Callable[[], BlockTable | None],
        offers: Collection[tuple[int, int, int]],
        num_ready: int | None = None,
    ) -> None:
        """Plan stores of the chunks that are ready, and of those whose recurrent states are offered.

        Runs end where a state is offered, as that is the last chunk which a recurrent group can cover.
        """
        chunk_tokens = self._cache.chunk_tokens
        ready = state.num_computed if num_ready is None else num_ready
        ready = max(0, min(ready, state.request.num_tokens) - self._cache.volatile_tokens)
        if self._settings.store == "prompt":
            ready = min(ready, state.request.num_prompt_tokens)
        stop = ready // chunk_tokens
        boundaries: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            if tokens % chunk_tokens == 0 and 0 < tokens <= ready:
                boundaries.setdefault(tokens // chunk_tokens, {})[group] = block_id
        if stop <= state.num_stored and not boundaries:
            return
        table = table_of()
        if table is None or self._pool is None:
            return
        ends = {*boundaries, stop} if stop > state.num_stored else {*boundaries}
        for end in sorted(ends):
            first = min(state.num_stored, end - 1)
            while first < end:
                planned = self._plan_store(state, table, first, end, boundaries.get(end, {}))
                if not planned:
                    return
                first += planned
                state.num_stored = max(state.num_stored, first)

    def _plan_store(self, state: _Request, table: BlockTable, first: int, stop: int, states: Mapping[int, int]) -> int:
        """Pin and plan a store of chunks from `first` on; return how many, 0 if the engine can spare no more blocks."""
        assert self._pool is not None
        per_chunk = sum(
            1 if group.kind is GroupKind.RECURRENT else self._cache.chunk_tokens // group.block_tokens
            for group in self._cache.groups
        )
        room = int(len(self._pool.blocks) * self._settings.max_pinned_share) - self._num_pinned_blocks
        if room < per_chunk:
            self._count("stores_put_off")
            return 0
        if stop - first > room // per_chunk:
            stop, states = first + room // per_chunk, {}
        block_ids = self._blocks_to_store(table, first, stop, states)
        steps = [self._blocks_per_chunk(group) for group in self._cache.groups]
        covered = tuple(len(ids) // step for ids, step in zip(block_ids, steps, strict=True))
        for group, count in zip(self._cache.groups, covered, strict=True):
            if group.kind is GroupKind.FULL_ATTENTION and count != stop - first:
                self._count("stores_without_blocks")
                return 0
        self._hash(state, stop)
        number, self._next_job = self._next_job, self._next_job + 1
        job = StoreJob(number, state.request.request_id, state.hasher.run(first, stop), block_ids)
        blocks = [self._pool.blocks[block_id] for ids in block_ids for block_id in ids]
        span = start_span("kvdepot store", state.request, tokens=(stop - first) * self._cache.chunk_tokens)
        store = _PinnedStore(state.request, first, stop - first, covered, blocks, self._clock(), span)
        self._pool.touch(blocks)  # from here on nothing fails: who forgot the store would hold its blocks for ever
        self._num_pinned_blocks += len(blocks)
        self._pinned[number] = store
        self._stores.append(job)
        return stop - first

    def _blocks_per_chunk(self, group: EngineGroup) -> int:
        return 1 if group.kind is GroupKind.RECURRENT else self._cache.chunk_tokens // group.block_tokens

    def workers_reported(
        self, report: WorkerReport, finished: Collection[str], failed: Collection[str], invalid_blocks: set[int]
    ) -> None:
        """Take what the workers say.

        Args:
            report: stores that ended.
            finished: requests whose load ended on all workers.
            failed: those of them that failed, told by request (several KV cache groups).
            invalid_blocks: blocks that loads, ended or not, left unfilled (one group).
        """
        self._pace.reported(self._clock())
        for number, (count, num_stored) in report.ended.items():
            store = self._pinned.get(number)
            if store is None:
                logger.error("workers report store %d, which is not pending", number)
                continue
            store.num_reports += count
            store.num_stored = min(store.num_stored, num_stored)
            if store.num_reports >= self._num_workers:
                del self._pinned[number]
                try:
                    self._end_store(store)
                except Exception:
                    logger.exception("store %d has given its blocks back; what follows was left out", number)
        if invalid_blocks:
            for state in self._requests.values():
                if state.load is not None and state.load.block_ids:
                    state.has_failed |= not invalid_blocks.isdisjoint(state.load.block_ids[0])
        for request_id in finished:
            state = self._requests.get(request_id)
            if state is None or state.load is None:
                continue
            load, state.load = state.load, None
            end_span(state.span, failed=state.has_failed or request_id in failed)
            state.span = None
            self._drop_lease(state)
            if state.has_failed or request_id in failed:
                self._count("failed_loads")
                state.num_stored = 0
                state.num_computed = 0
            else:
                self._count("hit_tokens", load.key.num_chunks * self._cache.chunk_tokens - load.skip_tokens)

    def _end_store(self, store: _PinnedStore) -> None:
        assert self._pool is not None
        self._num_pinned_blocks -= len(store.blocks)
        self._pool.free_blocks(reversed(store.blocks))
        stored = min(store.num_stored, store.num_chunks)
        end_span(store.span, stored_tokens=stored * self._cache.chunk_tokens)
        if store.num_stored and self._on_stored is not None:
            num_chunks = min(store.num_stored, store.num_chunks)
            cut = store.num_chunks - num_chunks
            covered = tuple(max(0, count - cut) for count in store.covered)
            self._on_stored(store.request, store.first_chunk, num_chunks, covered)
        self._send_hints(store.request.request_id)

    @property
    def has_pending_stores(self) -> bool:
        """Whether blocks are held for stores: the engine has to go on stepping to learn that they ended."""
        return bool(self._pinned)

    @property
    def can_free_blocks_soon(self) -> bool:
        """Whether a store that is about to end holds blocks that nobody else does. False once a store is late."""
        now = self._clock()
        return any(
            now - store.planned_at < self._settings.deadline_seconds
            and any(block.ref_cnt == 1 for block in store.blocks)
            for store in self._pinned.values()
        )

    # --- end ------------------------------------------------------------------------------------------------------

    def finished(self, request: EngineRequest, table: BlockTable, *, has_failed: bool = False) -> None:
        """A request ended, whatever the reason, and still has its blocks: store what filled up last."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        try:
            if state.may_store and not has_failed and state.load is None:
                computed = min(request.num_computed_tokens - request.num_in_flight_tokens, state.num_computed)
                self._plan_stores(state, lambda: table, (), num_ready=computed)
            if state.hints is not None:
                chunks = min(state.num_stored, MAXIMUM_CHUNKS, state.hasher.num_tokens // self._cache.chunk_tokens)
                self._late_hints[request.request_id] = state.hasher.run(0, chunks), state.hints
                self._send_hints(request.request_id)
        finally:
            self._forget(state)

    def _send_hints(self, request_id: str) -> None:
        """Say what an ended request has said of its prefix, once all of it is in the depot."""
        if request_id not in self._late_hints or any(
            store.request.request_id == request_id for store in self._pinned.values()
        ):
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

    def reset(self) -> None:
        """The engine's weights may have changed: nothing stored so far is found by it, and its own by nobody else."""
        if self._settings.keep_after_reset:
            return
        extra = tuple(item for item in self._namespace.extra if item[0] != "generation")
        self._namespace = replace(self._namespace, extra=(*extra, ("generation", uuid.uuid4().hex)))
        for state in self._requests.values():
            state.may_load = state.may_store = False
            self._drop_lease(state)
        logger.info("the prefix cache was reset: this engine begins a new generation of keys")

    def close(self) -> None:
        """Leave the depot. Twice is harmless."""
        self._client.close()

    def _count(self, name: str, amount: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + amount


def _wishes(request: EngineRequest) -> Mapping[str, Any]:
    """Return what the request itself asks for: `kv_transfer_params={"kvdepot": {"load": false, "store": false}}`."""
    params: Any = request.kv_transfer_params
    wishes: Any = cast("dict[str, Any]", params).get("kvdepot") if isinstance(params, dict) else None
    return cast("dict[str, Any]", wishes) if isinstance(wishes, dict) else {}
