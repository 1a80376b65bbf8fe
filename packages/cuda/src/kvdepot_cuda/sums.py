"""Computes the checksums of a store on the device, from the pages that are about to be copied.

So the pool is not read again, and the checksums cover the copy, too. The copy engine calls `DeviceSums.begin` before it
queues the copies of a batch. The kernels (`kvdepot_cuda.sum_kernel`) work on whole blocks of XXH3, as nearly all pages
are; `begin` declines other batches, whose checksums threads compute from the pool.
"""

import contextlib
import ctypes
import mmap
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.copying.runs import EXTENT_DTYPE, Addresses, Runs, order_of, split
from kvdepot.kvcache import CopyBatch
from kvdepot.wire.messages import CHECKSUM_BYTES, MAXIMUM_STORE_ENTRIES
from kvdepot_cuda.driver import CopyKind, Driver
from kvdepot_cuda.images import KernelImage, compile_kernels

BLOCK_BYTES: Final = 1024  # of XXH3: 16 stripes of 64 bytes
RUNS: Final = 4  # that a thread block sums side by side
EXTENTS: Final = 8  # whose digests a thread block takes, which is one warp: 4 lanes each
NUM_PROGRAMS: Final = 32
"""Thread blocks that sum. By arithmetic, each has 32 KiB under way, so 32 of them read about 1 TB/s: 64 MiB in 0.1 ms,
which take 1.3 ms across the link. Not measured."""
_RUN_BYTES: Final = 64 << 10  # the share of a program: a run may be all of a batch
_SUM_BYTES: Final = 64  # of a block
_STRIPE_BYTES: Final = 64
_ROW_BYTES: Final = 24  # three numbers of 8 bytes
_ALIGNMENT: Final = 16  # of the words that a lane loads
_SECRET: Final = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
CONSTANTS: Final = np.concatenate([
    np.frombuffer(_SECRET, "<u8"),  # of stripes; from number 16 on, of the scramble
    np.frombuffer(_SECRET, "<u8", 8, 121),  # of an extent's last stripe
    np.frombuffer(_SECRET, "<u8", 8, 11),  # of the low half of the digest
    np.frombuffer(_SECRET, "<u8", 8, 117),  # ... and of the high half
    np.array([  # the sums at the start of an extent
        0xC2B2AE3D, 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, 0x9E3779B1, 0,
    ], np.uint64),
])  # fmt: skip
"""The head of the table, whole rows of it, `(57,)`."""

CompileSums = Callable[[int], tuple[KernelImage, ...]]
"""Makes both kernels for a compute capability (90 is 9.0); raises `KernelUnavailable`."""
OpenSums = Callable[[Driver], "DeviceSums"]
"""Compiles and loads them; raises `KernelUnavailable` or `DriverError`."""


def compile_sums(capability: int) -> tuple[KernelImage, ...]:
    """Compile both kernels: see `compile_kernels`."""
    return compile_kernels("sum_kernel", capability)


def open_sums(driver: Driver, compile_sums: CompileSums, max_bytes: int) -> "DeviceSums":
    """Compile the kernels for a device and load them; see `DeviceSums`."""
    images = compile_sums(driver.capability)
    with driver.activated():
        return DeviceSums(driver, images, max_bytes)


