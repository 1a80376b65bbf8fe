"""A worker for the suites. The driver allocates its memory: NVIDIA's, or the fake one in its place.

Like an engine's, its tensors are views of one allocation in multiples of 2 MiB: a driver may put smaller allocations
into one block of its own and share that whole block. `small_allocations` still makes one allocation for each tensor.

Needs no torch. In mode `direct`, `wait_until_connected` returns when pieces of the pool are registered and the kernel,
unless it is switched off, is loaded. So a suite that passes has used both.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdepot.lab.processes import wait_until
from kvdepot.testing.plan import WorkerPlan
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
from kvdepot_cuda.driver import CopyKind, Driver, OpenDriver
from kvdepot_cuda.images import has_triton
from kvdepot_cuda.nvidia import CudaDriver
from support.cuda.fake import DEFAULT_STREAM, FakeTensor

PIECE_BYTES = 8 << 20
ALLOCATION_BYTES = 2 << 20
ALIGNMENT = 512  # of each tensor, as in torch
SETTLE_SECONDS = 60.0  # includes Triton's compilation


class Memory:
    """Zeroed memory on the device, with access to it. Not thread-safe."""

    def __init__(self, driver: Driver, num_bytes: int) -> None:
        self._driver = driver
        with driver.activated():
            self.address = driver.allocate_device(num_bytes)
            self._stream = driver.create_stream()
        self.copy(np.zeros(num_bytes, np.uint8), self.address, CopyKind.TO_DEVICE)

    def copy(self, host: Any, address: int, direction: CopyKind) -> None:
        ends = (int(host.ctypes.data), address)
        source, target = ends if direction is CopyKind.TO_DEVICE else ends[::-1]
        with self._driver.activated():
            self._driver.copy(source, target, host.size, direction, self._stream)
            self._driver.synchronize_stream(self._stream)

    def free(self) -> None:
        with self._driver.activated():
            self._driver.destroy_stream(self._stream)
            self._driver.free_device(self.address)


class DeviceWorker:
    def __init__(
        self,
        url: str,
        plan: WorkerPlan,
        *,
        open_driver: OpenDriver = CudaDriver,
        small_allocations: bool = False,
        **options: Any,
    ) -> None:
        self.driver = open_driver(0)
        sizes = [
            [plan.num_blocks * (size + group.padding_bytes) for size in group.page_sizes_bytes] for group in plan.groups
        ]
        self._memories: list[Memory] = []
        self._addresses: list[list[int]] = []
        if small_allocations:
            for group_sizes in sizes:
                self._memories += (mine := [Memory(self.driver, size) for size in group_sizes])
                self._addresses.append([memory.address for memory in mine])
        else:
            total = sum(-(-size // ALIGNMENT) * ALIGNMENT for group_sizes in sizes for size in group_sizes)
            self._memories.append(Memory(self.driver, -(-total // ALLOCATION_BYTES) * ALLOCATION_BYTES))
            free = self._memories[0].address
            for group_sizes in sizes:
                steps = [-(-size // ALIGNMENT) * ALIGNMENT for size in group_sizes]
                self._addresses.append([free + sum(steps[:number]) for number in range(len(steps))])
                free += sum(steps)
        tensors = [
            [
                FakeTensor(address, (plan.num_blocks, size), (size + group.padding_bytes, 1))
                for address, size in zip(addresses, group.page_sizes_bytes, strict=True)
            ]
            for addresses, group in zip(self._addresses, plan.groups, strict=True)
        ]
        options = {"piece_bytes": PIECE_BYTES} | options
        self._plan = plan
        self._has_kernel = options.get("gather_kernel", has_triton())
        self.context = CudaTransferContext(
            plan.cache(tensors), CudaOptions(url=url, stream=lambda: DEFAULT_STREAM, open_driver=open_driver, **options)
        )
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)
        if self.context.transfer_mode == "direct":
            wait_until(lambda: self.context.is_warm, SETTLE_SECONDS, "the pool to be registered")
            assert self.context.num_registered > 0, "the driver registered nothing of the pool: all copies are pageable"
            assert self.context.uses_kernel == self._has_kernel, "the kernel was not loaded: see the warnings"

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        for block, one in zip(blocks, np.frombuffer(bytearray(data), np.uint8).reshape(len(blocks), -1), strict=True):
            self._copy(group, page, block, one, CopyKind.TO_DEVICE)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        found = np.zeros((len(blocks), self._plan.groups[group].page_sizes_bytes[page]), np.uint8)
        for block, one in zip(blocks, found, strict=True):
            self._copy(group, page, block, one, CopyKind.TO_HOST)
        return found.tobytes()

    def _copy(self, group: int, page: int, block: int, host: Any, direction: CopyKind) -> None:
        plan = self._plan.groups[group]
        offset = block * (plan.page_sizes_bytes[page] + plan.padding_bytes)
        self._memories[0].copy(host, self._addresses[group][page] + offset, direction)

    def close(self) -> None:
        """Leave the depot, then free the memory, which no other process has open any more."""
        self.context.close()
        for memory in self._memories:
            memory.free()
        self.driver.close()
