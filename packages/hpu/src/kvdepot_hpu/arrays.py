"""The tensors of a Gaudi engine's KV cache."""

from typing import Any

from kvdepot.backends import CacheGroup
from kvdepot.copying.staged import arrays
from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind


def tensors_of(group: CacheGroup) -> list[Any]:
    """Return the tensors of a group one by one, as `kvdepot.copying.staged.arrays.tensors_of`.

    vllm-gaudi hands over a `TensorTuple((keys, values))` for each layer, and one tensor for latent attention.

    Raises:
        LayoutError: not one or two tensors a layer, or keys without values.
    """
    found = arrays.tensors_of(group)
    num_layers = group.num_layers or len(group.tensors)
    is_paired = len(found) in (2 * len(group.tensors), 2 * num_layers)
    if not (group.is_mla or group.kind is GroupKind.RECURRENT or is_paired):
        raise LayoutError(
            f"{len(found)} tensors for {num_layers} layers without latent attention: keys"
            " without values, as vllm-gaudi hands them over for fp8 with dynamic scales, which kvdepot cannot store:"
            " use bfloat16 or static scales; else pass (keys, values), or is_mla=True for latent attention"
        )
    return found
