"""`FakeDriver`: a `Driver` without a device. It is as strict as a real driver and runs work as late as one may.

The module `memory` has the memory of the device, `streams` its streams.

Every stream is a thread that does nothing until its stream is waited for, and then works in order. A copy that is never
synchronised never happens, and until it happens its target holds poison. The fake refuses the calls that a real driver
refuses: without a current context, with addresses in no allocation, with host memory half registered, on the default
stream. `violations` has the errors that a real driver would not report (unregistering under a copy, targets that
overlap, a kernel's table in two streams). `fail` makes any call fail.

Kernels do not run here: `launch_kernel` uses their models (`kernels`), or passes its arguments to `run_kernel`.

It proves the worker's side: order, waits, errors, when memory is registered, which resources are released; with handles
also the life of the processes. It proves nothing about a device: no speed, no ordering inside hardware, and no
behaviour of NVIDIA's driver beyond what is coded here.
"""

import collections
import contextlib
import ctypes
import itertools
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import Addresses
from kvdepot_cuda.driver import CopyKind, DriverError
from support.cuda.fake.kernels import RunKernel, run_kernel, touched
from support.cuda.fake.memory import FakeMemory, FakeTensor
from support.cuda.fake.streams import FakeStream

POISON: Final = 0xAB
DEFAULT_STREAM: Final = 0


class FakeEvent:
    """Stands for a `torch.cuda.Event` that was recorded on a stream of the fake device."""

    def __init__(self, driver: "FakeDriver", stream: int) -> None:
        self._driver, self._stream = driver, stream
        with driver.activated():
            self.cuda_event = driver.create_event()
            driver.of_engine.add(self.cuda_event)
            driver.record_event(self.cuda_event, stream)

    def synchronize(self) -> None:
        """As in torch."""
        with self._driver.activated():
            self._driver.synchronize_stream(self._stream)


@dataclass(slots=True)
class _Failure:
    code: str
    after: int
    times: int


