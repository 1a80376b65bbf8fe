# pyright: basic
"""SGLang's KV pools as layer groups: a page of SGLang is both a block and a chunk.

This module refuses caches that cannot be kept whole, and gives the reason.

A buffer of a pool is `(slots, heads, dim)`, or `(slots, 1, dim)` for latent attention. Page `i` has the slots
`i * page_size` to `(i + 1) * page_size`.
"""

from collections.abc import Collection, Iterable
from typing import Any, Final, NamedTuple

from kvdepot.errors import KVDepotError
from kvdepot.kvcache import CacheGroup
from kvdepot.layout import MAXIMUM_HEADS, GroupKind, Part, Plane

_LEAST_PAGE_TOKENS: Final = 16  # a page is a chunk: smaller ones cost more in messages and records than they save
_PLAIN_DTYPES: Final = ("bfloat16", "float16", "float32", "float8_")  # how names begin


class Unsupported(KVDepotError):
    """kvdepot cannot keep the cache of this engine. The text gives the reason and the way out."""


class Holding(NamedTuple):
    """A rank, the number of ranks that share the model, and the model's KV heads; 0 heads if unknown."""

    rank: int
    num_ranks: int
    heads: int


def refuse_unsupported(server_args: Any, params: Any, page_size: int) -> None:
    """Refuse an engine whose cache could not be kept whole or would be mixed up.

    Args:
        server_args: SGLang's `ServerArgs`.
        params: SGLang's `CacheInitParams`.
        page_size: tokens of a page.

    Raises:
        Unsupported: with the reason.
    """
    if page_size < _LEAST_PAGE_TOKENS:
        raise Unsupported(f"pages of {page_size} tokens cost more than they save: start SGLang with --page-size 64")
    for name, text in (
        ("pp_size", "pipeline parallelism (--pp-size)"),
        ("attn_cp_size", "context parallelism (--attn-cp-size)"),
        ("dcp_size", "decode context parallelism (--dcp-size)"),
    ):
        if (getattr(server_args, name, 1) or 1) > 1:
            raise Unsupported(f"{text} is not supported: start SGLang without it")
    for name, text in (
        ("enable_hierarchical_cache", "--enable-hierarchical-cache keeps pages in a host pool of its own"),
        ("enable_lmcache", "--enable-lmcache is another cache"),
    ):
        if getattr(server_args, name, False):
            raise Unsupported(f"{text}: start SGLang without it")
    drafts = ("mtp_draft_device_pools", "sidecar_draft_device_pools", "mtp_draft_mamba_pools")
    if getattr(params, "is_eagle", False) or any(getattr(params, name, ()) for name in drafts):
        raise Unsupported("the KV of a draft model is not supported: start SGLang without --speculative-algorithm")


def find_groups(kvcache: Any, components: Collection[str], params: Any, holding: Holding) -> dict[str, CacheGroup]:
    """Return the layer groups of an engine's cache by the name of SGLang's pool, full attention first.

    Args:
        kvcache: SGLang's pool.
        components: names of the parts of SGLang's tree: "FULL", "SWA", "MAMBA".
        params: SGLang's `CacheInitParams`.
        holding: this rank's share of the model.

    Raises:
        Unsupported: with the reason.
    """
    if components == {"FULL"}:
        return {"kv": _group(kvcache, params.page_size, holding)}
    if components == {"FULL", "SWA"} and type(kvcache).__name__ == "SWAKVPool":
        window_tokens = params.swa_retain_window + 1  # kvdepot's window counts the next token, too
        return {
            "kv": _group(kvcache.full_kv_pool, params.page_size, holding),
            "swa": _group(kvcache.swa_kv_pool, params.page_size, holding, window_tokens),
        }
    if "MAMBA" in components:
        raise Unsupported("models with Mamba or linear attention layers are not supported with SGLang yet")
    raise Unsupported(f"SGLang's {type(kvcache).__name__} with {', '.join(sorted(components))} is not supported")


def _group(pool: Any, page_size: int, holding: Holding, window_tokens: int = 0) -> CacheGroup:
    kind = type(pool).__name__
    if kind == "MHATokenToKVPool":
        layout = getattr(pool, "kv_cache_layout", "nhd")
        if layout != "nhd":
            raise Unsupported(f"SGLang's KV layout {layout!r} is not supported: unset SGLANG_USE_HND_KVCACHE")
        buffers = [each for pair in zip(pool.k_buffer, pool.v_buffer, strict=True) for each in pair]
        part, plane, rows = _part(int(pool.head_num), page_size, holding)
    elif kind == "MLATokenToKVPool":
        buffers = list(pool.kv_buffer)
        part, plane, rows = Part(), Plane(1, 1), 1  # every rank has the same bytes
    else:
        raise Unsupported(f"SGLang's {kind} is not supported: the linker knows MHATokenToKVPool and MLATokenToKVPool")
    if not buffers:
        raise Unsupported(f"SGLang's {kind} has no layer")
    # An fp8 page is complete: its scales belong to the model, one per layer. But they may also lie in further buffers.
    dtype = str(getattr(pool, "dtype", buffers[0].dtype)).removeprefix("torch.")
    if any(getattr(pool, name, None) is not None for name in ("k_scale_buffer", "native_k_scale_buffer")):
        raise Unsupported(
            f"SGLang keeps the scales of a KV cache of {dtype} in buffers of their own, which kvdepot would lose: start"
            " SGLang with --kv-cache-dtype auto, fp8_e4m3 or fp8_e5m2"
        )
    if not dtype.startswith(_PLAIN_DTYPES):
        raise Unsupported(f"a KV cache of {dtype} is not supported: start SGLang with --kv-cache-dtype auto")
    return CacheGroup(
        [_by_page(buffer, page_size) for buffer in buffers],
        page_size,
        GroupKind.SLIDING_WINDOW if window_tokens else GroupKind.FULL_ATTENTION,
        window_tokens,
        part,
        plane,
        rows,
        num_layers=int(pool.layer_num),
        hidden_dims=tuple(int(size) for size in buffers[0].shape[1:])[:8],
        is_mla=kind == "MLATokenToKVPool",
    )


def _part(held: int, page_size: int, holding: Holding) -> tuple[Part, Plane, int]:
    """Return the heads that this rank holds, all heads of the model, and the rows of a page.

    If the head count does not fit, only the same rank of an engine with as many ranks can use the bytes.
    """
    rank, size, heads = holding
    fits = 0 < heads <= MAXIMUM_HEADS and not (heads % size and size % heads) and held == max(1, heads // size)
    if not fits:
        return Part(rank), Plane(size), 1
    # With more ranks than heads, several ranks hold the same head: equal parts. A page has one row of heads per token.
    return Part(0, 1, rank * heads // size, held), Plane(1, heads), page_size


def _by_page(buffer: Any, page_size: int) -> Any:
    """View a buffer `(slots, ...)` as `(pages, page_size, ...)`. Slots behind the last whole page are left out."""
    pages = int(buffer.shape[0]) // page_size
    if not buffer.is_contiguous():
        raise Unsupported("a KV buffer of SGLang is not contiguous")
    return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])


def block_ids(groups: Iterable[str], transfers: Iterable[Any], page_size: int) -> list[list[int]]:
    """Return the pages of each group in SGLang's transfers, which name slots. A window covers the last pages."""
    slots = {str(getattr(each.name, "value", each.name)): each.device_indices for each in transfers}
    return [pages_of(slots[name], page_size) if name in slots else [] for name in groups]


def pages_of(slots: Any, page_size: int) -> list[int]:
    """Return the pages that consist of these slots, in order."""
    return (slots[::page_size] // page_size).tolist()
