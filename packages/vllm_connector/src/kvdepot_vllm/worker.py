"""The worker's side: starts transfers, polls their futures and reports each exactly once.

vLLM calls it in every step, so nothing here waits for a copy or for the depot.
"""

import contextlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Final

from kvdepot.backends import NO_BLOCK, TransferContext, TransferFuture
from kvdepot.counting import CounterName, engine_counter
from kvdepot.errors import LayoutError
from kvdepot_vllm.contents import WorkerContents
from kvdepot_vllm.jobs import BlendFigures, LoadJob, StepPlan, StoreJob, WorkerReport

logger = logging.getLogger(__name__)

_STORES: Final = (
    engine_counter("stores", "Store operations that ended"),
    engine_counter("store_bytes", "Bytes copied into the depot"),
    engine_counter("store_seconds", "Seconds spent on stores, beside the engine's steps"),
)
_LOADS: Final = (
    engine_counter("loads", "Loads that ended"),
    engine_counter("load_bytes", "Bytes copied out of the depot"),
    engine_counter("load_seconds", "Seconds spent on loads, beside the engine's steps"),
)

_IDLE_SECONDS: Final = 0.002  # little beside a load, which takes 10 ms and more


@dataclass(frozen=True, slots=True)
class LoadResults:
    """The loads that ended since the last poll, including the `failed` ones.

    `invalid_blocks` are the unfilled blocks of failed loads, from which an engine with one group recomputes.
    """

    finished: set[str] = field(default_factory=set[str])
    failed: set[str] = field(default_factory=set[str])
    invalid_blocks: set[int] = field(default_factory=set[int])


