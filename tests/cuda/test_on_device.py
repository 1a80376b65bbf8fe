"""The suite of every backend with NVIDIA's driver and a real device, in mode `direct`, with and without the kernel.

Skipped where there is no device; with KVDEPOT_REQUIRE_CUDA set, as on machines that have one, that is a failure. Needs
no torch: the tensors are memory that the driver allocates.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from kvdepot.protocols import CacheGroup
from kvdepot.testing.backend import BackendSuite, WorkerPlan
from kvdepot_cuda.availability import why_unavailable
from kvdepot_cuda.context import CudaTransferContext
from kvdepot_cuda.driver import Direction
from kvdepot_cuda.nvidia import CudaDriver
from kvdepot_cuda.testing import DEFAULT_STREAM, FakeTensor

REASON = why_unavailable()
pytestmark = pytest.mark.skipif(
    REASON is not None and not os.environ.get("KVDEPOT_REQUIRE_CUDA"), reason=f"no device: {REASON}"
)


@dataclass
class Memory:
    """Memory on the device, and a way into it."""

    driver: CudaDriver
    address: int
    num_bytes: int

    def copy(self, host: Any, offset: int, direction: Direction) -> None:
        with self.driver.activated():
            stream = self.driver.create_stream()
            ends = (int(host.ctypes.data), self.address + offset)
            source, target = ends if direction is Direction.TO_DEVICE else ends[::-1]
            self.driver.copy(source, target, host.size, direction, stream)
            self.driver.synchronize_stream(stream)
            self.driver.destroy_stream(stream)


class DeviceWorker:
    def __init__(self, url: str, plan: WorkerPlan, **options: Any) -> None:
        self.driver = CudaDriver(0)
        self._memories: list[list[Memory]] = []
        groups: list[CacheGroup] = []
        for group in plan.groups:
            memories = [
                self._allocate(plan.num_blocks * (size + group.padding_bytes)) for size in group.page_sizes_bytes
            ]
            self._memories.append(memories)
            tensors = [
                FakeTensor(memory.address, (plan.num_blocks, size), (size + group.padding_bytes, 1))
                for memory, size in zip(memories, group.page_sizes_bytes, strict=True)
            ]
            groups.append(
                CacheGroup(tensors, group.block_tokens, group.kind, group.window_tokens, group.shard, group.num_shards)
            )
        self._plan = plan
        self.context = CudaTransferContext(
            groups, plan.instance, dtype="bytes", rank=plan.rank, world_size=plan.world_size, format=plan.format,
            chunk_tokens=plan.chunk_tokens, url=url, stream=lambda: DEFAULT_STREAM,
            piece_bytes=8 << 20, **options,
        )  # fmt: skip
        self.spec = self.context.spec

    def _allocate(self, num_bytes: int) -> Memory:
        with self.driver.activated():
            memory = Memory(self.driver, self.driver.allocate_device(num_bytes), num_bytes)
        memory.copy(np.zeros(num_bytes, np.uint8), 0, Direction.TO_DEVICE)
        return memory

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_block(self, group: int, page: int, block: int, data: bytes) -> None:
        self._copy(group, page, block, np.frombuffer(bytearray(data), np.uint8), Direction.TO_DEVICE)

    def read_block(self, group: int, page: int, block: int) -> bytes:
        found = np.zeros(self._plan.groups[group].page_sizes_bytes[page], np.uint8)
        self._copy(group, page, block, found, Direction.TO_HOST)
        return found.tobytes()

    def _copy(self, group: int, page: int, block: int, host: Any, direction: Direction) -> None:
        plan = self._plan.groups[group]
        offset = block * (plan.page_sizes_bytes[page] + plan.padding_bytes)
        self._memories[group][page].copy(host, offset, direction)

    def free(self) -> None:
        with self.driver.activated():
            for memories in self._memories:
                for memory in memories:
                    self.driver.free_device(memory.address)
        self.driver.close()


class TestOnADevice(BackendSuite):
    options: dict[str, Any] = {}  # noqa: RUF012  # of this class

    @pytest.fixture(autouse=True)
    def memory(self) -> Iterator[None]:
        self.made: list[DeviceWorker] = []
        yield
        for worker in self.made:
            worker.context.close()
            worker.free()

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> DeviceWorker:
        self.made.append(DeviceWorker(url, plan, **(self.options | options)))
        return self.made[-1]


class TestOnADeviceWithTheKernel(TestOnADevice):
    options = {"kernel_run_bytes": 1 << 20, "kernel_runs": 1}  # noqa: RUF012
