"""Replays traffic on the eight workers of one pool in modelled time: `python benchmarks/devices/registration.py TRACE`.

TRACE is in the format of `kvdepot replay`. The depot, which has no sockets, and the workers' registrations are the real
ones. The driver is modelled: it registers 1 GiB in 0.3 s (H100), for one process at a time. The workers split the heads
of a 70B model (320 KiB a token), retrieve what each prompt finds, and store the rest.

Prints JSON: the share of the pool that a worker has registered, the seconds of all registrations, the longest wait of a
bystander's call for the driver, the seconds from a worker's first copy to its first copy of registered memory only, and
the share of bytes that were copied as pageable memory in the first and last tenth of the trace. With `--arenas 0`,
extents lie anywhere, as in a small pool.
"""

import argparse
import json
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np

from kvdepot.copying.runs import EXTENT_DTYPE, Runs, split
from kvdepot.index.index import ChunkIndex
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.layout import GroupKind, Part
from kvdepot.pool.extents import ARENA_BYTES, ExtentAllocator
from kvdepot.pool.files import PoolMemory
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.server.depot import Depot
from kvdepot.wire import messages as m
from kvdepot_cuda.copy import PIECE_BYTES
from kvdepot_cuda.registration import PoolRegistration
from kvdepot_plan.trace import BLOCK_TOKENS, TraceRequest, read_trace

GIB: Final = 1 << 30
SECONDS_PER_GIB: Final = 0.3
BATCH_BYTES: Final = 64 << 20
TOKEN_BYTES: Final = 320 << 10


class ModelledDriver:
    """Counts the seconds that registrations take."""

    def __init__(self) -> None:
        self.seconds = self.longest = 0.0

    @contextmanager
    def activated(self) -> Generator[None]:
        """Do nothing."""
        yield

    def register_host(self, address: int, num_bytes: int) -> None:
        """Take modelled time."""
        del address
        seconds = num_bytes / GIB * SECONDS_PER_GIB
        self.longest = max(self.longest, seconds)
        self.seconds += seconds

    def unregister_host(self, address: int) -> None:
        """Do nothing."""

    def device_address_of(self, address: int) -> int:
        """Return the same address."""
        return address


