# pyright: basic
"""Registers a pool by 1, 2, 4 and 8 processes, all of it each or a part each: the phase `ranks` of `cuda_gpu.py`.

Reports the seconds until the last one is ready, the MiB that the device and the kernel have taken, and how long a
bystander's calls take meanwhile.
"""

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from cuda_gpu import FAKE, MIB, open_driver, part, percentiles, report

from kvdepot.copying.runs import Runs
from kvdepot.lab.processes import wait_until
from kvdepot.pool.files import PoolMemory
from kvdepot_cuda import registration
from kvdepot_cuda.copy import PIECE_BYTES


def measure() -> None:
    """Report each number of ranks."""
    size = (64 * MIB) if FAKE else 16 << 30
    driver, fd = open_driver(), os.memfd_create("pool")
    os.posix_fallocate(fd, 0, size)
    for count, is_whole in [(1, True), (2, False)] if FAKE else itertools.product((1, 2, 4, 8), (True, False)):
        with part(f"{count} ranks, {is_whole=}"), contextlib.ExitStack() as ends:
            processes: list[Any] = []
            for number in range(count):
                command = [sys.executable, __file__, *map(str, (fd, size, number, count, int(is_whole)))]
                options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
                process = subprocess.Popen([*command, *["--fake"] * FAKE], pass_fds=[fd], **options)
                ends.enter_context(process)
                ends.callback(process.communicate)  # closes its input, which ends it and its registrations
                processes.append(process)
            for process in processes:
                process.stdout.readline()
            before, times, done, said = memory_in_use(), list[float](), threading.Event(), list[str]()

            def begin(processes: list[Any] = processes, done: threading.Event = done, said: list[str] = said) -> None:
                for process in processes:
                    print(file=process.stdin, flush=True)
                said.extend(process.stdout.readline() for process in processes)
                done.set()

            threading.Thread(target=begin, daemon=True).start()
            while not done.wait(0.001):
                began = time.perf_counter()
                with driver.activated():
                    driver.destroy_event(driver.create_event())
                    driver.free_device(driver.allocate_device(4096))
                times.append(time.perf_counter() - began)
            each = [json.loads(line) for line in said]
            taken = {name: round(value - before[name]) for name, value in memory_in_use().items()}
            row = {"ranks": count, "whole": is_whole, "gib": size / (1 << 30), "taken_mib": taken}
            row |= {
                "seconds": round(max(found["seconds"] for found in each), 3),
                "bystander": percentiles(times or [0.0]),
            }
            report("ranks", right=all(found["pieces"] == found["wanted"] for found in each), **row)
    os.close(fd)


def rank(fd: int, size: int, number: int, count: int, is_whole: int) -> None:
    """Register the pool, or this rank's part of it, when told to. Keep it until the end of the input."""
    registration.SMALL_POOL_BYTES = size if is_whole else 0
    pool, piece = PoolMemory(fd, size), (8 * MIB) if FAKE else PIECE_BYTES
    made, num_pieces = registration.PoolRegistration(open_driver(), pool, piece), size // piece
    pieces = np.arange(num_pieces * number // count, num_pieces * (number + 1) // count, dtype=np.uint64)
    offsets = pieces * np.uint64(piece)
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    made.want(Runs(offsets, offsets, np.ones(len(offsets), np.uint64)))
    thread = threading.Thread(target=made.register, daemon=True)
    thread.start()
    wait_until(lambda: made.is_idle, 170)
    found = {"seconds": time.perf_counter() - began, "pieces": made.num_registered}
    print(json.dumps({**found, "wanted": num_pieces if is_whole else len(pieces)}), flush=True)
    sys.stdin.read()


def memory_in_use() -> dict[str, float]:
    """Return the MiB that the device and, of several kinds, the kernel have in use."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    found = {
        name: int(fields[name].split()[0]) / 1024 for name in ("Slab", "PageTables", "VmallocUsed") if name in fields
    }
    found["unavailable"] = -int(fields["MemAvailable"].split()[0]) / 1024
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        found["device"] = float(subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()[0])
    return found


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:] if argument != "--fake"]
    rank(*numbers) if numbers else measure()
