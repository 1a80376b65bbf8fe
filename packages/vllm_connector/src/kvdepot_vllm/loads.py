"""Loads: at most one per request, of its exact prefix or of a blend, from vLLM's allocation until all workers ended it.

`SchedulerSide` plans a load when vLLM has allocated its blocks, hands the planned jobs to the workers with the next
step, and tells of the loads that ended. The lease that keeps a load's chunks belongs to the request's question.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.keys import KeyRun
from kvdepot_vllm.blend.planning import Blends
from kvdepot_vllm.blocks import blocks_to_fill
from kvdepot_vllm.engine import BlockTable, LoadJob
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.lookups import Question
from kvdepot_vllm.tracing import end_span, start_span

logger = logging.getLogger(__name__)

_NO_CHUNKS: Final = KeyRun(b"", 0, bytes(32))


@dataclass(slots=True)
class Load:
    """The load of one request.

    Attributes:
        question: the request's; its lease names the chunks.
        local_tokens: the hit in vLLM's own cache, as told with the last question.
        job: the one under way, if any.

    The other fields belong to `Loads`.
    """

    question: Question
    local_tokens: int = 0
    job: LoadJob | None = None
    stop_tokens: int = 0  # where it ends, which may be within a chunk
    planned_at: int = -1  # preemption count when a load was last planned
    has_failed: bool = False
    span: Any = None

    @property
    def was_offered(self) -> bool:
        """Whether this admission had its load: each one loads at most once, and recomputes what fails."""
        return self.planned_at == self.question.request.num_preemptions


class Loads:
    """All loads of one engine.

    Args:
        cache: the engine's cache.
        blends: plans the loads that blend; None if the engine does not blend.
        null_block: returns the block that marks places without one.
    """

    def __init__(self, cache: EngineCache, blends: Blends | None, null_block: Callable[[], int]) -> None:
        self._cache = cache
        self._blends = blends
        self._null_block = null_block
        self._planned: list[LoadJob] = []
        self._has_hit = False  # and the log says so

    def plan(self, load: Load, table: BlockTable, external_tokens: int) -> None:
        """Plan the load of `external_tokens`; vLLM recomputes what cannot be loaded."""
        request = load.question.request
        load.planned_at, load.has_failed = request.num_preemptions, False
        begin = self._blends.exact_end(request.request_id) if self._blends is not None else None
        try:
            if self._blends is not None and begin is not None:
                job = self._blend_job(self._blends, load, table, begin, external_tokens)
            else:
                job = self._job(load, table, external_tokens)
                self._planned += [job] if job is not None else []
        except Exception:
            logger.exception("request %s cannot be loaded", request.request_id)
            job = None
        load.job = job or LoadJob(request.request_id, _NO_CHUNKS, (), 0)
        if job is None:
            self._planned.append(load.job)  # the workers report it as failed
        load.span = start_span("kvdepot load" if begin is None else "kvdepot blend", request, tokens=external_tokens)
        if not self._has_hit:
            self._has_hit = True
            logger.info("first hit: request %s loads %d tokens from the depot", request.request_id, external_tokens)

    def _blend_job(
        self, blends: Blends, load: Load, table: BlockTable, begin: int, external_tokens: int
    ) -> LoadJob | None:
        """Plan a blend, and return a job with its blocks and the exact chunks in front of it; None if that fails."""
        local_tokens, exact = load.local_tokens, None
        if begin > local_tokens:
            exact = self._job(load, table, begin - local_tokens)
            if exact is None:
                return None
        request = load.question.request
        if not blends.allocated(request, table, local_tokens, local_tokens + external_tokens, exact):
            return None
        blocks = tuple(list(row) for row in table)
        if exact is None:
            return LoadJob(request.request_id, _NO_CHUNKS, blocks, 0)
        return LoadJob(request.request_id, exact.key, blocks, exact.skip_tokens)

    def _job(self, load: Load, table: BlockTable, external_tokens: int) -> LoadJob | None:
        """Return the job of an exact prefix; None, with a log line, if vLLM's blocks do not fit the lease."""
        request_id, chunk_tokens = load.question.request.request_id, self._cache.chunk_tokens
        stop_tokens = load.local_tokens + external_tokens
        first, skip_tokens = divmod(load.local_tokens, chunk_tokens)
        stop = -(-stop_tokens // chunk_tokens)  # vLLM may end a load within a chunk
        lease, progress = load.question.lease, load.question.progress
        # A chunk has the recurrent state of its end only.
        has_state = not self._cache.num_recurrent or stop_tokens in (stop * chunk_tokens, progress.tail_end)
        block_ids = blocks_to_fill(self._cache, table, first, stop_tokens, self._null_block()) if has_state else None
        if block_ids is None or lease is None or stop > lease.num_chunks:
            logger.error(
                "request %s: a load of tokens %d to %d does not fit the %d chunks of %d tokens that were found; they"
                " are recomputed",
                request_id, load.local_tokens, stop_tokens, lease.num_chunks if lease else 0, chunk_tokens,
            )  # fmt: skip
            return None
        load.stop_tokens = stop_tokens
        return LoadJob(request_id, progress.run_to(first, stop_tokens), block_ids, skip_tokens)

    def take_planned(self) -> tuple[LoadJob, ...]:
        """Return the loads planned since the last call. Blends are not among them."""
        planned, self._planned = tuple(self._planned), []
        return planned

    def mark_invalid(self, loads: Iterable[Load], invalid_blocks: set[int]) -> None:
        """Note the blocks that loads, ended or not, left unfilled (one KV cache group)."""
        for load in loads:
            if load.job is not None and load.job.block_ids:
                load.has_failed |= not invalid_blocks.isdisjoint(load.job.block_ids[0])

    def end(self, load: Load, *, has_failed: bool) -> int:
        """End a load that all workers have ended; return the tokens of the exact prefix that it brought."""
        assert load.job is not None
        job, load.job = load.job, None
        end_span(load.span, failed=has_failed)
        load.span = None
        return 0 if has_failed or not job.key.num_chunks else load.stop_tokens - load.local_tokens

    def forget(self, load: Load) -> None:
        """Note the end of a request."""
        end_span(load.span, cancelled=True)
        load.span = None
