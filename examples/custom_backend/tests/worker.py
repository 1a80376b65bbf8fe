"""The part of a backend that the suites need: a worker with access to its device's memory."""

from collections.abc import Sequence
from typing import Any

from kvdepot_toy import device

from kvdepot.backends import get_backend
from kvdepot.testing.backend import WorkerPlan


class ToyWorker:
    """See `kvdepot.testing.backend.Worker`."""

    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        self.tensors = [
            [device.allocate(plan.num_blocks, size, size + group.padding_bytes) for size in group.page_sizes_bytes]
            for group in plan.groups
        ]
        self.context = get_backend("toy").create_context(plan.cache(self.tensors), url=url, **options)
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        tensor = self.tensors[group][page]
        for place, block in enumerate(blocks):
            one = memoryview(data)[place * tensor.page_size_bytes :][: tensor.page_size_bytes]
            device.copy_in(one, tensor.address + block * tensor.stride_bytes)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        tensor = self.tensors[group][page]
        data = bytearray(tensor.page_size_bytes * len(blocks))
        for place, block in enumerate(blocks):
            one = memoryview(data)[place * tensor.page_size_bytes :][: tensor.page_size_bytes]
            device.copy_out(tensor.address + block * tensor.stride_bytes, one)
        return bytes(data)
