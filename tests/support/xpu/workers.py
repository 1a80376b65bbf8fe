"""Workers whose cache lies on an Intel GPU, arranged as vLLM arranges it."""

from typing import Any

from kvdepot.copying.staged import Bridge
from kvdepot.testing.plan import WorkerPlan
from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext
from support.staged.bench import torch
from support.staged.workers import StagedWorker, pages_of


def device_type() -> str:
    """Return torch's name of the device."""
    return "xpu" if torch().xpu.is_available() else "fakexpu"


def load_bridge() -> Bridge:
    name = device_type()
    return Bridge(torch(), name, getattr(torch(), name), index=0)


def _page(num_blocks: int, block_tokens: int, width: int) -> Any:
    return torch().zeros((num_blocks, 1, block_tokens, width), dtype=torch().bfloat16, device=device_type())


class XpuWorker(StagedWorker):
    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        pages = pages_of(plan, device_type(), _page)
        options = {"url": url, "device_type": device_type(), **options}
        super().__init__(pages, XpuTransferContext(plan.cache(pages), XpuOptions(**options)))
