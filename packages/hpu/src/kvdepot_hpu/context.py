"""`HpuTransferContext`: the transfers of a worker whose KV cache is in the memory of a Gaudi.

Other processes cannot open a Gaudi's memory, so the worker copies by itself: `kvdepot.copying.staged` copies blocks
through host memory to and from the depot's pool. `kvdepot.client.transfers` communicates with the depot.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying import arrays
from kvdepot.copying.arrays import page_layout_of
from kvdepot.copying.staged import STAGING_BYTES, Bridge, StagedCopier
from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind

MAX_BLOCKS: Final = 32  # per move; each doubling means two more graphs per layer group to compile at the start


@dataclass(frozen=True, kw_only=True)
class HpuOptions(TransferOptions):
    """Options of an `HpuTransferContext`. If `synchronous`, no other thread issues device work."""

    # Limit of a staging slot: there are four on the host, and two such buffers on the device.
    staging_bytes: int = STAGING_BYTES
    max_blocks: int = MAX_BLOCKS  # limit per move


class HpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an HPU and the depot.

    Construct it when the cache is registered: after its allocation, on the thread and stream of the computation, and
    before the first request. Construct it again after the cache was reallocated (sleep mode). It compiles all shapes
    that it will use, which takes minutes on a Gaudi without a recipe cache.

    The groups of the cache may have a `(keys, values)` tuple per layer. A store without `ready`, and each retrieve,
    comes after the work that the engine's stream has at the time of the call.

    Raises:
        LayoutError: the tensors do not fit their description, or cannot be viewed as bytes.
    """

    def __init__(self, cache: KVCache, options: HpuOptions = HpuOptions()) -> None:  # frozen
        cache = arrays.flattened(cache, tensors_of)
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "hpu", has_address=False))
        bridge = load_bridge()
        bridge.launch()  # the work that created the cache may still be deferred
        copier = StagedCopier(
            bridge,
            layout,
            [group.tensors for group in cache.groups],
            max_blocks=options.max_blocks,
            staging_bytes=options.staging_bytes,
        )
        self.is_pinned: Final = copier.is_pinned
        super().__init__(cache.registration(layout, "hpu"), layout, copier, options)


def tensors_of(group: CacheGroup) -> list[Any]:
    """Return the tensors of a group one by one, as `kvdepot.copying.arrays.tensors_of`.

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


def load_bridge() -> Bridge:
    """Import the bridge.

    `mark_step` launches the work that lazy mode has accumulated, and does nothing in eager mode.
    """
    importlib.import_module("habana_frameworks.torch")  # registers torch.hpu
    core = importlib.import_module("habana_frameworks.torch.core")
    torch: Any = importlib.import_module("torch")
    return Bridge(torch, "hpu", torch.hpu, getattr(core, "mark_step", lambda: None), compiles_shapes=True)
