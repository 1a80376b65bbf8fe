# pyright: basic, reportMissingImports=false
"""The worker's side of blends: retrieves runs, moves them to their positions, and recomputes tokens slice by slice.

It runs on the engine's thread, between steps. With several workers, each slice contains collectives, so all workers
compute the same slice in the same step, as named by the scheduler.
"""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvdepot.backends import TransferContext, TransferFuture
from kvdepot_vllm.blend.blender import Blender, choose
from kvdepot_vllm.blend.policies import Budget
from kvdepot_vllm.jobs import BlendFigures, BlendJob, StepPlan
from kvdepot_vllm.worker import LoadResults, NoBlends

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Blend:
    job: BlendJob
    futures: list[TransferFuture[bool]]
    has_started: bool  # False: a retrieve could not be started
    slices: Iterator[None] | None = None
    is_reported: bool = False
    is_given_up: bool = False


class BlendWorker(NoBlends):
    """Blends in one worker.

    Args:
        context: retrieves the bytes.
        blender: runs the model.
        block_tokens: tokens of the engine's blocks.
        step_tokens: tokens recomputed in one slice.
    """

    def __init__(self, context: TransferContext, blender: Blender, block_tokens: int, step_tokens: int) -> None:
        self._context = context
        self._blender = blender
        self._block_tokens = block_tokens
        self._step_tokens = step_tokens
        self._blends: dict[str, _Blend] = {}
        self._ended = LoadResults()
        self._loaded: dict[str, tuple[int, bool]] = {}
        self._figures: dict[str, BlendFigures] = {}

    @property
    def num_pending(self) -> int:
        """See `NoBlends`."""
        return len(self._blends)

    def start(self, plan: StepPlan) -> None:
        """See `NoBlends`."""
        for job in plan.blends:
            self._blends[job.request_id] = self._start(job)
        for request_id in plan.given_up:
            if request_id in self._blends:
                self._blends[request_id].is_given_up = True
        if plan.slice_of is not None:
            self._compute_slice(plan.slice_of)

    def _start(self, job: BlendJob) -> _Blend:
        futures: list[TransferFuture[bool]] = []
        try:
            if (exact := job.exact) is not None:
                futures.append(
                    self._context.submit_retrieve(job.request_id, exact.key, exact.block_ids, exact.skip_tokens)
                )
            for run in job.runs:
                futures.append(self._context.submit_retrieve(job.request_id, run.key, (list(run.block_ids),), 0))
        except Exception:
            logger.exception("the blend of request %s failed to start, so it is recomputed", job.request_id)
            return _Blend(job, futures, has_started=False)
        return _Blend(job, futures, has_started=True)

    def wait_a_little(self, seconds: float) -> None:
        """See `NoBlends`."""
        for blend in self._blends.values():
            for future in blend.futures:
                if not future.query():
                    with contextlib.suppress(TimeoutError):
                        future.result(seconds)
                    return

    def poll(self) -> LoadResults:
        """See `NoBlends`."""
        for blend in [blend for blend in self._blends.values() if all(future.query() for future in blend.futures)]:
            if blend.is_given_up:
                self._fail(blend)
            elif not blend.is_reported:
                blend.is_reported = True
                self._loaded[blend.job.request_id] = (1, self._move(blend))
        ended, self._ended = self._ended, LoadResults()
        return ended

    def _move(self, blend: _Blend) -> bool:
        if not (blend.has_started and all(future.result() for future in blend.futures)):
            return False
        try:
            for run in blend.job.runs:
                tokens = torch.arange(run.length)
                self._blender.move(
                    self._slots(run.block_ids, run.offset + tokens),
                    self._slots(blend.job.table, run.position + tokens),
                    run.source_position + tokens,
                    run.position + tokens,
                )
        except Exception:
            logger.exception("the blend of request %s failed, so it is recomputed", blend.job.request_id)
            return False
        blend.slices = self._slices(blend.job)
        return True

    def _slots(self, block_ids: tuple[int, ...], places: torch.Tensor) -> torch.Tensor:
        table = torch.tensor(block_ids, dtype=torch.int64)
        return table[places // self._block_tokens] * self._block_tokens + places % self._block_tokens

    def _slices(self, job: BlendJob) -> Iterator[None]:
        """Compute a blend; every `yield` ends a slice."""
        tokens = torch.tensor(job.tokens, dtype=torch.int64)
        table = torch.tensor(job.table, dtype=torch.int64)
        runs = [(run.position, run.position + run.length) for run in job.runs]
        is_reused = torch.zeros(job.end, dtype=torch.bool)
        for start, stop in runs:
            is_reused[start:stop] = True
        gaps = (~is_reused[job.begin :]).nonzero().squeeze(1) + job.begin
        # Gaps first: the tokens that are selected next have to see them.
        for part in gaps.split(self._step_tokens):
            self._blender.recompute(tokens, part, table)
            yield
        room = len(job.table) * self._block_tokens
        question = (job.end, len(tokens)) if room >= len(tokens) else None
        chosen = choose(self._blender, job.policy, tokens, runs, table, question, Budget(job.ratio))
        yield
        for part in chosen.split(self._step_tokens):
            self._blender.recompute(tokens, part, table)
            yield
        num_reused = int(is_reused.sum())
        self._figures[job.request_id] = BlendFigures(num_reused - len(chosen), len(chosen), len(gaps))

    def _compute_slice(self, request_id: str) -> None:
        blend = self._blends.get(request_id)
        if blend is None or blend.slices is None:
            return  # the blend ended in a step of which the scheduler has no report yet
        try:
            next(blend.slices)
        except StopIteration:
            del self._blends[request_id]
            self._ended.finished.add(request_id)
        except Exception:
            logger.exception("the blend of request %s failed, so it is recomputed", request_id)
            self._fail(blend)

    def _fail(self, blend: _Blend) -> None:
        """End a blend whose retrieves have ended: its request is computed from the end of its exact prefix on."""
        job = blend.job
        del self._blends[job.request_id]
        is_exact = job.exact is None or (blend.futures and blend.futures[0].result())
        first, last = job.begin if is_exact else job.loaded_from, -(-job.end // self._block_tokens)
        self._ended.finished.add(job.request_id)
        self._ended.invalid_blocks.update(job.table[first // self._block_tokens : last])

    def lose(self) -> None:
        """See `NoBlends`."""
        for blend in self._blends.values():
            blend.futures, blend.has_started, blend.slices = [], False, None
            blend.is_given_up = True

    def use(self, context: TransferContext) -> None:
        """See `NoBlends`."""
        self._context = context

    def take_reports(self) -> tuple[dict[str, tuple[int, bool]], dict[str, BlendFigures]]:
        """See `NoBlends`."""
        reports = self._loaded, self._figures
        self._loaded, self._figures = {}, {}
        return reports
