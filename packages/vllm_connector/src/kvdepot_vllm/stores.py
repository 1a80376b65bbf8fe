"""Stores of the scheduler's side: plans them as chunks fill up, and holds their source blocks until they end.

A reference on vLLM's block pool holds each source block. It is taken when the store is planned and released when
every worker has reported the store, so the blocks survive the end, abort and preemption of their request.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvdepot.counting import Counts
from kvdepot.keys import KeyRun, PrefixHasher
from kvdepot.layout import GroupKind
from kvdepot_vllm.blocks import blocks_per_chunk, blocks_to_store
from kvdepot_vllm.counting import engine_counter
from kvdepot_vllm.engine import BlockPool, BlockTable, EngineRequest, StoreJob
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.tracing import end_span, start_span

logger = logging.getLogger(__name__)

_STORES_PUT_OFF: Final = engine_counter(
    "stores_put_off", "Stores that waited because too many blocks were held by others"
)
_STORES_WITHOUT_BLOCKS: Final = engine_counter("stores_without_blocks", "Stores whose blocks were gone")
_MOST_PUT_OFF: Final = 256  # ended requests; each step looks at the oldest only while there is room for its chunks


class RequestKeys:
    """The keys of one request's chunks, hashed when they are first needed.

    `tail_end` is where the prompt's last chunk ends if it is handed over though it may be incomplete; otherwise 0.
    """

    def __init__(self, request: EngineRequest, hasher: PrefixHasher, chunk_tokens: int, tail_end: int = 0) -> None:
        self._request = request
        self._hasher = hasher
        self.chunk_tokens = chunk_tokens
        self.tail_end = tail_end

    def run(self, first: int, stop: int) -> KeyRun:
        """Return the key of chunks `first` to `stop`."""
        done, wanted = self._hasher.num_tokens, stop * self.chunk_tokens
        if done < wanted:
            self._hasher.extend(self._request.all_token_ids[done:wanted])
        return self._hasher.run(first, stop)

    def run_with_tail(self, first: int) -> KeyRun:
        """Return the key of the prompt's chunks from `first` to `tail_end`."""
        stop, rest = divmod(self.tail_end, self.chunk_tokens)
        run = self.run(0, stop)
        if rest:
            tail = self._hasher.tail(stop, self._request.all_token_ids[self.tail_end - rest : self.tail_end])
            run = replace(run, digests=run.digests + tail)
        return run.slice(first)


