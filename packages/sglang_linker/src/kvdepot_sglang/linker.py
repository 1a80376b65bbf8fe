# pyright: basic, reportMissingImports=false
"""`KVDepotLinker`: SGLang constructs it in each worker (linker backend "dynamic") and calls it from its scheduler.

SGLang names each page by a digest of all tokens up to its end. The linker sends these names to the depot, masked by the
namespace. A request waits for its load in SGLang's queue, see `loads`. So no request is aborted because of the depot,
none waits for it longer than a deadline, and only a lookup stops the others. An exception here would end the engine, so
each is caught and logged, and costs a miss.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import sglang
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import (
    LayerWiseLoadCounter,
    UnifiedCacheLinker,
)

from kvdepot.backends import EngineTraits, KVCache, TransferFuture, get_backend
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.config import directory_of_url
from kvdepot.counting import CounterGroup, CounterName, Counts
from kvdepot.engines.settings import EngineSettings
from kvdepot.errors import DepotUnavailable
from kvdepot.features.routers.feed import Description
from kvdepot.features.sessions.client import hint
from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot.logs import log_like, never_raises
from kvdepot_sglang import Placed, missing_hooks
from kvdepot_sglang.identity import Weights, engine_namespace
from kvdepot_sglang.loads import Load, Loads
from kvdepot_sglang.lookups import Lookups
from kvdepot_sglang.pools import Holding, Unsupported, block_ids, find_groups, pages_of, refuse_unsupported
from kvdepot_sglang.ranks import Ranks

logger = logging.getLogger(__name__)

_START_SECONDS: Final = 1.0  # a starting engine waits this long for a depot
_ID_DIGITS: Final = 16  # of a page's name that are its id in events, as in SGLang's own
_LONGEST_SESSION: Final = 256  # characters of a session's name that the depot accepts
_UNNAMED: Final = "default"  # SGLang's version of weights that have no name
_NO_LOAD: Final = -1  # SGLang's index for a batch without loads
_IDLE_SECONDS: Final = 2e-3  # an idle scheduler waits this long for a load before it looks for new requests

linker_counter: Final = CounterGroup()  # `sglang:kvdepot_NAME_total`

_LOOKUPS: Final = linker_counter("lookups", "Prefixes that were looked up, repeated answers included")
_LOOKUP_MICROSECONDS: Final = linker_counter("lookup_microseconds", "Time for which the scheduler waited for lookups")
_FOUND_PAGES: Final = linker_counter("found_pages", "Pages that the depot had and the device had not")
_LOADS: Final = linker_counter("loads", "Loads that ended in place")
_REFUSED_LOADS: Final = linker_counter("refused_loads", "Loads that failed: their tokens were computed")
_LOAD_BYTES: Final = linker_counter("load_bytes", "Bytes copied out of the depot")
_LOAD_MICROSECONDS: Final = linker_counter("load_microseconds", "Time that loads took")
_STORES: Final = linker_counter("stores", "Store operations that ended")
_STORE_BYTES: Final = linker_counter("store_bytes", "Bytes copied into the depot")

_LOG_SECONDS: Final = 60.0  # between two log lines, as between SGLang's own


@dataclass(frozen=True, slots=True)
class Settings(EngineSettings):
    """Each setting is an optional field of `linker_extra_config`.

    SGLang's scheduler does nothing else while it waits for the depot.
    """

    SOURCE: ClassVar[str] = "linker_extra_config"

    lookup_seconds: float = 0.25  # the longest wait for the answer to a lookup
    tier_seconds: float = 0.05  # the part of that wait for tiers; chunks that arrive later help the next request

    def __post_init__(self) -> None:
        EngineSettings.__post_init__(self)  # `super()` refers to the class that `slots` has replaced
        self.check_seconds("lookup_seconds")
        self.check_seconds("tier_seconds")


class _Offload(NamedTuple):
    """A store under way, its agent session ("" for none), and the description of the last pages of its key."""

    job: TransferFuture[bool]
    key: KeyRun
    session: str
    description: Description | None


class _Events:
    """Several events, waited for as one."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = events

    def synchronize(self) -> None:
        for each in self._events:
            each.synchronize()


