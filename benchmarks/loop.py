"""What the server's loop does in one go, whatever it is asked: `python benchmarks/loop.py`.

Each line is a kind of work: how many turns of the loop it took, their 99th percentile and longest of processor time,
and how many were above the 5 ms that a turn may take. What a turn waits for a core that others use is not its work; how
even the machine's processor time is, the last line says: a piece of work that is always the same.

One million entries need about 5 GB of memory and five minutes; `--entries 20000` shows that it runs. `--only PART...`
leaves out the other parts.
"""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvdepot import SchedulerClient
from kvdepot import messages as m
from kvdepot.client.connection import ask_depot
from kvdepot.layout import GroupKind
from kvdepot.testing.filler import ENTRY_BYTES, IndexFiller, filler_spec, prompt_key
from kvdepot.testing.processes import DepotProcess, wait_until

LEDGER = "LOOP_LEDGER"
BUCKET_MICROSECONDS = 50
NUM_BUCKETS = 4000
NUM_PHASES = 32
SLOW_MICROSECONDS = 5000
PROMPT_CHUNKS = 1000
LONGEST_CHUNKS = 16_384  # a million tokens in chunks of 64
LONGEST_RECURRENT_CHUNKS = 4096  # and in chunks of 256
MOST_TENANTS = 60_000
NUM_CACHES = 4_090  # as many models or layouts
NUM_TIER_PROMPTS = 8
TIER_PROMPT_CHUNKS = 4096
SPEC = filler_spec(64)
SPARSE_SPEC = m.CacheSpec(64, (m.GroupShape(GroupKind.RECURRENT, 64),), "bytes", "recurrent")

Ledger = np.memmap[tuple[int, int], np.dtype[np.int64]]


def open_ledger(path: str, mode: str) -> Ledger:
    """Return turns by phase and bucket of their work; the phase of now is in the last row's first place."""
    return np.memmap(path, np.int64, mode, shape=(NUM_PHASES + 1, NUM_BUCKETS))  # pyright: ignore[reportCallIssue, reportArgumentType]


