"""Where the blocks of a tensor on a device lie, for tensors of any library, told by their attributes alone."""

from collections.abc import Iterable
from typing import Any

from kvdepot.errors import LayoutError
from kvdepot.layout import PageLayout, strided_pages


def page_layout_of(tensor: Any) -> PageLayout:
    """Return where the blocks of `tensor`, `(num_blocks, ...)` on a device, lie.

    Takes torch-like tensors: `data_ptr()`, `stride()` in elements, `element_size()`, `shape`. Nothing is copied.

    Raises:
        LayoutError: not such a tensor, or the bytes of one block are not contiguous.
    """
    missing = [name for name in ("data_ptr", "stride", "element_size", "shape") if not hasattr(tensor, name)]
    if missing:
        raise LayoutError(f"{type(tensor).__name__} has no {', '.join(missing)}: not a tensor on a device")
    itemsize = int(tensor.element_size())
    shape = tuple(int(size) for size in tensor.shape)
    strides = tuple(int(step) * itemsize for step in tensor.stride())
    return strided_pages(int(tensor.data_ptr()), shape, strides, itemsize)


def ordinal_of(tensors: Iterable[Any]) -> int:
    """Return the number of the CUDA device that all tensors are on.

    Raises:
        LayoutError: they are on none, or on several.
    """
    found: set[int] = set()
    for tensor in tensors:
        device = getattr(tensor, "device", None)
        kind = str(getattr(device, "type", "cpu"))
        if kind != "cuda":
            raise LayoutError(f"a tensor on {kind}: the cuda backend copies device memory, use the backend of {kind}")
        found.add(int(getattr(device, "index", None) or 0))
    if len(found) != 1:
        raise LayoutError(f"tensors on devices {sorted(found)}: a worker has one")
    return found.pop()