class FakeDriver:
    """See `kvdepot_cuda.driver.Driver`.

    `calls` counts calls by name, also `"pageable"` copies, all `"runs"`, `"gathered"` runs, which kernels copied, and
    the extents of `"digest_extents"`.

    Args:
        ordinal: number of the device.
        has_batch_copy: whether the driver supports batches.
        root: folder of the device's memory. None: memory without handles.
        run_kernel: replaces the models.
    """

    capability = 90
    description = "no GPU: a driver without a device, whose times say nothing about one"

    def __init__(
        self,
        ordinal: int = 0,
        *,
        has_batch_copy: bool = True,
        root: Path | None = None,
        run_kernel: RunKernel = run_kernel,
    ) -> None:
        self.ordinal = ordinal
        self.uuid = f"GPU-{ordinal}"
        self.has_batch_copy = has_batch_copy
        self.run_kernel = run_kernel
        self.calls: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self.largest_batch = 0
        self.is_closed = False
        self.capturing: set[int] = set()  # streams that are being captured into a graph
        self.of_engine: set[int] = set()  # streams and events that the engine releases, not the backend
        self.memory = FakeMemory(root)
        self._local = threading.local()
        self._lock = threading.RLock()
        self._numbers = itertools.count(0x1000)
        self._kernels: dict[int, str] = {}
        self._tables: collections.Counter[int] = collections.Counter()  # of launches that have not finished
        self._table_streams: dict[int, int] = {}  # the stream of each table's launches
        self._events: dict[int, tuple[FakeStream, int] | None] = {}
        self._failures: dict[str, _Failure] = {}
        self._streams = {DEFAULT_STREAM: FakeStream()}

    # --- for tests ------------------------------------------------------------------------------------------------

    def allocate(self, num_bytes: int) -> int:
        """Allocate zeroed device memory and return its address."""
        return self.memory.allocate(num_bytes)

    def tensor(self, num_blocks: int, page_size_bytes: int, padding_bytes: int = 0) -> FakeTensor:
        """Return a new tensor `(num_blocks, page_size_bytes)`."""
        stride = page_size_bytes + padding_bytes
        return FakeTensor(self.allocate(num_blocks * stride), (num_blocks, page_size_bytes), (stride, 1), self.ordinal)

    def bytes_at(self, address: int, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Return a writable view of device memory."""
        return self.memory.bytes_at(address, num_bytes)

    def engine_stream(self) -> int:
        """Create a stream of the engine's own."""
        with self.activated():
            stream = self.create_stream()
        self.of_engine.add(stream)
        return stream

    def launch(self, kernel: Callable[[], None], stream: int = DEFAULT_STREAM) -> None:
        """Queue a function on a stream, as an engine does with its kernels."""
        self._streams[stream].add(kernel)

    def fail(self, call: str, code: str = "CUDA_ERROR_UNKNOWN (999)", *, after: int = 0, times: int = 1 << 30) -> None:
        """Make a call fail `times` times after `after` more calls. `"execute"` makes copies fail while they run."""
        self._failures[call] = _Failure(code, after, times)

    @property
    def left_over(self) -> dict[str, int]:
        """Resources that were created and not released."""
        found = {
            "streams": len(self._streams.keys() - self.of_engine) - 1,
            "events": len(self._events.keys() - self.of_engine),
            "registrations": len(self.memory.registered),
            "opened": self.memory.num_opened,
            "device memory": len(self.memory.taken),
            "kernels": len(self._kernels),
            "open": int(not self.is_closed),
        }
        return {name: count for name, count in found.items() if count}

    @property
    def registered_bytes(self) -> int:
        """Bytes of host memory that are registered now."""
        return sum(size for _, size in self.memory.registered)

    @property
    def largest_registered_bytes(self) -> int:
        """The most bytes of host memory that one call registered."""
        return self.memory.largest_registered_bytes

    # --- Driver ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def activated(self) -> Generator[None]:
        """See `Driver`."""
        if self.is_closed:
            raise DriverError("activated", "CUDA_ERROR_CONTEXT_IS_DESTROYED (709)")
        self.calls["activated"] += 1
        self._local.depth = getattr(self._local, "depth", 0) + 1
        try:
            yield
        finally:
            self._local.depth -= 1

    def create_stream(self) -> int:
        """See `Driver`."""
        self._enter("create_stream")
        stream = next(self._numbers)
        self._streams[stream] = FakeStream()
        return stream

    def destroy_stream(self, stream: int) -> None:
        """See `Driver`."""
        self._enter("destroy_stream")
        found = self._stream(stream, "destroy_stream")
        if found.touched:
            self._note(f"stream {stream:#x} was destroyed with copies in it")
        del self._streams[stream]

    def synchronize_stream(self, stream: int) -> None:
        """See `Driver`."""
        found = self._stream(stream, "synchronize_stream")
        found.finish(found.num_added)
        self._enter("synchronize_stream")
        error, found.error = found.error, None
        if error is not None:
            raise error

    def create_event(self) -> int:
        """See `Driver`."""
        self._enter("create_event")
        event = next(self._numbers)
        self._events[event] = None
        return event

    def destroy_event(self, event: int) -> None:
        """See `Driver`."""
        self._enter("destroy_event")
        if self._events.pop(event, -1) == -1:
            raise DriverError("destroy_event", "CUDA_ERROR_INVALID_HANDLE (400)")

    def record_event(self, event: int, stream: int) -> None:
        """See `Driver`."""
        self._enter("record_event")
        found = self._stream(stream, "record_event")
        if event not in self._events:
            raise DriverError("record_event", "CUDA_ERROR_INVALID_HANDLE (400)")
        if stream in self.capturing:
            raise DriverError("record_event", "the stream is captured")
        self._events[event] = found, found.num_added

    def wait_for_event(self, stream: int, event: int) -> None:
        """See `Driver`."""
        self._enter("wait_for_event")
        found = self._stream(stream, "wait_for_event")
        if event not in self._events:
            raise DriverError("wait_for_event", "CUDA_ERROR_INVALID_HANDLE (400)")
        recorded = self._events[event]
        if recorded is None:  # an event that was never recorded counts as complete
            return

        def wait() -> None:
            recorded[0].finish(recorded[1])
            found.num_waits -= 1

        found.num_waits += 1
        found.add(wait)

    def synchronize_event(self, event: int) -> None:
        """See `Driver`."""
        self._enter("synchronize_event")
        if event not in self._events:
            raise DriverError("synchronize_event", "CUDA_ERROR_INVALID_HANDLE (400)")
        recorded = self._events[event]
        if recorded is not None:
            recorded[0].finish(recorded[1])
            if recorded[0].error is not None:
                raise recorded[0].error

    def export_memory(self, address: int) -> tuple[bytes, int, int]:
        """See `Driver`."""
        self._enter("export_memory")
        return self.memory.export(address)

    def open_memory(self, handle: bytes) -> tuple[int, int]:
        """See `Driver`."""
        self._enter("open_memory")
        return self.memory.open(handle)

    def register_host(self, address: int, num_bytes: int) -> None:
        """See `Driver`."""
        self._enter("register_host")
        self.memory.register(address, num_bytes)

    def unregister_host(self, address: int) -> None:
        """See `Driver`."""
        self._enter("unregister_host")
        with self._lock:
            size = self.memory.registered_bytes_at(address)
            for stream in self._streams.values():
                with stream.changed:
                    for _, ranges in stream.touched:
                        if any(start < address + size and address < start + length for start, length in ranges):
                            self._note(f"host memory at {address:#x} was unregistered under a copy")
            self.memory.unregister(address)

    def device_address_of(self, address: int) -> int:
        """See `Driver`."""
        self._enter("device_address_of")
        return self.memory.device_address_of(address)

    def allocate_device(self, num_bytes: int) -> int:
        """See `Driver`."""
        self._enter("allocate_device")
        address = self.allocate(num_bytes)
        self.memory.taken.add(address)
        return address

    def free_device(self, address: int) -> None:
        """See `Driver`."""
        self._enter("free_device")
        if address not in self.memory.taken:
            raise DriverError("free_device", "CUDA_ERROR_INVALID_VALUE (1)")
        if self._tables[address]:
            self._note(f"device memory at {address:#x} was freed under a kernel")
        self._table_streams.pop(address, None)
        self.memory.free(address)

    def load_kernel(self, image: bytes, name: str) -> int:
        """See `Driver`; any image will do."""
        self._enter("load_kernel")
        if not image or not name:
            raise DriverError("load_kernel", "CUDA_ERROR_INVALID_IMAGE (200)")
        kernel = next(self._numbers)
        self._kernels[kernel] = name
        return kernel

    def unload_kernel(self, kernel: int) -> None:
        """See `Driver`."""
        self._enter("unload_kernel")
        if kernel not in self._kernels:
            raise DriverError("unload_kernel", "CUDA_ERROR_INVALID_HANDLE (400)")
        del self._kernels[kernel]

    def launch_kernel(
        self, kernel: int, num_programs: int, num_threads: int, shared_bytes: int, arguments: Sequence[Any], stream: int
    ) -> None:
        """See `Driver`."""
        self._enter("launch_kernel")
        found = self._copy_stream(stream, "launch_kernel")
        if kernel not in self._kernels or num_programs < 1 or num_threads % 32 or len(arguments) < 2:
            raise DriverError("launch_kernel", "CUDA_ERROR_INVALID_VALUE (1)")
        name, values = self._kernels[kernel], tuple(int(each.value) for each in arguments)
        table = values[0]

        def run() -> None:
            with self._lock:
                self._tables[table] -= 1
                self._fail_if_told("execute")
                for address, size in touched(name, values):
                    if not self.memory.is_reached_by_kernels(address, size):
                        raise DriverError(name, "CUDA_ERROR_ILLEGAL_ADDRESS (700)", f"{size} bytes at {address:#x}")
                self.run_kernel(name, values, num_programs)
                self.calls["gathered" if name == "gather_runs" else name] += values[1]

        with self._lock:
            if self._table_streams.setdefault(table, stream) != stream:
                self._note("two streams use one table of runs")
            self._tables[table] += 1
            found.add(run, self.memory.registered)  # the kernel may touch all of it

    def copy(self, source: int, target: int, num_bytes: int, direction: CopyKind, stream: int) -> None:
        """See `Driver`."""
        self._enter("copy")
        found = self._copy_stream(stream, "copy")
        is_registered = self._is_registered(source, target, num_bytes, direction, "copy")
        number = self._add(found, [(source, target, num_bytes)], direction)
        if not is_registered:
            self.calls["pageable"] += 1
            found.finish(number)

    def copy_batch(
        self, sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        """See `Driver`."""
        self._enter("copy_batch")
        found = self._copy_stream(stream, "copy_batch")
        runs = list(zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True))
        if not self.has_batch_copy or not runs:
            raise DriverError("copy_batch", "CUDA_ERROR_INVALID_VALUE (1)", "no runs, or no such call")
        for source, target, size in runs:
            if not self._is_registered(source, target, size, direction, "copy_batch"):
                raise DriverError("copy_batch", "CUDA_ERROR_INVALID_VALUE (1)", "host memory that is not registered")
        ordered = sorted((target, size) for _, target, size in runs)
        if any(start + size > following for (start, size), (following, _) in itertools.pairwise(ordered)):
            self._note("targets of a batch overlap")
        self.largest_batch = max(self.largest_batch, len(runs))
        self._add(found, runs[::-1], direction)  # in any order

    def close(self) -> None:
        """See `Driver`."""
        self.is_closed = True

    # --- inside ---------------------------------------------------------------------------------------------------

    def _enter(self, call: str) -> None:
        if not getattr(self._local, "depth", 0):
            raise DriverError(call, "CUDA_ERROR_INVALID_CONTEXT (201)")
        with self._lock:
            self.calls[call] += 1
            self._fail_if_told(call)

    def _fail_if_told(self, call: str) -> None:
        failure = self._failures.get(call)
        if failure is None:
            return
        if failure.after:
            failure.after -= 1
        elif failure.times:
            failure.times -= 1
            raise DriverError(call, failure.code)

    def _note(self, violation: str) -> None:
        self.violations.append(violation)

    def _stream(self, stream: int, call: str) -> FakeStream:
        found = self._streams.get(stream)
        if found is None:
            raise DriverError(call, "CUDA_ERROR_INVALID_HANDLE (400)")
        return found

    def _copy_stream(self, stream: int, call: str) -> FakeStream:
        if stream == DEFAULT_STREAM:
            raise DriverError(call, "CUDA_ERROR_INVALID_VALUE (1)", "the default stream")
        return self._stream(stream, call)

    def _is_registered(self, source: int, target: int, num_bytes: int, direction: CopyKind, call: str) -> bool:
        """Refuse a copy that a driver refuses. Return whether the host side is registered."""
        device, host = (source, target) if direction is CopyKind.TO_HOST else (target, source)
        if num_bytes <= 0 or not self.memory.is_on_device(device, num_bytes):
            raise DriverError(call, "CUDA_ERROR_INVALID_VALUE (1)", f"{num_bytes} bytes at {device:#x} on the device")
        return self.memory.is_registered(host, num_bytes, call)

    def _add(self, stream: FakeStream, runs: list[tuple[int, int, int]], direction: CopyKind) -> int:
        self.calls["runs"] += len(runs)
        to_host = direction is CopyKind.TO_HOST
        for _, target, size in runs:
            if to_host or not (stream.num_waits or self._tables[target]):  # else earlier work may still read it
                ctypes.memset(target, POISON, size)

        def copy() -> None:
            with self._lock:
                self._fail_if_told("execute")
            for source, target, size in runs:
                ctypes.memmove(target, source, size)

        return stream.add(copy, [(target if to_host else source, size) for source, target, size in runs])
