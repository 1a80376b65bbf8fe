"""Finds where the blocks of a tensor lie. Tensors of any library are recognised by their attributes."""

import math
from collections.abc import Iterable
from typing import Any

from kvdepot.errors import LayoutError
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
