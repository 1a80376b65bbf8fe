# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
"""The caches of models with sparse and compressed latent attention, by vLLM's own layers and groups, without a model.

`of_v32` and `of_v4` have the layers of DeepSeek-V3.2 and V4 that keep something, `round_trip` stores blocks of every
group of such an engine in a depot and loads them into others.
"""

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v4.attention import DeepseekV4Attention, DeepseekV4IndexerCache
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32
    planning = kv_cache_utils

from kvdepot.backends import KVCache
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot_cpu import backend
from kvdepot_vllm.groups import EngineCache, Seat, engine_cache, named_format, worker_groups

LAYOUT, NUM_BLOCKS, CHUNKS, WAIT = KVCacheLayout.BLNHC, 768, 2, 60.0
Specs = dict[str, Any]


class Packed:
    """A layer of the main attention, as far as its cache goes."""

    def __init__(self, layer: Any, **fields: Any) -> None:
        self._layer, self._fields = layer, SimpleNamespace(kv_cache_dtype="fp8_ds_mla", **fields)

    def get_kv_cache_spec(self, config: Any) -> Any:
        return self._layer.get_kv_cache_spec(self._fields, config)

    def get_attn_backend(self) -> Any:
        return type("FLASHMLA_SPARSE", (), {})


def new_config(block_tokens: int) -> Any:
    """Return a configuration without a model, in whose context layers are made."""
    config = VllmConfig()
    config.cache_config.block_size, config.cache_config.cache_dtype = block_tokens, "fp8_ds_mla"
    config.cache_config.kv_cache_layout = LAYOUT.name
    return config


def of_v32(num_layers: int = 4) -> tuple[Any, dict[str, Any]]:
    """Return the layers of DeepSeek-V3.2: packed latent vectors, and the keys of the indexer."""
    config, layers = new_config(64), dict[str, Any]()
    fields = {"head_size": 576, "sliding_window": None, "topk_buffer_width": 2048, "indexer": None}
    with set_current_vllm_config(config):
        for number in range(num_layers):
            name = f"model.layers.{number}.self_attn"
            layers[f"{name}.attn"] = Packed(MLAAttention, non_causal_multi_token_decode=False, **fields)
            layers[f"{name}.indexer.k_cache"] = DeepseekV32IndexerCache(
                132, torch.uint8, f"{name}.indexer.k_cache", config.cache_config
            )
    return config, layers


def of_v4(ratios: tuple[int, ...] = (1, 1, 4, 128, 4, 128)) -> tuple[Any, dict[str, Any]]:
    """Return the layers of DeepSeek-V4: windows, compressed vectors, states of compressors, and keys of indexers."""
    config, layers = new_config(256), dict[str, Any]()
    with set_current_vllm_config(config):
        for number, ratio in enumerate(ratios):
            name = f"model.layers.{number}.attn"
            layers[f"{name}.swa_cache"] = DeepseekV4SWACache(
                512, 128, torch.uint8, f"{name}.swa_cache", config.cache_config
            )
            if ratio == 1:
                continue
            layers[name] = Packed(DeepseekV4Attention, compress_ratio=ratio, head_dim=512)
            state = f"{name}.compressor.state_cache"
            coefficient = 1 + (ratio == 4)
            layers[state] = CompressorStateCache(2 * coefficient * 512, torch.float32, ratio, state)
            if ratio == 4:
                keys, state = f"{name}.indexer.k_cache", f"{name}.indexer.compressor.state_cache"
                layers[keys] = DeepseekV4IndexerCache(132, torch.uint8, keys, config.cache_config, ratio)
                layers[state] = CompressorStateCache(2 * coefficient * 128, torch.float32, ratio, state)
    return config, layers


