"""Loads: at most one per admission, of an exact prefix or of a blend, from vLLM's allocation until all workers end it.

`SchedulerSide` plans a load when vLLM has allocated its blocks, passes the planned jobs to the workers with the next
step, and reports ended loads here. The lease that keeps a load's chunks belongs to the request's lookup.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from kvdepot.backends import NO_BLOCK
from kvdepot.keys import KeyRun
from kvdepot.layout import GroupKind
from kvdepot_vllm.blend.planning import Blends
from kvdepot_vllm.engine import BlockTable
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.jobs import LoadJob
from kvdepot_vllm.state import RequestState, end_span, start_span

logger = logging.getLogger(__name__)

_NO_CHUNKS: Final = KeyRun(b"", 0, bytes(32))


class Loads:
    """All loads of one engine.

    Args:
        cache: the engine's cache.
        blends: plans the loads that blend.
        null_block: returns the block that marks positions without a block.
    """

    def __init__(self, cache: EngineCache, blends: Blends, null_block: Callable[[], int]) -> None:
        self._cache = cache
        self._blends = blends
        self._null_block = null_block
        self._planned: list[LoadJob] = []
        self._has_hit = False  # whether the first hit has been logged

    def plan(self, state: RequestState, table: BlockTable, external_tokens: int) -> None:
        """Plan the load of `external_tokens`; vLLM recomputes tokens that cannot be loaded."""
        state.loaded_in, state.load_has_failed = state.request.num_preemptions, False
        end = state.local_tokens + external_tokens
        offer = state.offer
        try:
            job = self._job(state, table, end) if offer is None else self._blend_job(state, table, offer.begin, end)
        except Exception:
            logger.exception("request %s cannot be loaded", state.request_id)
            job = None
        if job is None or offer is None:
            self._planned.append(job or LoadJob(state.request_id, _NO_CHUNKS, (), 0))  # the workers report it as failed
        state.load = job or self._planned[-1]
        state.load_span = start_span(
            "kvdepot load" if offer is None else "kvdepot blend", state.request, tokens=external_tokens
        )
        logger.debug(
            "request %s: %s of tokens %d to %d begins",
            state.request_id,
            "load" if offer is None else "blend",
            state.local_tokens,
            end,
        )
        if not self._has_hit:
            self._has_hit = True
            logger.info("first hit: request %s loads %d tokens from the depot", state.request_id, external_tokens)

    def _blend_job(self, state: RequestState, table: BlockTable, begin: int, end: int) -> LoadJob | None:
        """Plan a blend, and return a job with its blocks and the exact chunks in front of it; None if that fails."""
        exact = self._job(state, table, begin) if begin > state.local_tokens else None
        if begin > state.local_tokens and exact is None:
            return None
        if not self._blends.allocated(state, table, end, exact):
            return None
        blocks = tuple(list(row) for row in table)
        if exact is None:
            return LoadJob(state.request_id, _NO_CHUNKS, blocks, 0)
        return replace(exact, block_ids=blocks)

    def _job(self, state: RequestState, table: BlockTable, end: int) -> LoadJob | None:
        """Return the job that loads up to token `end`; None, with a log line, if vLLM's blocks do not fit the lease."""
        chunk_tokens = self._cache.chunk_tokens
        first, skip_tokens = divmod(state.local_tokens, chunk_tokens)
        stop = -(-end // chunk_tokens)  # vLLM may end a load within a chunk
        # Of a recurrent state or a short window, a chunk holds only the end.
        is_exact = not (self._cache.num_recurrent or self._cache.has_short_window)
        has_end = is_exact or end in (stop * chunk_tokens, state.tail_end)
        block_ids = blocks_to_fill(self._cache, table, state.local_tokens, end, self._null_block()) if has_end else None
        if block_ids is None or stop > state.num_leased:
            logger.error(
                "request %s: a load of tokens %d to %d does not fit the %d chunks of %d tokens that were found; they"
                " are recomputed",
                state.request_id,
                state.local_tokens,
                end,
                state.num_leased,
                chunk_tokens,
            )
            return None
        state.load_end = end
        return LoadJob(state.request_id, state.run_to(first, end), block_ids, skip_tokens, state.contents)

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call. Blends are not among them."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def mark_invalid(self, states: Iterable[RequestState], invalid_blocks: set[int]) -> None:
        """Note the blocks that loads, ended or not, left unfilled (one KV cache group)."""
        for state in states:
            if state.load is not None and state.load.block_ids:
                state.load_has_failed |= not invalid_blocks.isdisjoint(state.load.block_ids[0])

    def end(self, state: RequestState, *, has_failed: bool) -> int:
        """End a load that all workers have ended. Return how many tokens of the exact prefix it brought."""
        assert state.load is not None
        job, state.load = state.load, None
        end_span(state.load_span, failed=has_failed)
        state.load_span = None
        return 0 if has_failed or not job.key.num_chunks else state.load_end - state.local_tokens

    def forget(self, state: RequestState) -> None:
        """Note the end of a request."""
        end_span(state.load_span, cancelled=True)
        state.load_span = None


def blocks_to_fill(
    cache: EngineCache, table: BlockTable, first_tokens: int, stop_tokens: int, null_block: int
) -> tuple[list[int], ...] | None:
    """Return the blocks, as `BlockIds`, that a load of tokens `first_tokens` to `stop_tokens` fills; None if one lacks.

    The load may end within its last chunk, whose later blocks are `NO_BLOCK`. If a chunk keeps only the end of a
    window, it ends with that chunk.
    """
    result: list[list[int]] = []
    first = first_tokens // cache.chunk_tokens
    for group, kept in zip(cache.groups, cache.num_kept, strict=True):
        row, step = table[group.number], cache.chunk_tokens // group.block_tokens
        num_blocks = -(-stop_tokens // group.block_tokens)
        if group.kind is GroupKind.RECURRENT:
            ids = list(row[num_blocks - 1 : num_blocks])
            if ids in ([], [null_block]):
                return None
        elif kept < step:
            ids = list(row[num_blocks - kept : num_blocks])
            before = row[first_tokens // group.block_tokens : num_blocks - kept]
            if len(row) < num_blocks or any(block != null_block for block in before):  # vLLM's window is longer
                return None
        else:
            ids = list(row[first * step : num_blocks])
            if len(ids) != num_blocks - first * step:
                return None
            if group.kind is GroupKind.FULL_ATTENTION and null_block in ids:
                return None
            ids += [null_block] * (-num_blocks % step)
            while ids and all(block == null_block for block in ids[:step]):  # chunks in front of a window
                del ids[:step]
        result.append([NO_BLOCK if block == null_block else block for block in ids])
    return tuple(result)
