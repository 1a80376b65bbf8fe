"""Measures a tier in Mooncake Store: `python benchmarks/tiers/mooncake_tier.py` in tox's environment `mooncake`.

Starts a master and a cluster on loopback over TCP. The depot's tier queue writes entries from a pool and reads them
back, including trailers, checks and the child process. Entries lie in this node's part of the cluster (`own`) or in
another process's part (`other`). Each round writes, reads and copies the same number of bytes (memcpy, one thread,
between halves of the pool). Prints medians and extremes of the ratios within a round.
"""

import argparse
import ctypes
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.lab.bench import describe_machine
from kvdepot.lab.processes import wait_until
from kvdepot.testing.tier_traffic import clear, make_key, run
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl, open_tier
from support.mooncake.cluster import Master, Node
from support.mooncake.node import make_shared_pool
from support.tiers.direct import write_to

MIB = 1 << 20


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def measure(place: str, entry_bytes: int, num_threads: int, num_rounds: int, total_bytes: int) -> dict[str, Any]:
    """Return the figures of one row of the table."""
    pool = make_shared_pool(2 * total_bytes)
    pool.view[:] = os.urandom(MIB) * (2 * total_bytes // MIB)
    base = ctypes.addressof(ctypes.c_char.from_buffer(pool.view))
    extents = [(offset, entry_bytes) for offset in range(0, total_bytes, entry_bytes)]
    behind = [(total_bytes + offset, size) for offset, size in extents]
    segment = f"segment={4 * total_bytes // MIB}MiB"
    woken = threading.Event()
    rows: list[tuple[float, float, float]] = []
    with ExitStack() as stack:
        master = Master()
        stack.callback(master.kill)
        if place == "other":
            stack.enter_context(closing(Node(f"mooncake://{master.address}?{segment}")))
            segment = "segment=0"
        tier = open_tier(TierUrl.parse(f"mooncake://{master.address}?{segment}&threads={num_threads}"), pool)
        queue = TierQueue(tier, pool, "bench", deadline_seconds=30.0, num_threads=num_threads, wake=woken.set)
        stack.callback(queue.close)

        def do(operation: JobKind, keys: list[bytes], places: list[tuple[int, int]]) -> None:
            assert run(queue, Job(operation, keys, places), woken=woken) == [[True] * len(keys)], queue.status()

        wait_until(lambda: write_to(tier, pool, [make_key(0)], extents[:1]) == [True], what="room")
        for turn in range(-2, num_rounds):  # two rounds of warm-up
            clear(queue, None, None)
            keys = [make_key(turn * 1000 + number + 10_000) for number in range(len(extents))]
            copy = seconds_of(lambda: ctypes.memmove(base + total_bytes, base, total_bytes))
            put = seconds_of(lambda keys=keys: do(JobKind.WRITE, keys, extents))
            get = seconds_of(lambda keys=keys: do(JobKind.READ, keys, behind))
            if turn >= 0:
                rows.append((copy, put, get))
        assert pool.view[:total_bytes] == pool.view[total_bytes:]
    os.close(pool.fd)

    def spread(values: list[float]) -> list[float]:
        return [round(value, 2) for value in (statistics.median(values), min(values), max(values))]

    return {
        "place": place,
        "entry_mib": entry_bytes // MIB,
        "threads": num_threads,
        "memcpy_gb_s": spread([total_bytes / copy / 1e9 for copy, _, _ in rows]),
        "put_gb_s": spread([total_bytes / put / 1e9 for _, put, _ in rows]),
        "get_gb_s": spread([total_bytes / get / 1e9 for _, _, get in rows]),
        "put_ratio": spread([copy / put for copy, put, _ in rows]),
        "get_ratio": spread([copy / get for copy, _, get in rows]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entry-mib", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--total-mib", type=int, default=256)
    options = parser.parse_args()
    print(describe_machine())
    for place in ("own", "other"):
        for entry_mib in options.entry_mib:
            for threads in options.threads:
                row = measure(place, entry_mib * MIB, threads, options.rounds, options.total_mib * MIB)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
