"""Copies many small runs of a store or retrieve by one kernel launch, instead of one DMA per run.

The copy engine asks `runs_for_kernel` which runs of a call suit the kernel, and the direction's `Gather` copies them.
The kernel reads and writes the pool directly, so it gets only runs in registered pieces of the pool.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import Addresses
from kvdepot_cuda.driver import CopyKind, Driver
from kvdepot_cuda.images import KernelImage, compile_kernels

# Measured on an H100 (PCIe 5.0 x16) as ratios to one large copy, as `cuda_gpu.py --only copies` does: batches of
# scattered runs against the kernel, which is alike in both directions.
MOST_RUN_BYTES: Final = 64 << 10
"""Per run. 1024 runs of 8 KiB have 0.14 to 0.16 by batches and 0.78 to 0.84 by the kernel, of 32 KiB 0.55 and 0.82 to
0.89, of 64 KiB 0.60 to 0.66 and 0.84 to 0.88. With 256 KiB, the two are alike, and copies need no thread blocks."""
LEAST_RUNS: Final = 64
"""Per call. 64 runs of 8 KiB have 0.20 to 0.81 by batches and 0.42 to 1.10 by the kernel. 16 runs are alike up to 24
KiB; larger ones are slower by the kernel (64 KiB: 0.87 and 0.60)."""
NUM_PROGRAMS: Final = 12
"""Thread blocks: the share of the device that the kernel takes from the model. Read at each launch."""
_ALIGNMENT: Final = 16  # of the words that a lane copies
_ROW_BYTES: Final = 24  # source, target and size of a run, 8 bytes each


def runs_for_kernel(pool: Addresses, blocks: Addresses, sizes: Addresses) -> npt.NDArray[np.bool_]:
    """Return, for each run, `(num_runs,)`, whether the kernel copies it.

    Args:
        pool: device addresses in the pool, 0 for unregistered memory.
        blocks: addresses in the blocks.
        sizes: in bytes.
    """
    suits = (sizes <= np.uint64(MOST_RUN_BYTES)) & (pool != 0)
    suits &= (pool | blocks) % np.uint64(_ALIGNMENT) == 0  # the kernel would copy other runs byte by byte
    if np.count_nonzero(suits) < LEAST_RUNS:
        suits[:] = False
    return suits


CompileGather = Callable[[int], KernelImage]
"""Makes the kernel for a compute capability (90 is 9.0); raises `KernelUnavailable`."""


def compile_gather(capability: int) -> KernelImage:
    """Compile the kernel: see `compile_kernels`."""
    return compile_kernels("gather_kernel", capability)[0]


class Gather:
    """Launches the kernel on one stream. Used by one thread at a time, with the device current.

    The table of runs is copied to the device on the same stream, from registered memory. A second stream would need
    its own table, and so its own `Gather`.

    Args:
        driver: the device's driver.
        image: the kernel, compiled for that device.
        max_runs: the limit of one launch.

    Raises:
        DriverError: the kernel cannot be loaded. All resources are released then.
    """

    def __init__(self, driver: Driver, image: KernelImage, max_runs: int) -> None:
        self._driver = driver
        self._image = image
        self._max_runs = max_runs
        num_bytes = -(-max_runs * _ROW_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory = mmap.mmap(-1, num_bytes)
        self._rows = np.frombuffer(self._memory, np.uint64)[: max_runs * 3].reshape(max_runs, 3)
        self._rows_address = int(self._rows.ctypes.data)
        with contextlib.ExitStack() as undo:
            self._kernel = driver.load_kernel(image.image, image.name)
            undo.callback(driver.unload_kernel, self._kernel)
            driver.register_host(self._rows_address, num_bytes)
            undo.callback(driver.unregister_host, self._rows_address)
            self._table = driver.allocate_device(num_bytes)
            undo.callback(driver.free_device, self._table)
            self._rows_are_free = driver.create_event()  # after the copy of the rows
            undo.callback(driver.destroy_event, self._rows_are_free)
            self._undo = undo.pop_all()

    def copy(self, sources: Addresses, targets: Addresses, sizes: Addresses, stream: int) -> None:
        """Queue copies of runs, `(num_runs,)` each, in any order. All calls must use the same stream.

        Args:
            sources: device addresses.
            targets: device addresses, disjoint.
            sizes: in bytes.
            stream: the stream for the copies.

        Raises:
            DriverError: the launch was refused. Some runs may be copied nevertheless.
        """
        for start in range(0, len(sizes), self._max_runs):
            self._driver.synchronize_event(self._rows_are_free)
            count = min(self._max_runs, len(sizes) - start)
            for place, column in enumerate((sources, targets, sizes)):
                self._rows[:count, place] = column[start : start + count]
            self._driver.copy(self._rows_address, self._table, count * _ROW_BYTES, CopyKind.TO_DEVICE, stream)
            self._driver.record_event(self._rows_are_free, stream)
            hidden = [ctypes.c_uint64(0)] * self._image.num_hidden
            self._driver.launch_kernel(
                self._kernel,
                min(NUM_PROGRAMS, count),
                self._image.num_threads,
                self._image.shared_bytes,
                [ctypes.c_uint64(self._table), ctypes.c_uint32(count), *hidden],
                stream,
            )

    def close(self) -> None:
        """Release all resources. No copy may be running. Idempotent.

        Raises:
            DriverError: a resource could not be released; the others were.
        """
        self._undo.close()
