"""Derives a depot's layer groups from vLLM's KV cache groups.

Both sides of the connector use the same configuration. Ranks and stages can divide the KV heads and layers of some
groups, so that engines of any size share. Ranks can divide heads if each head's bytes are one piece of each row of a
page. Otherwise pages are opaque: their bytes fit only the rank with the same number in an engine of the same size.
Pipeline stages can divide layers if all layers of the model are alike.

With decode context parallelism, ranks with the same head divide the tokens of each block among them. A block then
spans as many times the tokens of a page, and each rank's share of a head counts as a head of the plane.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

from blake3 import blake3

from kvdepot.backends import CacheGroup
from kvdepot.errors import LayoutError
from kvdepot.layout import MAXIMUM_HEADS, GroupKind, Part, Plane, blocks_per_chunk, default_chunk_tokens
from kvdepot.wire.messages import CacheSpec, GroupShape

_LEAST_CHUNK_WITH_TAIL: Final = 128  # tokens: the incomplete chunk of smaller ones is quickly computed again
_PLAIN_SPECS: Final = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_PLAIN_DTYPES: Final = frozenset({"auto", "float16", "bfloat16", "float32"})
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_NAMES_OF_KV_HEADS: Final = re.compile(r"(kv|key_value).*head|head.*kv")


class Unsupported(LayoutError):
    """This engine cannot use a depot; the text gives the reason and the way out."""


class Seat(NamedTuple):
    """A worker's place in its engine, as vLLM numbers its ranks."""

    rank: int = 0  # tensor parallel
    stage: int = 0  # pipeline
    replica: int = 0  # prefill context parallel: replicas hold the same KV, unless they divide its tokens
    shard: int = 0  # decode context parallel


@dataclass(frozen=True, slots=True)
class EngineGroup:
    """One KV cache group of vLLM that a depot keeps."""

    number: int  # among vLLM's groups
    kind: GroupKind
    block_tokens: int  # that a block of the block table spans, over all shards
    window_tokens: int
    layer_names: tuple[str, ...]
    is_mla: bool
    states_by_position: bool  # recurrent: whether the block table holds a state for every boundary
    heads: int = 0  # KV heads of the whole model, if ranks can divide the pages; 0: the pages are opaque
    first_layer: int = 0  # the first layer of this process's stage
    num_layers: int = 0  # layers of the whole model, if stages can divide them; 0: each stage has its own kind of bytes
    num_shards: int = 1  # ranks that divide the tokens of a block

    @property
    def page_tokens(self) -> int:
        """The tokens of a block on one rank."""
        return self.block_tokens // self.num_shards

    @property
    def plane_heads(self) -> int:
        """The heads of the plane: one for each shard of each KV head."""
        return self.heads * self.num_shards

    def blocks_per_chunk(self, chunk_tokens: int) -> int:
        """Return how many blocks a chunk keeps, its last ones."""
        return blocks_per_chunk(self.kind, self.block_tokens, self.window_tokens, chunk_tokens)

    def kept(self, row: Sequence[int], first: int, stop: int, chunk_tokens: int) -> list[int]:
        """Return the blocks that chunks `first` to `stop` keep, from a row of vLLM's block table."""
        stride, count = chunk_tokens // self.block_tokens, self.blocks_per_chunk(chunk_tokens)
        ends = range((first + 1) * stride, stop * stride + 1, stride)
        return [block for end in ends for block in row[end - count : end]]


