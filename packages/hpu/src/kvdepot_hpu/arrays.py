"""The tensors of a Gaudi engine's KV cache, as bytes."""

import math
from typing import Any, cast

from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind, PageLayout
from kvdepot.protocols import CacheGroup


def tensors_of(group: CacheGroup) -> list[Any]:
    """Return the tensors of a group one by one: keys and values of the first layer, of the second, and so on.

    vllm-gaudi hands over a `TensorTuple((keys, values))` for each layer, and one tensor for latent attention.

    Raises:
        LayoutError: not one or two tensors a layer, or keys without values.
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
    has_values = group.is_mla or group.kind is GroupKind.RECURRENT or num_pairs or 2 * group.num_layers == len(found)
    if not has_values:
        raise LayoutError(
            f"{len(found)} tensors for {group.num_layers or len(found)} layers without latent attention: keys"
            " without values, as vllm-gaudi hands them over for fp8 with dynamic scales, which kvdepot cannot store:"
            " use bfloat16 or static scales; else pass (keys, values), or is_mla=True for latent attention"
        )
    return found


def without_pad_block(flat: Any, block_tokens: int) -> Any:
    """Return the blocks of `((num_blocks + 1) * block_tokens, ...)` as `(num_blocks, block_tokens, ...)`.

    vllm-gaudi allocates keys and values so; the last block is padding that any request may write. A view.

    Raises:
        LayoutError: not a whole number of blocks, or no block but the padding.
    """
    num_blocks, rest = divmod(int(flat.shape[0]), block_tokens)
    if rest or num_blocks < 2:
        raise LayoutError(f"{flat.shape[0]} slots are not blocks of {block_tokens} and one of padding")
    return flat.view(num_blocks, block_tokens, *flat.shape[1:])[:-1]


def page_layout_of(tensor: Any) -> PageLayout:
    """Return how the blocks of `tensor`, `(num_blocks, ...)` on an HPU, lie.

    Without an address: what `data_ptr()` says there is virtual, and nothing is computed with it.

    Raises:
        LayoutError: not on an HPU, or the bytes of one block are not contiguous.
    """
    device = str(getattr(getattr(tensor, "device", None), "type", type(tensor).__name__))
    if device != "hpu":
        raise LayoutError(f"a tensor on {device}: the hpu backend copies memory of an HPU, use the backend of {device}")
    shape = tuple(int(size) for size in tensor.shape)
    if not shape or 0 in shape:
        raise LayoutError(f"a cache of shape {shape}: the first dimension counts the blocks, and none may be empty")
    strides = tuple(int(step) for step in tensor.stride())
    expected = 1
    for size, stride in reversed(list(zip(shape[1:], strides[1:], strict=True))):
        if size != 1 and stride != expected:
            raise LayoutError(f"shape {shape} with strides {strides}: the bytes of one block are not contiguous")
        expected *= size
    itemsize = int(tensor.element_size())
    page_size_bytes = itemsize * math.prod(shape[1:])
    return PageLayout(0, shape[0], page_size_bytes, strides[0] * itemsize if shape[0] > 1 else page_size_bytes)


def byte_view(tensor: Any, int8: Any) -> Any:
    """Return `tensor` as `(num_blocks, page_size_bytes)` int8: the same memory, never a copy.

    Bytes, since the bridge lacks gathers and scatters for some types (fp8), and a copy must not round or quieten.

    Raises:
        LayoutError: the bridge cannot view it so.
    """
    try:
        flat = tensor.view(int(tensor.shape[0]), -1)
        return flat.view(int8)
    except RuntimeError as error:
        raise LayoutError(f"a cache of shape {tuple(tensor.shape)} cannot be seen as bytes: {error}") from error
