"""Workers whose cache lies on a device that torch drives."""

from collections.abc import Callable, Sequence
from typing import Any

from kvdepot.testing.plan import WorkerPlan
from support.staged.bench import read_blocks, torch, write_blocks


def pages_of(plan: WorkerPlan, device_type: str, make_page: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Return the zeroed tensors of a plan, group by group, `(num_blocks, ...)` each.

    Args:
        plan: the sizes.
        device_type: torch's name of the device.
        make_page: returns the engine's tensor of bfloat16 for blocks, tokens of a block and elements of a token. Pages
            that do not divide evenly are bytes.
    """

    def page(num_blocks: int, block_tokens: int, size_bytes: int, padding_bytes: int) -> Any:
        if padding_bytes or size_bytes % (2 * block_tokens):
            shape = (num_blocks, size_bytes + padding_bytes)
            return torch().zeros(shape, dtype=torch().uint8, device=device_type)[:, :size_bytes]
        return make_page(num_blocks, block_tokens, size_bytes // block_tokens // 2)

    return [
        [page(plan.num_blocks, group.block_tokens, size, group.padding_bytes) for size in group.page_sizes_bytes]
        for group in plan.groups
    ]


class StagedWorker:
    """See `kvdepot.testing.backend.Worker`. Like an engine, it touches the cache only by operations of the device."""

    def __init__(self, pages: list[list[Any]], context: Any) -> None:
        self.pages = pages
        self.context = context
        self.spec = context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        write_blocks(self.pages[group][page], blocks, data)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return read_blocks(self.pages[group][page], blocks)
