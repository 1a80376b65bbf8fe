"""Times the compiled copies alone, with and without checksums: `python benchmarks/depot/copies.py`.

Copies 32 MiB from scattered pages of an engine's memory into shared memory, pages of 8 KiB to 1 MiB, in turn with a
memcpy of as many bytes. Prints ratios of processor times. Of each kind of copy it takes the time that a fifth of the
rounds keep to, so that a busy machine disturbs it little. The copies are as a thread of a store makes them.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
from splits import anonymous

from kvdepot.lab.bench import describe_machine
from kvdepot.pool.files import PoolMemory
from kvdepot_cpu.kernels import Kernels, load_kernels, memcpy_runs

COPY_BYTES: Final = 32 << 20
CACHE_BYTES: Final = 384 << 20
POOL_BYTES: Final = 256 << 20
# memcpy bypasses the caches from a size on that depends on the machine, often more than COPY_BYTES
STREAMING_MEMCPY: Final = "glibc.cpu.x86_non_temporal_threshold=0x100000"


class Copies:
    """Scattered pages, the pool, and the copies to compare."""

    def __init__(self, kernels: Kernels) -> None:
        descriptor = os.memfd_create("pool")
        os.ftruncate(descriptor, POOL_BYTES)
        self._pool = PoolMemory(descriptor, POOL_BYTES)
        np.frombuffer(self._pool.pool, np.uint8)[::4096] = 1
        self._cache = anonymous(CACHE_BYTES)
        self._kernels = kernels

    def seconds(self, kind: str, page_bytes: int) -> float:
        """Make one copy. Return its processor time."""
        count = COPY_BYTES // page_bytes
        pages = np.array(random.sample(range(CACHE_BYTES // page_bytes), count), np.uint64)
        sources = pages * np.uint64(page_bytes) + np.uint64(self._cache.ctypes.data)
        start = self._pool.address + random.randrange(POOL_BYTES // COPY_BYTES) * COPY_BYTES
        targets = np.arange(count, dtype=np.uint64) * np.uint64(page_bytes) + np.uint64(start)
        sizes, whole = np.full(count, page_bytes, np.uint64), np.array([COPY_BYTES], np.uint64)
        first = random.randrange(CACHE_BYTES // COPY_BYTES) * COPY_BYTES
        contiguous = np.array([self._cache.ctypes.data + first], np.uint64)
        copies: dict[str, Callable[[], npt.NDArray[np.uint8] | None]] = {
            "memcpy": lambda: memcpy_runs(contiguous, targets[:1], whole),
            "copy": lambda: self._kernels.copy_runs(sources, targets, sizes),
            "summed": lambda: self._kernels.copy_and_sum(sources, targets, sizes, whole),
        }
        began = time.thread_time()
        copies[kind]()
        return time.thread_time() - began


def main() -> None:
    """Print a line for each size of pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    rounds: int = parser.parse_args().rounds
    if os.environ.get("GLIBC_TUNABLES") != STREAMING_MEMCPY:
        environment = os.environ | {"GLIBC_TUNABLES": STREAMING_MEMCPY}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    kernels = load_kernels()
    if kernels is None:
        sys.exit("the compiled copy was not built: there was no C compiler")
    print(describe_machine())
    copies = Copies(kernels)
    for kib in (8, 32, 64, 128, 256, 512, 1024):
        times: dict[str, list[float]] = {"memcpy": [], "copy": [], "summed": []}
        for _ in range(rounds):
            for kind in random.sample(list(times), len(times)):
                times[kind].append(copies.seconds(kind, kib << 10))
        memcpy, copy, summed = (sorted(times[kind])[rounds // 5] for kind in ("memcpy", "copy", "summed"))
        print(
            f"pages of {kib:4} KiB: copy {memcpy / copy:.2f} of memcpy, with checksums {memcpy / summed:.2f} of memcpy"
            f" and {copy / summed:.2f} of the copy; memcpy {COPY_BYTES / memcpy / 1e9:.1f} GB/s",
            flush=True,
        )


if __name__ == "__main__":
    main()
