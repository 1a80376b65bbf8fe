"""Makes every call of `CudaDriver` over the stub library, and prints whether another thread ran meanwhile."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable

import numpy as np

from kvdepot_cuda.driver import CopyKind, DriverError
from kvdepot_cuda.nvidia import CudaDriver

BEAT_SECONDS = 0.002
beats: list[float] = []


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")


def beat() -> None:
    never = threading.Event()
    while not never.wait(BEAT_SECONDS):
        beats.append(time.monotonic())


def check_released(name: str, work: Callable[[], object]) -> None:
    """Print whether the other thread ran while the library slept for 0.3 s. On a busy machine it may be late."""
    began = time.monotonic()
    work()
    ended = time.monotonic()
    inside = sum(began + 0.05 < moment < ended - 0.05 for moment in list(beats))
    say(name, "released" if inside > 5 else f"held: {inside} beats")


def refused(name: str, work: Callable[[], object]) -> None:
    try:
        work()
    except DriverError as error:
        say(name, error)


def main() -> None:
    threading.Thread(target=beat, daemon=True).start()
    driver = CudaDriver(3)
    say(driver.description, driver.uuid, driver.capability, driver.has_batch_copy)
    # Columns that are not contiguous.
    sources, targets, sizes = np.array(((2**40, 20, 4), (11, 2**41, 2**33)), np.uint64).T
    odd = np.array([13], np.uint64)
    with driver.activated():
        stream, event = driver.create_stream(), driver.create_event()
        driver.record_event(event, stream)
        driver.wait_for_event(stream, event)
        check_released("synchronize_event", lambda: driver.synchronize_event(event))
        check_released("synchronize_stream", lambda: driver.synchronize_stream(stream))
        check_released("register_host", lambda: driver.register_host(4096, 8192))
        say(driver.device_address_of(4096))
        handle, base, num_bytes = driver.export_memory(0x7F0000201000)
        say(handle == bytes(range(64)), hex(base), num_bytes)
        check_released("open_memory", lambda: driver.open_memory(handle))
        driver.copy(1, 2, 3, CopyKind.TO_HOST, stream)
        check_released("copy", lambda: driver.copy(1, 2, 3, CopyKind.TO_DEVICE, stream))
        check_released("copy_batch", lambda: driver.copy_batch(sources, targets, sizes, CopyKind.TO_DEVICE, stream))
        driver.copy_batch(sources[:1], targets[:1], sizes[:1], CopyKind.TO_HOST, stream)
        refused("copy", lambda: driver.copy(1, 2, 13, CopyKind.TO_DEVICE, stream))
        refused("batch", lambda: driver.copy_batch(odd, odd, odd, CopyKind.TO_DEVICE, stream))
        driver.unregister_host(4096)
        memory = driver.allocate_device(8192)
        kernel = driver.load_kernel(b"\x7fELF image", "gather_runs")
        arguments = [ctypes.c_uint64(2**40), ctypes.c_uint32(5), ctypes.c_uint64(0)]
        driver.launch_kernel(kernel, 8, 128, 1024, arguments, stream)
        driver.unload_kernel(kernel)
        driver.free_device(memory)
        driver.destroy_event(event)
        driver.destroy_stream(stream)
    driver.close()


if __name__ == "__main__":
    sys.exit(main())