@dataclass(frozen=True, slots=True)
class EngineCache:
    """A depot's view of the KV cache of one engine."""

    groups: tuple[EngineGroup, ...]
    num_groups: int  # vLLM's number of groups
    chunk_tokens: int
    num_ranks: int  # tensor parallel ranks
    dtype: str
    format: str = ""  # only the workers know it
    volatile_tokens: int = 0  # the last computed tokens, whose KV a draft model may still write again
    state_step: int = 0  # recurrent: vLLM keeps the state at the last multiple of this before the end of a prompt
    num_stages: int = 1  # stages of the pipeline
    num_replicas: int = 1  # workers of a stage with the same tensor parallel rank
    interleave_tokens: int = 1  # a shard's neighbouring tokens
    layout: str = ""  # vLLM's name for the order of a block's bytes
    shapes: tuple[GroupShape, ...] = ()  # by group, as the workers register them; only they know the form of pages

    @property
    def num_workers(self) -> int:
        """The number of workers of the engine. vLLM's `world_size` may count all data-parallel replicas."""
        return self.num_stages * self.num_replicas * self.num_ranks

    @property
    def num_recurrent(self) -> int:
        """The number of groups that keep recurrent states."""
        return sum(group.kind is GroupKind.RECURRENT for group in self.groups)

    @property
    def num_kept(self) -> tuple[int, ...]:
        """The number of blocks that a chunk keeps, by group."""
        return tuple(group.blocks_per_chunk(self.chunk_tokens) for group in self.groups)

    @property
    def has_short_window(self) -> bool:
        """Whether a chunk keeps only its end in a group of windows."""
        return any(
            group.kind is GroupKind.SLIDING_WINDOW and kept * group.block_tokens < self.chunk_tokens
            for group, kept in zip(self.groups, self.num_kept, strict=True)
        )

    def tail_end(self, prompt_tokens: int) -> int:
        """Return the token up to which prefill engines hand a prompt over, with its last, incomplete chunk.

        Return 0 if chunks are so small that an incomplete one is not worth handing over. A short window ends elsewhere
        in an incomplete chunk, and could need one block more than a chunk keeps.
        """
        if self.chunk_tokens < _LEAST_CHUNK_WITH_TAIL or self.has_short_window:
            return 0
        if not self.num_recurrent:
            return prompt_tokens
        return (prompt_tokens - 1) // self.state_step * self.state_step if self.state_step else 0

    @property
    def spec(self) -> CacheSpec:
        """The cache spec that workers and scheduler register."""
        return CacheSpec(self.chunk_tokens, self.shapes, self.dtype, self.format)

    @property
    def division(self) -> str:
        """The division of a block's tokens among ranks and the kept ends of chunks, as a part of the format, or ""."""
        shards = max(group.num_shards for group in self.groups)
        text = f" cp{shards}x{self.interleave_tokens}" if shards > 1 else ""
        return text + " ends" + "-".join(map(str, self.num_kept)) if self.has_short_window else text

    def number_of(self, seat: Seat) -> int:
        """Return the number of a worker in its engine."""
        return (seat.stage * self.num_replicas + seat.replica) * self.num_ranks + seat.rank

    def part(self, group: EngineGroup, seat: Seat) -> tuple[Part, Plane]:
        """Return the part of a group that a worker holds, and the group's plane."""
        if not group.heads:
            return Part(self.number_of(seat)), Plane(self.num_workers)
        # With more ranks than heads, several ranks hold the same head: equal parts, or shards of it.
        first, held = seat.rank * group.heads // self.num_ranks, max(1, group.heads // self.num_ranks)
        first += seat.shard % group.num_shards * group.heads  # groups that vLLM does not divide have one shard
        if group.num_layers:
            part = Part(group.first_layer, len(group.layer_names), first, held)
            return part, Plane(group.num_layers, group.plane_heads)
        return Part(seat.stage, 1, first, held), Plane(self.num_stages, group.plane_heads)