@dataclass(slots=True)
class StoreProgress:
    """How far one request is computed and stored.

    Attributes:
        request: vLLM's.
        keys: of its chunks.
        may_store: False once its stores are switched off.
        num_stored: leading chunks that are in the depot or on their way.
        num_computed: tokens whose KV is computed once the steps planned so far have run.
        exact_tokens: leading tokens whose KV is exact; those behind are never stored. None: all.
        is_tail_stored: whether the incomplete chunk that is handed over is in the depot or on its way.
    """

    request: EngineRequest
    keys: RequestKeys
    may_store: bool
    num_stored: int = 0
    num_computed: int = 0
    exact_tokens: int | None = None
    is_tail_stored: bool = False

    @property
    def tail_end(self) -> int:
        """Where the chunks end that a load may bring if the last one may be incomplete; 0 if it may not.

        The incomplete chunk is the last one only before the first output token.
        """
        return self.keys.tail_end if self.request.num_tokens == self.request.num_prompt_tokens else 0

    def run_to(self, first: int, stop_tokens: int) -> KeyRun:
        """Return the key of the chunks from `first` on that hold the tokens before `stop_tokens`."""
        stop = -(-stop_tokens // self.keys.chunk_tokens)
        if 0 < self.tail_end < stop * self.keys.chunk_tokens:
            return self.keys.run_with_tail(first)
        return self.keys.run(first, stop)

    def found(self, num_chunks: int) -> None:
        """Note that the depot has `num_chunks` of the wanted chunks."""
        whole = (self.tail_end or self.request.num_tokens) // self.keys.chunk_tokens
        self.num_stored = min(num_chunks, whole)
        self.is_tail_stored = num_chunks > whole


@dataclass(frozen=True, slots=True)
class EndedStore:
    """A store that every worker has reported.

    Attributes:
        request: vLLM's.
        first_chunk: where the store began.
        num_chunks: leading chunks of it that all workers stored; 0 for the incomplete one of a prompt.
        covered: for each group, how many of the last of these chunks it covers.
    """

    request: EngineRequest
    first_chunk: int
    num_chunks: int
    covered: tuple[int, ...]


@dataclass(slots=True)
class _PendingStore:
    request: EngineRequest
    first_chunk: int
    num_chunks: int
    covered: tuple[int, ...]
    blocks: list[Any]
    planned_at: float
    span: Any
    num_stored: int  # the fewest chunks that any worker has reported
    is_tail: bool
    num_reports: int = 0


@dataclass(frozen=True, slots=True)
class _PutOff:
    """Chunks that found no room when their request ended. vLLM's prefix cache may keep their blocks for a while."""

    progress: StoreProgress
    table: BlockTable
    stop: int  # the chunk after the last
    hashes: dict[int, Any]  # of the blocks when the request ended: a block with another one holds something else


class Stores:
    """All stores of one engine that are planned or under way.

    Args:
        cache: the engine's cache.
        settings: the user's.
        num_workers: workers that report each store.
        on_ended: called after a store has ended and its blocks are released.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        cache: EngineCache,
        settings: Settings,
        num_workers: int,
        on_ended: Callable[[EndedStore], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = Counts()
        self.pool: BlockPool | None = None
        self._cache = cache
        self._settings = settings
        self._num_workers = num_workers
        self._on_ended = on_ended
        self._clock = clock
        self._blocks_per_chunk = [blocks_per_chunk(cache, group) for group in cache.groups]
        self._planned: list[StoreJob] = []
        self._pending: dict[int, _PendingStore] = {}
        self._put_off: dict[str, _PutOff] = {}  # by request, the oldest first
        self._afterwards: dict[str, list[Callable[[], None]]] = {}
        self.num_held_blocks = 0
        self._next_job = 1

    def plan(
        self,
        progress: StoreProgress,
        table_of: Callable[[], BlockTable | None],
        offers: Collection[tuple[int, int, int]],
        num_ready: int,
    ) -> None:
        """Plan stores of the chunks that are ready, and of those whose recurrent states are offered.

        A store ends at each offered state, because a recurrent group can cover only the last chunk of a store.

        Args:
            progress: the request's.
            table_of: returns its block table.
            offers: `(group, block id, tokens)` of recurrent states.
            num_ready: computed tokens.
        """
        chunk_tokens, ready = self._cache.chunk_tokens, self._ready_tokens(progress, num_ready)
        stop = ready // chunk_tokens
        tail_end = progress.keys.tail_end
        tail_states = {group: block_id for group, block_id, tokens in offers if tokens == tail_end}
        has_tail = (
            tail_end % chunk_tokens > 1
            and ready >= tail_end
            and not progress.is_tail_stored
            and len(tail_states) == self._cache.num_recurrent
        )
        states: dict[int, dict[int, int]] = {}
        for group, block_id, tokens in offers:
            if tokens % chunk_tokens == 0 and 0 < tokens <= ready:
                states.setdefault(tokens // chunk_tokens, {})[group] = block_id
        if stop <= progress.num_stored and not states and not has_tail:
            return
        table = table_of()
        if table is None or self.pool is None:
            return
        ends = {*states, stop} if stop > progress.num_stored else {*states}
        for end in sorted(ends):
            first = min(progress.num_stored, end - 1)
            while first < end:
                planned = self._plan_one(self.pool, progress, table, first, end, states.get(end, {}))
                if not planned:
                    return
                first += planned
                progress.num_stored = max(progress.num_stored, first)
        if has_tail:
            last = tail_end // chunk_tokens
            planned = self._plan_one(self.pool, progress, table, last, last + 1, tail_states, is_tail=True)
            progress.is_tail_stored = planned > 0

    def _ready_tokens(self, progress: StoreProgress, num_ready: int) -> int:
        """Return how many leading tokens of a request can be stored, `num_ready` of which are computed."""
        ready = max(0, min(num_ready, progress.request.num_tokens) - self._cache.volatile_tokens)
        if self._settings.store == "prompt":
            ready = min(ready, progress.request.num_prompt_tokens)
        return ready if progress.exact_tokens is None else min(ready, progress.exact_tokens)

    def plan_last(self, progress: StoreProgress, table: BlockTable, num_ready: int) -> None:
        """Plan stores of a request that ends. Chunks that find no room are stored later, if their blocks last."""
        self.plan(progress, lambda: table, (), num_ready)
        stop = self._ready_tokens(progress, num_ready) // self._cache.chunk_tokens
        if self.pool is None or stop <= progress.num_stored or len(self._put_off) >= _MOST_PUT_OFF:
            return
        ids = {block_id for group in self._cache.groups for block_id in table[group.number]}
        hashes = {block_id: self.pool.blocks[block_id].block_hash for block_id in ids}
        self._put_off[progress.request.request_id] = _PutOff(progress, table, stop, hashes)

    def plan_put_off(self) -> None:
        """Plan stores of chunks that were put off, while there is room. Those whose blocks were taken are given up."""
        pool, per_chunk = self.pool, sum(self._blocks_per_chunk)
        while self._put_off and pool is not None:
            if self.num_held_blocks and self._room(pool) < per_chunk:
                return
            request_id, rest = next(iter(self._put_off.items()))
            progress, stop = rest.progress, self._held_until(pool, rest)
            first = progress.num_stored
            planned = self._plan_one(pool, progress, rest.table, first, stop, {}) if stop > first else 0
            progress.num_stored += planned
            if not planned or progress.num_stored >= rest.stop:
                del self._put_off[request_id]
                self._call_afterwards(request_id)

    def _held_until(self, pool: BlockPool, rest: _PutOff) -> int:
        """Return the first chunk of an ended request that its blocks no longer hold."""

        def is_held(chunk: int) -> bool:
            for group in self._cache.groups:
                step = self._cache.chunk_tokens // group.block_tokens
                if group.kind is GroupKind.RECURRENT and not group.states_by_position:
                    continue
                for block_id in rest.table[group.number][chunk * step : (chunk + 1) * step]:
                    known = rest.hashes[block_id]
                    is_same = known is not None and pool.blocks[block_id].block_hash == known
                    if block_id != pool.null_block.block_id and not is_same:
                        return False
            return True

        chunk = rest.progress.num_stored
        while chunk < rest.stop and is_held(chunk):
            chunk += 1
        return chunk

    def _room(self, pool: BlockPool) -> int:
        """Return how many more blocks stores may hold."""
        return int(len(pool.blocks) * self._settings.max_pinned_share) - self.num_held_blocks

    def _plan_one(
        self,
        pool: BlockPool,
        progress: StoreProgress,
        table: BlockTable,
        first: int,
        stop: int,
        states: Mapping[int, int],
        *,
        is_tail: bool = False,
    ) -> int:
        """Plan one store from chunk `first` on and hold its blocks. Return its chunks, 0 if none can be stored now."""
        per_chunk = sum(self._blocks_per_chunk)
        room = self._room(pool)
        if room < per_chunk:
            self.counters[_STORES_PUT_OFF] += 1
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
                return 0
        number, self._next_job = self._next_job, self._next_job + 1
        key = progress.keys.run_with_tail(first) if is_tail else progress.keys.run(first, stop)
        job = StoreJob(number, progress.request.request_id, key, block_ids)
        blocks = [pool.blocks[block_id] for ids in block_ids for block_id in ids]
        span = start_span("kvdepot store", progress.request, tokens=(stop - first) * self._cache.chunk_tokens)
        store = _PendingStore(
            progress.request, first, stop - first, covered, blocks, self._clock(), span, stop - first, is_tail
        )
        pool.touch(blocks)  # nothing after this line fails: a store that is not recorded holds its blocks for ever
        self.num_held_blocks += len(blocks)
        self._pending[number] = store
        self._planned.append(job)
        return stop - first

    def take_planned(self) -> tuple[StoreJob, ...]:
        """Return the stores planned since the last call."""
        planned, self._planned = self._planned, []
        return tuple(planned)

    def report(self, ended: Mapping[int, tuple[int, int]]) -> None:
        """Take for each store how many workers have ended it since the last report, and the chunks that all stored."""
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
        self.num_held_blocks -= len(store.blocks)
        self.pool.free_blocks(reversed(store.blocks))
        end_span(store.span, stored_tokens=store.num_stored * self._cache.chunk_tokens)
        cut = store.num_chunks - store.num_stored
        self._on_ended(
            EndedStore(
                store.request,
                store.first_chunk,
                0 if store.is_tail else store.num_stored,
                tuple(max(0, count - cut) for count in store.covered),
            )
        )
        self._call_afterwards(store.request.request_id)

    def _call_afterwards(self, request_id: str) -> None:
        if not self.is_storing(request_id):
            for call in self._afterwards.pop(request_id, ()):
                call()

    @property
    def num_pending(self) -> int:
        """Stores that hold blocks or wait for those: the engine must keep stepping to learn that they ended."""
        return len(self._pending) + len(self._put_off)

    @property
    def can_free_blocks_soon(self) -> bool:
        """Whether a store that should end soon holds blocks alone. False once the store exceeds the deadline."""
        now = self._clock()
        return any(
            now - store.planned_at < self._settings.deadline_seconds
            and any(block.ref_cnt == 1 for block in store.blocks)
            for store in self._pending.values()
        )

    def is_storing(self, request_id: str) -> bool:
        """Return whether a store of this request is under way or put off."""
        return request_id in self._put_off or any(
            store.request.request_id == request_id for store in self._pending.values()
        )

    def once_stored(self, request_id: str, call: Callable[[], None]) -> None:
        """Call `call` when the last store of an ended request has ended: at once if none is under way."""
        if self.is_storing(request_id):
            self._afterwards.setdefault(request_id, []).append(call)
        else:
            call()
