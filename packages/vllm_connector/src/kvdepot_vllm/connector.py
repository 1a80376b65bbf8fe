# pyright: basic, reportMissingImports=false
"""`KVDepotConnector`: vLLM constructs it once in the scheduler and once in each worker (`KVConnectorBase_V1`).

It adapts vLLM's hooks to `SchedulerSide` and `WorkerSide`. vLLM's base class dictates its methods. An exception in a
hook would end the engine, so each one is caught and logged, and costs a miss. Every load is asynchronous, because vLLM
can recompute only asynchronous loads after a failure.

At start, each worker registers its cache with the depot and reports the format of its blocks, which only a worker
knows, to the scheduler's process. The scheduler's side starts once all workers have reported the same format. If one
worker uses no depot, the whole engine uses none.
"""

import contextlib
import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvdepot.counting import engine_counter
from kvdepot.errors import DepotUnavailable, KVDepotError
from kvdepot.logs import log_like, never_raises
from kvdepot_vllm.contents import WorkerContents
from kvdepot_vllm.events import Announcer
from kvdepot_vllm.groups import EngineCache
from kvdepot_vllm.inspection import find_version, name_of_engine
from kvdepot_vllm.jobs import StepPlan, WorkerReport
from kvdepot_vllm.scheduler import SchedulerSide
from kvdepot_vllm.settings import Settings, requested_layout, set_failure_policy
from kvdepot_vllm.setup import Start, WorkerFormat
from kvdepot_vllm.worker import LoadResults, WorkerSide

logger = logging.getLogger(__name__)

_START_SECONDS: Final = 1.0  # a starting engine waits this long for a depot


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The plan of a step, for the workers."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """The report of a worker, for the scheduler."""

    report: WorkerReport = field(default_factory=WorkerReport)

    def aggregate(self, other: "KVConnectorWorkerMetadata") -> "KVConnectorWorkerMetadata":
        """Join the reports of two workers."""
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merge(other.report))


class KVDepotStats(KVConnectorStats):
    """Counts since the last report, for vLLM's "KV Transfer metrics" log line.

    `data` is a plain dictionary of numbers.
    """

    def reset(self) -> None:
        """Set all counts to zero."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another worker's or another interval's counts."""
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures for the log line."""
        data: dict[str, Any] = self.data
        result: dict[str, int | float] = {}
        for kind, title in (("store", "Stored"), ("load", "Loaded")):
            seconds = data.get(f"{kind}_seconds", 0)
            if data.get(f"{kind}s"):
                result[f"{title} MB"] = round(data.get(f"{kind}_bytes", 0) / 1e6, 1)
                result[f"{title} GB/s"] = round(data.get(f"{kind}_bytes", 0) / 1e9 / seconds, 2) if seconds else 0.0
        for name, title in (("hit_tokens", "Tokens loaded"), ("lookups", "Lookups"), ("failed_loads", "Failed loads")):
            if data.get(name):
                result[title] = data[name]
        return result

    def is_empty(self) -> bool:
        """Return whether all counts are zero."""
        return not any(self.data.values())


class KVDepotPromMetrics(KVConnectorPromMetrics):
    """Exports the counts as `vllm:kvdepot_*`, by engine."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvdepot_{name}", documentation=f"{text} (kvdepot).", labelnames=self._labelnames
            )
            for name, text in engine_counter.texts.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, amount in transfer_stats_data.items():
            if name in self._counters and amount:
                self._counters[name].labels(*labels).inc(amount)


class KVDepotConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps the engine's KV cache in a kvdepot server. See `docs/vllm.md`."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_like("vllm")
        transfer = vllm_config.kv_transfer_config
        self._settings = Settings.parse(transfer.kv_connector_extra_config, role=transfer.kv_role)
        self.scheduler_side: SchedulerSide | None = None
        self.worker_side = WorkerSide(None, 1, 0)  # uses no depot: every load fails, every store ends at once
        self._contents = WorkerContents()  # one for all registrations of the cache
        self._unsaid: WorkerFormat | None = None  # this worker's format until it is sent
        self._block_pool: Any = None
        self._plan = StepPlan()
        self._results = LoadResults()
        events = vllm_config.kv_events_config
        self._announcer: Announcer | None = None  # for the scheduler's side, if the engine publishes events
        if role is KVConnectorRole.SCHEDULER and events is not None and events.enable_kv_cache_events:
            self._announcer = Announcer()
            self._announcer.watch_publisher()
        self._version = find_version() if role is KVConnectorRole.SCHEDULER else lambda: ""
        self._start = Start(vllm_config, kv_cache_config, self._settings, name_of_engine(vllm_config, sys.argv))
        self.cache: EngineCache | None = self._start.find_cache()
        if self.cache is not None and role is KVConnectorRole.SCHEDULER:
            set_failure_policy(transfer, keep=self._settings.keep_load_failure_policy)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return the preferred layout. If vLLM cannot provide it, vLLM logs that and the connector works anyway.

        Raises:
            ConfigError: a setting is wrong, as at construction.
        """
        from vllm.platforms import current_platform

        settings = Settings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        is_cuda = current_platform.is_cuda()
        capability = current_platform.get_device_capability() if is_cuda else None
        return requested_layout(
            settings.kv_cache_layout,
            is_cuda=is_cuda,
            block_tokens=vllm_config.cache_config.block_size,
            capability=None if capability is None else capability.major,
        )

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """True: the worker's side leaves the depot before vLLM frees the cache's memory, and returns afterwards."""
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """False: a lost entry is a miss, not an error."""
        return False

    def shutdown(self) -> None:
        """Leave the depot."""
        if self.scheduler_side is not None:
            self.scheduler_side.close()
        self.worker_side.close()

    # --- format of the cache, from the workers to the scheduler ------------------------------------------------------

    @never_raises(type(None))
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return the format of this worker's cache for the scheduler's side, when the engine starts.

        A `MultiConnector` forwards the metadata of one of its connectors to all of them. If another connector sends or
        receives metadata, or there are several pipeline stages, the first report carries the format instead.
        """
        group: Any = get_kv_transfer_group()
        others = [type(other) for other in getattr(group, "_connectors", [group]) if other is not self]
        parallel = self._vllm_config.parallel_config
        is_one_stage = parallel.pipeline_parallel_size == 1
        # vLLM names a worker by its stage and its tensor parallel rank, so the formats of several would be one.
        has_replicas = getattr(parallel, "prefill_context_parallel_size", 1) > 1
        has_rivals = others and not (is_one_stage and all(map(_takes_no_part, others)))
        if self._unsaid is None or has_replicas or has_rivals:
            return None
        told, self._unsaid = self._unsaid, None
        return told

    @never_raises(type(None))
    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take the formats of the workers' caches."""
        told = [each for each in metadata.values() if isinstance(each, WorkerFormat)]
        self._take_formats(told)
        if self.scheduler_side is not None:
            # Wait, so that a running depot already serves the first request. A depot that starts later is used later.
            with contextlib.suppress(DepotUnavailable):
                self.scheduler_side.wait_until_connected(_START_SECONDS)

    @never_raises(type(None))
    def _take_formats(self, told: Sequence[WorkerFormat]) -> None:
        """Start the scheduler's side with the format that all workers registered; it blends if all of them can."""
        if self.cache is None or self.scheduler_side is not None or not told:
            return
        cache, self.cache = self.cache, None
        self.scheduler_side = self._start.open_scheduler(cache, told, self._announcer, self._version)
        if self.scheduler_side is None:
            return
        self.cache = cache
        if self._block_pool is not None:
            self.scheduler_side.bind_block_pool(self._block_pool)

    # --- worker ---------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register this worker's KV cache with the depot. If that fails, the engine runs without a depot."""
        self.unregister_kv_caches()
        self._unsaid = WorkerFormat("")
        if self.cache is None:
            return
        try:
            self.worker_side, self._unsaid = self._start.register_worker(self.cache, kv_caches, self._contents)
        except KVDepotError as reason:
            logger.error("kvdepot is not used by this worker: %s", reason)
        except Exception:
            logger.exception("kvdepot failed and is not used by this worker; the engine runs without it")

    @never_raises(type(None))
    def unregister_kv_caches(self) -> None:
        """Release the cache's memory before vLLM frees it. Until `restore_kv_caches`, every load is a miss."""
        self.worker_side.leave()

    @never_raises(type(None))
    def restore_kv_caches(self) -> None:
        """Register the cache again, after vLLM has reallocated its memory."""
        self.worker_side.come_back()

    @never_raises(type(None))
    def reset_capture_state(self) -> None:
        """Note that vLLM has captured its graphs: the pool may be registered with the device from now on."""
        self.worker_side.end_of_captures()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Take the step's plan, and start its loads, which run beside the forward pass."""
        super().bind_connector_metadata(connector_metadata)
        self._plan = connector_metadata.plan if isinstance(connector_metadata, StepMetadata) else StepPlan()
        self.worker_side.start_loads(self._plan)

    def clear_connector_metadata(self) -> None:
        """Forget the step's plan."""
        super().clear_connector_metadata()
        self._plan = StepPlan()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Do nothing: loads began when the step was bound."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: the scheduler waits for loads."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are stored after the step."""

    def wait_for_save(self) -> None:
        """Start the step's stores, which read their blocks after the step's work on the device. Never waits."""
        self.worker_side.start_stores(self._plan)

    @never_raises(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report the loads that ended."""
        if self._plan.is_idle:
            self.worker_side.wait_a_little()
        self._results = self.worker_side.poll_loads()
        return KVConnectorTransferResults(finished_recving=self._results.finished, failed_recving=self._results.failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Report the blocks that loads left unfilled, for models with one KV cache group."""
        return self._results.invalid_blocks

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Report the stores that ended and, once, the cache's format."""
        report = self.worker_side.take_report()
        if self._unsaid is not None:
            report = (report or WorkerReport()).merge(WorkerReport(formats=(self._unsaid,)))
            self._unsaid = None
        return ReportMetadata(report) if report is not None else None

    # --- scheduler ------------------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take the pool whose blocks stores hold."""
        self._block_pool = gpu_block_pool

    @never_raises(type(None))
    def on_new_request(self, request: Any) -> None:
        """Send the request's lookup."""
        if self.scheduler_side is not None:
            self.scheduler_side.begin(request)

    @never_raises(lambda: (0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens a load would bring."""
        if self.scheduler_side is None:
            return 0, False
        return self.scheduler_side.matched_tokens(request, num_computed_tokens)

    @never_raises(dict)
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """Split a load by where it came from: tiers (disk), or the pool (host)."""
        if self.scheduler_side is None or not num_external_tokens:
            return {}
        promoted = self.scheduler_side.promoted_tokens(request, num_external_tokens)
        split = {CacheHitSource.HOST: num_external_tokens - promoted, CacheHitSource.DISK: promoted}
        return {source: count for source, count in split.items() if count}

    @never_raises(type(None))
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load."""
        if self.scheduler_side is not None:
            table = blocks.get_block_ids() if num_external_tokens else ()
            self.scheduler_side.allocated(request, table, num_external_tokens)

    @never_raises(lambda: StepMetadata(StepPlan()))
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Plan the step."""
        return StepMetadata(
            self.scheduler_side.plan_step(scheduler_output) if self.scheduler_side is not None else StepPlan()
        )

    @never_raises(type(None))
    def update_connector_output(self, connector_output: Any) -> None:
        """Take the workers' reports."""
        meta = connector_output.kv_connector_worker_meta
        report = meta.report if isinstance(meta, ReportMetadata) else WorkerReport()
        self._take_formats(report.formats)
        if self.scheduler_side is None:
            return
        self.scheduler_side.workers_reported(
            report,
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or set(),
        )

    @never_raises(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Plan the request's last stores. vLLM may free its blocks at once: references hold blocks that stores read."""
        if self.scheduler_side is None:
            return False, None
        reason = request.get_finished_reason()
        return False, self.scheduler_side.finished(request, block_ids, has_failed=str(reason) == "error")

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `request_finished_all_groups`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping, because stores hold blocks."""
        return self.scheduler_side is not None and self.scheduler_side.has_pending_stores

    def has_pending_block_frees(self) -> bool:
        """Return whether stores that are about to end will free blocks for a waiting request."""
        return self.scheduler_side is not None and self.scheduler_side.can_free_blocks_soon

    @never_raises(type(None))
    def reset_cache(self) -> bool | None:
        """Begin a new generation of keys, named by the weights. Other engines keep their entries."""
        if self.scheduler_side is not None:
            self.scheduler_side.reset()
        return True

    # --- metrics, events ------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVDepotStats | None:
        """Return the counts since the last call, None if all are zero."""
        side = self.scheduler_side or self.worker_side
        if not side.counters:
            return None
        stats = KVDepotStats(data=dict(side.counters))
        side.counters.clear()
        return stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVDepotStats | None:
        """Return stats from counts that crossed a process boundary."""
        return KVDepotStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> KVDepotPromMetrics:
        """Return the Prometheus counters."""
        return KVDepotPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def take_events(self) -> Iterable[Any]:
        """Return events of the depot's chunks that vLLM's publisher did not get from the connector."""
        return self._announcer.take() if self._announcer is not None else ()


def _takes_no_part(connector: type[KVConnectorBase_V1]) -> bool:
    """Return whether a connector neither sends nor receives handshake metadata when the engine starts."""
    names = ("get_handshake_metadata", "set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware")
    return all(getattr(connector, name, None) is getattr(KVConnectorBase_V1, name) for name in names)
