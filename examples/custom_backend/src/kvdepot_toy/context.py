"""How a worker's blocks get to the pool and back. The protocol with the depot is `WorkerTransfers`'."""

from collections.abc import Callable, Sequence
from typing import Any

from kvdepot.backends import CacheGroup
from kvdepot.client.transfers import CopyBatch, WorkerTransfers, detail_of, layer_group_of
from kvdepot.copying.runs import BatchRuns, merge
from kvdepot.errors import LayoutError
from kvdepot.layout import CacheLayout, GroupKind, PageLayout, default_chunk_tokens
from kvdepot.wire import messages as m
from kvdepot_toy import device


class ToyCopier:
    """Copies on the thread that calls. See `kvdepot.client.transfers.Copier`."""

    def __init__(self, layout: CacheLayout) -> None:
        self._runs = BatchRuns(layout)

    def store(self, batch: CopyBatch) -> None:
        """Blocks to extents; the bytes are in the pool when it returns."""
        self._each(batch, device.copy_out)

    def retrieve(self, batch: CopyBatch) -> None:
        """Extents to blocks; the bytes are on the device when it returns, and the pool is no longer read."""
        self._each(batch, lambda address, source: device.copy_in(source, address))

    def close(self) -> None:
        """Nothing to give up."""

    def _each(self, batch: CopyBatch, copy: Callable[[int, memoryview], None]) -> None:
        runs = merge(self._runs.of(batch))
        pool = memoryview(batch.mapping.pool)
        columns = zip(runs.blocks.tolist(), runs.offsets.tolist(), runs.sizes.tolist(), strict=True)
        for address, offset, size in columns:
            copy(address, pool[offset : offset + size])


class ToyTransferContext(WorkerTransfers):
    """Moves blocks between a cache on a toy device and the depot. Arguments as in `Backend.create_context`."""

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        instance: str,
        *,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        format: str = "",  # noqa: A002  # the field's word
        chunk_tokens: int | None = None,
        **options: Any,
    ) -> None:
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(g.block_tokens for g in groups if g.kind is not GroupKind.RECURRENT)
        layer_groups = [layer_group_of(group, [_page_of(tensor) for tensor in group.tensors]) for group in groups]
        layout = CacheLayout(tuple(layer_groups), chunk_tokens, dtype, format)
        details = tuple(detail_of(*each, dtype, ()) for each in zip(groups, layer_groups, strict=True))
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, "toy", "worker-driven", model, m.spec_of(layout), details
        )
        super().__init__(registration, layout, ToyCopier(layout), **options)  # url, deadline_seconds, synchronous, ...


def _page_of(tensor: Any) -> PageLayout:
    if not isinstance(tensor, device.ToyTensor):
        raise LayoutError(f"{type(tensor).__name__} is not on a toy device: use the backend of its device")
    return PageLayout(tensor.address, tensor.num_blocks, tensor.page_size_bytes, tensor.stride_bytes)
