"""Stores of the scheduler's side: plans them as chunks fill up, and holds their source blocks until they end.

A reference in vLLM's block pool holds each source block. It is taken when the store is planned, and released when all
workers have reported the store. So the blocks survive the end, abort and preemption of their request.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.counting import Counts, engine_counter
from kvdepot.layout import GroupKind
from kvdepot_vllm.engine import BlockPool, BlockTable
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.jobs import StoreJob
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.state import RequestState, end_span, start_span

logger = logging.getLogger(__name__)

_STORES_PUT_OFF: Final = engine_counter(
    "stores_put_off", "Stores that waited because too many blocks were held by others"
)
_STORES_WITHOUT_BLOCKS: Final = engine_counter("stores_without_blocks", "Stores whose blocks were gone")
_MOST_PUT_OFF: Final = 256  # ended requests; each step looks at the oldest only while there is room for its chunks


@dataclass(slots=True)
class _PendingStore:
    state: RequestState
    first_chunk: int
    num_chunks: int
    blocks: list[Any]
    planned_at: float
    span: Any
    num_stored: int  # the fewest chunks that any worker has reported
    is_tail: bool
    num_reports: int = 0


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Chunks that found no room when their request ended. vLLM's prefix cache may keep their blocks for a while."""

    state: RequestState
    table: BlockTable
    stop: int  # the chunk after the last
    hashes: dict[int, Any]  # block hashes at the end of the request: a block whose hash changes loses the chunk