class NoBlends:
    """The interface of blends, for a worker that does not blend.

    `BlendWorker`, which needs torch, overrides all of it.
    """

    @property
    def num_pending(self) -> int:
        """The number of blends under way."""
        return 0

    def start(self, plan: StepPlan) -> None:
        """Start the step's retrieves, end abandoned blends, and compute the step's slice."""

    def wait_a_little(self, seconds: float) -> None:
        """Wait for a retrieve, at most `seconds`."""

    def poll(self) -> LoadResults:
        """Return the blends that ended since the last poll. Afterwards nothing of this worker writes their blocks."""
        return LoadResults()

    def take_reports(self) -> tuple[dict[str, tuple[int, bool]], dict[str, BlendFigures]]:
        """Return the blends whose retrieves ended since the last call, and the figures of the blends that ended."""
        return {}, {}

    def lose(self) -> None:
        """Make all blends under way fail, because the cache's memory is gone, and with it all retrieved KV."""

    def use(self, context: TransferContext) -> None:
        """Retrieve through another context from now on."""


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way. `future` is None if it could not be started."""

    job: LoadJob
    future: TransferFuture[bool] | None
    is_lost: bool = False  # whether the cache's memory was freed, and with it everything that the load brought


class WorkerSide:
    """Connects one worker to the depot.

    Args:
        context: copies the bytes. None if this worker uses no depot: every load fails, and every store ends at once.
        chunk_tokens: tokens of one chunk.
        block_tokens: tokens of a block, for one group of full attention; else 0, with failures reported by request.
        blends: this worker's side of blends; None if it does not blend.
        open_context: creates another context after the engine has reallocated the cache's memory.
        tell_weights: returns this worker's number and a digest of its weights, "" if there is none.
        contents: the weights and adapters with which this worker computes.
    """

    def __init__(
        self,
        context: TransferContext | None,
        chunk_tokens: int,
        block_tokens: int,
        blends: NoBlends | None = None,
        open_context: Callable[[], TransferContext] | None = None,
        tell_weights: Callable[[], tuple[int, str]] = lambda: (0, ""),
        contents: WorkerContents | None = None,
    ) -> None:
        self.context = context
        self._contents = contents or WorkerContents()
        self._open_context = open_context
        self._tell_weights = tell_weights
        self._weights: dict[int, tuple[int, str]] = {}  # to be reported
        self._has_slept = False
        self._blends = blends or NoBlends()
        self._chunk_tokens = chunk_tokens
        self._block_tokens = block_tokens
        self.loads: dict[str, Load] = {}
        self._stores: dict[int, TransferFuture[bool]] = {}
        self._ended: dict[int, tuple[int, int]] = {}
        self.counters: dict[CounterName, float] = {}

    def end_of_captures(self) -> None:
        """Have the context register the pool with its device, if it put that off."""
        if self.context is not None:
            self.context.start_registering()

    def start_loads(self, plan: StepPlan) -> None:
        """Start the step's loads, and compute its slice of a blend. A load that cannot be started counts as failed."""
        self._contents.begin_step(plan.step)
        for job in plan.loads:
            if job.request_id in self.loads:
                logger.error("request %s is being loaded already", job.request_id)
            # The rest of the prompt would be computed with other contents than those of the loaded KV.
            is_same = self._contents.will_compute_with(job.contents)
            self.loads[job.request_id] = Load(job, self._submit("the load", job) if is_same else None)
        self._blends.start(plan)
        if plan.asks_for_weights:
            worker, weights = self._tell_weights()
            self._weights = {worker: (plan.asks_for_weights, weights)}

    def _submit(self, what: str, job: LoadJob | StoreJob) -> TransferFuture[bool] | None:
        """Start a transfer; None if there is none to start, or, with a log line about `what`, if that fails."""
        context = self.context
        if context is None or not job.key.num_chunks:
            return None
        try:
            if isinstance(job, StoreJob):
                return context.submit_store(job.request_id, job.key, job.block_ids)
            return context.submit_retrieve(job.request_id, job.key, job.block_ids, job.skip_tokens)
        except LayoutError as error:
            logger.error("%s of request %s was refused: %s", what, job.request_id, error)
        except Exception:
            logger.exception("%s of request %s failed in kvdepot", what, job.request_id)
        return None

    def start_stores(self, plan: StepPlan) -> None:
        """Start the step's stores; the device reads their blocks after the work that it has been given by now."""
        for job in plan.stores:
            # Every engine would find KV of other contents under the key of these, until it is evicted.
            is_same = self._contents.computed_with(job.contents)
            future = self._submit(f"store {job.number}", job) if is_same else None
            if future is None:
                self._ended[job.number] = (1, 0)
            else:
                self._stores[job.number] = future

    def wait_a_little(self) -> None:
        """Wait up to 2 ms for a load, in a step that computes nothing.

        Without this the engine's loop would spin, and the interpreter's lock would slow down the copying threads.
        """
        for load in self.loads.values():
            if load.future is not None:
                with contextlib.suppress(TimeoutError):
                    load.future.result(_IDLE_SECONDS)
                return
        self._blends.wait_a_little(_IDLE_SECONDS)

    def poll_loads(self) -> LoadResults:
        """Return the loads that ended. Every load ends, even without a depot; afterwards nothing writes its blocks."""
        results = LoadResults()
        for load in [load for load in self.loads.values() if load.future is None or load.future.query()]:
            request_id = load.job.request_id
            del self.loads[request_id]
            results.finished.add(request_id)
            if load.future is not None:
                self._count(_LOADS, load.future)
                if load.future.result() and not load.is_lost:
                    continue
            if self._block_tokens and load.job.key.num_chunks:
                results.invalid_blocks.update(self._unfilled(load))
            else:
                results.failed.add(request_id)
        ended = self._blends.poll()
        results.finished.update(ended.finished)
        results.invalid_blocks.update(ended.invalid_blocks)
        return results

    def _unfilled(self, load: Load) -> Collection[int]:
        filled = load.future.num_chunks if load.future is not None and not load.is_lost else 0
        first = max(filled * self._chunk_tokens, load.job.skip_tokens) // self._block_tokens
        return [block for block in load.job.block_ids[0][first:] if block != NO_BLOCK]

    def take_report(self) -> WorkerReport | None:
        """Return the report of everything since the last one, None if there is nothing to report."""
        for number in [number for number, future in self._stores.items() if future.query()]:
            future = self._stores.pop(number)
            self._count(_STORES, future)
            self._ended[number] = (1, future.num_chunks)
        loaded, figures = self._blends.take_reports()
        changes = self._contents.take_changes()
        if not (self._ended or loaded or figures or self._weights or changes):
            return None
        report = WorkerReport(self._ended, blends_loaded=loaded, blended=figures, changes=changes)
        self._ended = {}
        if self._weights:
            report.weights, report.has_slept = self._weights, self._has_slept
            self._weights, self._has_slept = {}, False
        return report

    @property
    def num_pending(self) -> int:
        """The number of transfers under way."""
        return len(self.loads) + len(self._stores) + self._blends.num_pending

    def leave(self) -> None:
        """Give up the cache's memory before the engine frees it. Idempotent.

        Transfers under way end first, within the depot's deadline. Afterwards, this side does not touch that memory.
        Every load that is not reported yet counts as failed. Until `come_back`, loads are misses, and stores end at
        once.
        """
        context, self.context = self.context, None
        self._has_slept = True
        self.loads = {request_id: replace(load, is_lost=True) for request_id, load in self.loads.items()}
        self._blends.lose()
        if context is not None:
            context.close()

    def come_back(self) -> None:
        """Register the cache again, now that the engine has its memory back. Its content may be lost.

        Raises:
            KVDepotError: the backend cannot be used; the side remains as it was left.
        """
        if self.context is None and self._open_context is not None:
            self.context = self._open_context()
            self._blends.use(self.context)
            self.context.start_registering()  # the engine has captured its graphs

    def close(self) -> None:
        """Finish the copies under way, within the depot's deadline, and leave. Idempotent."""
        if self.context is not None:
            self.context.close()

    def _count(self, names: tuple[CounterName, CounterName, CounterName], future: TransferFuture[Any]) -> None:
        for name, amount in zip(names, (1, future.num_bytes, future.seconds), strict=True):
            self.counters[name] = self.counters.get(name, 0) + amount
