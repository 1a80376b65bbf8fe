"""The part of a backend that the suites need: a worker with access to its device's memory."""

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

    def write_block(self, group: int, page: int, block: int, data: bytes) -> None:
        device.copy_in(memoryview(data), self._address(group, page, block))

    def read_block(self, group: int, page: int, block: int) -> bytes:
        data = bytearray(self.tensors[group][page].page_size_bytes)
        device.copy_out(self._address(group, page, block), memoryview(data))
        return bytes(data)

    def _address(self, group: int, page: int, block: int) -> int:
        tensor = self.tensors[group][page]
        return tensor.address + block * tensor.stride_bytes
