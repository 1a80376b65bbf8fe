"""The scheduler's side of blends: finds reusable runs, keeps their KV out of exact caches, and plans the workers' jobs.

Blended KV depends on more than the tokens before it, so it must never be found under an exact key. From the first block
with a reused token on, a request gets block hashes that no other request can have (`taint`), and `exact_tokens` ends
its stores there.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kvdepot.client.scheduler import SchedulerClient
from kvdepot.counting import CounterName, Counts, engine_counter
from kvdepot.features.blend.client import BlendRun, note_contents, report_blend, submit_blend_lookup
from kvdepot.keys import KeyRun, Namespace
from kvdepot_vllm.engine import BlockPool, BlockTable, EngineRequest
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.jobs import BlendFigures, BlendJob, LoadJob, RunJob
from kvdepot_vllm.params import EVERYTHING, BlendParams
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.state import BlendOffer, BlendState, Outcome, RequestState

if TYPE_CHECKING:
    from kvdepot.features.blend.segments import Segments

logger = logging.getLogger(__name__)

_BLENDS_REFUSED: Final = engine_counter("blends_refused", "Requests that asked for a blend and cannot be blended")
_BLENDS_FAILED: Final = engine_counter(
    "blends_failed", "Blends that did not bring everything: the prompt was computed from its exact prefix on"
)
_BLENDS: Final = engine_counter("blends", "Prompts that were blended")
_BLEND_REUSED_TOKENS: Final = engine_counter("blend_reused_tokens", "Tokens of blends whose KV was reused as it was")
_BLEND_RECOMPUTED_TOKENS: Final = engine_counter(
    "blend_recomputed_tokens", "Tokens of blends that were reused and computed again"
)
_BLEND_GAP_TOKENS: Final = engine_counter(
    "blend_gap_tokens", "Tokens of blends between the reused ones, which were computed"
)
_BLENDS_DECLINED_SHORT: Final = engine_counter("blends_declined_short", "Blends that would have reused too few tokens")
_BLENDS_DECLINED_ROOM: Final = engine_counter(
    "blends_declined_room", "Blends for which the engine had too few free blocks"
)
_BLENDS_DECLINED_SLOW: Final = engine_counter(
    "blends_declined_slow", "Blends that would have taken longer than computing the prompt"
)

# A longer rest of the prompt is not a question: its attention does not show which tokens matter.
QUESTION_TOKENS: Final = 256
LEAST_RUN_TOKENS: Final = 64  # a shorter run costs more than it saves
RECOMPUTE_COST: Final = 1.6  # cost of a recomputed token, in tokens of a prefill: measured
_LEAST_GAIN: Final = 0.1  # a blend that saves a smaller share of the computation is declined
_FREE_SHARE: Final = 0.1  # share of the engine's blocks that staging leaves to others
_NONCE_BYTES: Final = 32  # as long as vLLM's hashes, and random: no other request has the same
_SUFFIX: Final = " blend"


@dataclass(slots=True)
class _Job:
    state: RequestState
    job: BlendJob
    staging: list[Any]
    planned_at: float
    num_loaded: int = 0
    is_whole: bool = True
    figures: BlendFigures | None = None


class Blends:
    """All blends of one engine, and the contents of its prompts as sources for others.

    An engine that cannot blend has none: `begin` starts no blend, and all other calls then do nothing.

    Args:
        cache: the engine's cache, with one group of full attention.
        settings: the user's settings.
        client: asks the depot.
        num_workers: the number of workers, which all report each blend.
        counters: counts, declared by `engine_counter`.
        clock: returns monotonic seconds.
        can_blend: whether all workers can blend.
    """

    def __init__(
        self,
        cache: EngineCache,
        settings: Settings,
        client: SchedulerClient,
        num_workers: int,
        counters: Counts,
        clock: Callable[[], float] = time.monotonic,
        *,
        can_blend: bool,
    ) -> None:
        self.pool: BlockPool | None = None
        self.can_blend = can_blend
        self._cache = cache
        self._block_tokens = cache.groups[0].block_tokens
        self._settings = settings
        self._client = client
        self._num_workers = num_workers
        self._counters = counters
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        self._planned: list[BlendJob] = []
        self._given_up: list[str] = []
        self._load_seconds = 0.0  # running mean of the time to load one reused token

    @property
    def num_pending(self) -> int:
        """The number of blends under way."""
        return len(self._jobs)

    # --- admission ------------------------------------------------------------------------------------------------

    def begin(self, state: RequestState, namespace: Namespace, params: Mapping[str, Any]) -> None:
        """Send the blend lookup of a request, if it is to be blended."""
        how = BlendParams.parse(self._settings, params) if self.can_blend else None
        if how is None:
            return
        refusal = refuse(state.request)
        if refusal is not None:
            self._counters[_BLENDS_REFUSED] += 1
            logger.warning("request %s is not blended: %s", state.request_id, refusal)
            return
        tokens = state.request.all_token_ids[: state.request.num_prompt_tokens]
        segments = named(namespace, state.request, tokens, how.borders)
        # Under a name of its own: withdrawing an announcement releases all leases of the request.
        name = state.request_id + _SUFFIX
        lookup = submit_blend_lookup(self._client, name, segments, min_run_tokens=LEAST_RUN_TOKENS)
        state.blend = BlendState(how, segments, lookup)

    def offer(self, state: RequestState, exact_tokens: int, token_seconds: float) -> Outcome:
        """Return whether a blend would bring tokens behind the exact ones. If so, set `state.offer`.

        An offer taints the request at once, because vLLM may enter its blocks into the prefix cache before it calls
        back. A request is blended once. After a preemption it is computed.

        Args:
            state: the request's state.
            exact_tokens: leading tokens that vLLM or the depot has under exact keys.
            token_seconds: the time to compute one token, 0 if unknown.
        """
        request, blend = state.request, state.blend
        if blend is None:
            return Outcome.MISS
        state.offer = None
        if exact_tokens == request.num_tokens - 1:  # nothing is left to blend
            return Outcome.MISS
        if blend.lookup is not None:
            if not blend.lookup.query():
                return Outcome.PENDING
            blend.hit, blend.lookup = blend.lookup.result(), None
        # The engine computes at least the last token of the prompt.
        clipped = (
            run.clip(exact_tokens, request.num_prompt_tokens - 1, self._cache.chunk_tokens)
            for run in (blend.hit.runs if blend.hit is not None else ())
        )
        runs = tuple(run for run in clipped if run is not None and run.length >= LEAST_RUN_TOKENS)
        if not runs:
            return Outcome.MISS
        offer = BlendOffer(runs, exact_tokens, runs[-1].position + runs[-1].length)
        declined = self._declined(request, blend.params, offer, token_seconds)
        if declined:
            self._counters[declined] += 1
            logger.debug("request %s: blend of tokens up to %d declined (%s)", state.request_id, offer.end, declined)
            return Outcome.MISS
        state.offer = offer
        first = runs[0].position
        if state.exact_tokens is None or first < state.exact_tokens:
            state.exact_tokens = first
            taint(request, first // self._block_tokens)
        return Outcome.HIT

    def _declined(
        self, request: EngineRequest, params: BlendParams, offer: BlendOffer, token_seconds: float
    ) -> CounterName | None:
        """Return the counter of the reason not to blend, None if the blend pays."""
        reused = sum(run.length for run in offer.runs)
        first_block = offer.runs[0].position // self._block_tokens
        # Otherwise the hash of the first block, taken when the block fills up, would be exact.
        can_taint = len(request.block_hashes) == request.num_tokens // self._block_tokens > first_block
        if not can_taint or reused < self._settings.blend_min_tokens:
            return _BLENDS_DECLINED_SHORT
        if not self._has_room(offer, request):
            return _BLENDS_DECLINED_ROOM
        total = offer.end - offer.begin
        recomputed = total - reused + (0 if params.policy == "none" else params.ratio * reused)
        cost = RECOMPUTE_COST * recomputed + (self._load_seconds / token_seconds * reused if token_seconds else 0)
        if params.policy != EVERYTHING and cost > (1 - _LEAST_GAIN) * total:
            return _BLENDS_DECLINED_SLOW
        return None

    def _has_room(self, offer: BlendOffer, request: EngineRequest) -> bool:
        if self.pool is None:
            return False
        step, question = self._block_tokens, request.num_prompt_tokens - offer.end
        wanted = (offer.end + min(question, QUESTION_TOKENS)) // step + 1
        for run in offer.runs:  # staging
            is_aligned = (run.position - run.source_position) % step == 0
            wanted += 2 if is_aligned else run.length // step + 2
        return self.pool.get_num_free_blocks() - wanted >= _FREE_SHARE * len(self.pool.blocks)

    # --- jobs -----------------------------------------------------------------------------------------------------

    def allocated(self, state: RequestState, table: BlockTable, end: int, exact: LoadJob | None) -> bool:
        """Plan the blend that was offered, into the blocks of `table`; False if none was offered up to `end`.

        `exact` loads the chunks of the request's own prefix that the depot has, behind the tokens that vLLM has.
        """
        request, blend, offer = state.request, state.blend, state.offer
        if blend is None or offer is None or offer.end != end or self.pool is None:
            return False
        state.offer = None
        staging = _Staging(self.pool)
        row = list(table[0])
        runs = tuple(self._run_job(run, row, staging) for run in offer.runs)
        if request.num_prompt_tokens - end <= QUESTION_TOKENS:
            while len(row) * self._block_tokens < request.num_prompt_tokens:
                row.append(staging.take())
        job = BlendJob(
            request.request_id,
            tuple(request.all_token_ids[: request.num_prompt_tokens]),
            tuple(row),
            exact,
            state.local_tokens,
            offer.begin,
            end,
            runs,
            blend.params.policy,
            blend.params.ratio,
        )
        self._jobs[request.request_id] = _Job(state, job, staging.blocks, self._clock())
        self._planned.append(job)
        return True

    def drop(self, state: RequestState, figures: BlendFigures | None = None) -> None:
        """Cancel the blend lookup of a request, or release its lease and report the figures of its blend."""
        blend = state.blend
        if blend is None:
            return
        if blend.lookup is not None:
            blend.lookup.cancel()
        elif blend.hit is not None:
            self._client.release(blend.hit.lease)
            if figures is not None:
                report_blend(self._client, figures.reused, figures.recomputed)
        blend.lookup = blend.hit = state.offer = None

    def _run_job(self, run: BlendRun, row: list[int], staging: "_Staging") -> RunJob:
        step, start = self._block_tokens, run.key.first_chunk * self._cache.chunk_tokens
        stop = start + run.key.num_chunks * self._cache.chunk_tokens
        shift = run.position - run.source_position
        last = run.source_position + run.length
        block_ids = tuple(
            row[(first + shift) // step]
            if shift % step == 0 and run.source_position <= first and first + step <= last
            else staging.take()
            for first in range(start, stop, step)
        )
        return RunJob(run.key, block_ids, run.source_position - start, run.position, run.source_position, run.length)

    def take_planned(self) -> tuple[tuple[BlendJob, ...], str | None, tuple[str, ...]]:
        """Return the new jobs, the request whose blend computes its next slice, and the blends to give up."""
        planned, self._planned = tuple(self._planned), []
        given_up, self._given_up = tuple(self._given_up), []
        ready = (
            request_id for request_id, job in self._jobs.items() if job.num_loaded >= self._num_workers and job.is_whole
        )
        return planned, next(ready, None), given_up

    def loaded(self, reports: Mapping[str, tuple[int, bool]]) -> None:
        """Take for each blend how many workers ended its retrieves, and whether all of these succeeded."""
        for request_id, (count, is_whole) in reports.items():
            job = self._jobs.get(request_id)
            if job is None:
                continue
            job.num_loaded += count
            job.is_whole &= is_whole
            if job.num_loaded < self._num_workers:
                continue
            if job.is_whole:
                reused = sum(run.length for run in job.job.runs)
                seconds = (self._clock() - job.planned_at) / reused
                self._load_seconds += (seconds - self._load_seconds) / (4 if self._load_seconds else 1)
            else:
                self._give_up(request_id)

    def _give_up(self, request_id: str) -> None:
        job = self._jobs[request_id]
        job.is_whole = False
        if request_id not in self._given_up:
            self._given_up.append(request_id)

    def computed(self, figures: Mapping[str, BlendFigures]) -> None:
        """Take the figures of blends that ended on a worker."""
        for request_id in figures.keys() & self._jobs.keys():
            self._jobs[request_id].figures = figures[request_id]

    def ended(self, request_id: str, *, has_failed: bool) -> None:
        """End the blend of a request, if any, once all workers ended it. Free its staging blocks, release its lease."""
        job = self._jobs.pop(request_id, None)
        if job is None:
            return
        assert self.pool is not None
        self.pool.free_blocks(reversed(job.staging))
        figures = None if has_failed or not job.is_whole else job.figures
        self.drop(job.state, figures)
        if figures is None:
            self._counters[_BLENDS_FAILED] += 1
            return
        self._counters[_BLENDS] += 1
        self._counters[_BLEND_REUSED_TOKENS] += figures.reused
        self._counters[_BLEND_RECOMPUTED_TOKENS] += figures.recomputed
        self._counters[_BLEND_GAP_TOKENS] += figures.gaps
        if job.state.blend is not None:
            job.state.blend.figures = figures

    # --- end ------------------------------------------------------------------------------------------------------

    def answer_of(self, state: RequestState) -> dict[str, Any] | None:
        """Return the report of a blend for the request's output; None if the request was not blended."""
        if state.blend is None or state.blend.figures is None:
            return None
        figures = state.blend.figures
        return {
            "policy": state.blend.params.policy,
            "reused_tokens": figures.reused,
            "recomputed_tokens": figures.recomputed,
            "gap_tokens": figures.gaps,
        }

    def forget(self, state: RequestState) -> None:
        """End a request. A blend under way is given up; its staging blocks stay until all workers have ended it."""
        self.drop(state)
        state.blend = None
        if state.request_id in self._jobs:
            self._give_up(state.request_id)

    # --- sources --------------------------------------------------------------------------------------------------

    def note(self, state: RequestState, namespace: Namespace, key: KeyRun) -> None:
        """Tell the depot the contents of the chunks of `key`, a run from chunk 0 on. All of them are exact."""
        request = state.request
        if refuse(request) is not None:
            return
        num_tokens = key.num_chunks * self._cache.chunk_tokens
        if state.blend is not None:
            segments = state.blend.segments.before(num_tokens)
        else:
            tokens = request.all_token_ids[: min(num_tokens, request.num_prompt_tokens)]
            segments = named(namespace, request, tokens)
        note_contents(self._client, key, segments)