def engine_cache(
    vllm_config: Any, kv_cache_config: Any, kind_of: Callable[[Any], str], chunk_tokens: int | None
) -> EngineCache:
    """Return the cache of an engine.

    Args:
        vllm_config: `VllmConfig`.
        kv_cache_config: `KVCacheConfig`, of the scheduler or of any worker.
        kind_of: vLLM's name for the kind of a KV cache spec.
        chunk_tokens: None for the default: the fewest whole blocks of at least 64 tokens, or with windows or recurrent
            states the smallest size that all groups support.

    Raises:
        Unsupported: with the reason.
    """
    parallel = vllm_config.parallel_config
    num_ranks, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    num_replicas = getattr(parallel, "prefill_context_parallel_size", 1)
    num_workers = num_ranks * num_replicas * num_stages
    if parallel.distributed_executor_backend == "external_launcher" and num_workers > 1:
        raise Unsupported(
            f"each of {num_workers} ranks of an external_launcher schedules for itself: a load that ends later on one"
            " of them would put them out of step"
        )
    if _reuses_nothing(vllm_config):
        raise Unsupported(
            "vLLM has switched prefix caching and chunked prefill off, because its latent attention on this CPU"
            " computes the rest of a prompt differently after a hit: use a CPU with AMX, or a GPU. If you switched both"
            " off, leave chunked prefill on"
        )
    groups = [
        _engine_group(vllm_config, kv_cache_config, number, group, kind_of)
        for number, group in enumerate(kv_cache_config.kv_cache_groups)
        if group.enable_kv_transfer
    ]
    if not groups:
        raise Unsupported("no KV cache group of this model can be transferred")
    block_tokens = [group.block_tokens for group in groups]
    state_step = kv_cache_config.cache_hit_alignment_tokens or 0
    step = math.lcm(*block_tokens, state_step or 1)
    if chunk_tokens is None:
        # vLLM keeps a prompt's recurrent state at its last multiple of `step`, where longer chunks seldom end. And of a
        # window, each longer chunk would keep more than the window reaches.
        is_full = all(group.kind is GroupKind.FULL_ATTENTION for group in groups)
        chunk_tokens = default_chunk_tokens([step]) if is_full else step
    if chunk_tokens % step:
        raise Unsupported(f"kvdepot.chunk_tokens is {chunk_tokens}: give a multiple of {step}, or leave it out")
    return EngineCache(
        groups=tuple(groups),
        num_groups=len(kv_cache_config.kv_cache_groups),
        chunk_tokens=chunk_tokens,
        num_ranks=num_ranks,
        dtype=_dtype(vllm_config),
        volatile_tokens=_volatile_tokens(vllm_config, kv_cache_config),
        state_step=state_step,
        num_stages=num_stages,
        num_replicas=num_replicas,
        interleave_tokens=getattr(parallel, "cp_kv_cache_interleave_size", 1),
        layout=str(kv_cache_config.kv_cache_layout),
    )


def _reuses_nothing(vllm_config: Any) -> bool:
    """Return whether vLLM computes only whole prompts, as its latent attention does on a CPU without AMX.

    A user who switches prefix caching off keeps chunked prefill, and may use a depot instead of vLLM's own cache.
    """
    return (
        vllm_config.device_config.device_type == "cpu"
        and vllm_config.model_config.use_mla
        and not vllm_config.cache_config.enable_prefix_caching
        and not vllm_config.scheduler_config.enable_chunked_prefill
    )


def _volatile_tokens(vllm_config: Any, kv_cache_config: Any) -> int:
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None or not any(group.is_eagle_group for group in kv_cache_config.kv_cache_groups):
        return 0
    return 1 + int(speculative.num_speculative_tokens)


def _engine_group(
    vllm_config: Any, kv_cache_config: Any, number: int, group: Any, kind_of: Callable[[Any], str]
) -> EngineGroup:
    spec = group.kv_cache_spec
    name, kind = type(spec).__name__, kind_of(spec)
    window, states_by_position = 0, False
    if name in ("RSWASpec", "HiddenStateCacheSpec") or not spec.prefix_cacheable or group.host_resident:
        reason = f"KV cache group {number} ({name}) keeps no prefix that could be reused"
        if getattr(spec, "prefix_replay_tokens", 0):  # DeepSeek-V4.1
            reason += ": vLLM computes its windows again after a hit. Start vLLM with --no-swa-bounded-replay"
        raise Unsupported(reason)
    if kind in ("full_attention", "mla_attention"):
        ours = GroupKind.FULL_ATTENTION
    elif kind in ("sliding_window", "sliding_window_mla"):
        ours = GroupKind.SLIDING_WINDOW
        window = _common(spec, "sliding_window") + _common(spec, "extra_retained_tokens", 0)
    elif kind == "chunked_local_attention":
        ours = GroupKind.SLIDING_WINDOW
        window = _common(spec, "attention_chunk_size") + 1  # at most one attention chunk back
    elif kind == "mamba":
        ours = GroupKind.RECURRENT
        mode = _common(spec, "mamba_cache_mode")
        states_by_position = mode == "all"
        if mode not in ("all", "align"):
            raise Unsupported(
                f"KV cache group {number} keeps recurrent states only at a request's end (mamba_cache_mode {mode!r}):"
                " start vLLM with prefix caching, --mamba-cache-mode align"
            )
    else:
        raise Unsupported(f"KV cache group {number} is {kind} ({name}), which is not supported")
    shards = _shards_of(vllm_config, number, spec)
    heads = heads_of(vllm_config, group, kind)
    return EngineGroup(
        number,
        ours,
        spec.block_size * shards,
        window,
        tuple(group.layer_names),
        "mla" in kind,
        states_by_position,
        heads if heads * shards <= MAXIMUM_HEADS else 0,
        *layers_of(vllm_config, kv_cache_config, group),
        shards,
    )


