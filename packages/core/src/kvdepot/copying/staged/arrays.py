"""The tensors of an engine's KV cache on a device, as pages and as bytes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from kvdepot.errors import LayoutError
from kvdepot.kvcache import CacheGroup, KVCache


def tensors_of(group: CacheGroup) -> list[Any]:
    """Return the tensors of a group one by one: keys and values of the first layer, of the second, and so on.

    A layer is one tensor, or a tuple of two. If a view orders the dimensions within a block otherwise than memory does,
    as vLLM's views do, it is permuted to the order in memory.

    Raises:
        LayoutError: not one or two tensors a layer, or some layers have one and some two.
    """
    found: list[Any] = []
    num_pairs = 0
    for number, layer in enumerate(group.tensors):
        if not isinstance(layer, tuple):
            found.append(layer)
            continue
        pair = cast("tuple[Any, ...]", layer)
        if len(pair) != 2:
            raise LayoutError(f"layer {number} has {len(pair)} tensors: keys and values are two")
        found += pair
        num_pairs += 1
    if num_pairs not in (0, len(group.tensors)):
        raise LayoutError(
            f"{num_pairs} of {len(group.tensors)} layers have keys and values apart: all of a group or none"
        )
    return [_in_memory_order(tensor) for tensor in found]


def flattened(cache: KVCache, split_group: Callable[[CacheGroup], list[Any]] = tensors_of) -> KVCache:
    """Return `cache` with the tensors of each group one by one, as `split_group` returns them.

    Raises:
        LayoutError: not one or two tensors a layer, or some layers have one and some two.
    """
    groups = [
        replace(group, tensors=split_group(group), num_layers=group.num_layers or len(group.tensors))
        for group in cache.groups
    ]
    return replace(cache, groups=groups)


def _in_memory_order(tensor: Any) -> Any:
    if not hasattr(tensor, "permute"):
        return tensor  # `page_layout_of` refuses it
    places = sorted(zip(tensor.stride()[1:], tensor.shape[1:], range(1, tensor.dim()), strict=True), reverse=True)
    order = [dimension for _, size, dimension in places if size != 1]
    if order == sorted(order):
        return tensor
    return tensor.permute(0, *(dimension for dimension in range(1, tensor.dim()) if dimension not in order), *order)


def byte_view(tensor: Any, int8: Any) -> Any:
    """Return `tensor` as `(num_blocks, page_size_bytes)` int8: the same memory, never a copy.

    Copies are of bytes, because devices lack gathers and scatters for some types (fp8), and because a copy must not
    round numbers or quieten NaNs.

    Raises:
        LayoutError: the device's library cannot make such a view.
    """
    try:
        flat = tensor.view(int(tensor.shape[0]), -1)
        return flat.view(int8)
    except RuntimeError as error:
        raise LayoutError(f"a cache of shape {tuple(tensor.shape)} cannot be seen as bytes: {error}") from error
