"""Workers whose cache lies in host memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdepot.testing.plan import WorkerPlan
from kvdepot_cpu.context import CpuOptions, CpuTransferContext

_ALIGNMENT_BYTES = 64  # of torch's tensors


class NumpyWorker:
    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        self.pages = [
            [_padded(plan.num_blocks, size, g.padding_bytes) for size in g.page_sizes_bytes] for g in plan.groups
        ]
        self.context = CpuTransferContext(plan.cache(self.pages), CpuOptions(url=url, **options))
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        self.pages[group][page][list(blocks)] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return self.pages[group][page][list(blocks)].tobytes()


def _padded(num_blocks: int, page_size_bytes: int, padding_bytes: int) -> npt.NDArray[np.uint8]:
    stride = page_size_bytes + padding_bytes
    flat = np.zeros(num_blocks * stride + _ALIGNMENT_BYTES, np.uint8)
    skip = -flat.ctypes.data % _ALIGNMENT_BYTES
    return flat[skip : skip + num_blocks * stride].reshape(num_blocks, stride)[:, :page_size_bytes]