def _shards_of(vllm_config: Any, number: int, spec: Any) -> int:
    """Return the number of ranks that divide the tokens of a group's blocks among them.

    Tokens `n * i` to `n * (i + 1)` of a block are in shard `i % shards`, where `n` is the interleave.
    """
    parallel = vllm_config.parallel_config
    shards = getattr(parallel, "decode_context_parallel_size", 1)
    if shards == 1 or not spec.dcp_sharded:
        return 1
    interleave = parallel.cp_kv_cache_interleave_size
    # A shard's tokens would not be the same in blocks of another size, and vLLM does not say which they are.
    if not interleave or spec.block_size % interleave:
        raise Unsupported(
            f"KV cache group {number}: {shards} ranks divide blocks of {spec.block_size} tokens by an interleave of"
            f" {interleave}: give a --cp-kv-cache-interleave-size that divides the block"
        )
    return shards


def _common(spec: Any, name: str, *default: Any) -> Any:
    """Return an attribute of a spec, or of the specs of its layers if they agree."""
    inner: Mapping[str, Any] | None = getattr(spec, "kv_cache_specs", None)
    values = {getattr(layer, name, *default) for layer in (inner.values() if inner else [spec])}
    if len(values) != 1:
        raise Unsupported(f"layers of one KV cache group differ in {name}: {sorted(map(str, values))}")
    return values.pop()


def _dtype(vllm_config: Any) -> str:
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    return str(vllm_config.model_config.dtype).removeprefix("torch.") if cache_dtype == "auto" else cache_dtype


