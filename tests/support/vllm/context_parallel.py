# pyright: basic, reportMissingImports=false
"""Engines with context parallelism, without a model: ranks with vLLM's own pages, filled as vLLM's kernel says."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    MLAAttentionSpec,
    compute_layout_strides,
    create_kv_cache_views,
    get_kv_cache_spec_kind,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvdepot.backends import KVCache
from kvdepot.client.scheduler import SchedulerClient
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.wire.messages import CacheSpec
from kvdepot_cpu import backend
from kvdepot_vllm.groups import EngineCache, Seat, engine_cache, worker_groups
from support.vllm import contract
from support.vllm.slots import slots_of_v1

KERNEL = contract.describe(contract.reader(Path(vllm.__path__[0]).parent))["kernels"]["v1"]
LAYERS, BLOCKS, WAIT = ("model.layers.0.attn", "model.layers.1.attn"), 24, 60.0


@dataclass(frozen=True)
class Shape:
    """How an engine divides and keeps its cache."""

    size: int  # tensor parallel ranks
    shards: int = 1
    interleave: int = 1
    page_tokens: int = 16
    replicas: int = 1  # prefill context parallel
    latent: bool = False
    layout: str = "LBNHC"
    heads: int = 2

    def seats(self) -> Iterator[Seat]:
        """Yield the places of the workers, with the shards that vLLM's `initialize_model_parallel` gives them."""
        for replica in range(self.replicas):
            for rank in range(self.size):
                whole = self.replicas > 1 and self.shards == self.size * self.replicas
                by_replica = self.replicas > 1 and self.shards > 1
                shard = rank * self.replicas + replica if whole else replica if by_replica else rank % self.shards
                yield Seat(rank, 0, replica, shard)

    def spec(self) -> Any:
        """Return vLLM's own spec of a layer."""
        if self.latent:
            return MLAAttentionSpec(
                block_size=self.page_tokens, num_kv_heads=1, head_size=24, dtype=torch.int8, max_tp_shards=1
            )
        held = max(1, self.heads // self.size)
        return FullAttentionSpec(block_size=self.page_tokens, num_kv_heads=held, head_size=8, dtype=torch.int8)

    def config(self) -> Any:
        """Return what the connector reads of a `VllmConfig`."""
        heads = 1 if self.latent else self.heads
        model = SimpleNamespace(
            dtype="torch.bfloat16",
            is_hybrid=False,
            has_noops=False,
            model_arch_config=SimpleNamespace(per_layer_overrides=None),
            hf_text_config=SimpleNamespace(to_dict=lambda: {"num_key_value_heads": heads}),
            get_total_num_kv_heads=lambda: heads,
            get_layers_start_end_indices=lambda _: (0, len(LAYERS)),
            get_total_num_hidden_layers=lambda: len(LAYERS),
        )
        return SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=self.size,
                pipeline_parallel_size=1,
                prefill_context_parallel_size=self.replicas,
                decode_context_parallel_size=self.shards,
                cp_kv_cache_interleave_size=self.interleave,
                distributed_executor_backend="mp",
            ),
            device_config=SimpleNamespace(device_type="cuda"),
            cache_config=SimpleNamespace(cache_dtype="auto"),
            model_config=model,
            speculative_config=None,
        )

    def cache(self, chunk_tokens: int | None) -> EngineCache:
        """Return the engine's cache, as both sides of the connector find it."""
        group = SimpleNamespace(
            kv_cache_spec=self.spec(),
            layer_names=LAYERS,
            enable_kv_transfer=True,
            host_resident=False,
            is_eagle_group=False,
        )
        step = self.page_tokens * self.shards
        found = SimpleNamespace(kv_cache_groups=[group], cache_hit_alignment_tokens=step, kv_cache_layout=self.layout)
        return engine_cache(self.config(), found, lambda spec: get_kv_cache_spec_kind(spec).value, chunk_tokens)


