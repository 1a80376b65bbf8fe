"""Where the blocks of a tensor lie, for tensors of any library, told by their attributes alone."""

import math
from typing import Any

from kvdepot.errors import LayoutError
from kvdepot.layout import PageLayout, strided_pages


def page_layout_of(tensor: Any) -> PageLayout:
    """Return where the blocks of `tensor`, `(num_blocks, ...)` in host memory, lie.

    Takes torch-like tensors (`data_ptr()`, `stride()` in elements, `element_size()`, `shape`) and arrays with
    `__array_interface__`. Nothing is copied.

    Raises:
        LayoutError: not such a tensor, not in host memory, or the bytes of one block are not contiguous.
    """
    shape, strides, itemsize, address = _describe(tensor)
    return strided_pages(address, shape, strides, itemsize)


def _describe(tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], int, int]:
    """Return shape, strides in bytes, bytes of an element and address."""
    if hasattr(tensor, "data_ptr"):
        device = str(getattr(getattr(tensor, "device", None), "type", "cpu"))
        if device != "cpu":
            raise LayoutError(f"a tensor on {device}: the cpu backend copies host memory, use the backend of {device}")
        itemsize = int(tensor.element_size())
        return tuple(tensor.shape), tuple(int(step) * itemsize for step in tensor.stride()), itemsize, tensor.data_ptr()
    interface = getattr(tensor, "__array_interface__", None)
    if interface is None:
        raise LayoutError(f"{type(tensor).__name__} has neither data_ptr nor __array_interface__: not a tensor")
    shape = tuple(int(size) for size in interface["shape"])
    itemsize = int(interface["typestr"][2:])
    address, read_only = interface["data"]
    if read_only:
        raise LayoutError("a read-only array cannot be a KV cache")
    strides = interface.get("strides")
    if strides is None:
        strides = tuple(itemsize * math.prod(shape[place + 1 :]) for place in range(len(shape)))
    return shape, tuple(strides), itemsize, int(address)
