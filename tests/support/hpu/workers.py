"""Workers whose cache lies on an HPU, arranged as vllm-gaudi arranges it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvdepot.backends import CacheGroup
from kvdepot.testing.backend.plan import STATE, GroupPlan, WorkerPlan
from kvdepot_hpu.context import HpuOptions, HpuTransferContext, load_bridge
from support.staged.bench import Bench, read_blocks, torch, write_blocks


class TensorTuple(tuple[Any, ...]):
    """As in vllm-gaudi: keys and values of one layer, with the attributes of a tensor."""

    __slots__ = ()

    @property
    def shape(self) -> Any:
        return self[0].shape


def without_pad_block(flat: Any, block_tokens: int) -> Any:
    """Return a view of `((num_blocks + 1) * block_tokens, ...)` as `(num_blocks, block_tokens, ...)`.

    vllm-gaudi allocates keys and values in this shape. The last block is padding that any request may write.
    """
    return flat.view(-1, block_tokens, *flat.shape[1:])[:-1]


def page(num_blocks: int, block_tokens: int, size_bytes: int, padding_bytes: int = 0) -> Any:
    """Return a zeroed tensor `(num_blocks, ...)` with pages of `size_bytes`: flat bfloat16 if that divides evenly."""
    if padding_bytes or size_bytes % (2 * block_tokens):
        shape = (num_blocks, size_bytes + padding_bytes)
        return torch().zeros(shape, dtype=torch().uint8, device="hpu")[:, :size_bytes]
    shape = ((num_blocks + 1) * block_tokens, 1, size_bytes // block_tokens // 2)
    return without_pad_block(torch().zeros(shape, dtype=torch().bfloat16, device="hpu"), block_tokens)


def cache_group(plan: GroupPlan, pages: list[Any]) -> CacheGroup:
    """Return keys and values in pairs where the plan has pairs, else tensors of latent attention."""
    sizes = plan.page_sizes_bytes
    is_paired = plan.kind is not STATE and sizes[::2] == sizes[1::2]
    tensors = [TensorTuple(pages[place : place + 2]) for place in range(0, len(pages), 2)] if is_paired else pages
    return CacheGroup(
        tensors,
        plan.block_tokens,
        plan.kind,
        plan.window_tokens,
        plan.part,
        plan.plane,
        plan.rows,
        is_mla=not is_paired,
    )


class HpuWorker:
    """See `kvdepot.testing.backend.Worker`. Like an engine, it touches the cache only by operations of the device."""

    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        self.pages = [
            [page(plan.num_blocks, group.block_tokens, size, group.padding_bytes) for size in group.page_sizes_bytes]
            for group in plan.groups
        ]
        groups = [cache_group(group, pages) for group, pages in zip(plan.groups, self.pages, strict=True)]
        cache = replace(plan.cache(self.pages), groups=groups)
        self.context = HpuTransferContext(cache, HpuOptions(url=url, **options))
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        write_blocks(self.pages[group][page], blocks, data)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return read_blocks(self.pages[group][page], blocks)


class HpuBench(Bench):
    """A copier with a Gaudi's shapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(load_bridge(), **options)
