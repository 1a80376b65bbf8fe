"""The tensors of a KV cache, as pages and as bytes. Tensors of any library are recognised by their attributes."""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

from kvdepot.errors import LayoutError
from kvdepot.kvcache import CacheGroup, KVCache
from kvdepot.layout import PageLayout, strided_pages


def page_layout_of(tensor: Any, device_type: str, *, has_address: bool = True) -> PageLayout:
    """Return the layout of the blocks of `tensor`, `(num_blocks, ...)` in memory of that type of device.

    Takes torch-like tensors (`device.type`, `data_ptr()`, `stride()` in elements, `element_size()`, `shape`), and for
    host memory arrays with `__array_interface__`. Nothing is copied.

    Args:
        tensor: of any library.
        device_type: as in `torch.device`.
        has_address: False where `data_ptr()` may be virtual; the address is 0 then.

    Raises:
        LayoutError: not such a tensor, on another device, without blocks, or with blocks that are not contiguous.
    """
    if device_type == "cpu" and not hasattr(tensor, "data_ptr") and hasattr(tensor, "__array_interface__"):
        return _layout_of_array(tensor.__array_interface__)
    missing = [name for name in ("data_ptr", "stride", "element_size", "shape") if not hasattr(tensor, name)]
    if missing:
        raise LayoutError(f"{type(tensor).__name__} has no {', '.join(missing)}: not a tensor")
    found = str(getattr(getattr(tensor, "device", None), "type", "cpu"))
    if found != device_type:
        raise LayoutError(f"a tensor on {found}: the {device_type} backend cannot copy it, use the backend of {found}")
    itemsize = int(tensor.element_size())
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(int(step) * itemsize for step in tensor.stride())
    return strided_pages(int(tensor.data_ptr()) if has_address else 0, shape, strides, itemsize)


def device_index_of(tensors: Iterable[Any]) -> int:
    """Return the number of the one device that all tensors are on.

    Raises:
        LayoutError: the tensors are on several devices.
    """
    found = {int(getattr(getattr(tensor, "device", None), "index", None) or 0) for tensor in tensors}
    if len(found) != 1:
        raise LayoutError(f"tensors on devices {sorted(found)}: a worker has one")
    return found.pop()


def _layout_of_array(interface: dict[str, Any]) -> PageLayout:
    shape = tuple(int(size) for size in interface["shape"])
    itemsize = int(interface["typestr"][2:])
    address, read_only = interface["data"]
    if read_only:
        raise LayoutError("a read-only array cannot be a KV cache")
    strides = interface.get("strides") or tuple(itemsize * math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return strided_pages(int(address), shape, tuple(strides), itemsize)


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
            raise LayoutError(f"layer {number} has {len(pair)} tensors: give two, keys and values")
        found += pair
        num_pairs += 1
    if num_pairs not in (0, len(group.tensors)):
        raise LayoutError(
            f"{num_pairs} of {len(group.tensors)} layers have separate keys and values: all of a group or none"
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
