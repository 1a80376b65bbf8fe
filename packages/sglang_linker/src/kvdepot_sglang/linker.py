# pyright: basic, reportMissingImports=false
"""`KVDepotLinker`: SGLang constructs it in each worker (linker backend "dynamic") and calls it from its scheduler.

SGLang names each page by a digest of all tokens up to its end. The linker sends these names to the depot, masked by the
namespace. A load is copied and verified as soon as SGLang queues it, into slots that belong only to the request. The
ranks agree on its outcome. If it failed, the linker refuses it, and SGLang computes the tokens. So no request is
aborted because of the depot, and none waits for it longer than a deadline. An exception here would end the engine, so
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
    UnifiedCacheLinkerWrapper,
)

from kvdepot.backends import EngineTraits, KVCache, TransferFuture, get_backend
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.config import directory_of_url
from kvdepot.counting import CounterGroup, CounterName, Counts
from kvdepot.engines.settings import EngineSettings
from kvdepot.errors import DepotUnavailable
from kvdepot.features.sessions.client import hint
from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot.logs import log_like, never_raises
from kvdepot_sglang import Placed, are_hooked
from kvdepot_sglang.identity import Weights, engine_namespace
from kvdepot_sglang.lookups import Lookups
from kvdepot_sglang.pools import Holding, Unsupported, block_ids, find_groups, pages_of, refuse_unsupported
from kvdepot_sglang.ranks import Ranks

logger = logging.getLogger(__name__)

_START_SECONDS: Final = 1.0  # a starting engine waits this long for a depot
_LONGEST_SESSION: Final = 256  # characters of a session's name that the depot accepts
_UNNAMED: Final = "default"  # SGLang's version of weights that have no name
_NO_LOAD: Final = -1  # SGLang's index for a batch without loads

linker_counter: Final = CounterGroup()  # `sglang:kvdepot_NAME_total`

_LOOKUPS: Final = linker_counter("lookups", "Prefixes that were looked up, repeated answers included")
_LOOKUP_MICROSECONDS: Final = linker_counter("lookup_microseconds", "Time for which the scheduler waited for lookups")
_FOUND_PAGES: Final = linker_counter("found_pages", "Pages that the depot had and the device had not")
_LOADS: Final = linker_counter("loads", "Loads that ended in place")
_REFUSED_LOADS: Final = linker_counter("refused_loads", "Loads that failed: their tokens were computed")
_LOAD_BYTES: Final = linker_counter("load_bytes", "Bytes copied out of the depot")
_LOAD_MICROSECONDS: Final = linker_counter("load_microseconds", "Time for which the scheduler waited for loads")
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
    """A store under way, and its agent session, "" for none."""

    job: TransferFuture[bool]
    key: KeyRun
    session: str


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
        if not are_hooked(UnifiedCacheLinkerWrapper):
            raise Unsupported(
                "SGLang has not loaded the plugin `kvdepot`, which says where pages belong: install kvdepot-sglang in"
                " this environment, and name it in SGLANG_PLUGINS if that is set"
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
        dtype = str(next(iter(groups.values())).tensors[0].dtype).removeprefix("torch.")
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
            weights=self._weights.namespace.weights,
        )
        self._lookups = Lookups(self._client, settings.tier_seconds)
        self._landed: set[str] = set()  # requests whose loads are in place but whose batch has not started
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
        found = self._lookups.ask(rid, self._key([*self.before, *tail]), len(self.before))
        self.stats.add(_LOOKUPS)
        self.stats.add(_LOOKUP_MICROSECONDS, round((time.perf_counter() - began) * 1e6))
        self.stats.add(_FOUND_PAGES, found)
        self.stats.log_now_and_then()
        return found

    def load(self, rid: str, transfers: list[Any]) -> bool:
        """Fill the slots of a request. Return False if that failed on any rank, so that SGLang computes the tokens."""
        began = time.perf_counter()
        ok = self._ranks.all_agree(self._retrieve(rid, transfers))
        if ok:
            self._landed.add(rid)
        self.stats.add(_LOADS if ok else _REFUSED_LOADS)
        self.stats.add(_LOAD_MICROSECONDS, round((time.perf_counter() - began) * 1e6))
        return ok

    @never_raises(bool)
    def _retrieve(self, rid: str, transfers: list[Any]) -> bool:
        key = self._lookups.key_of(rid, len(transfers[0].keys))
        if key is None:
            return False
        try:
            self._order_after_forward()
            job = self._worker.submit_retrieve(rid, key, block_ids(self.pools, transfers, self.page_size))
            ok = job.result()
        finally:
            self._lookups.drop(rid)
        self.stats.add(_LOAD_BYTES, job.num_bytes)
        return ok

    def _order_after_forward(self) -> None:
        """Order the load after the forward pass under way, which may still write slots that were just freed."""
        if self._device != "cpu" and self.forward_stream is not None:
            import torch

            torch.get_device_module(self._device).current_stream().wait_stream(self.forward_stream)

    def start_layer_wise_loading(self) -> int:
        """Begin a batch of the loads so far, which are all in place."""
        if not self._landed:
            return _NO_LOAD
        self._landed.clear()
        index = self.layer_done_counter.update_producer()
        for layer in range(self._num_layers):
            self.layer_done_counter.complete(index, layer)
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Return whether a batch is in place."""
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Forget a load whose batch has not begun. No copy for it is running."""
        was_queued = rid in self._landed
        self._landed.discard(rid)
        return was_queued

    @never_raises(bool)
    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Store the pages of a node. Return False if that is impossible now, so that SGLang offers it again."""
        key, first = self._key([*self.before, *transfers[0].keys]), len(self.before)
        self._worker.start_registering()  # SGLang captures its graphs before it serves
        pages = block_ids(self.pools, transfers, self.page_size)
        start = self._lookups.first_to_store(key, first)
        if start < first:
            pages[0] = pages_of(self.slots_before(), self.page_size)[start:] + pages[0]
        ready = _Events(self.record_offload_ready())
        session = (session_id or "")[:_LONGEST_SESSION]
        self._offloads.append(
            _Offload(self._worker.submit_store(session, key.slice(start), pages, ready), key, session)
        )
        return True

    def num_completed_offloads(self) -> int:
        """Return the number of oldest stores that have all ended."""
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
        job, key, session = self._offloads.popleft()
        self.stats.add(_STORES)
        self.stats.add(_STORE_BYTES, job.num_bytes)
        is_stored = job.result()
        if session and is_stored and self._ranks.rank == 0:
            hint(self._client, key, session=session)
        return is_stored

    def reset(self) -> None:
        """End all transfers, because SGLang flushes its cache. The next request begins a new generation of keys."""
        for offload in self._offloads:
            offload.job.result()
        self._offloads.clear()
        self._landed.clear()
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


def _instance(server_args: Any, ranks: Ranks) -> str:
    """Return the engine's name in the depot's status, which is the same on all ranks."""
    served = str(getattr(server_args, "served_model_name", None) or server_args.model_path)
    return f"sglang {served[:200]} port {server_args.port} {ranks.common_random()[:8]}"[:256]


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
