"""Where the blocks of a tensor lie, for tensors of any library, told by their attributes alone."""

import math
from typing import Any

from kvdepot.errors import LayoutError
from kvdepot.layout import PageLayout


def page_layout_of(tensor: Any) -> PageLayout:
    """Return where the blocks of `tensor`, `(num_blocks, ...)` in host memory, lie.

    Takes torch-like tensors (`data_ptr()`, `stride()` in elements, `element_size()`, `shape`) and arrays with
    `__array_interface__`. Nothing is copied.

    Raises:
        LayoutError: not such a tensor, not in host memory, or the bytes of one block are not contiguous.
    """
    shape, strides, itemsize, address = _describe(tensor)
    if not shape or shape[0] < 1:
        raise LayoutError(f"a cache of shape {shape}: the first dimension counts the blocks")
    expected = itemsize
    for size, stride in reversed(list(zip(shape[1:], strides[1:], strict=True))):
        if size != 1 and stride != expected:
            raise LayoutError(
                f"shape {shape} with strides of {strides} bytes: the bytes of one block are not contiguous"
            )
        expected *= size
    page_size_bytes = itemsize * math.prod(shape[1:])
    stride_bytes = strides[0] if shape[0] > 1 else page_size_bytes
    return PageLayout(address, shape[0], page_size_bytes, stride_bytes)


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