class Stores:
    """All stores of one engine that are planned or under way.

    Args:
        cache: the engine's cache.
        settings: the user's settings.
        num_workers: the number of workers, which all report each store.
        on_planned: called with the request and the whole chunks of a store that has been planned.
        on_ended: called with the request after a store has ended and its blocks are released.
        clock: returns monotonic seconds.
    """

    def __init__(
        self,
        cache: EngineCache,
        settings: Settings,
        num_workers: int,
        on_planned: Callable[[RequestState, range], None],
        on_ended: Callable[[RequestState], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counts()
        self.pool: BlockPool | None = None
        self._cache = cache
        self._settings = settings
        self._num_workers = num_workers
        self._on_planned = on_planned
        self._on_ended = on_ended
        self._clock = clock
        self._blocks_per_chunk = cache.num_kept
        self._planned: list[StoreJob] = []
        self._pending: dict[int, _PendingStore] = {}
        self._put_off: deque[_PutOff] = deque()  # the oldest first
        self.num_held_blocks = 0
        self._next_job = 1
        self._has_warned = False  # of a missing pool

    def plan(
        self,
        state: RequestState,
        table_of: Callable[[], BlockTable | None],
        offers: Collection[tuple[int, int, int]],
        num_ready: int,
    ) -> None:
        """Plan stores of the chunks that are ready, and of chunks whose recurrent states are offered.

        A store ends at each offered state, because a recurrent group can cover only the last chunk of a store.

        Args:
            state: the request's state.
            table_of: returns the request's block table.
            offers: `(group, block id, tokens)` of recurrent states.
            num_ready: the number of computed tokens.
        """
        chunk_tokens, ready = self._cache.chunk_tokens, self._ready_tokens(state, num_ready)
        stop = ready // chunk_tokens
        tail_end = state.prompt_tail_end
        tail_states = {group: block_id for group, block_id, tokens in offers if tokens == tail_end}
        has_tail = (
            tail_end % chunk_tokens > 1
            and ready >= tail_end
            and not state.is_tail_stored
            and len(tail_states) == self._cache.num_recurrent
        )
        states: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            if tokens % chunk_tokens == 0 and 0 < tokens <= ready:
                states.setdefault(tokens // chunk_tokens, {})[group] = block_id
        if stop <= state.num_stored and not states and not has_tail:
            return
        table = table_of()
        if table is None:
            return
        if self.pool is None:
            self._warn_of_no_pool()
            return
        ends = {*states, stop} if stop > state.num_stored else {*states}
        for end in sorted(ends):
            first = min(state.num_stored, end - 1)
            while first < end:
                planned = self._plan_one(self.pool, state, table, first, end, states.get(end, {}))
                if not planned:
                    return
                first += planned
                state.num_stored = max(state.num_stored, first)
        if has_tail:
            last = tail_end // chunk_tokens
            planned = self._plan_one(self.pool, state, table, last, last + 1, tail_states, is_tail=True)
            state.is_tail_stored = planned > 0

    def _warn_of_no_pool(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "nothing is stored: this vLLM did not call the connector's hook bind_gpu_block_pool, so no store can"
                " hold its blocks. Loads work. Use a release of vLLM that kvdepot-vllm was tested with: docs/vllm.md"
            )

    def _ready_tokens(self, state: RequestState, num_ready: int) -> int:
        """Return how many leading tokens of a request can be stored, `num_ready` of which are computed."""
        ready = max(0, min(num_ready, state.request.num_tokens) - self._cache.volatile_tokens)
        if self._settings.store == "prompt":
            ready = min(ready, state.request.num_prompt_tokens)
        return ready if state.exact_tokens is None else min(ready, state.exact_tokens)

    def plan_last(self, state: RequestState, table: BlockTable, num_ready: int) -> None:
        """Plan stores of a request that ends. Chunks that find no room are stored later, if their blocks last."""
        self.plan(state, lambda: table, (), num_ready)
        stop = self._ready_tokens(state, num_ready) // self._cache.chunk_tokens
        if self.pool is None or stop <= state.num_stored or len(self._put_off) >= _MOST_PUT_OFF:
            return
        if state.request.prompt_embeds is not None:  # prompts that differ may have equal hashes: see `matched_tokens`
            return
        ids = {block_id for group in self._cache.groups for block_id in table[group.number]}
        hashes = {block_id: self.pool.blocks[block_id].block_hash for block_id in ids}
        self._put_off.append(_PutOff(state, table, stop, hashes))
        state.num_storing += 1

    def plan_put_off(self) -> None:
        """Plan stores of chunks that were put off, while there is room. Give up chunks whose blocks were taken."""
        pool, per_chunk = self.pool, sum(self._blocks_per_chunk)
        while self._put_off and pool is not None:
            if self.num_held_blocks and self._room(pool) < per_chunk:
                return
            rest = self._put_off[0]
            state, stop = rest.state, self._held_until(pool, rest)
            first = state.num_stored
            planned = self._plan_one(pool, state, rest.table, first, stop, {}) if stop > first else 0
            state.num_stored += planned
            if not planned or state.num_stored >= rest.stop:
                if not planned:
                    logger.debug("request %s: chunks %d to %d are given up", state.request_id, first, rest.stop)
                self._put_off.popleft()
                state.num_storing -= 1
                self._call_afterwards(state)

    def _held_until(self, pool: BlockPool, rest: _PutOff) -> int:
        """Return the first chunk of an ended request that its blocks no longer hold."""

        def is_held(chunk: int) -> bool:
            for group in self._cache.groups:
                if group.kind is GroupKind.RECURRENT and not group.states_by_position:
                    continue
                for block_id in group.kept(rest.table[group.number], chunk, chunk + 1, self._cache.chunk_tokens):
                    known = rest.hashes[block_id]
                    is_same = known is not None and pool.blocks[block_id].block_hash == known
                    if block_id != pool.null_block.block_id and not is_same:
                        return False
            return True

        chunk = rest.state.num_stored
        while chunk < rest.stop and is_held(chunk):
            chunk += 1
        return chunk

    def _room(self, pool: BlockPool) -> int:
        """Return how many more blocks stores may hold."""
        return int(len(pool.blocks) * self._settings.max_pinned_share) - self.num_held_blocks

    def _plan_one(
        self,
        pool: BlockPool,
        state: RequestState,
        table: BlockTable,
        first: int,
        stop: int,
        states: Mapping[int, int],
        *,
        is_tail: bool = False,
    ) -> int:
        """Plan one store from chunk `first` on and hold its blocks. Return its number of chunks, 0 for no store."""
        per_chunk = sum(self._blocks_per_chunk)
        room = self._room(pool)
        if room < per_chunk:
            self.counters[_STORES_PUT_OFF] += 1
            logger.debug(
                "request %s: chunks %d to %d are not stored now, because stores hold %d blocks",
                state.request_id,
                first,
                stop,
                self.num_held_blocks,
            )
            return 0
        if stop - first > room // per_chunk:
            stop, states = first + room // per_chunk, {}
        block_ids = blocks_to_store(self._cache, table, first, stop, states, pool.null_block.block_id)
        if is_tail:  # the last block stands for those that the prompt does not reach
            block_ids = tuple(
                ids + ids[-1:] * (-len(ids) % step) for ids, step in zip(block_ids, self._blocks_per_chunk, strict=True)
            )
        covered = tuple(len(ids) // step for ids, step in zip(block_ids, self._blocks_per_chunk, strict=True))
        for group, count in zip(self._cache.groups, covered, strict=True):
            if group.kind is GroupKind.FULL_ATTENTION and count != stop - first:
                self.counters[_STORES_WITHOUT_BLOCKS] += 1
                logger.debug("request %s: chunks %d to %d have lost their blocks", state.request_id, first, stop)
                return 0
        number, self._next_job = self._next_job, self._next_job + 1
        key = state.run_with_tail(first) if is_tail else state.run(first, stop)
        job = StoreJob(number, state.request_id, key, block_ids, state.contents)
        blocks = [pool.blocks[block_id] for ids in block_ids for block_id in ids]
        span = start_span("kvdepot store", state.request, tokens=(stop - first) * self._cache.chunk_tokens)
        store = _PendingStore(state, first, stop - first, blocks, self._clock(), span, stop - first, is_tail)
        logger.debug("request %s: store %d of chunks %d to %d begins", state.request_id, number, first, stop)
        pool.touch(blocks)  # nothing after this line may fail: an unrecorded store would hold its blocks forever
        self.num_held_blocks += len(blocks)
        state.num_storing += 1
        self._pending[number] = store
        self._planned.append(job)
        if not is_tail:
            try:
                self._on_planned(state, range(first, stop))
            except Exception:
                logger.exception("request %s: no events name chunks %d to %d", state.request_id, first, stop)
        return stop - first

    def take_planned(self) -> tuple[StoreJob, ...]:
        """Return the stores planned since the last call."""
        planned, self._planned = self._planned, []
        return tuple(planned)

    def report(self, ended: Mapping[int, tuple[int, int]]) -> None:
        """Record which workers have ended their part of a store. End each store that all workers have ended.

        Args:
            ended: by the store's number, how many workers ended it since the last report, and the fewest chunks that
                any of them stored.
        """
        for number, (count, num_stored) in ended.items():
            store = self._pending.get(number)
            if store is None:
                logger.error("workers report store %d, which is not pending", number)
                continue
            store.num_reports += count
            store.num_stored = min(store.num_stored, num_stored)
            if store.num_reports >= self._num_workers:
                del self._pending[number]
                try:
                    self._end(store)
                except Exception:
                    logger.exception("store %d gave its blocks back; its events and hints are skipped", number)

    def _end(self, store: _PendingStore) -> None:
        assert self.pool is not None
        store.state.num_storing -= 1
        self.num_held_blocks -= len(store.blocks)
        self.pool.free_blocks(reversed(store.blocks))
        end_span(store.span, stored_tokens=store.num_stored * self._cache.chunk_tokens)
        logger.debug(
            "request %s: a store of %d chunks from %d on ended, %d were cut",
            store.state.request_id,
            store.num_chunks,
            store.first_chunk,
            store.num_chunks - store.num_stored,
        )
        self._on_ended(store.state)
        self._call_afterwards(store.state)

    def _call_afterwards(self, state: RequestState) -> None:
        if not state.num_storing:
            calls, state.after_stores = state.after_stores, []
            for call in calls:
                call()

    @property
    def num_pending(self) -> int:
        """The number of stores that hold blocks or wait for room. The engine must step on to learn of their end."""
        return len(self._pending) + len(self._put_off)

    @property
    def can_free_blocks_soon(self) -> bool:
        """Whether a store that should end soon is the only holder of blocks. False once it exceeds the deadline."""
        now = self._clock()
        return any(
            now - store.planned_at < self._settings.deadline_seconds
            and any(block.ref_cnt == 1 for block in store.blocks)
            for store in self._pending.values()
        )

    def once_stored(self, state: RequestState, call: Callable[[], None]) -> None:
        """Call `call` when the last store of an ended request has ended: at once if none is under way."""
        state.after_stores.append(call)
        self._call_afterwards(state)


def blocks_to_store(
    cache: EngineCache, table: BlockTable, first: int, stop: int, states: Mapping[int, int], null_block: int
) -> tuple[list[int], ...]:
    """Return the blocks that a store of chunks `first` to `stop` reads, as `BlockIds`.

    A group that no longer holds all of them covers only the last chunks.

    Args:
        cache: the engine's cache.
        table: the request's block table.
        first: the first chunk.
        stop: the chunk after the last.
        states: the block with the state at the end of the run, for each recurrent group that has one.
        null_block: marks places of the table without a block.
    """
    result: list[list[int]] = []
    for group, step in zip(cache.groups, cache.num_kept, strict=True):
        if group.kind is not GroupKind.RECURRENT or group.states_by_position:
            ids = group.kept(table[group.number], first, stop, cache.chunk_tokens)
        else:
            ids = [states[group.number]] if group.number in states else []
        whole = range(0, len(ids) - step + 1, step)
        after_lost = (start + step for start in reversed(whole) if null_block in ids[start : start + step])
        result.append(ids[next(after_lost, 0) :])
    return tuple(result)
