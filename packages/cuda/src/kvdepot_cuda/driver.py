"""The interface to a device's driver: only the calls that the copy engine makes, so that tests can replace a device.

`kvdepot_cuda.nvidia` implements it by the CUDA driver API, the tests' `support.cuda.fake` without a device. It uses the
terms that drivers share (streams, events, registered host memory), so another driver would fit, but there is none.

Failed calls raise `DriverError`. Handles are plain integers, as in drivers and torch; 0 is the default stream of the
context. Calls are made inside `activated()`, with the device current.
"""

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvdepot.copying.runs import Addresses
from kvdepot.errors import DeviceError

MAXIMUM_REGISTERED_BYTES: Final = 64 << 30  # per call: drivers from 580 on refuse 512 GiB
PERMANENT: Final = frozenset({
    "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_ASSERT", "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_EXTERNAL_DEVICE", "CUDA_ERROR_MPS_CLIENT_TERMINATED",
})  # fmt: skip
"""Errors that make the context or the process unusable, according to the driver API's documentation."""


class DriverError(DeviceError):
    """A driver call failed: `call` is its name, `code` the driver's error."""

    def __init__(self, call: str, code: str, detail: str = "", *, is_permanent: bool = False) -> None:
        super().__init__(f"{call}: {code}" + (f" ({detail})" if detail else ""))
        self.call = call
        self.code = code
        self.is_permanent = is_permanent or code.partition(" ")[0] in PERMANENT


class CopyKind(enum.Enum):
    """The side of a copy that is in host memory."""

    TO_HOST = "to_host"  # a store
    TO_DEVICE = "to_device"  # a retrieve


class Driver(Protocol):
    """One device, used by several threads. Addresses and sizes are in bytes."""

    @property
    def description(self) -> str:
        """A description of the device and its driver."""
        ...

    @property
    def has_batch_copy(self) -> bool:
        """Whether `copy_batch` can be called."""
        ...

    @property
    def uuid(self) -> str:
        """The device's UUID, which `CUDA_VISIBLE_DEVICES` accepts and which is the same in every process."""
        ...

    @property
    def capability(self) -> int:
        """The device's compute capability: 90 is 9.0."""
        ...

    def activated(self) -> AbstractContextManager[None]:
        """Make the device current in this thread until the end of the block, then restore the thread's state."""
        ...

    def create_stream(self) -> int:
        """Return a new stream of the lowest priority that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Destroy a stream."""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Wait until all work of a stream is done. Raise its errors."""
        ...

    def create_event(self) -> int:
        """Return a new event. Threads that wait for it sleep."""
        ...

    def destroy_event(self, event: int) -> None:
        """Destroy an event."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Record an event for the work that the stream has now.

        It is refused while the stream is captured into a graph, as a wait for the event would become part of the graph.
        """
        ...

    def wait_for_event(self, stream: int, event: int) -> None:
        """Make later work of the stream wait, on the device, for the event as recorded now."""
        ...

    def synchronize_event(self, event: int) -> None:
        """Wait in this thread until the recorded work is done. Other threads can run meanwhile."""
        ...

    def export_memory(self, address: int) -> tuple[bytes, int, int]:
        """Return the handle, the address and the size of the allocation that contains `address`.

        All addresses of an allocation give the same handle. Raises for memory that other processes cannot open.
        """
        ...

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """Open another process's allocation. Return its address here, and its size as reported by the driver.

        A process opens each allocation only once, and keeps it until the process ends, which releases the memory.
        """
        ...

    def register_host(self, address: int, num_bytes: int) -> None:
        """Register host memory with the device, so that it is copied without staging; at most 64 GiB per call."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo one `register_host`, by its address."""
        ...

    def device_address_of(self, address: int) -> int:
        """Return the device address of registered host memory, given the address of a `register_host`."""
        ...

    def allocate_device(self, num_bytes: int) -> int:
        """Allocate memory on the device. May wait for all work of the device."""
        ...

    def free_device(self, address: int) -> None:
        """Free memory from `allocate_device`. May wait for all work of the device."""
        ...

    def load_kernel(self, image: bytes, name: str) -> int:
        """Load a kernel from a compiled image."""
        ...

    def unload_kernel(self, kernel: int) -> None:
        """Unload a kernel and its image."""
        ...

    def launch_kernel(
        self, kernel: int, num_programs: int, num_threads: int, shared_bytes: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """Launch a kernel on a stream, as `num_programs` thread blocks of `num_threads`.

        `arguments` are ctypes values, which can be reused after the call. Errors of the kernel are permanent, and a
        later `synchronize_stream` raises them.
        """
        ...

    def copy(self, source: int, target: int, num_bytes: int, direction: CopyKind, stream: int) -> None:
        """Copy one run in stream order. Its host side is within one registered range, or outside all of them.

        If the host memory is not registered, the call may wait for the copy.
        """
        ...

    def copy_batch(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        """Copy runs, `(num_runs,)` each, in any order. Their host sides are registered, their targets disjoint.

        The arrays can be reused after the call.
        """
        ...

    def close(self) -> None:
        """Close the device. Idempotent."""
        ...


OpenDriver = Callable[[int], Driver]
"""Opens the driver of a device, by its ordinal in this process."""
