# pyright: basic
"""Measures a spinning Python thread beside retrieves: `python benchmarks/devices/interpreter_lock.py`.

The transfers go through the real bindings to the tests' stub of the driver, whose copies take as long as at 52 GB/s. No
byte moves, so it needs no GPU, but a C compiler. Each retrieve has 1,024 runs: of 512 KiB, or of 64 KiB in one batch.

`lost` is the share of the time in which the spinning thread neither ran nor waited for a processor: it waited for the
interpreter's lock. `beside` says how many times as long a retrieve takes then as alone.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
from support.cuda.fake import FakeTensor

STUB = Path(__file__).parents[2] / "tests" / "support" / "cuda" / "stub_libcuda.c"
RUNS, ROUNDS, SECONDS = 1024, 15, 0.4


def spin(seconds: float) -> float:
    """Return the share of the time in which this thread waited for the interpreter's lock."""
    schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    before, began = schedstat.read_text().split(), time.perf_counter()
    while time.perf_counter() < began + seconds:
        pass
    wall = time.perf_counter() - began
    ran, waited = (int(b) - int(a) for a, b in zip(before[:2], schedstat.read_text().split()[:2], strict=True))
    return max(0.0, 1 - (ran + waited) * 1e-9 / wall)


def measure(page: int) -> None:
    tensor = FakeTensor(0x7F0000200000, (2 * RUNS, page), (page, 1))
    with DepotProcess(pool_size=str(RUNS * page + (128 << 20))) as depot:
        cache = KVCache([CacheGroup([tensor], 16)], "spin", "bytes", chunk_tokens=64)
        context = CudaTransferContext(cache, CudaOptions(url=depot.url, stream=lambda: 0, gather_kernel=False))
        context.wait_until_connected(30)
        key, blocks = hash_prefix(Namespace("spin"), 64, range(RUNS * 16)), list(range(0, 2 * RUNS, 2))

        def timed(submit: Callable[..., Any] = context.submit_retrieve) -> float:
            future = submit("spin", key, [blocks])
            if not future.result(60):
                raise RuntimeError("a transfer was a miss")
            return future.seconds

        timed(context.submit_store)
        wait_until(lambda: context.is_warm, 60)
        rows: list[tuple[float, float]] = []
        for _ in range(ROUNDS):
            alone, times, stop = statistics.median(timed() for _ in range(3)), list[float](), threading.Event()

            def repeat(times: list[float] = times, stop: threading.Event = stop) -> None:
                while not stop.is_set():
                    times.append(timed())

            thread = threading.Thread(target=repeat)
            thread.start()
            lost = spin(SECONDS)
            stop.set()
            thread.join()
            rows.append((lost, statistics.median(times) / alone))
        lost, beside = (sorted(column) for column in zip(*rows, strict=True))
        print(f"1,024 runs of {page >> 10} KiB: lost {lost[ROUNDS // 2]:.1%}, at most {lost[-1]:.1%}", end="; ")
        print(f"beside {beside[ROUNDS // 2]:.2f} (median of {ROUNDS})", flush=True)
        context.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        for page_bytes in (512 << 10, 64 << 10):
            measure(page_bytes)
    else:
        with tempfile.TemporaryDirectory() as folder:
            flags = ["-shared", "-fPIC", "-O1", "-DBYTES_PER_SECOND=52e9", "-o", f"{folder}/libcuda.so.1"]
            subprocess.run(["cc", *flags, str(STUB), "-ldl"], check=True)
            environment = os.environ | {"LD_LIBRARY_PATH": folder}
            subprocess.run([sys.executable, __file__, "measure"], check=True, env=environment)
