# pyright: basic, reportMissingImports=false
"""The start of both sides of the connector: each worker registers its cache, then the scheduler's side opens.

`KVDepotConnector` calls `find_cache` when vLLM constructs it, `register_worker` in each worker's process, and
`open_scheduler` in the scheduler's process once all workers have reported their formats. After a failure here, the
engine runs without a depot. Nothing here is used after the start.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import vllm
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvdepot.backends import CacheGroup, EngineTraits, KVCache, get_backend
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.config import directory_of_url
from kvdepot.engines.generation import Generation
from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind
from kvdepot.wire.messages import GroupShape
from kvdepot_vllm.contents import WorkerContents
from kvdepot_vllm.events import Announcer, Describer
from kvdepot_vllm.groups import EngineCache, Seat, Unsupported, engine_cache, named_format, worker_groups
from kvdepot_vllm.identity import engine_namespace
from kvdepot_vllm.inspection import digest_of_weights, find_runner, find_worker, served_model
from kvdepot_vllm.scheduler import SchedulerSide
from kvdepot_vllm.settings import Settings
from kvdepot_vllm.worker import WorkerSide

logger = logging.getLogger(__name__)


@dataclass
class WorkerFormat(KVConnectorHandshakeMetadata):
    """Carries the format of a worker's cache to the scheduler at start; "" if the worker uses no depot.

    `blend` is a line for operators that says whether the worker can blend; "" if the settings do not ask for it.
    """

    format: str
    can_blend: bool = False
    blend: str = ""
    shapes: tuple[GroupShape, ...] = ()  # by group
    weights: tuple[int, str] = (0, "")  # the worker's number and a digest of its weights, "" if there is none


@dataclass(frozen=True)
class Start:
    """Opens the side of the connector that this process needs.

    Attributes:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's configuration of this engine's cache.
        settings: the user's settings.
        instance: names the engine to the depot.
    """

    vllm_config: Any
    kv_cache_config: Any
    settings: Settings
    instance: str

    def find_cache(self) -> EngineCache | None:
        """Return the engine's cache; None, with a log line, if kvdepot cannot keep it."""
        try:
            return engine_cache(self.vllm_config, self.kv_cache_config, _kind_of, self.settings.chunk_tokens)
        except Unsupported as reason:
            logger.error("kvdepot is not used: %s", reason)
        except Exception:
            logger.exception("kvdepot failed and is not used; the engine runs without it")
        return None

    def register_worker(
        self, cache: EngineCache, kv_caches: dict[str, Any], contents: WorkerContents
    ) -> tuple[WorkerSide, WorkerFormat]:
        """Register this process's KV cache with the depot.

        Args:
            cache: the engine's cache. Its format, which only a worker can find, is added here.
            kv_caches: tensors by layer name, as vLLM passes them.
            contents: notes from now on with which weights and adapters this process computes.

        Returns:
            the worker's side, which the caller closes, and the format under which it registers.

        Raises:
            KVDepotError: the backend or the cache's layout cannot be used; the text says why.
        """
        from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group
        from vllm.platforms import current_platform

        places = (get_tp_group(), get_pp_group(), get_pcp_group(), get_dcp_group())
        seat = Seat(*(group.rank_in_group for group in places))
        rank = cache.number_of(seat)
        device = current_platform.device_type
        cache_dtype = str(self.vllm_config.cache_config.cache_dtype)
        if device == "cpu" and cache_dtype.endswith("_per_token_head"):
            raise Unsupported(f"vLLM on CPU lays out a {cache_dtype} cache differently than it says: not supported")
        _permit_tiles(device)
        backend = get_backend(device)
        kinds = tuple(group.kind for group in cache.groups)
        prefix_caching = bool(self.vllm_config.cache_config.enable_prefix_caching)
        reason = backend.why_unsuited(EngineTraits("vllm", kinds, prefix_caching))
        if reason is not None:
            raise Unsupported(reason)
        layers = self.vllm_config.compilation_config.static_forward_context
        options = self.settings.backend_options(backend)
        groups = worker_groups(
            cache,
            kv_caches,
            self.kv_cache_config.num_blocks,
            seat,
            cuts_pages=lambda row_tokens: backend.cuts_pages(row_tokens, **options),
            layers=layers,
        )
        text, groups = _seen_or_named(cache, groups, layers)
        cache = replace(cache, format=text + cache.division)
        open_context = partial(
            backend.create_context,
            KVCache(
                groups,
                self.instance,
                cache.dtype,
                rank=rank,
                world_size=cache.num_workers,
                model=str(self.vllm_config.model_config.model),
                format=cache.format,
                chunk_tokens=cache.chunk_tokens,
            ),
            url=self.settings.url,
            deadline_seconds=self.settings.deadline_seconds,
            synchronous=self.settings.is_synchronous(backend),
            register_when_asked=True,  # vLLM reports graph captures that fail or hang during a registration
            **options,
        )
        context = open_context()
        runner = find_runner()
        contents.watch(find_worker(), runner)

        def tell_weights() -> tuple[int, str]:
            return rank, digest_of_weights(runner)

        # Only after a sleep does it matter whether the weights are those that were loaded.
        can_sleep = bool(getattr(self.vllm_config.model_config, "enable_sleep_mode", False))
        loaded = tell_weights() if can_sleep else (rank, "")
        # vLLM computes a prompt again from an invalid block on. It has the blocks before with full attention alone.
        only = cache.groups[0] if cache.num_groups == 1 else None
        block_tokens = only.block_tokens if only is not None and only.kind is GroupKind.FULL_ATTENTION else 0
        blends, text = None, ""
        if self.settings.blend != "off":
            from kvdepot_vllm.blend.setup import start_blending

            blends, text = start_blending(self.vllm_config, self.kv_cache_config, self.settings, context)
        side = WorkerSide(context, cache.chunk_tokens, block_tokens, blends, open_context, tell_weights, contents)
        return side, WorkerFormat(cache.format, blends is not None, text, context.spec.groups, loaded)

    def open_scheduler(
        self,
        cache: EngineCache,
        told: Sequence[WorkerFormat],
        announcer: Announcer | None,
        version: Callable[[], str],
    ) -> SchedulerSide | None:
        """Open the scheduler's side with the format that all workers registered. It blends if all of them can.

        Args:
            cache: the engine's cache.
            told: the formats that all workers reported.
            announcer: tells routers what the depot holds; None if the engine publishes no events.
            version: returns the version that people gave the engine's weights, "" if they gave none.

        Returns:
            None, with a log line, if a worker uses no depot or the workers' formats differ.
        """
        formats = {(each.format, each.shapes) for each in told}
        is_missing = any(not each.format for each in told)
        if is_missing or len(formats) > 1:
            logger.error(
                "kvdepot is not used by this engine: %s",
                "a worker cannot use it, see its log"
                if is_missing
                else f"its workers differ: {sorted(map(str, formats))}",
            )
            return None
        text, shapes = next(iter(formats))
        cache = replace(cache, format=text, shapes=shapes)
        config, settings = self.vllm_config, self.settings
        namespace = engine_namespace(config, settings, is_batch_invariant=bool(envs.VLLM_BATCH_INVARIANT))
        client = SchedulerClient(
            cache.spec,
            self.instance,
            model=str(config.model_config.model),
            url=settings.url,
            deadline_seconds=settings.deadline_seconds,
            remark=min(told, key=lambda each: each.can_blend).blend,
            served_model=served_model(config) if announcer is not None else "",
            weights=namespace.weights,
        )
        scheduler = SchedulerSide(
            cache,
            Generation(namespace, cache.num_workers, dict(each.weights for each in told)),
            settings,
            client,
            cache.num_workers,
            announcer=announcer,
            describer=Describer(cache, self.kv_cache_config) if announcer is not None else None,
            can_blend=all(each.can_blend for each in told),
            version=version,
        )
        logger.info(
            "model %s, tenant %s, namespace %s, chunks of %d tokens: %s %s the depot in %s",
            config.model_config.model,
            settings.tenant,
            settings.namespace or "(default)",
            cache.chunk_tokens,
            {"all": "stores prompts and answers", "prompt": "stores prompts", "none": "stores nothing"}[settings.store],
            "in, and loads from," if settings.load else "in, and does not load from,",
            directory_of_url(settings.url),
        )
        scheduler.log_namespace()
        return scheduler


