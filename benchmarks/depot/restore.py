"""Measures how long it takes to read back an index table, and how long each step blocks the server's loop.

`python benchmarks/depot/restore.py --entries 1000000` needs 1.5 GB of memory and no pool.
"""

import argparse
import gc
import hashlib
import statistics
import time

from kvdepot.index.entries import NewRun, PartPlace
from kvdepot.index.index import ChunkIndex
from kvdepot.index.restore import restore
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.wire.messages import CacheSpec, GroupShape

_SPEC = CacheSpec(16, (GroupShape(GroupKind.FULL_ATTENTION, 16),), "bfloat16", "")
_PROMPT_CHUNKS = 64
_ENTRY_BYTES = 8192
_ENTRIES_PER_SECOND = 500  # rate of stores by the clock that the policy sees


def fill(table: IndexTable, num_entries: int) -> None:
    """Store prompts until the table has the given number of entries."""
    index = ChunkIndex(ExtentAllocator(num_entries * _ENTRY_BYTES), table)
    space = index.space(_SPEC)
    place = PartPlace(0, 0, _ENTRY_BYTES, 1)
    for start in range(0, num_entries, _PROMPT_CHUNKS):
        numbers = range(start, min(start + _PROMPT_CHUNKS, num_entries))
        keys = (hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest() for number in numbers)
        run = NewRun(space, b"".join(keys), writer=Writer(1, 1))
        begun, _ = index.reserve(run, [(chunk, place) for chunk in range(len(numbers))])
        assert len(begun) == len(numbers)
        index.seal([entry for _, _, (entry, *_) in begun], now=start // _ENTRIES_PER_SECOND)


def main() -> None:
    """Fill a table, read it back as a new server does, and print the times of the steps."""
    parser = argparse.ArgumentParser(description="Read back an index table.")
    parser.add_argument("--entries", type=int, default=1_000_000)
    num_entries: int = parser.parse_args().entries
    table = IndexTable.in_memory(num_entries)
    fill(table, num_entries)
    index = ChunkIndex(ExtentAllocator(num_entries * _ENTRY_BYTES), table)
    gc.collect()
    gc.disable()  # as the server does
    began = time.monotonic()
    steps: list[float] = []
    worked = time.thread_time()
    for _ in restore(index, [_SPEC]):
        steps.append(time.thread_time() - worked)
        worked = time.thread_time()
    print(f"{index.entries.num_sealed} entries in {time.monotonic() - began:.1f} s, {len(steps)} steps")
    longest = ", ".join(f"{seconds * 1e3:.1f}" for seconds in sorted(steps)[-5:])
    slow = sum(seconds > 5e-3 for seconds in steps)
    print(
        f"median {statistics.median(steps) * 1e3:.2f} ms, {slow} above 5 ms, the longest {longest} ms of processor time"
    )


if __name__ == "__main__":
    main()