def rows_of(extents: Addresses, runs: Runs) -> npt.NDArray[np.uint64] | None:
    """Return the rows of the table, `(num_extents + num_runs, 3)`. Return None if the kernels cannot sum these runs.

    Args:
        extents: `(num_extents,)`, sizes in bytes, in the order in which the runs fill them.
        runs: all bytes of the extents.
    """
    if (extents % BLOCK_BYTES).any() or (runs.sizes % BLOCK_BYTES).any() or (runs.blocks % _ALIGNMENT).any():
        return None
    ends, run_ends = np.cumsum(extents), np.cumsum(runs.sizes)
    if ends[-1] != run_ends[-1]:
        return None
    starts, run_starts = ends - extents, run_ends - runs.sizes
    stripes = ends - np.uint64(_STRIPE_BYTES)
    run_of = np.searchsorted(run_ends, stripes, "right")
    size = np.uint64(BLOCK_BYTES)
    return np.concatenate(
        [
            np.stack([starts // size, extents // size, runs.blocks[run_of] + (stripes - run_starts[run_of])], 1),
            np.stack([runs.blocks, run_starts // size, runs.sizes // size], 1),
        ]
    )


class DeviceSums:
    """Computes the checksums of one batch at a time, on one stream, with the device current.

    Args:
        driver: the device's driver.
        images: both kernels, compiled for that device.
        max_bytes: the largest batch.

    Raises:
        DriverError: the kernels cannot be loaded. All resources are released then.
    """

    def __init__(self, driver: Driver, images: tuple[KernelImage, ...], max_bytes: int) -> None:
        self._driver = driver
        self._images = images
        self._max_bytes = max_bytes
        max_blocks = max_bytes // BLOCK_BYTES
        digest_bytes = MAXIMUM_STORE_ENTRIES * CHECKSUM_BYTES
        table_bytes = CONSTANTS.nbytes + (MAXIMUM_STORE_ENTRIES + max_blocks) * _ROW_BYTES
        memory = mmap.mmap(-1, -(-(digest_bytes + table_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._digests = np.frombuffer(memory, np.uint64, digest_bytes // 8).reshape(-1, 2)
        self._table = np.frombuffer(memory, np.uint64, table_bytes // 8, digest_bytes)
        self._table[: len(CONSTANTS)] = CONSTANTS
        before_scratch = -(-table_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with contextlib.ExitStack() as undo:
            self._kernels: list[int] = []
            for image in images:
                self._kernels.append(driver.load_kernel(image.image, image.name))
                undo.callback(driver.unload_kernel, self._kernels[-1])
            driver.register_host(self._digests.ctypes.data, len(memory))
            undo.callback(driver.unregister_host, self._digests.ctypes.data)
            self._on_device = driver.allocate_device(before_scratch + digest_bytes + max_blocks * _SUM_BYTES)
            undo.callback(driver.free_device, self._on_device)
            self._undo = undo.pop_all()
        self._scratch = self._on_device + before_scratch

    def begin(self, batch: CopyBatch, runs: Runs, stream: int) -> Callable[[], bytes] | None:
        """Queue the computation of a batch's checksums. Return None if the kernels cannot compute them.

        Return a function that returns the packed checksums of the extents, once the stream is synchronised.

        Args:
            batch: the batch of a store.
            runs: of the batch, in the order in which they fill the extents.
            stream: the stream on which the blocks are ready.

        Raises:
            DriverError: a launch was refused.
        """
        records = np.frombuffer(batch.extents, EXTENT_DTYPE)
        num_extents = len(records)
        if not 0 < num_extents <= MAXIMUM_STORE_ENTRIES or int(runs.sizes.sum()) > self._max_bytes:
            return None
        order = order_of(records)
        rows = rows_of(records["num_bytes"][order], split(runs, _RUN_BYTES))
        if rows is None:
            return None
        used = len(CONSTANTS) + rows.size
        self._table[len(CONSTANTS) : used] = rows.reshape(-1)
        num_runs = len(rows) - num_extents
        self._driver.copy(self._table.ctypes.data, self._on_device, used * 8, CopyKind.TO_DEVICE, stream)
        programs = min(NUM_PROGRAMS, -(-num_runs // RUNS)), -(-num_extents // EXTENTS)
        for image, kernel, num_programs in zip(self._images, self._kernels, programs, strict=True):
            self._driver.launch_kernel(
                kernel,
                num_programs,
                image.num_threads,
                image.shared_bytes,
                [
                    ctypes.c_uint64(self._on_device),
                    ctypes.c_uint32(num_extents),
                    ctypes.c_uint32(num_runs),
                    ctypes.c_uint64(self._scratch),
                    *[ctypes.c_uint64(0)] * image.num_hidden,
                ],
                stream,
            )
        num_bytes = num_extents * CHECKSUM_BYTES
        self._driver.copy(self._scratch, self._digests.ctypes.data, num_bytes, CopyKind.TO_HOST, stream)

        def digests() -> bytes:
            packed = np.empty((num_extents, 2), ">u8")
            packed[order] = self._digests[:num_extents]
            return packed.tobytes()

        return digests

    def close(self) -> None:
        """Release all resources. No computation may be running. Idempotent.

        Raises:
            DriverError: a resource could not be released; the others were.
        """
        self._undo.close()
