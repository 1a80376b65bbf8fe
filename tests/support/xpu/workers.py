"""Workers whose cache lies on an Intel GPU, arranged as vLLM arranges it."""

from collections.abc import Sequence
from typing import Any

from kvdepot.copying.staged.bridge import Bridge
from kvdepot.testing.backend.plan import WorkerPlan
from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext
from support.staged.bench import Bench, read_blocks, torch, write_blocks


def device_type() -> str:
    """Return torch's name of the device."""
    return "xpu" if torch().xpu.is_available() else "fakexpu"


def load_bridge() -> Bridge:
    name = device_type()
    return Bridge(torch(), name, getattr(torch(), name), index=0)


def page(num_blocks: int, block_tokens: int, size_bytes: int, padding_bytes: int = 0) -> Any:
    """Return a zeroed tensor `(num_blocks, ...)` with pages of `size_bytes`, in bfloat16 if that divides evenly."""
    if padding_bytes or size_bytes % (2 * block_tokens):
        shape = (num_blocks, size_bytes + padding_bytes)
        return torch().zeros(shape, dtype=torch().uint8, device=device_type())[:, :size_bytes]
    shape = (num_blocks, 1, block_tokens, size_bytes // block_tokens // 2)
    return torch().zeros(shape, dtype=torch().bfloat16, device=device_type())


def pages_of(plan: WorkerPlan) -> list[list[Any]]:
    """Return the tensors of a plan, group by group."""
    return [
        [page(plan.num_blocks, group.block_tokens, size, group.padding_bytes) for size in group.page_sizes_bytes]
        for group in plan.groups
    ]


class XpuWorker:
    """See `kvdepot.testing.backend.Worker`. Like an engine, it touches the cache only by operations of the device."""

    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        self.pages = pages_of(plan)
        self.context = XpuTransferContext(
            plan.cache(self.pages), XpuOptions(url=url, device_type=device_type(), **options)
        )
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        write_blocks(self.pages[group][page], blocks, data)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return read_blocks(self.pages[group][page], blocks)


class XpuBench(Bench):
    """A staged copier, made as by the context."""

    def __init__(self, **options: Any) -> None:
        super().__init__(load_bridge(), **options)