def serve() -> None:
    """Be a depot that counts its turns in the ledger."""
    from kvdepot import cli
    from kvdepot.server.loop import DepotServer

    ledger = open_ledger(os.environ[LEDGER], "r+")

    def watch(_server: DepotServer, _seconds: float, work_seconds: float) -> None:
        bucket = min(int(work_seconds * 1e6) // BUCKET_MICROSECONDS, NUM_BUCKETS - 1)
        ledger[int(ledger[NUM_PHASES, 0]), bucket] += 1

    with patch.object(DepotServer, "_watch_turn", watch):
        raise SystemExit(cli.main(sys.argv[1:]))


class Phases:
    """Says which kind of work the turns are counted under, and prints a line for each."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._number = 0

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count what happens in the body as one kind."""
        self._number += 1
        self._ledger[NUM_PHASES, 0] = self._number
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self._ledger[NUM_PHASES, 0] = 0
        time.sleep(0.05)  # the turn that is under way still counts
        self._say(name, seconds, self._ledger[self._number])

    def _say(self, name: str, seconds: float, counts: npt.NDArray[np.int64]) -> None:
        total = int(counts.sum())
        if not total:
            print(f"{name:56} no turns")
            return
        longest = int(np.flatnonzero(counts)[-1]) * BUCKET_MICROSECONDS / 1e3
        p99 = int(np.searchsorted(np.cumsum(counts), 0.99 * total)) * BUCKET_MICROSECONDS / 1e3
        slow = int(counts[SLOW_MICROSECONDS // BUCKET_MICROSECONDS :].sum())
        print(
            f"{name:56} {seconds:6.1f} s {total:8} turns  p99 {p99:6.2f}  longest {longest:6.2f} ms  above 5: {slow}",
            flush=True,
        )


def fill(url: str, prompts: range, tenant: str = "default") -> None:
    """Store whole prompts, until `--max-entries` evict others."""
    filler = IndexFiller(url)
    for prompt in prompts:
        filler.store(prompt_key(prompt, PROMPT_CHUNKS, tenant))
    filler.close()


def busy(url: str, prompts: range, seconds: float) -> None:
    """Look up a prompt of 128k tokens again and again."""
    client = SchedulerClient(SPEC, f"client {os.getpid()}", url=url, deadline_seconds=30)
    client.wait_until_connected(30)
    keys = [prompt_key(prompt, 2 * PROMPT_CHUNKS) for prompt in prompts]
    end = time.monotonic() + seconds
    number = 0
    while time.monotonic() < end:
        client.lookup(f"request {number}", keys[number % len(keys)])
        client.end_request(f"request {number}")
        number += 1
    client.close()


def look_up(client: SchedulerClient, num_prompts: int, num_chunks: int) -> int:
    """Look up prompts one after the other; return how many of their chunks were found."""
    found = 0
    for prompt in range(num_prompts):
        found += client.lookup("request", prompt_key(prompt, num_chunks)).num_chunks
        client.end_request("request")
    return found


def together(*tasks: tuple[Callable[..., None], tuple[object, ...]]) -> None:
    """Run processes side by side."""
    spawn = get_context("spawn")
    processes = [spawn.Process(target=target, args=arguments) for target, arguments in tasks]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert not process.exitcode, "a client failed"


def store_for_tenants(phases: Phases, filler: IndexFiller, num_entries: int) -> None:
    """Store one chunk for each of very many tenants."""
    num_tenants = min(num_entries // 20, MOST_TENANTS)
    with phases.phase(f"first stores of {num_tenants:,} tenants"):
        for number in range(num_tenants):
            filler.store(prompt_key(20_000_000 + number, 1, f"tenant {number}"))


def in_service(phases: Phases, depot: DepotProcess, num_entries: int, seconds: float) -> None:
    """Everything that engines and operators ask while a full index serves."""
    num_prompts = num_entries // PROMPT_CHUNKS
    with phases.phase(f"filling {num_entries:,} entries, two workers"):
        half = num_prompts // 2
        together((fill, (depot.url, range(half), "a")), (fill, (depot.url, range(half, num_prompts), "b")))
    with phases.phase("four clients looking up 2,000 chunks, half of them there"):
        together(*[(busy, (depot.url, range(k, k + 8), seconds)) for k in range(4)])
    with phases.phase("a worker storing into the full index, beside two clients"):
        stores = range(num_prompts, num_prompts + max(20, num_prompts // 10))
        together((fill, (depot.url, stores, "c")), *[(busy, (depot.url, range(k, k + 8), seconds)) for k in range(2)])
    client = SchedulerClient(SPEC, "client", url=depot.url, deadline_seconds=30)
    client.wait_until_connected(30)
    with phases.phase(f"lookups of {LONGEST_CHUNKS:,} chunks, most of them not there"):
        look_up(client, 50, LONGEST_CHUNKS)
    sparse = SchedulerClient(SPARSE_SPEC, "sparse", url=depot.url, deadline_seconds=30)
    sparse.wait_until_connected(30)
    with phases.phase(f"of {LONGEST_RECURRENT_CHUNKS:,} chunks, of a model of recurrent layers only"):
        look_up(sparse, 50, LONGEST_RECURRENT_CHUNKS)
    with phases.phase("hints for prompts of 1,000 chunks, in a second all to end"):
        for prompt in range(num_prompts):
            tenant = "a" if prompt < num_prompts // 2 else "b"
            client.hint(prompt_key(prompt, PROMPT_CHUNKS, tenant), ttl_seconds=1.0)
        time.sleep(1 + seconds)
    filler = IndexFiller(depot.url)
    store_for_tenants(phases, filler, num_entries)
    with phases.phase("status, fifty times"):
        for _ in range(50):
            depot.status()
    with phases.phase("a quota at runtime for a half of the chunks"):
        ask_depot(m.SetQuota("b", ENTRY_BYTES * num_entries // 2), depot.url, 60)
    with phases.phase("a worker that leaves 10,000 unfinished entries"):
        for number in range(10_000 // m.MAXIMUM_STORE_ENTRIES):
            filler.prepare(prompt_key(10_000_000 + number, m.MAXIMUM_STORE_ENTRIES))
        filler.close()
        time.sleep(1)
    client.close()
    sparse.close()


def run_index(phases: Phases, num_entries: int, seconds: float) -> None:
    """A full index: in service, killed and read back, cleared."""
    with index_depot(num_entries) as depot:
        in_service(phases, depot, num_entries, seconds)
        depot.kill()
        with phases.phase("reading back, killed and started again"):
            depot.start(60)
            wait_until(lambda: not depot.status().recovering, 300)
        with phases.phase("reading back, with two clients"):
            depot.kill()
            depot.start(60)
            together(*[(busy, (depot.url, range(k, k + 8), seconds)) for k in range(2)])
            wait_until(lambda: not depot.status().recovering, 300)
        with phases.phase("clearing a half, then all"):
            for tenant in ("a", None):
                ask_depot(m.Clear(tenant), depot.url, 120)


@contextmanager
def index_depot(num_entries: int) -> Generator[DepotProcess]:
    """A depot with room for so many entries, whose pool is there."""
    pool_size = f"{(num_entries + 20_000) * ENTRY_BYTES}"
    with DepotProcess("--max-entries", str(num_entries), pool_size=pool_size, module="loop") as depot:
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 120)
        yield depot


def run_tier(phases: Phases, _num_entries: int, _seconds: float) -> None:
    """Prompts go down to a tier, leave the pool and come back."""
    tier = f"memory://?capacity={8 * NUM_TIER_PROMPTS * TIER_PROMPT_CHUNKS * ENTRY_BYTES}&deadline=30"
    patience = "--promote-seconds", "30"  # all of it is to come, however busy the machine is
    with DepotProcess("--tier", tier, *patience, pool_size="256MiB", module="loop") as depot:
        filler = IndexFiller(depot.url)

        def store(prompts: range) -> None:
            for prompt in prompts:
                filler.store(prompt_key(prompt, TIER_PROMPT_CHUNKS))
                wait_until(lambda: not depot.status().tiers[0].queued_write_bytes, 120)

        with phases.phase("storing prompts of 4,096 chunks, written to a tier"):
            store(range(NUM_TIER_PROMPTS))
        with phases.phase("other prompts, until those have left the pool"):
            store(range(100, 120))
        client = SchedulerClient(SPEC, "filler", url=depot.url, deadline_seconds=30)
        client.wait_until_connected(30)
        with phases.phase("lookups of 4,096 chunks that the tier has"):
            found = look_up(client, NUM_TIER_PROMPTS, TIER_PROMPT_CHUNKS)
        print(f"{found} of {NUM_TIER_PROMPTS * TIER_PROMPT_CHUNKS} chunks came from the tier")
        client.close()
        filler.close()


def run_tenants(phases: Phases, num_entries: int, _seconds: float) -> None:
    """Tenants by themselves."""
    with index_depot(num_entries) as depot:
        filler = IndexFiller(depot.url)
        store_for_tenants(phases, filler, num_entries)
        filler.close()


def run_caches(phases: Phases, num_entries: int, _seconds: float) -> None:
    """What operators ask that has to look into every cache."""
    num_caches = min(NUM_CACHES, num_entries // 20)
    key = prompt_key(0, 16)
    with index_depot(16 * num_caches) as depot:
        for chunk_tokens in range(1, num_caches + 1):
            filler = IndexFiller(depot.url, chunk_tokens=chunk_tokens)
            filler.store(key)
            filler.close()
        with phases.phase(f"warm and find in {num_caches:,} caches"):
            for _ in range(50):
                ask_depot(m.Warm("default", key.digests), depot.url, 60)
                ask_depot(m.Find(key.digests), depot.url, 60)


def run_reference(_phases: Phases, _num_entries: int, seconds: float) -> None:
    """Print what the same piece of work takes at most on this machine."""
    times: list[float] = []
    end = time.monotonic() + 7 * seconds
    while time.monotonic() < end:
        began = time.thread_time()
        sum(range(100_000))
        times.append((time.thread_time() - began) * 1e3)
    times.sort()
    p50, p99, longest = times[len(times) // 2], times[int(len(times) * 0.99)], times[-1]
    print(f"reference: {len(times)} equal pieces of work took {p50:.2f} ms, p99 {p99:.2f}, longest {longest:.2f} ms")


PARTS: dict[str, Callable[[Phases, int, float], None]] = {
    "index": run_index, "tier": run_tier, "tenants": run_tenants, "caches": run_caches, "reference": run_reference,
}  # fmt: skip


def main() -> None:
    """Print a line for each kind of work."""
    parser = argparse.ArgumentParser(description="What the server's loop does in one go.")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of what goes on and on")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ[LEDGER] = str(Path(folder, "ledger"))
        phases = Phases(open_ledger(os.environ[LEDGER], "w+"))
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        for part in arguments.only:
            PARTS[part](phases, arguments.entries, arguments.seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    main()