def heads_of(vllm_config: Any, group: Any, kind: str) -> int:
    """Return the KV heads of a group in the whole model, 0 if its pages are opaque. Latent attention has one.

    Args:
        vllm_config: `VllmConfig`.
        group: `KVCacheGroupSpec`.
        kind: vLLM's name for the kind of its spec.
    """
    spec = group.kv_cache_spec
    layers = list(getattr(spec, "kv_cache_specs", {"": spec}).values())
    if "mla" in kind:
        return int(all(getattr(layer, "max_tp_shards", None) == 1 for layer in layers))  # every rank has the same
    if getattr(group, "is_eagle_group", False) or str(vllm_config.cache_config.cache_dtype) not in _PLAIN_DTYPES:
        return 0  # the heads of a drafter are its own; a quantised page may have scales between its heads
    heads, ranks = _total_heads(vllm_config.model_config), vllm_config.parallel_config.tensor_parallel_size
    if not 0 < heads <= MAXIMUM_HEADS or (heads % ranks and ranks % heads):
        return 0
    return heads if all(_is_plain(layer, max(1, heads // ranks)) for layer in layers) else 0


def layers_of(vllm_config: Any, kv_cache_config: Any, group: Any) -> tuple[int, int]:
    """Return the first layer of this process's stage, and the number of layers of the model; 0, 0 if stages differ.

    All stages must give the same answer, though each sees only its own layers. So a model that may have layers without
    a KV cache of their own gives 0, 0, wherever these layers are.

    Args:
        vllm_config: `VllmConfig`.
        kv_cache_config: `KVCacheConfig` of this worker.
        group: this worker's `KVCacheGroupSpec`.
    """
    model = vllm_config.model_config
    config: Any = getattr(model, "hf_text_config", None)
    if (
        len(kv_cache_config.kv_cache_groups) > 1  # vLLM forms the groups anew for each number of stages
        or vllm_config.speculative_config is not None  # the layers of a drafter are in the last stage
        or model.is_hybrid
        or model.has_noops
        or any("shared" in name and "kv" in name and value for name, value in config.to_dict().items())
    ):
        return 0, 0
    first, end = model.get_layers_start_end_indices(vllm_config.parallel_config)
    numbers = [_NUMBER.findall(name) for name in group.layer_names]
    is_whole = numbers == [[str(number)] for number in range(first, end)]
    return (first, model.get_total_num_hidden_layers()) if is_whole else (0, 0)


def name_of_layers(name: str) -> str:
    """Return the name that layers of a model have in common, without their number."""
    return _NUMBER.sub("*", name)


def _total_heads(model: Any) -> int:
    """Return the number of KV heads of a model; 0 if its layers differ in it, or if it is unknown."""
    config: Any = getattr(model, "hf_text_config", None)
    if not hasattr(config, "to_dict") or getattr(model.model_arch_config, "per_layer_overrides", None):
        return 0
    heads = int(model.get_total_num_kv_heads())
    # With more ranks than heads, each rank has one head. Then only other fields of the configuration show that some
    # layers have another number of heads.
    named = (value for name, value in config.to_dict().items() if _NAMES_OF_KV_HEADS.search(name))
    return heads if all(value in (None, heads) for value in named) else 0


def _is_plain(spec: Any, heads: int) -> bool:
    return (
        type(spec).__name__ in _PLAIN_SPECS
        and spec.num_kv_heads == heads
        and getattr(spec, "num_head_slots", None) in (None, heads)
        and getattr(spec, "state_content_bytes", None) is None
        and getattr(spec, "tokens_per_state", 1) == 1
    )


def named_format(cache: EngineCache, layers: Mapping[str, Any], device: str, version: str) -> str:
    """Return a worker's format, made of the names of everything that decides how bytes lie within a block.

    Among them is the code that packs a block's bytes: the attention backend that vLLM chose for each layer and, on CPU,
    the instruction set whose kernels pack the keys. The scheduler's process knows neither, so it takes the format from
    its workers.

    Args:
        cache: the engine's cache.
        layers: vLLM's attention layers by name, in the worker's process.
        device: the kind of device, with everything else about it that changes the bytes.
        version: vLLM's version; another minor version may lay out blocks differently.

    Raises:
        Unsupported: a layer does not name its attention backend or instruction set.
    """
    packers = [
        "+".join(sorted({_packer(group, name, layers, device) for name in group.layer_names})) for group in cache.groups
    ]
    minor, digest = ".".join(version.split(".")[:2]), blake3(derive_key_context="kvdepot 2026-11 format")
    digest.update(repr((cache.layout, device, packers)).encode())
    return f"vllm {minor} pp{cache.num_stages} named {digest.hexdigest()[:32]}"


def _packer(group: EngineGroup, name: str, layers: Mapping[str, Any], device: str) -> str:
    layer = layers.get(name)
    if not hasattr(layer, "get_attn_backend"):
        raise Unsupported(f"KV cache group {group.number}: vLLM does not say which attention backend layer {name} has")
    backend = _backend_of(layer)
    if device != "cpu" or group.is_mla or group.kind is GroupKind.RECURRENT:
        return backend
    instructions = getattr(layer, "isa", None)
    if not instructions:
        raise Unsupported(f"KV cache group {group.number}: vLLM does not say for which instructions {name} packs keys")
    return f"{backend}/{instructions}"


def _backend_of(layer: Any) -> str:
    return str(layer.get_attn_backend().__name__) if hasattr(layer, "get_attn_backend") else ""


def worker_groups(
    cache: EngineCache,
    kv_caches: Mapping[str, Any],
    num_blocks: int,
    seat: Seat = Seat(),  # noqa: B008  # immutable
    *,
    cuts_pages: Callable[[int], bool] = lambda _row_tokens: False,
    layers: Mapping[str, Any] = MappingProxyType({}),
) -> list[CacheGroup]:
    """Return one worker's KV cache as a backend takes it.

    Args:
        cache: the engine's cache.
        kv_caches: layer name to tensor, or to a tuple of keys and values, as vLLM registers them.
        num_blocks: blocks of the engine's block table.
        seat: this worker's place in its engine.
        cuts_pages: see `Backend`.
        layers: vLLM's attention layers by name. Operators see the names of their backends.

    Raises:
        Unsupported: a layer has no tensor here, or its blocks cannot be told apart.
    """
    result: list[CacheGroup] = []
    for group in cache.groups:
        pages = _layers(group, kv_caches)
        tensors = [tensor for page in pages for tensor in page]
        physical = {int(tensor.shape[0]) for tensor in tensors}
        if len(physical) != 1 or min(physical) % num_blocks:
            raise Unsupported(f"KV cache group {group.number}: {num_blocks} blocks in tensors of {sorted(physical)}")
        ratio = physical.pop() // num_blocks
        rows = _rows_of(cache.layout, group.page_tokens, ratio)
        if group.is_mla:
            rows = group.page_tokens  # one row a token, unless no probe confirms it (`setup._seen_or_named`)
        elif not cuts_pages(group.page_tokens // rows) or not lie_apart(
            tensors, rows // ratio, max(1, group.heads // cache.num_ranks)
        ):
            group = replace(group, heads=0)
        if len(pages) != len(group.layer_names) or len({_shapes(page) for page in pages}) > 1:
            group = replace(group, num_layers=0)
        part, plane = cache.part(group, seat)
        result.append(
            CacheGroup(
                [_by_logical_block(tensor, ratio) for tensor in tensors],
                group.block_tokens,
                group.kind,
                group.window_tokens,
                part,
                plane,
                rows if group.heads else 1,
                num_layers=len(group.layer_names) if len(pages) == len(tensors) else len(pages),
                physical_block_tokens=group.page_tokens // ratio,
                hidden_dims=tuple(int(size) for size in tensors[0].shape[1:])[:8],
                is_mla=group.is_mla,
                attention_backend="+".join(sorted({_backend_of(layers.get(name)) for name in group.layer_names})),
            )
        )
    return result


def _rows_of(layout: str, block_tokens: int, kernel_blocks: int) -> int:
    """Return the rows of a page, each with all heads of a rank.

    Args:
        layout: vLLM's name for the order in memory: L(ayers), B(locks), H(eads), N (tokens), C(ontent).
        block_tokens: tokens of a block in the block table.
        kernel_blocks: the kernel's blocks in such a block.
    """
    return kernel_blocks if layout.find("H") < layout.find("N") else block_tokens


def lie_apart(tensors: Iterable[Any], rows: int, heads: int) -> bool:
    """Return whether blocks of tensors `(num_blocks, ...)` are rows of heads in memory. A single head always is."""
    return heads == 1 or all(_lie_apart(tensor, rows, heads) for tensor in tensors)


def _lie_apart(tensor: Any, rows: int, heads: int) -> bool:
    order = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True), reverse=True)
    sizes = [int(size) for _, size in order if size != 1]
    return any(math.prod(sizes[:n]) == rows and sizes[n] == heads for n in range(len(sizes)))


def _shapes(layer: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(tensor.shape) for tensor in layer)


def _layers(group: EngineGroup, kv_caches: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    """Return each layer's tensors: one, or keys and values. Layers that share memory count once.

    vllm-gaudi registers a `TensorTuple((keys, values))` for each layer, and one tensor for latent attention.
    """
    found: dict[tuple[int, ...], tuple[Any, ...]] = {}
    for name in group.layer_names:
        if name not in kv_caches:
            raise Unsupported(f"KV cache group {group.number}: vLLM registered no tensor for layer {name}")
        layer = kv_caches[name]
        tensors = tuple(cast("Iterable[Any]", layer)) if isinstance(layer, list | tuple) else (layer,)
        if len(tensors) != 1 and (len(tensors) != 2 or group.kind is GroupKind.RECURRENT):
            raise Unsupported(
                f"KV cache group {group.number}: layer {name} ({group.kind}) has {len(tensors)} tensors; 1, or 2"
                " (keys, values), are supported"
            )
        found.setdefault(tuple(tensor.data_ptr() for tensor in tensors), tensors)
    if not found:
        raise Unsupported(f"KV cache group {group.number} has no layer on this worker")
    if len({len(tensors) for tensors in found.values()}) != 1:
        raise Unsupported(f"KV cache group {group.number}: some layers have keys and values apart, and some do not")
    return list(found.values())


def _by_logical_block(tensor: Any, ratio: int) -> Any:
    """Return the tensor with blocks of the block table as its first dimension."""
    if ratio == 1:
        return tensor
    try:
        return tensor.view(tensor.shape[0] // ratio, ratio, *tensor.shape[1:])
    except RuntimeError as error:
        raise Unsupported(f"kernel blocks of {tuple(tensor.shape)} do not join to blocks: {error}") from error
