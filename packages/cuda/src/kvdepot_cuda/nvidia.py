"""`CudaDriver`: the `Driver` of NVIDIA devices, by the CUDA driver API of cuda-bindings.

CUDA is not imported before the first use. This is the driver API, not the runtime API, because its errors are only in
the return codes: a failed runtime call would leave an error behind that torch finds.

It uses the device's primary context, like torch. The API does not make a context current, so each use pushes it and
pops it again. Meanwhile the thread's capture mode is relaxed: with the default mode, a registration or a wait here
would break a CUDA graph that the engine is capturing in another thread.
"""

import contextlib
import ctypes
import importlib
import os
from collections.abc import Generator, Sequence
from typing import Any, Final
from uuid import UUID

import numpy as np

from kvdepot.copying.runs import Addresses
from kvdepot_cuda.driver import CopyKind, DriverError

_BATCH_COPY_VERSION: Final = 12080  # the signature with `failIdx`; drivers of CUDA 13 still have it
_ORDER_STREAM: Final = 1  # the source is read in stream order
_ORDER_ANY: Final = 3  # ... at any time: nothing in the stream writes it
_NO_FAILURE_INDEX: Final = 2**64 - 1
_HANDLE_BYTES: Final = 64  # CU_IPC_HANDLE_SIZE


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes.

    The hints are only for managed memory. The flags stay 0: on an H100, `CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE`
    (1) did not make copies disturb kernels less.
    """

    _fields_ = (
        ("source_order", ctypes.c_uint32),
        ("source_hint", ctypes.c_int32 * 2),
        ("target_hint", ctypes.c_int32 * 2),
        ("flags", ctypes.c_uint32),
    )


assert ctypes.sizeof(_CopyAttributes) == 24

_P, _N = ctypes.c_void_p, ctypes.c_size_t
BatchCopy = ctypes.CFUNCTYPE(ctypes.c_int, _P, _P, _P, _N, _P, _P, _N, _P, _P)


class CudaDriver:
    """See `kvdepot_cuda.driver.Driver`.

    Args:
        ordinal: the device's number in this process.

    Raises:
        DriverError: the driver or the device is missing, or cannot be used.
    """

    def __init__(self, ordinal: int) -> None:
        self._cuda = load_bindings()
        self._is_open = False
        self._done: dict[int, int] = {}  # by stream: the event to wait for
        self._modules: dict[int, Any] = {}  # by kernel: its module
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", ordinal)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._is_open = True
        self._batch_copy = self._find_batch_copy()

    @property
    def description(self) -> str:
        """See `Driver`."""
        name = bytes(self._call("cuDeviceGetName", 128, self._device)).partition(b"\0")[0].decode(errors="replace")
        version = int(self._call("cuDriverGetVersion"))
        return f"{name}, driver for CUDA {version // 1000}.{version % 1000 // 10}"

    @property
    def has_batch_copy(self) -> bool:
        """See `Driver`: from CUDA 12.8 on."""
        return self._batch_copy is not None

    @property
    def uuid(self) -> str:
        """See `Driver`."""
        return f"GPU-{UUID(bytes=bytes(self._call('cuDeviceGetUuid', self._device).bytes))}"

    @property
    def capability(self) -> int:
        """See `Driver`."""
        names = self._cuda.CUdevice_attribute
        major = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, self._device)
        minor = self._call("cuDeviceGetAttribute", names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, self._device)
        return int(major) * 10 + int(minor)

    @contextlib.contextmanager
    def activated(self) -> Generator[None]:
        """See `Driver`."""
        self._call("cuCtxPushCurrent", self._context)
        try:
            before = self._call(
                "cuThreadExchangeStreamCaptureMode", self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            )
            try:
                yield
            finally:
                self._call("cuThreadExchangeStreamCaptureMode", before)
        finally:
            self._call("cuCtxPopCurrent")

    def create_stream(self) -> int:
        """See `Driver`."""
        lowest, _ = self._call("cuCtxGetStreamPriorityRange")
        flags = int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        stream = int(self._call("cuStreamCreateWithPriority", flags, lowest))
        self._done[stream] = self.create_event()
        return stream

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self.destroy_event(self._done.pop(stream))
        self._call("cuStreamDestroy", stream)

    def synchronize_stream(self, stream: int) -> None:
        """See `Driver`. Waits for an event, as a thread that does so sleeps instead of spinning."""
        event = self._done[stream]
        try:
            self._call("cuEventRecord", event, stream)
            self._call("cuEventSynchronize", event)
        except DriverError:
            self._call("cuStreamSynchronize", stream)  # no work may be running afterwards, even after an error
            raise

    def create_event(self) -> int:
        """See `Driver`."""
        kinds = self._cuda.CUevent_flags
        return int(self._call("cuEventCreate", int(kinds.CU_EVENT_DISABLE_TIMING) | int(kinds.CU_EVENT_BLOCKING_SYNC)))

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventDestroy", event)

    def record_event(self, event: int, stream: int) -> None:
        """See `Driver`."""
        status = self._call("cuStreamIsCapturing", stream)
        if status != self._cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE:
            raise DriverError("cuStreamIsCapturing", status.name, f"stream {stream:#x} cannot be waited for")
        self._call("cuEventRecord", event, stream)

    def wait_for_event(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self._call("cuStreamWaitEvent", stream, event, 0)

    def synchronize_event(self, event: int) -> None:
        """See `Driver`."""
        self._call("cuEventSynchronize", event)

    def export_memory(self, address: int) -> tuple[bytes, int, int]:
        """See `Driver`. Uses the handles of `cuIpcGetMemHandle`, which memory of `cuMemCreate` does not have.

        torch's expandable segments and vLLM's sleep mode use `cuMemCreate`.
        """
        attribute = self._cuda.CUpointer_attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        if not self._call("cuPointerGetAttribute", attribute, address):
            raise DriverError(
                "cuPointerGetAttribute",
                "not IPC capable",
                "memory of expandable segments or of a sleep mode has no handle that another process can open",
            )
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        handle = self._call("cuIpcGetMemHandle", base)
        return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES), int(base), int(num_bytes)

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """See `Driver`."""
        if len(handle) != _HANDLE_BYTES:
            raise DriverError("cuIpcOpenMemHandle", f"a handle of {len(handle)} bytes")
        opened = self._cuda.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, _HANDLE_BYTES)
        flags = int(self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        address = int(self._call("cuIpcOpenMemHandle", opened, flags))
        base, num_bytes = self._call("cuMemGetAddressRange", address)
        if int(base) != address:
            raise DriverError(
                "cuIpcOpenMemHandle",
                "an address inside an allocation",
                f"{address:#x} lies {address - int(base)} bytes behind the base; handles name whole allocations",
            )
        return address, int(num_bytes)

    def register_host(self, address: int, num_bytes: int) -> None:
        """See `Driver`."""
        flags = int(self._cuda.CU_MEMHOSTREGISTER_PORTABLE) | int(self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP)
        self._call("cuMemHostRegister", address, num_bytes, flags)

    def unregister_host(self, address: int) -> None:
        """See `Driver`."""
        self._call("cuMemHostUnregister", address)

    def device_address_of(self, address: int) -> int:
        """See `Driver`."""
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def allocate_device(self, num_bytes: int) -> int:
        """See `Driver`."""
        return int(self._call("cuMemAlloc", num_bytes))

    def free_device(self, address: int) -> None:
        """See `Driver`."""
        self._call("cuMemFree", address)

    def load_kernel(self, image: bytes, name: str) -> int:
        """See `Driver`."""
        module = self._call("cuModuleLoadData", image)
        try:
            kernel = int(self._call("cuModuleGetFunction", module, name.encode()))
        except DriverError:
            self._call("cuModuleUnload", module)
            raise
        self._modules[kernel] = module
        return kernel

    def unload_kernel(self, kernel: int) -> None:
        """See `Driver`."""
        self._call("cuModuleUnload", self._modules.pop(kernel))

    def launch_kernel(
        self, kernel: int, num_programs: int, num_threads: int, shared_bytes: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """See `Driver`."""
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(value) for value in arguments))
        grid, block = (num_programs, 1, 1), (num_threads, 1, 1)
        self._call("cuLaunchKernel", kernel, *grid, *block, shared_bytes, stream, ctypes.addressof(places), 0)

    def copy(self, source: int, target: int, num_bytes: int, direction: CopyKind, stream: int) -> None:
        """See `Driver`."""
        call = "cuMemcpyDtoHAsync" if direction is CopyKind.TO_HOST else "cuMemcpyHtoDAsync"
        self._call(call, target, source, num_bytes, stream)

    def copy_batch(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        """See `Driver`. Passes the arrays in one call; the binding's own function takes lists of Python objects."""
        assert self._batch_copy is not None
        columns = [np.ascontiguousarray(column, np.uint64) for column in (targets, sources, sizes)]
        # A store reads blocks that are written in stream order. A retrieve reads leased extents, which do not change.
        order = _ORDER_STREAM if direction is CopyKind.TO_HOST else _ORDER_ANY
        attributes = _CopyAttributes(source_order=order)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(_NO_FAILURE_INDEX)
        pointers = [column.ctypes.data for column in columns]
        places = [ctypes.addressof(each) for each in (attributes, first)]
        code = self._batch_copy(*pointers, len(sizes), *places, 1, ctypes.addressof(failed), stream)
        if code:
            run = "no run named" if failed.value == _NO_FAILURE_INDEX else f"run {failed.value}"
            raise DriverError("cuMemcpyBatchAsync", _name_of(self._cuda, code), f"{run} of {len(sizes)}")

    def close(self) -> None:
        """See `Driver`."""
        if self._is_open:
            self._is_open = False
            self._call("cuDevicePrimaryCtxRelease", self._device)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Make one call. Return its results without the error code: None, one value or a tuple."""
        try:
            code, *values = getattr(self._cuda, name)(*arguments)
        except (KeyError, ValueError) as error:  # the bindings raise these for a code that is newer than they are
            raise DriverError(name, f"a code that the bindings do not know: {error}") from error
        if int(code):
            raise DriverError(name, _name_of(self._cuda, int(code)))
        return values[0] if len(values) == 1 else tuple(values)

    def _find_batch_copy(self) -> Any:
        try:
            address, found = self._call("cuGetProcAddress", b"cuMemcpyBatchAsync", _BATCH_COPY_VERSION, 0)
        except DriverError:  # the driver is older than the requested version
            return None
        return BatchCopy(int(address)) if int(found) == 0 and address else None


def _name_of(cuda: Any, code: int) -> str:
    try:
        return f"{cuda.CUresult(code).name} ({code})"
    except ValueError:  # the driver is newer than the bindings
        return f"error {code}"


def load_bindings() -> Any:
    """Return the module of the driver's bindings.

    Raises:
        DriverError: the bindings, or the driver below them, are not here.
    """
    try:
        cuda = importlib.import_module("cuda.bindings.driver")
        code, _ = cuda.cuDriverGetVersion()  # the first call loads the driver, and raises if there is none
    except (ImportError, RuntimeError, KeyError, ValueError) as error:
        raise DriverError("loading the CUDA driver", "not possible", str(error)) from error
    if int(code):
        raise DriverError("cuDriverGetVersion", _name_of(cuda, int(code)))
    return cuda


def see_only(uuid: str) -> None:
    """Make one device the only visible one of this process, with number 0. Call this before the first `CudaDriver`."""
    os.environ["CUDA_VISIBLE_DEVICES"] = uuid