class _Staging:
    """Blocks of the engine's own pool, taken for one job."""

    def __init__(self, pool: BlockPool) -> None:
        self.blocks: list[Any] = []
        self._pool = pool

    def take(self) -> int:
        self.blocks += self._pool.get_new_blocks(1)
        return self.blocks[-1].block_id


def refuse(request: EngineRequest) -> str | None:
    """Return why a request can be neither blended nor a source, None if it can."""
    if request.lora_request is not None:
        return "it uses an adapter"
    if request.mm_features or request.prompt_embeds is not None:
        return "its prompt is not only text"
    sampling = request.sampling_params
    if sampling is None:
        return "it is not a request for text"
    if sampling.prompt_logprobs is not None:
        return "it asks for log-probabilities of the prompt"
    return None


def named(
    namespace: Namespace, request: EngineRequest, tokens: Sequence[int], borders: Collection[int] = ()
) -> "Segments":
    """Return the segments of a prompt. Requests with different cache salts share none."""
    from kvdepot.features.blend.segments import (
        SegmentNamer,  # loads numpy, which engines that do not blend do not need here
    )

    if request.cache_salt:
        namespace = replace(namespace, extra=(*namespace.extra, ("cache salt", request.cache_salt)))
    return SegmentNamer(namespace).name(tokens, borders)


def taint(request: EngineRequest, first_block: int) -> None:
    """Give a request block hashes that no other request has, from a block on that holds blended tokens.

    vLLM chains each later hash, also those of generated tokens, to the one before.
    """
    del request.block_hashes[first_block:]
    request.block_hashes.append(os.urandom(_NONCE_BYTES))
    request.update_block_hashes()