class Rank:
    """A worker: its pages, and a context of the depot."""

    def __init__(self, shape: Shape, cache: EngineCache, seat: Seat, url: str) -> None:
        self.shape, self.seat = shape, seat
        spec = shape.spec()
        layout = KVCacheLayout[shape.layout]
        raw = torch.zeros(len(LAYERS) * BLOCKS * spec.page_size_bytes, dtype=torch.int8)
        layer_stride, block_stride, *_ = compute_layout_strides(spec, BLOCKS, len(LAYERS), layout)
        place = KVCacheTensor(
            size=raw.numel(), layers=list(LAYERS), layer_stride=layer_stride, block_stride=block_stride
        )
        self.raw = raw
        self.views = create_kv_cache_views(raw, spec, BLOCKS, layout, place)  # (blocks, heads, tokens, content)
        groups = worker_groups(
            cache, dict(zip(LAYERS, self.views, strict=True)), BLOCKS, seat, cuts_pages=lambda _: True
        )
        self.part = groups[0].part
        self.context = backend.create_context(
            KVCache(
                groups,
                f"{shape}",
                cache.dtype,
                rank=cache.number_of(seat),
                world_size=cache.num_workers,
                format=cache.format,
                chunk_tokens=cache.chunk_tokens,
            ),
            url=url,
            synchronous=True,
            deadline_seconds=WAIT,
        )
        self.spec: CacheSpec = self.context.spec

    def pages(self, whole: Any, table: list[int]) -> Any:
        """Return the pages of a prompt, `(layers, blocks, heads, page_tokens, content)`, by a transposition.

        Args:
            whole: KV of the whole model, `(layers, tokens, heads, content)`.
            table: blocks of the prompt.
        """
        shape, heads = self.shape, whole.shape[2]
        first, held = self.seat.rank * heads // shape.size, max(1, heads // shape.size)
        rounds = shape.page_tokens // shape.interleave
        cut = whole[:, :, first : first + held].reshape(
            len(LAYERS), len(table), rounds, shape.shards, shape.interleave, held, -1
        )
        own = cut[:, :, :, self.seat.shard].reshape(len(LAYERS), len(table), shape.page_tokens, held, -1)
        return own.transpose(2, 3)

    def fill(self, whole: Any, table: list[int]) -> None:
        """Write a prompt's KV at the slots of vLLM's kernel, token by token."""
        shape, heads = self.shape, whole.shape[2]
        first, held = self.seat.rank * heads // shape.size, max(1, heads // shape.size)
        arguments = (whole.shape[1], shape.page_tokens, shape.shards, self.seat.shard, shape.interleave)
        for token, slot in enumerate(slots_of_v1(KERNEL, table, *arguments)):
            if slot >= 0:
                for layer, view in enumerate(self.views):
                    view[slot // shape.page_tokens, :, slot % shape.page_tokens] = whole[
                        layer, token, first : first + held
                    ]

    def has(self, whole: Any, table: list[int]) -> bool:
        """Return whether the pages hold a prompt's KV."""
        return torch.equal(torch.stack([view[table] for view in self.views]), self.pages(whole, table))


class Engine:
    """All ranks of an engine, in one process."""

    def __init__(self, shape: Shape, url: str, chunk_tokens: int | None = None) -> None:
        cache = shape.cache(chunk_tokens)
        self.shape, self.url = shape, url
        self.cache = replace(cache, format="test" + cache.division)
        self.ranks = [Rank(shape, self.cache, seat, url) for seat in shape.seats()]
        for rank in self.ranks:
            rank.context.wait_until_connected(WAIT)

    def prompt(self, salt: int, num_chunks: int = 2) -> tuple[KeyRun, Any]:
        """Return the key of a prompt, and its KV in the whole model."""
        num_tokens = num_chunks * self.cache.chunk_tokens
        run = hash_prefix(Namespace("test", tenant_salt=str(salt)), self.cache.chunk_tokens, range(num_tokens))
        spec, generator = self.shape.spec(), torch.Generator().manual_seed(salt)
        heads = 1 if self.shape.latent else self.shape.heads
        content = spec.page_size_bytes // (spec.block_size * spec.num_kv_heads)
        whole = torch.randint(-128, 128, (len(LAYERS), num_tokens, heads, content), generator=generator)
        return run, whole.to(torch.int8)

    def table(self, run: KeyRun, seed: int) -> list[int]:
        """Return blocks for a prompt, in disorder."""
        count = run.num_chunks * self.cache.chunk_tokens // self.cache.groups[0].block_tokens
        return torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(seed))[:count].tolist()

    def store(self, salt: int, ranks: slice = slice(None)) -> bool:
        """Store a prompt from some ranks, which compute it as vLLM would."""
        run, whole = self.prompt(salt)
        table = self.table(run, salt)
        for rank in self.ranks[ranks]:
            rank.fill(whole, table)
            assert rank.has(whole, table), "vLLM's kernel and the transposition agree"
        futures = [rank.context.submit_store("request", run, [table]) for rank in self.ranks[ranks]]
        return all(future.result(WAIT) for future in futures)

    def found(self, salt: int) -> int:
        """Return the number of a prompt's chunks that a lookup finds."""
        run, _ = self.prompt(salt)
        with SchedulerClient(self.ranks[0].spec, "scheduler", url=self.url) as scheduler:
            scheduler.wait_until_connected(WAIT)
            return scheduler.lookup("request", run).num_chunks

    def load(self, salt: int) -> bool:
        """Load a prompt into other blocks of all ranks. Return whether each rank has its own bytes of it."""
        run, whole = self.prompt(salt)
        table = self.table(run, salt + 1000)
        for rank in self.ranks:
            rank.raw.zero_()
            if not rank.context.submit_retrieve("request", run, [table]).result(WAIT):
                return False
        return all(rank.has(whole, table) for rank in self.ranks)

    def close(self) -> None:
        """Leave the depot."""
        for rank in self.ranks:
            rank.context.close()