def _seen_or_named(
    cache: EngineCache, groups: list[CacheGroup], layers: Mapping[str, Any]
) -> tuple[str, list[CacheGroup]]:
    """Return the format of a worker's cache, by looking at its pages if that is possible, else by names.

    Also return the groups to register. Without a look, a page of latent attention is one row, because its tokens may
    not lie apart.
    """
    try:
        if envs.VLLM_BATCH_INVARIANT:  # another version, backend or device computes other last bits
            raise LayoutError("VLLM_BATCH_INVARIANT asks for equal bits")
        from kvdepot_vllm.encoding import seen_format

        return seen_format(cache, groups, layers, vllm.__version__), groups
    except Exception as reason:  # whatever a kernel raises, names tell caches apart
        logger.debug("the pages were not looked at", exc_info=True)
        logger.info("pages are shared only with engines of the same vLLM, attention backend and device: %s", reason)
    from vllm.platforms import current_platform

    device = str(current_platform.device_name)
    if cache.dtype not in ("float32", "float16", "bfloat16") and current_platform.is_fp8_fnuz():
        device += " fnuz"  # 8-bit floats of older AMD GPUs: other bits for the same value
    if current_platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT:
        device += " shuffled"
    groups = [replace(group, rows=1) if group.is_mla else group for group in groups]
    return named_format(cache, layers, device, vllm.__version__), groups


def _kind_of(spec: Any) -> str:
    return get_kv_cache_spec_kind(spec).value


def _permit_tiles(device: str) -> None:
    """Request AMX tiles from the kernel for this process, if vLLM's attention on CPU uses them.

    The first use of a tile without this permission ends the process with SIGILL
    (https://docs.kernel.org/arch/x86/xstate.html). vLLM 0.32 relies on an earlier matrix product of oneDNN to request
    it. No such product has run yet if an engine without warm-up loads all but one token for its first step.
    """
    if device != "cpu":
        return
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # noqa: SLF001  # torch has no other way
        logger.warning("the kernel refuses AMX tiles to this process: vLLM's attention may end with SIGILL")
