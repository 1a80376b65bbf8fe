# pyright: basic, reportMissingImports=false
"""Finds the places of K and V in an attention backend's pages, by writing numbers through its own kernel.

A digest of these places, layer by layer, is the encoding of a cache. Engines whose kernels write in the same way share
pages, whatever the names of their backends, devices and minor versions are. A kernel that does not copy values
verbatim, or not to the same places in all blocks, has no encoding; nor have recurrent states. For those,
`groups.named_format` names everything that may determine the layout of bytes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from blake3 import blake3

from kvdepot.backends import CacheGroup
from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind
from kvdepot_vllm.groups import EngineCache, name_of_layers

_BASE: Final = 100  # digits 1 to 100 are exact in every floating type
_VERBATIM: Final = ("float32", "float16", "bfloat16")
_CONTEXT: Final = "kvdepot 2026-11 encoding"
_SEED: Final = 1  # arbitrary, but fixed: the same values at every start
_MOST_EXPONENT: Final = 8  # values are scaled by up to 2**8, up or down: within the range of float16


def seen_format(cache: EngineCache, groups: Sequence[CacheGroup], layers: Mapping[str, Any], version: str) -> str:
    """Return the format of a cache, found by writing to its pages. Some blocks are overwritten and restored.

    The format contains the major version of vLLM, because places do not show which values are written there, for
    example K before its rotation. It also contains the layers' names in the order of their pages, because nothing else
    tells layers with equal places apart. If stages may divide the layers, it contains the common part of these names
    instead, because parts contain the layers' numbers.

    Args:
        cache: the engine's cache.
        groups: the groups as this worker registers them.
        layers: vLLM's attention layers by name, whose `kv_cache` no request uses yet.
        version: vLLM's version.

    Raises:
        LayoutError: the pages have no encoding; the text says why.
    """
    if cache.dtype not in _VERBATIM:
        raise LayoutError(f"values are written as {cache.dtype}")
    if any(group.kind is GroupKind.RECURRENT for group in cache.groups):
        raise LayoutError("recurrent states are not written by an attention backend")
    digest = blake3(derive_key_context=_CONTEXT)
    for ours, group in zip(cache.groups, groups, strict=True):
        tokens = group.physical_block_tokens or ours.page_tokens
        rows = max(1, group.rows * tokens // ours.page_tokens)
        # Probe every layer: the kernels of one attention backend may differ, as on CPU with AMX and without.
        found = [(name, _encoding(layers[name], tokens, rows, group.part.num_heads)) for name in ours.layer_names]
        if group.plane == (ours.num_layers, ours.plane_heads):  # stages may divide the layers, if all of them are alike
            found = sorted({(name_of_layers(name), encoding) for name, encoding in found})
            if len(found) > 1:
                raise LayoutError("layers of one group have different pages")
        elif cache.num_stages > 1:
            raise LayoutError("a stage of a pipeline does not see the layers of the others")
        digest.update(repr(found).encode())
    return f"vllm {version.split('.', 1)[0]} seen {digest.hexdigest()[:32]}"


def layout_of(module: Any) -> tuple[Any, ...]:
    """Return a value that is equal for attention layers with the same layout of pages."""
    cache = module.kv_cache
    return type(module.impl), cache.shape, cache.stride(), cache.dtype


def find_places(module: Any, block_tokens: int, scratch_block: int) -> tuple[Any, Any]:
    """Return where each element of K and V of a block lies.

    With latent attention (MLA) "K" is the part with a rotation, which all heads share, and "V" the latent vector.

    Args:
        module: vLLM's `Attention` or `MLAAttention`.
        block_tokens: tokens of a block in `module.kv_cache`.
        scratch_block: a block whose contents are overwritten and restored.

    Returns:
        `(block_tokens, heads, dim)` each, int64 on the CPU: offsets from the start of the block in memory, in elements.

    Raises:
        LayoutError: the pages do not hold K and V as they were written.
    """
    found = _find_both(module, block_tokens, scratch_block)
    memory = _memory_of(module.kv_cache[scratch_block])
    return memory[found[0]], memory[found[1]]


def _encoding(module: Any, block_tokens: int, rows: int, heads: int) -> bytes:
    """Return a digest of the places of one head in its row, or of the whole page if its heads cannot be divided."""
    cache = module.kv_cache
    block = cache.shape[0] - 1
    found, size = _find_both(module, block_tokens, block), cache[block].numel()
    _check(module, found, block_tokens, sorted({0, max(0, block - 1), block}))
    memory = _memory_of(cache[block])
    digest = blake3(derive_key_context=_CONTEXT)
    digest.update(str(cache.dtype).encode())
    for place in (memory[each] for each in found):
        if heads == place.shape[1]:
            place = _of_one_head(place, size, rows)
        digest.update(f" {tuple(place.shape)} ".encode())
        digest.update(place.contiguous().numpy().tobytes())
    return digest.digest(16)


def _of_one_head(places: Any, size: int, rows: int) -> Any:
    """Return the places of one head in one row, `(tokens of a row, dim)`, as if the page had no other head.

    Raises:
        LayoutError: the page is not `rows` rows of heads, or the heads or rows differ.
    """
    heads = places.shape[1]
    piece, rest = divmod(size, rows * heads)
    head, within = places // piece % heads, places // (piece * heads) * piece + places % piece
    if rest or bool((head != torch.arange(heads).view(1, -1, 1)).any()) or bool((within != within[:, :1]).any()):
        raise LayoutError("the heads of a page do not lie apart")
    of_rows = within[:, 0].view(rows, -1, places.shape[2]) - torch.arange(rows).view(-1, 1, 1) * piece
    if bool((of_rows != of_rows[0]).any()):
        raise LayoutError("the rows of a page differ")
    return of_rows[0]


def _shapes(module: Any, tokens: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    if hasattr(module, "kv_lora_rank"):
        return (tokens, 1, module.qk_rope_head_dim), (tokens, 1, module.kv_lora_rank)
    return (tokens, module.num_kv_heads, module.head_size), (tokens, module.num_kv_heads, module.head_size_v)


def _find_both(module: Any, block_tokens: int, block: int) -> tuple[Any, Any]:
    """Return where each element of K and V lies in a flattened page, `(block_tokens, heads, dim)` each."""
    shapes = _shapes(module, block_tokens)
    return _find(module, shapes, block, 0), _find(module, shapes, block, 1)


def _find(module: Any, shapes: Sequence[tuple[int, int, int]], block: int, which: int) -> Any:
    cache = module.kv_cache
    page = cache[block]
    saved = page.clone()
    shape = shapes[which]
    ids = torch.arange(shape[0] * shape[1] * shape[2])
    slots = torch.arange(block * shape[0], (block + 1) * shape[0])
    found, seen = torch.zeros(page.numel(), dtype=torch.int64), None
    try:
        power = 1
        while power < len(ids):
            written = [torch.zeros(each, device=cache.device, dtype=cache.dtype) for each in shapes]
            written[which] = (ids // power % _BASE + 1).to(cache.device, cache.dtype).view(shape)
            page.zero_()
            _write(module, slots, *written)
            got = page.flatten().to("cpu", torch.float32).round().long()
            seen = got > 0 if seen is None else seen
            found += (got - 1).clamp(min=0) * power
            power *= _BASE
    finally:
        page.copy_(saved)
    assert seen is not None
    where = seen.nonzero().squeeze(1)
    if not torch.equal(found[where].sort().values, ids):
        raise LayoutError(f"the attention backend's pages do not hold {'KV'[which]} as it was written")
    index = torch.empty(len(ids), dtype=torch.int64)
    index[found[where]] = where
    return index.view(shape)


def _check(module: Any, found: Sequence[Any], block_tokens: int, blocks: Sequence[int]) -> None:
    """Check the places in several blocks with values that use every bit: one token alone, then the others in disorder.

    Small numbers in one block do not reveal a kernel that rounds, that writes other blocks or single tokens
    differently, or that writes more than K and V.

    Raises:
        LayoutError: the pages hold other bits than were written.
    """
    cache, random = module.kv_cache, torch.Generator().manual_seed(_SEED)
    shapes = [(len(blocks) * block_tokens, *each.shape[1:]) for each in found]
    written = [
        torch.randn(each, generator=random).ldexp(
            torch.randint(-_MOST_EXPONENT, _MOST_EXPONENT + 1, each, generator=random)
        )
        for each in shapes
    ]
    written = [each.to(cache.dtype) for each in written]
    slots = (torch.tensor(blocks).view(-1, 1) * block_tokens + torch.arange(block_tokens)).flatten()
    order = torch.randperm(len(slots), generator=random)
    saved = [cache[block].clone() for block in blocks]
    try:
        for block in blocks:
            cache[block].zero_()
        for some in (order[:1], order[1:]):
            _write(module, slots[some], *(each[some].to(cache.device) for each in written))
        pages = [cache[block].flatten().clone().cpu() for block in blocks]  # copies, because the blocks are restored
    finally:
        for block, page in zip(blocks, saved, strict=True):
            cache[block].copy_(page)
    for number, page in enumerate(pages):
        expected = torch.zeros_like(page)
        for places, values in zip(found, written, strict=True):
            expected[places.flatten()] = values[number * block_tokens : (number + 1) * block_tokens].flatten()
        if not torch.equal(page.view(torch.uint8), expected.view(torch.uint8)):
            raise LayoutError(
                "the attention backend's pages do not hold the written bits at the places where they were found"
            )


def _memory_of(page: Any) -> Any:
    """Return where each element of a flattened page lies in memory, in elements from the start of its block."""
    memory = torch.zeros(page.shape, dtype=torch.int64)
    for axis, (size, stride) in enumerate(zip(page.shape, page.stride(), strict=True)):
        memory += (torch.arange(size) * stride).view(-1, *(1 for _ in page.shape[axis + 1 :]))
    return memory.flatten()


def _write(module: Any, slots: Any, k: Any, v: Any) -> None:
    """Write K and V of slots, `(n, heads, dim)` each, as the engine would."""
    slots = slots.to(k.device)
    if hasattr(module, "kv_lora_rank"):
        module.impl.do_kv_cache_update(
            v.squeeze(1),
            k,
            module.kv_cache,
            slots,
            module.kv_cache_dtype,
            module._k_scale,  # noqa: SLF001
        )
    else:
        module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)
