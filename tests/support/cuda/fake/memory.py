"""`FakeMemory`: the memory of a fake device, and the host memory that is registered with it.

Device memory is plain memory. If it has a folder, it is files on tmpfs, which other processes open by handle like IPC
handles. Registered host memory is mapped a second time, and the device finds it only at those addresses. So a kernel
that was given host addresses is noticed.
"""

import contextlib
import ctypes
import mmap
import os
import secrets
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot_cuda.driver import MAXIMUM_REGISTERED_BYTES, DriverError

_PAGE_BYTES: Final = mmap.PAGESIZE
_HANDLE_BYTES: Final = 64


@dataclass(frozen=True, slots=True)
class FakeDevice:
    """Stands for `torch.device`."""

    type: str = "cuda"
    index: int = 0


class FakeTensor:
    """A tensor of bytes on the fake device, with the attributes that a backend reads."""

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], index: int = 0) -> None:
        self.shape = shape
        self.device = FakeDevice(index=index)
        self._address = address
        self._strides = strides

    def data_ptr(self) -> int:
        """As in torch."""
        return self._address

    def stride(self) -> tuple[int, ...]:
        """As in torch: in elements, which are bytes here."""
        return self._strides

    def element_size(self) -> int:
        """As in torch."""
        return 1


class FakeMemory:
    """Memory of the device. Refuses with `DriverError` the calls that a driver refuses.

    Args:
        root: folder of the device's memory. None: memory without handles.
    """

    def __init__(self, root: Path | None) -> None:
        self.taken: set[int] = set()  # device memory of `Driver.allocate_device`
        self.largest_registered_bytes = 0
        self._root = root
        self._lock = threading.RLock()
        self._handles: dict[int, bytes] = {}  # by address of the allocation
        self._opened: dict[bytes, int] = {}  # handle: address
        self.allocations: dict[int, tuple[mmap.mmap, int]] = {}
        self._registered: dict[int, int] = {}
        self._aliases: dict[int, tuple[int, int]] = {}  # by registered address: the device's address, bytes

    @property
    def num_opened(self) -> int:
        """Number of other processes' handles that are open."""
        return len(self._opened)

    @property
    def registered(self) -> list[tuple[int, int]]:
        """Address and size in bytes of each registered range of host memory."""
        with self._lock:
            return list(self._registered.items())

    def allocate(self, num_bytes: int) -> int:
        """Allocate zeroed device memory and return its address."""
        if self._root is None:
            return self._keep(mmap.mmap(-1, num_bytes), b"")
        path = self._root / secrets.token_hex(8)
        with path.open("xb+") as file:
            file.truncate(num_bytes)
            return self._keep(mmap.mmap(file.fileno(), num_bytes), f"{os.getpid()}:{path}".encode())

    def free(self, address: int) -> None:
        """Free device memory from `Driver.allocate_device`."""
        self.taken.remove(address)
        del self.allocations[address]

    def bytes_at(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a writable view of device memory."""
        if not self.is_on_device(address, num_bytes):
            raise AssertionError(f"{num_bytes} bytes at {address:#x} are not on the device")
        return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B"), np.uint8)

    def export(self, address: int) -> tuple[bytes, int, int]:
        """See `Driver.export_memory`."""
        for base, (_, size) in self.allocations.items():
            if base <= address < base + size and base in self._handles:
                return self._handles[base], base, size
        raise DriverError("export_memory", "CUDA_ERROR_INVALID_VALUE (1)", "memory without a handle")

    def open(self, handle: bytes) -> tuple[int, int]:
        """See `Driver.open_memory`. A handle opens once, and never in a process with the exporter's PID."""
        pid, _, path = handle.rstrip(b"\0").decode(errors="replace").partition(":")
        if handle in self._opened or int(pid) == os.getpid():
            raise DriverError("open_memory", "CUDA_ERROR_INVALID_CONTEXT (201)")
        try:
            with Path(path).open("rb+") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError) as error:
            raise DriverError("open_memory", "CUDA_ERROR_MAP_FAILED (205)", str(error)) from error
        address = self._opened[handle] = self._keep(memory, b"")
        return address, len(memory)

    def register(self, address: int, num_bytes: int) -> None:
        """See `Driver.register_host`."""
        if not 0 < num_bytes <= MAXIMUM_REGISTERED_BYTES or not _is_mapped(address, num_bytes):
            raise DriverError("register_host", "CUDA_ERROR_INVALID_VALUE (1)")
        with self._lock:
            if self._registered_at(address, num_bytes):
                raise DriverError("register_host", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)")
            self._registered[address] = num_bytes
            self.largest_registered_bytes = max(self.largest_registered_bytes, num_bytes)

    def registered_bytes_at(self, address: int) -> int:
        """Return the size in bytes of the registered range that begins exactly at `address`."""
        size = self._registered.get(address)
        if size is None:
            raise DriverError("unregister_host", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED (713)")
        return size

    def unregister(self, address: int) -> None:
        """See `Driver.unregister_host`."""
        with self._lock:
            del self._registered[address]
            if address in self._aliases:
                _unmap(*self._aliases.pop(address))

    def device_address_of(self, address: int) -> int:
        """See `Driver.device_address_of`."""
        with self._lock:
            if address not in self._registered:
                raise DriverError("device_address_of", "CUDA_ERROR_INVALID_VALUE (1)", "not registered")
            if address not in self._aliases:
                self._aliases[address] = _map_again(address, self._registered[address]), self._registered[address]
            return self._aliases[address][0]

    def is_on_device(self, address: int, num_bytes: int) -> bool:
        """Return whether the range lies within one allocation."""
        return any(
            start <= address and address + num_bytes <= start + size for start, (_, size) in self.allocations.items()
        )

    def is_reached_by_kernels(self, address: int, num_bytes: int) -> bool:
        """Return whether kernels can use the range: device memory, or registered memory by its device address."""
        return self.is_on_device(address, num_bytes) or any(
            start <= address and address + num_bytes <= start + size for start, size in self._aliases.values()
        )

    def is_registered(self, host: int, num_bytes: int, call: str) -> bool:
        """Return whether a range of host memory is registered. Refuse a partly registered one, and other memory."""
        touched = self._registered_at(host, num_bytes)
        if not touched:
            if self.is_on_device(host, num_bytes) or not _is_mapped(host, num_bytes):
                raise DriverError(call, "CUDA_ERROR_INVALID_VALUE (1)", f"{num_bytes} bytes at {host:#x} of the host")
            return False
        if len(touched) > 1 or not touched[0][0] <= host <= host + num_bytes <= sum(touched[0]):
            raise DriverError(call, "CUDA_ERROR_INVALID_VALUE (1)", "across the end of registered memory")
        return True

    def _registered_at(self, address: int, num_bytes: int) -> list[tuple[int, int]]:
        return [
            (start, size) for start, size in self.registered if start < address + num_bytes and address < start + size
        ]

    def _keep(self, memory: mmap.mmap, handle: bytes) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.allocations[address] = memory, len(memory)
        if len(handle) > _HANDLE_BYTES:
            raise ValueError(f"the folder's name is too long for a handle of {_HANDLE_BYTES} bytes: {handle}")
        if handle:
            self._handles[address] = handle.ljust(_HANDLE_BYTES, b"\0")
        return address


def holders(path: Path) -> set[int]:
    """Return the processes that have a fake device's memory mapped."""
    found: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if str(path) in maps.read_text():
                found.add(int(maps.parent.name))
    return found


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.mremap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MREMAP_MAYMOVE: Final = 1
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


def _map_again(address: int, num_bytes: int) -> int:
    """Map shared memory a second time, which Linux does if `mremap` is given an old size of 0."""
    found = _libc.mremap(address, 0, num_bytes, _MREMAP_MAYMOVE)
    if found is None or found == ctypes.c_void_p(-1).value:
        raise DriverError("device_address_of", "CUDA_ERROR_NOT_SUPPORTED (801)", "this memory is not shared")
    return int(found)


def _unmap(address: int, num_bytes: int) -> None:
    _libc.munmap(address, num_bytes)


def _is_mapped(address: int, num_bytes: int) -> bool:
    start = address // _PAGE_BYTES * _PAGE_BYTES
    size = address + num_bytes - start
    pages = ctypes.create_string_buffer(-(-size // _PAGE_BYTES))
    return _libc.mincore(start, size, pages) == 0