class KVDepotLinker(Placed, UnifiedCacheLinker):
    """Keeps the engine's KV cache in a kvdepot server. See `docs/sglang.md`.

    Raises:
        KVDepotError: the engine's cache cannot be kept, or a setting is wrong; the text gives the way out.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Any,
        extra_config: dict[str, Any],
        forward_stream: Any = None,
    ) -> None:
        from sglang.srt.configs.model_config import ModelConfig

        log_like("sglang")
        self._settings = settings = Settings.read(extra_config)
        if missing := missing_hooks():
            raise Unsupported(
                f"SGLang has not loaded the plugin `kvdepot`, which hooks {', '.join(missing)}: install kvdepot-sglang"
                " in this environment, and name it in SGLANG_PLUGINS if that is set"
            )
        self.page_size = int(params.page_size)
        refuse_unsupported(server_args, params, self.page_size)
        self.forward_stream = forward_stream
        self._ranks = ranks = Ranks(
            getattr(params, "attn_tp_cache_group", None) or getattr(params, "tp_cache_group", None)
        )
        kvcache = params.token_to_kv_pool_allocator.get_kvcache()
        model = ModelConfig.from_server_args(server_args)
        self._device = device = str(kvcache.device).partition(":")[0]
        backend = get_backend(device)
        holding = Holding(ranks.rank, ranks.size, int(model.get_total_num_kv_heads()))
        groups = {
            name: replace(group, attention_backend=str(server_args.attention_backend or ""))
            for name, group in find_groups(kvcache, {each.name for each in components}, params, holding).items()
        }
        kinds = tuple(group.kind for group in groups.values())
        reason = backend.why_unsuited(EngineTraits("sglang", kinds, prefix_caching=True))
        if reason is not None:
            raise Unsupported(reason)
        self.pools = dict(groups)
        self._num_layers = int(kvcache.layer_num)
        self.layer_done_counter = LayerWiseLoadCounter(self._num_layers)
        self._weights = Weights(engine_namespace(server_args, model.hf_config, device, ranks.size, settings), ranks)
        self._mask_names()
        instance = _instance(server_args, ranks)
        dtype = str(getattr(kvcache, "dtype", next(iter(groups.values())).tensors[0].dtype)).removeprefix("torch.")
        self._worker = backend.create_context(
            KVCache(
                tuple(groups.values()),
                instance,
                dtype,
                rank=ranks.rank,
                world_size=ranks.size,
                model=str(server_args.model_path),
                format=f"sglang {sglang.__version__} nhd {device}",
                chunk_tokens=self.page_size,
            ),
            url=settings.url,
            deadline_seconds=settings.deadline_seconds,
            register_when_asked=True,
            **settings.backend_options(backend),
        )
        self._client = SchedulerClient(
            self._worker.spec,
            instance,
            model=str(server_args.model_path),
            url=settings.url,
            deadline_seconds=settings.lookup_seconds,
            served_model="" if ranks.rank else _served_model(server_args),  # one rank describes the chunks
            weights=self._weights.namespace.weights,
        )
        self._lookups = Lookups(self._client, settings.tier_seconds)
        self._loads = Loads(ranks, self._end_load)
        self._begun: TransferFuture[bool] | None = None  # the load that SGLang has just begun
        self._offloads: deque[_Offload] = deque()
        self.stats = Stats(ranks.rank, exports=bool(getattr(server_args, "enable_metrics", False)))
        self._say_hello()

    def _say_hello(self) -> None:
        try:
            self._worker.wait_until_connected(_START_SECONDS)
            self._client.wait_until_connected(_START_SECONDS)
        except DepotUnavailable as error:
            logger.warning("the engine starts without a depot, and uses it once it is available: %s", error)
        logger.info(
            "tenant %s, namespace %s, pages of %d tokens, pools %s: the depot in %s",
            self._settings.tenant,
            self._settings.namespace or "(default)",
            self.page_size,
            ", ".join(self.pools),
            directory_of_url(self._settings.url),
        )

    # --- keys -----------------------------------------------------------------------------------------------------

    def _mask_names(self) -> None:
        self._root = self._weights.namespace.digest(self.page_size)
        self._mask = np.frombuffer(self._root, np.uint8)

    def _change_keys(self) -> None:
        """Begin a new generation of keys, for the engine's current weights."""
        self._mask_names()
        self._lookups.drop_all()
        self._client.change_weights(self._weights.namespace.weights)

    def _key(self, names: Sequence[str]) -> KeyRun:
        """Return the key of a prompt's leading pages, given SGLang's names in hexadecimal digits."""
        if not self._weights.is_named:
            self._weights.name(_version())
            self._change_keys()
        digests = np.frombuffer(bytes.fromhex("".join(names)), np.uint8).reshape(-1, DIGEST_BYTES) ^ self._mask
        return KeyRun(digests.tobytes(), 0, self._root, self._settings.tenant)

    # --- SGLang's calls ---------------------------------------------------------------------------------------------

    @never_raises(list)
    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        """Return the lengths in pages of the loadable prefixes of a prompt's tail."""
        found = self._ask(rid, transfers[0].keys)
        if not found:
            return []
        return list(range(1, found + 1)) if len(self.pools) == 1 else [found]  # a shorter prefix may lack its window

    @never_raises(type(None))
    def keep_warm(self, rid: str) -> None:
        """See `Placed`."""
        self._ask(rid, ())

    def _ask(self, rid: str, tail: Sequence[str]) -> int:
        """Look up all pages of a prompt. Return how many pages the depot has behind the pages on the device."""
        began = time.perf_counter()
        names = [*self.before, *tail]
        key = self._key(names)
        found = self._lookups.ask(rid, key, len(self.before))
        if num_pages := self._lookups.num_undescribed:
            self._tell_routers(key.slice(0, num_pages), self._description(names[:num_pages], 0))
        self.stats.add(_LOOKUPS)
        self.stats.add(_LOOKUP_MICROSECONDS, round((time.perf_counter() - began) * 1e6))
        self.stats.add(_FOUND_PAGES, found)
        self.stats.log_now_and_then()
        return found

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Begin to fill slots for a request. A load that cannot begin ends as a failure, so that all ranks agree."""
        self._begun = self._retrieve(rid, transfers)
        return True

    @never_raises(type(None))
    def _retrieve(self, rid: str, transfers: list[Any]) -> TransferFuture[bool] | None:
        key = self._lookups.key_of(rid, len(transfers[0].keys))
        if key is None:
            return None
        self._order_after_forward()
        return self._worker.submit_retrieve(rid, key, block_ids(self.pools, transfers, self.page_size))

    def _order_after_forward(self) -> None:
        """Order the load after the forward pass under way, which may still write slots that were just freed."""
        if self._device != "cpu" and self.forward_stream is not None:
            import torch

            torch.get_device_module(self._device).current_stream().wait_stream(self.forward_stream)

    def hold(self, cache: Any, req: Any, first: int, names: Sequence[str], slots: Any, evicted: Any) -> None:
        """See `Placed`."""
        self._loads.begin(Load(cache, req, first, names, slots, evicted, cache.lock(req.last_node), self._begun))

    def _end_load(self, load: Load, landed: bool) -> None:
        (self._lookups.drop if landed else self._lookups.refuse)(load.req.rid)
        self.stats.add(_LOADS if landed else _REFUSED_LOADS)
        if load.job is not None:
            self.stats.add(_LOAD_BYTES, load.job.num_bytes)
            self.stats.add(_LOAD_MICROSECONDS, round(load.job.seconds * 1e6))

    def is_loading(self, rid: str | None = None) -> bool:
        """See `Placed`."""
        return self._loads.has(rid)

    def is_coming(self, page: str) -> bool:
        """See `Placed`."""
        return self._loads.bring(page)

    def wait_for_load(self) -> bool:
        """See `Placed`."""
        return self._loads.wait(_IDLE_SECONDS)

    def start_layer_wise_loading(self) -> int:
        """Tell SGLang that a batch has no loads to wait for."""
        return _NO_LOAD

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return whether a batch is in place, which is always so."""
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        """Return False: no load is queued. One that is under way ends without its request."""
        return False

    def _description(self, names: Sequence[str], first: int) -> Description | None:
        """Describe the pages of a prompt from `first` on, to a depot that publishes events; None if that is not asked.

        Pages with an adapter are not described, as SGLang does not give the linker its name.
        """
        prompt, size = self.prompt, self.page_size
        if prompt is None or prompt.extra_key is not None or not self._client.wants_tokens:
            return None
        tokens = prompt.token_ids[first * size : len(names) * size]
        if len(tokens) < (len(names) - first) * size:
            return None
        ids = [int(name[:_ID_DIGITS], 16) for name in names[max(0, first - 1) :]]
        salts = ((prompt.cache_salt,),) * (len(names) - first) if prompt.cache_salt else ()
        return Description(self._root, tokens, ids[min(first, 1) :], ids[0] if first else None, extra_keys=salts)

    def _tell_routers(self, key: KeyRun, description: Description | None) -> None:
        if description is not None:
            self._client.post(lambda context: description.requests(context, key))

    @never_raises(bool)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Store the pages of a node. Return False if that is impossible now, so that SGLang offers it again."""
        names, first = [*self.before, *transfers[0].keys], len(self.before)
        key = self._key(names)
        self._worker.start_registering()  # SGLang captures its graphs before it serves
        pages = block_ids(self.pools, transfers, self.page_size)
        start = self._lookups.first_to_store(key, first)
        if start < first:
            pages[0] = pages_of(self.slots_before(), self.page_size)[start:] + pages[0]
        ready = _Events(self.record_offload_ready())
        session = (session_id or "")[:_LONGEST_SESSION]
        job = self._worker.submit_store(session, key.slice(start), pages, ready)
        self._offloads.append(_Offload(job, key, session, self._description(names, start)))
        return True

    def num_completed_offloads(self) -> int:
        """Return the number of oldest stores that have all ended. SGLang asks at the begin of each step.

        So this is the place to end loads: no batch is being built.
        """
        self._loads.end()
        count = 0
        for offload in self._offloads:
            if not offload.job.query():
                break
            count += 1
        return count

    def pop_completed_offload(self) -> bool:
        """Return whether the depot has all pages of the oldest ended store.

        Its prefix is then the last one of its agent session, which operators and agents can refer to.
        """
        job, key, session, description = self._offloads.popleft()
        self.stats.add(_STORES)
        self.stats.add(_STORE_BYTES, job.num_bytes)
        is_stored = job.result()
        if is_stored and description is not None:
            self._tell_routers(key.slice(key.num_chunks - len(description.block_ids)), description)
        if session and is_stored and self._ranks.rank == 0:
            hint(self._client, key, session=session)
        return is_stored

    def reset(self) -> None:
        """End all transfers, because SGLang flushes its cache. The next request begins a new generation of keys."""
        for offload in self._offloads:
            offload.job.result()
        self._offloads.clear()
        self._loads.reset()
        self._lookups.drop_all()
        self.layer_done_counter.reset()
        if not self._settings.keep_after_reset:
            self._weights.flush()

    def note_update(self, model: Any) -> None:
        """Note that a model is about to get new weights; see `around_update`."""
        if not self._settings.keep_after_reset and self._weights.update(model):
            self._change_keys()

    def close(self) -> None:
        """Finish the copies under way, within the depot's deadline, and leave. Idempotent."""
        self._worker.close()
        self._client.close()


