"""Stand-ins for a depot's keys, payloads and memory; functions that run jobs on a queue and wait."""

import random
import threading
from collections.abc import Sequence
from mmap import mmap
from typing import Final

from kvdepot.keys import DIGEST_BYTES
from kvdepot.lab.processes import wait_until
from kvdepot.tiers.base import Extents, TierPool
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.keys import mark_of, name_hash, place_of, tier_key
from kvdepot.tiers.queue import TierQueue

EXTENT_BYTES: Final = 8192  # two pages: payloads of `suite.SIZES` fill both, one, or parts of them
NUM_EXTENTS: Final = 96  # six batches of the default size (`Tier.batch_entries`)

PLACE: Final = place_of(b"a spec", 0, 0, 7, EXTENT_BYTES)


def make_pool(num_bytes: int = NUM_EXTENTS * EXTENT_BYTES) -> TierPool:
    """Return memory that stands for a pool, without a file."""
    return TierPool(-1, memoryview(mmap(-1, num_bytes)))


def make_key(number: int, tenant: str = "", model: str = "a model", weights: str = "") -> bytes:
    """Return the key of entry `number`."""
    place = place_of(b"a spec", 0, 0, 7, EXTENT_BYTES, mark_of(weights))
    return tier_key(name_hash(tenant), name_hash(model), place, number.to_bytes(DIGEST_BYTES, "big"))


def content(key: bytes, size: int) -> bytes:
    """Return the payload that belongs to a key."""
    return random.Random(key).randbytes(size)


def extents_of(first: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return extents from number `first` on, with payloads of these sizes."""
    return [((first + place) * EXTENT_BYTES, size) for place, size in enumerate(sizes)]


def fill(pool: TierPool, first: int, keys: Sequence[bytes], sizes: Sequence[int]) -> None:
    """Put the payloads of keys into extents from number `first` on."""
    for key, (offset, size) in zip(keys, extents_of(first, sizes), strict=True):
        pool.view[offset : offset + size] = content(key, size)


def run(queue: TierQueue, *jobs: Job, woken: threading.Event | None = None) -> list[list[bool]]:
    """Run jobs; return the outcomes of the keys of each job.

    Args:
        queue: runs the jobs.
        jobs: the jobs to run.
        woken: set by the queue when it has outcomes; without it the queue is polled, which costs up to 5 ms.
    """
    outcomes = {id(job): [False] * len(job.keys) for job in jobs}
    for job in jobs:
        assert queue.submit(job), f"not taken: {queue.breaker.why_suspended}"
    left = {id(job) for job in jobs}

    def is_done() -> bool:
        for part in queue.poll():
            outcomes[id(part.job)][part.first : part.first + len(part.outcomes)] = part.outcomes
            if not part.job.num_left:
                left.discard(id(part.job))
        return not left

    if woken is None:
        wait_until(is_done, what="the outcomes of jobs")
    else:
        while not is_done():
            assert woken.wait(60.0), "no outcomes of jobs within a minute"
            woken.clear()
    return [outcomes[id(job)] for job in jobs]


def write(queue: TierQueue, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    """Write entries and wait."""
    return run(queue, Job(JobKind.WRITE, keys, extents))[0]


def read(queue: TierQueue, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    """Read entries and wait."""
    return run(queue, Job(JobKind.READ, keys, extents))[0]


def contains(queue: TierQueue, keys: Sequence[bytes]) -> list[bool]:
    """Ask for entries and wait."""
    return run(queue, Job(JobKind.CONTAINS, keys))[0]


def clear(queue: TierQueue, tenant: bytes | None, model: bytes | None) -> int:
    """Clear and wait; return the number of removed entries."""
    job = Job(JobKind.CLEAR, names=(tenant, model))
    run(queue, job)
    assert job.num_cleared is not None, "it failed"
    return job.num_cleared
