"""The calls that the copy engine makes to a device's driver, and no others. Behind this seam a device can be replaced.

`kvdepot_cuda.nvidia` answers it with the CUDA driver API, the tests' `support.cuda.fake` without a device. The words
are those that drivers share (streams, events, registered host memory), so that another one fits in; none other is
written.

Every call that fails raises `DriverError`. Handles are plain integers, as drivers and torch name them; 0 is the default
stream of the context. Calls are made with the device current, inside `activated()`.
"""

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

from kvdepot.copying.runs import Addresses
from kvdepot.errors import DeviceError

MAXIMUM_REGISTERED_BYTES: Final = 64 << 30  # of one call: drivers from 580 on refuse 512 GiB
PERMANENT: Final = frozenset({
    "CUDA_ERROR_DEINITIALIZED", "CUDA_ERROR_ECC_UNCORRECTABLE", "CUDA_ERROR_NVLINK_UNCORRECTABLE",
    "CUDA_ERROR_CONTAINED", "CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_LAUNCH_TIMEOUT",
    "CUDA_ERROR_CONTEXT_IS_DESTROYED", "CUDA_ERROR_ASSERT", "CUDA_ERROR_HARDWARE_STACK_ERROR",
    "CUDA_ERROR_ILLEGAL_INSTRUCTION", "CUDA_ERROR_MISALIGNED_ADDRESS", "CUDA_ERROR_INVALID_ADDRESS_SPACE",
    "CUDA_ERROR_INVALID_PC", "CUDA_ERROR_LAUNCH_FAILED", "CUDA_ERROR_TENSOR_MEMORY_LEAK",
    "CUDA_ERROR_EXTERNAL_DEVICE", "CUDA_ERROR_MPS_CLIENT_TERMINATED",
})  # fmt: skip
"""Errors after which, as the driver API's documentation has it, the context or the process is of no use any more."""


class DriverError(DeviceError):
    """A call of the driver failed: `call` names it, `code` is the driver's word for what happened."""

    def __init__(self, call: str, code: str, detail: str = "", *, is_permanent: bool = False) -> None:
        super().__init__(f"{call}: {code}" + (f" ({detail})" if detail else ""))
        self.call = call
        self.code = code
        self.is_permanent = is_permanent or code.partition(" ")[0] in PERMANENT


class CopyKind(enum.Enum):
    """Which side of a copy is the host's."""

    TO_HOST = "to_host"  # a store
    TO_DEVICE = "to_device"  # a retrieve


class Driver(Protocol):
    """One device, used by several threads. Addresses and sizes are bytes."""

    @property
    def description(self) -> str:
        """The device and its driver, for people."""
        ...

    @property
    def has_batch_copy(self) -> bool:
        """Whether `copy_batch` can be called."""
        ...

    @property
    def uuid(self) -> str:
        """The device, by the name that `CUDA_VISIBLE_DEVICES` takes and that is the same in every process."""
        ...

    @property
    def capability(self) -> int:
        """The device's compute capability: 90 is 9.0."""
        ...

    def activated(self) -> AbstractContextManager[None]:
        """Make the device current in this thread until the end of the block, and leave the thread as it was."""
        ...

    def create_stream(self) -> int:
        """Return a new stream of the lowest priority that does not wait for the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Give up a stream."""
        ...

    def synchronize_stream(self, stream: int) -> None:
        """Wait until all work of a stream is done, and raise any failure in it."""
        ...

    def create_event(self) -> int:
        """Return a new event; threads that wait for it sleep."""
        ...

    def destroy_event(self, event: int) -> None:
        """Give up an event."""
        ...

    def record_event(self, event: int, stream: int) -> None:
        """Let an event stand for the work that the stream has now.

        Refused while the stream is captured into a graph: a wait for the event would become part of it.
        """
        ...

    def wait_for_event(self, stream: int, event: int) -> None:
        """Have later work of the stream wait, on the device, for the event as recorded now."""
        ...

    def synchronize_event(self, event: int) -> None:
        """Wait in this thread until the recorded work is done; other threads run in the meantime."""
        ...

    def export_memory(self, address: int) -> tuple[bytes, int, int]:
        """Return the handle, the address and the size of the allocation that device memory at `address` lies in.

        Every address of an allocation gives the same handle. Raises for memory that cannot be opened elsewhere.
        """
        ...

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """Open another process's allocation and return where it lies here, and its size as the driver knows it.

        A process opens each once, and has it until it ends: that is how the memory is given back.
        """
        ...

    def register_host(self, address: int, num_bytes: int) -> None:
        """Make host memory known to the device, so that it is copied without staging; at most 64 GiB a call."""
        ...

    def unregister_host(self, address: int) -> None:
        """Take back one `register_host`, by its address."""
        ...

    def device_address_of(self, address: int) -> int:
        """Return where kernels find registered host memory, given where one `register_host` of it begins."""
        ...

    def allocate_device(self, num_bytes: int) -> int:
        """Return the address of new memory on the device. May wait for all that the device does."""
        ...

    def free_device(self, address: int) -> None:
        """Give such memory back. May wait for all that the device does."""
        ...

    def load_kernel(self, image: bytes, name: str) -> int:
        """Return a kernel out of a compiled image."""
        ...

    def unload_kernel(self, kernel: int) -> None:
        """Give up a kernel and its image."""
        ...

    def launch_kernel(
        self, kernel: int, num_programs: int, num_threads: int, shared_bytes: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """Put a kernel into a stream, `num_programs` thread blocks of `num_threads`.

        `arguments` are ctypes values, which can be reused after the call. Errors of the kernel are raised by a
        later `synchronize_stream`, and is permanent.
        """
        ...

    def copy(self, source: int, target: int, num_bytes: int, direction: CopyKind, stream: int) -> None:
        """Copy one run in stream order. Its host side lies in one registered range or touches none.

        With host memory that is not registered the call may wait for the copy.
        """
        ...

    def copy_batch(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        """Copy runs, `(num_runs,)` each, in any order among themselves; host sides are registered, targets disjoint.

        The arrays can be reused after the call.
        """
        ...

    def close(self) -> None:
        """Give the device up. Twice is harmless."""
        ...


OpenDriver = Callable[[int], Driver]
"""Opens the driver of a device, by its ordinal in this process."""