def _version() -> str:
    """Return the version that people gave the weights, "" if they gave none."""
    from sglang.srt.runtime_context import get_serving

    told = str(get_serving().weight_version)
    return "" if told == _UNNAMED else told


def _served_model(server_args: Any) -> str:
    """Return the model's name in requests."""
    return str(getattr(server_args, "served_model_name", None) or server_args.model_path)


def _instance(server_args: Any, ranks: Ranks) -> str:
    """Return the engine's name in the depot's status, which is the same on all ranks."""
    return f"sglang {_served_model(server_args)[:200]} port {server_args.port} {ranks.common_random()[:8]}"[:256]


class Stats:
    """The counts of one rank, for an occasional log line, and for Prometheus if SGLang exports its own counters.

    Args:
        rank: a label of the exported counters; rank 0 logs.
        exports: whether SGLang exports metrics.
        clock: returns monotonic seconds.
    """

    def __init__(self, rank: int, *, exports: bool = False, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = Counts()
        self._logged = Counts()
        self._rank, self._clock, self._logged_at = rank, clock, clock()
        self._exported: dict[str, Any] = _exported(rank) if exports else {}

    def add(self, name: CounterName, amount: int = 1) -> None:
        """Add an amount to a count."""
        self.counts[name] += amount
        if name in self._exported and amount:
            self._exported[name].inc(amount)

    def log_now_and_then(self) -> None:
        """Log the counts since the last line, at most once a minute, if there are any."""
        now = self._clock()
        if now - self._logged_at < _LOG_SECONDS or self._rank:
            return
        self._logged_at = now
        new = Counts({name: amount - self._logged[name] for name, amount in self.counts.items()})
        self._logged = Counts(self.counts)
        if any(new.values()):
            logger.info(
                "in %.0f s: %d lookups in %.0f ms found %d pages; %d loads of %.1f MB in %.0f ms, %d refused;"
                " %d stores of %.1f MB",
                _LOG_SECONDS,
                new[_LOOKUPS],
                new[_LOOKUP_MICROSECONDS] / 1e3,
                new[_FOUND_PAGES],
                new[_LOADS],
                new[_LOAD_BYTES] / 1e6,
                new[_LOAD_MICROSECONDS] / 1e3,
                new[_REFUSED_LOADS],
                new[_STORES],
                new[_STORE_BYTES] / 1e6,
            )


def _exported(rank: int) -> dict[str, Any]:
    from prometheus_client import Counter

    return {
        name: Counter(f"sglang:kvdepot_{name}", f"{text} (kvdepot).", labelnames=["tp_rank"]).labels(str(rank))
        for name, text in linker_counter.texts.items()
    }