class Worker:
    """One rank: its context at the depot, and its registration of the pool."""

    def __init__(self, depot: Depot, driver: Any, pool: PoolMemory, spec: m.CacheSpec, rank: int) -> None:
        self._depot, self._session = depot, (rank + 1, Writer(rank + 1, 1))
        self._ranks = spec.groups[0].heads
        self.registration = PoolRegistration(driver, pool, PIECE_BYTES)
        page = spec.chunk_tokens * TOKEN_BYTES // self._ranks
        detail = m.GroupDetail((page // spec.chunk_tokens,), 1, part=Part(0, 1, rank, 1).number)
        registered = self._ask(
            m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", rank, self._ranks, "none", "none", "70b", spec, (detail,))
        )
        self._context: int = registered.context
        self.batch_chunks = max(1, BATCH_BYTES // page)
        self.began_at = self.fast_at = -1.0
        self.num_bytes, self.num_pageable = 0, 0

    def _ask(self, request: Any) -> Any:
        return self._depot.handle(*self._session, request)

    def find(self, run: KeyRun) -> int:
        """Return how many chunks of a prompt are there."""
        reply = self._ask(m.Lookup(self._context, "r", run.digests))
        if reply.lease:
            self._ask(m.Release(self._context, (reply.lease,)))
        return reply.num_chunks

    def retrieve(self, run: KeyRun, now: float) -> None:
        """Retrieve a run that is there."""
        for start in range(0, run.num_chunks, self.batch_chunks):
            part = run.slice(start, min(start + self.batch_chunks, run.num_chunks))
            plan = self._ask(m.PrepareRetrieve(self._context, "r", part.digests, part.first_chunk, (part.num_chunks,)))
            if plan.lease:
                self._copy(plan.extents, now)
                self._ask(m.Release(self._context, (plan.lease,)))

    def store(self, run: KeyRun, now: float) -> None:
        """Store a run."""
        for start in range(0, run.num_chunks, self.batch_chunks):
            part = run.slice(start, min(start + self.batch_chunks, run.num_chunks))
            plan = self._ask(
                m.PrepareStore(
                    self._context, "r", run.tenant, part.digests, part.first_chunk, part.parent, (part.num_chunks,)
                )
            )
            if plan.ticket:
                self._copy(plan.extents, now)
                self._ask(m.CommitStore(self._context, plan.ticket))

    def _copy(self, extents: bytes, now: float) -> None:
        """Do as `CopyEngine` does."""
        records = np.frombuffer(extents, EXTENT_DTYPE)
        runs = Runs(*(records[name].astype(np.uint64) for name in ("offset", "offset", "num_bytes")))
        runs = split(runs, self.registration.unit_bytes)
        others = runs.where(~self.registration.covers(runs.offsets))
        self.num_bytes += int(runs.sizes.sum())
        self.num_pageable += int(others.sizes.sum())
        if self.began_at < 0:
            self.began_at = now
        if len(others):
            self.registration.want(others)
        elif self.fast_at < 0:
            self.fast_at = now


def replay(
    requests: list[TraceRequest], *, pool_bytes: int, num_ranks: int, chunk_tokens: int, arena_bytes: int
) -> dict[str, Any]:
    """Replay a trace, and return the figures to print."""
    num_records = pool_bytes * num_ranks // (chunk_tokens * TOKEN_BYTES) + 64
    index = ChunkIndex(ExtentAllocator(pool_bytes, arena_bytes=arena_bytes), IndexTable.in_memory(num_records))
    now = free_at = 0.0  # `free_at`: when the driver has done what the workers asked for
    depot = Depot(index, epoch=1, lease_seconds=60.0, clock=lambda: now)
    fd = os.memfd_create("pool")
    os.truncate(fd, pool_bytes)  # no memory lies under it
    driver, pool = ModelledDriver(), PoolMemory(fd, pool_bytes)
    spec = m.CacheSpec(chunk_tokens, (m.GroupShape(GroupKind.FULL_ATTENTION, 1, heads=num_ranks),), "bf16")
    workers = [Worker(depot, driver, pool, spec, rank) for rank in range(num_ranks)]
    counts: list[tuple[int, int]] = []
    for request in requests:
        until = request.timestamp_ms / 1000
        is_over = False
        while free_at < until and not is_over:
            is_over, free_at = True, max(free_at, now)
            for worker in workers:  # they take turns in the driver
                spent = driver.seconds
                if free_at < until and worker.registration.register_next():
                    free_at, is_over = free_at + driver.seconds - spent, False
        now = until
        per_block = BLOCK_TOKENS // chunk_tokens
        run = hash_prefix(
            Namespace("70b"), 1, [block * per_block + place for block in request.hash_ids for place in range(per_block)]
        )
        num_found = workers[0].find(run)
        for worker in workers:
            worker.retrieve(run.slice(0, num_found), now)
        step = 4 * workers[0].batch_chunks  # a rank is at most four batches ahead of another
        for start in range(num_found, run.num_chunks, step):
            for worker in workers:
                worker.store(run.slice(start, min(start + step, run.num_chunks)), now)
        depot.state.timers.expire(now)
        depot.expire()
        depot.background.work()
        counts.append((sum(each.num_bytes for each in workers), sum(each.num_pageable for each in workers)))
    units = np.arange(0, pool_bytes, workers[0].registration.unit_bytes, dtype=np.uint64)
    shares = [float(each.registration.covers(units).mean()) for each in workers]
    os.close(fd)
    tenth = max(1, len(counts) // 10)
    last = counts[-1][0] - counts[-1 - tenth][0], counts[-1][1] - counts[-1 - tenth][1]
    return {
        "minutes_of_trace": round(now / 60, 1),
        "pool_used": round(index.extents.used_bytes / pool_bytes, 3),
        "registered_share": [round(share, 4) for share in shares],
        "device_tables_mib": round(max(shares) * pool_bytes / GIB * 2),
        "seconds_of_registrations": round(driver.seconds),
        "longest_wait_of_a_bystander_seconds": driver.longest,
        "seconds_until_a_fast_copy": [round(each.fast_at - each.began_at, 2) for each in workers],
        "pageable_share_of_the_first_tenth": round(counts[tenth - 1][1] / max(1, counts[tenth - 1][0]), 3),
        "pageable_share_of_the_last_tenth": round(last[1] / max(1, last[0]), 4),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--pool-gib", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=None, help="of the trace (default all)")
    parser.add_argument("--arenas", type=int, choices=(0, 1), default=1)
    options = parser.parse_args()
    figures = replay(
        list(read_trace(options.trace, options.requests)),
        pool_bytes=options.pool_gib * GIB,
        num_ranks=options.ranks,
        chunk_tokens=options.chunk_tokens,
        arena_bytes=ARENA_BYTES if options.arenas else options.pool_gib * GIB,
    )
    print(json.dumps(figures))
