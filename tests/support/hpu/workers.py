"""Workers whose cache lies on an HPU, arranged as vllm-gaudi arranges it."""

from dataclasses import replace
from typing import Any

from kvdepot.backends import CacheGroup
from kvdepot.testing.plan import STATE, GroupPlan, WorkerPlan
from kvdepot_hpu.context import HpuOptions, HpuTransferContext
from support.staged.bench import torch
from support.staged.workers import StagedWorker, pages_of


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


def _page(num_blocks: int, block_tokens: int, width: int) -> Any:
    shape = ((num_blocks + 1) * block_tokens, 1, width)
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


class HpuWorker(StagedWorker):
    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        pages = pages_of(plan, "hpu", _page)
        groups = [cache_group(group, tensors) for group, tensors in zip(plan.groups, pages, strict=True)]
        cache = replace(plan.cache(pages), groups=groups)
        super().__init__(pages, HpuTransferContext(cache, HpuOptions(url=url, **options)))
