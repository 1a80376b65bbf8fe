"""A worker of the conformance suite whose device is the fake driver."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdepot.testing.plan import WorkerPlan
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
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
        self._blocks(group, page)[list(blocks)] = np.frombuffer(data, np.uint8).reshape(len(blocks), -1)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return self._blocks(group, page)[list(blocks)].tobytes()

    def _blocks(self, group: int, page: int) -> Any:
        tensor = self.tensors[group][page]
        num_blocks, size_bytes = tensor.shape
        whole = self.driver.bytes_at(tensor.data_ptr(), num_blocks * tensor.stride()[0])
        return whole.reshape(num_blocks, -1)[:, :size_bytes]
