"""A worker of the conformance suite whose device is the fake driver."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdepot.testing.backend import WorkerPlan
from kvdepot_cuda.context import CudaTransferContext
from kvdepot_cuda.copy_route import CudaOptions
from support.cuda.fake import DEFAULT_STREAM, FakeDriver

POOL_BYTES = 64 << 20  # as in the suite
PIECE_BYTES = 8 << 20
NUM_PIECES = POOL_BYTES // PIECE_BYTES


class FakeWorker:
    def __init__(
        self, url: str, plan: WorkerPlan, *, driver: FakeDriver | None = None, instance: str = "", **options: Any
    ) -> None:
        self.driver = driver or FakeDriver()
        self.tensors = [
            [self.driver.tensor(plan.num_blocks, size, group.padding_bytes) for size in group.page_sizes_bytes]
            for group in plan.groups
        ]
        # Without the kernel unless a test asks for it, also where Triton is installed.
        defaults = {"piece_bytes": PIECE_BYTES, "batch_runs": 64, "gather_kernel": False}
        options = defaults | {"stream": lambda: DEFAULT_STREAM} | options
        cache = replace(plan.cache(self.tensors), instance=instance or plan.instance)
        self.context = CudaTransferContext(
            cache, CudaOptions(url=url, open_driver=lambda _ordinal: self.driver, **options)
        )
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        for block, one in zip(blocks, np.frombuffer(data, np.uint8).reshape(len(blocks), -1), strict=True):
            self._block(group, page, block)[:] = one

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return b"".join(self._block(group, page, block).tobytes() for block in blocks)

    def _block(self, group: int, page: int, block: int) -> Any:
        tensor = self.tensors[group][page]
        return self.driver.bytes_at(tensor.data_ptr() + block * tensor.stride()[0], tensor.shape[1])