class SparseEngine:
    """One worker of an engine with these layers, with zeroed memory."""

    def __init__(self, config: Any, layers: dict[str, Any]) -> None:
        specs: Specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
        groups = planning.get_kv_cache_groups(config, specs)
        page = planning._get_kv_cache_bytes_per_block(groups, LAYOUT)  # noqa: SLF001
        self.config = planning.get_kv_cache_config_from_groups(config, groups, page * NUM_BLOCKS)
        self.config.kv_cache_layout = LAYOUT
        self.views = allocate_kv_cache(self.config, torch.device("cpu"), LAYOUT)
        self.specs, self.layers, self.vllm_config = specs, layers, config

    def cache(self, *, ranks: int = 1) -> EngineCache:
        """Return the cache as the connector sees it."""
        given = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=ranks, pipeline_parallel_size=1, distributed_executor_backend="mp"
            ),
            device_config=SimpleNamespace(device_type="cuda"),
            cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla"),
            model_config=SimpleNamespace(
                is_hybrid=False, has_noops=False, hf_text_config=SimpleNamespace(to_dict=dict),
                get_layers_start_end_indices=lambda _: (0, 1),
            ),
            speculative_config=None,
        )  # fmt: skip
        return engine_cache(given, self.config, lambda spec: get_kv_cache_spec_kind(spec).value, None)

    def groups(self, cache: EngineCache) -> list[Any]:
        """Return what a worker registers: pages that nothing has probed, so each is one row."""
        found = worker_groups(cache, self.views, self.config.num_blocks, Seat(), layers=self.layers)
        return [replace(group, rows=1) if group.is_mla else group for group in found]

    def pages(self, group: Any, block: int) -> Iterator[tuple[str, Any]]:
        """Yield the pages of one block by layer."""
        for name in group.layer_names:
            yield name, self.views[name][block]


def round_trip(config: Any, layers: dict[str, Any], depot: DepotProcess) -> dict[str, Any]:
    """Store random bytes of blocks of every group, load them into other blocks, and compare every byte of every layer.

    Return the tokens of a chunk, each group's kind with the tokens of its blocks and window, the parts of all groups on
    eight ranks, and the bytes of a token by group, as `kvdepot status` shows them.
    """
    engine = SparseEngine(config, layers)
    cache = engine.cache()
    text = named_format(cache, layers, "cuda", vllm.__version__)
    context = backend.create_context(
        KVCache(engine.groups(cache), "engine", cache.dtype, format=text, chunk_tokens=cache.chunk_tokens),
        url=depot.url, synchronous=True, deadline_seconds=WAIT,
    )  # fmt: skip
    context.wait_until_connected(WAIT)
    run = hash_prefix(Namespace("sparse"), cache.chunk_tokens, range(CHUNKS * cache.chunk_tokens))
    order = torch.randperm(engine.config.num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
    tables: list[tuple[list[int], list[int]]] = []
    for group in cache.groups:  # a block belongs to one group at a time
        count = group.blocks_per_chunk(cache.chunk_tokens)
        if group.kind is not GroupKind.SLIDING_WINDOW:  # the last chunk has the window
            count *= CHUNKS
        tables.append(([order.pop() for _ in range(count)], [order.pop() for _ in range(count)]))
    expected: list[dict[str, list[Any]]] = []
    generator = torch.Generator().manual_seed(5)
    for group, (stored, _) in zip(cache.groups, tables, strict=True):
        kept: dict[str, list[Any]] = {}
        for block in stored:
            for name, page in engine.pages(group, block):
                raw = page.view(torch.uint8)
                raw.copy_(torch.randint(0, 256, raw.shape, generator=generator, dtype=torch.uint8))
                kept.setdefault(name, []).append(raw.clone())
        expected.append(kept)
    assert context.submit_store("request", run, [stored for stored, _ in tables]).result(WAIT)
    for view in engine.views.values():
        view.view(torch.uint8).zero_()
    future = context.submit_retrieve("request", run, [loaded for _, loaded in tables])
    assert future.result(WAIT)
    names: set[str] = set()
    for group, kept, (_, loaded) in zip(cache.groups, expected, tables, strict=True):
        for place, block in enumerate(loaded):
            for name, page in engine.pages(group, block):
                assert torch.equal(page.view(torch.uint8), kept[name][place]), (name, place)
                names.add(name)
    (worker,) = (each for each in depot.status().contexts if each.role == "worker")
    context.close()
    assert names == set(layers), "a layer that keeps something is not stored"
    eight = engine.cache(ranks=8)
    return {
        "chunk": cache.chunk_tokens,
        "groups": [f"{group.kind} {group.block_tokens} {group.window_tokens}" for group in cache.groups],
        "parts": len({eight.part(group, Seat(rank)) for group in eight.groups for rank in range(8)}),
        "bytes": [group.bytes_per_token for group in worker.groups],
    }
