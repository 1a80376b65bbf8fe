"""Models of the backend's kernels for the fake driver: their work in plain Python, and the memory that they touch."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from kvdepot_cuda.images import KernelImage
from kvdepot_cuda.sums import BLOCK_BYTES, CONSTANTS

_STRIPE_BYTES: Final = 64

RunKernel = Callable[[str, tuple[int, ...], int], None]
"""Called when the stream reaches a launch, with the kernel's name, the launch's arguments and the number of programs.
Addresses are those of this process."""


def fake_gather(_capability: int) -> KernelImage:
    """Return a kernel that only the fake driver can load."""
    return KernelImage(b"a fake", "gather_runs", 128, 0, 2)


def fake_sums(_capability: int) -> tuple[KernelImage, ...]:
    """Return kernels that only the fake driver can load."""
    return KernelImage(b"a fake", "sum_blocks", 256, 0, 2), KernelImage(b"a fake", "digest_extents", 32, 0, 2)


def run_kernel(name: str, arguments: tuple[int, ...], num_programs: int) -> None:
    """Do the work of a kernel. `digest_extents` does that of `sum_blocks`, too, for 8 extents in each program."""
    if name == "gather_runs":
        for source, target, size in _rows(arguments[0], arguments[1]).tolist():
            ctypes.memmove(target, source, size)
    elif name == "digest_extents":
        extents, runs, scratch = _sum_table(arguments)
        data = b"".join(ctypes.string_at(address, count * BLOCK_BYTES) for address, _, count in runs.tolist())
        for number, (first, count, stripe) in enumerate(extents[: 8 * num_programs].tolist()):
            extent = data[first * BLOCK_BYTES : (first + count) * BLOCK_BYTES]
            assert ctypes.string_at(stripe, _STRIPE_BYTES) == extent[-_STRIPE_BYTES:]
            high, low = np.frombuffer(xxhash.xxh3_128_digest(extent), ">u8").tolist()
            (ctypes.c_uint64 * 2).from_address(scratch + 16 * number)[:] = high, low
        for number in range(8 * num_programs, len(extents)):  # what was there before
            (ctypes.c_uint64 * 2).from_address(scratch + 16 * number)[:] = 1, 1


def touched(name: str, arguments: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the address and the size in bytes of what a kernel reads or writes, but for its table."""
    if name == "gather_runs":
        for source, target, size in _rows(arguments[0], arguments[1]).tolist():
            yield source, size
            yield target, size
        return
    extents, runs, scratch = _sum_table(arguments)
    yield scratch, 16 * len(extents) + 64 * int(runs[:, 2].sum())
    for address, _, count in runs.tolist():
        yield address, count * BLOCK_BYTES
    for _, _, stripe in extents.tolist():
        yield stripe, _STRIPE_BYTES


def _rows(address: int, count: int) -> npt.NDArray[Any]:
    return np.frombuffer(ctypes.string_at(address, 24 * count), np.uint64).reshape(count, 3)


def _sum_table(arguments: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any], int]:
    table, num_extents, num_runs, scratch = arguments[:4]
    assert ctypes.string_at(table, CONSTANTS.nbytes) == CONSTANTS.tobytes()
    rows = _rows(table + CONSTANTS.nbytes, num_extents + num_runs)
    return rows[:num_extents], rows[num_extents:], scratch
