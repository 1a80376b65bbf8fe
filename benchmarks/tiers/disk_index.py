"""Measures how long a disk tier takes to index files: `python benchmarks/tiers/disk_index.py FOLDER`.

Makes files with the names and sizes of entries (sparse, 4 MiB each) in a new folder below FOLDER, and removes them
afterwards. Each round first walks the tree with only `os.scandir` and a `stat` of every file. Then it opens a tier and
waits for the complete index. Then it does so again while a thread asks for keys through the tier's queue, as the
depot's loop does for lookups: 512 at a time, without a pause. The result is the ratio of tier to walk within a round.
The kernel's caches are warm, because the files were made just before.
"""

import argparse
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvdepot.testing.tier_traffic import PLACE, make_pool
from kvdepot.tiers.disk.files import name_of
from kvdepot.tiers.disk.tier import DiskTier
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.keys import name_hash, tier_key
from kvdepot.tiers.queue import TierQueue

PAYLOAD_BYTES = 4 << 20
QUESTION_KEYS = 512
SWITCH_SECONDS = 0.001  # the interpreter's switch interval, as in a depot


def make_files(folder: Path, num_entries: int, num_tenants: int) -> list[bytes]:
    """Create the files of entries and return their keys."""
    keys: list[bytes] = []
    for number in range(num_entries):
        digest = hashlib.blake2b(number.to_bytes(8, "little"), digest_size=32).digest()
        key = tier_key(name_hash(f"tenant {number % num_tenants}"), name_hash("model"), PLACE, digest)
        path = folder / name_of(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(PAYLOAD_BYTES + 4096)
        keys.append(key)
    return keys


def walk(folder: str) -> int:
    """Call `stat` on every file and return their number."""
    count = 0
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                count += walk(item.path)
            else:
                count += item.stat(follow_symlinks=False).st_size > 0
    return count


def ask(queue: TierQueue, answered: threading.Event, keys: list[bytes], is_over: threading.Event) -> list[float]:
    """Ask for keys until the end of the measurement and return the duration of each question."""
    seconds: list[float] = []
    first = 0
    while not is_over.is_set():
        start = time.perf_counter()
        assert queue.submit(Job(JobKind.CONTAINS, keys[first : first + QUESTION_KEYS]))
        while not queue.poll():
            answered.wait()
            answered.clear()
        seconds.append(time.perf_counter() - start)
        first = (first + QUESTION_KEYS) % len(keys)
    return seconds


def open_and_wait(folder: Path, keys: list[bytes], seconds: list[float] | None) -> float:
    """Return the time until the index is complete. With a list, ask for keys meanwhile and add the durations to it."""
    is_over, answered, pool = threading.Event(), threading.Event(), make_pool()
    start = time.perf_counter()
    tier = DiskTier(pool, folder, 1 << 50)
    queue = TierQueue(tier, pool, "benchmark", deadline_seconds=60.0, wake=answered.set)
    with ThreadPoolExecutor(1) as thread:
        asking = None if seconds is None else thread.submit(ask, queue, answered, keys, is_over)
        while not tier.is_listed:
            time.sleep(0.001)
        taken = time.perf_counter() - start
        is_over.set()
        if asking is not None and seconds is not None:
            seconds += asking.result()
    assert all(tier.contains(keys)), "the index is not complete"
    queue.close()
    return taken


def said(name: str, seconds: list[float], bases: list[float]) -> str:
    ratios = [value / base for value, base in zip(seconds, bases, strict=True)]
    return (
        f"{name} {statistics.median(seconds):.2f} s: {statistics.median(ratios):.1f} times the walk "
        f"({min(ratios):.1f} to {max(ratios):.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--tenants", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    parent: Path = options.folder
    sys.setswitchinterval(SWITCH_SECONDS)
    folder = Path(tempfile.mkdtemp(dir=parent))
    walks, alone, beside, questions = list[float](), list[float](), list[float](), list[float]()
    try:
        keys = make_files(folder, options.entries, options.tenants)
        for _ in range(options.rounds):
            start = time.perf_counter()
            assert walk(str(folder)) == options.entries
            walks.append(time.perf_counter() - start)
            alone.append(open_and_wait(folder, keys, None))
            beside.append(open_and_wait(folder, keys, questions))
    finally:
        shutil.rmtree(folder)
    questions.sort()
    print(f"{options.entries} entries: plain walk {statistics.median(walks):.2f} s")
    print(said("index", alone, walks))
    print(said("index, with questions beside it", beside, walks))
    p50, p99 = questions[len(questions) // 2], questions[len(questions) * 99 // 100]
    print(
        f"{len(questions)} questions for {QUESTION_KEYS} keys answered meanwhile: "
        f"p50 {p50 * 1e3:.2f}, p99 {p99 * 1e3:.2f}, longest {questions[-1] * 1e3:.1f} ms"
    )


if __name__ == "__main__":
    main()
