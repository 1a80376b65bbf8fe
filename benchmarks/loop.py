"""How long the turns of the server's loop take, whatever it is asked: `python benchmarks/loop.py`.

Each line is a kind of work: how many turns of the loop it took, their 99th percentile and longest by wall clock, and
how many took more than 20 ms. The depot has a core of its own if there are two, and priority over its clients.

One million entries need about 5 GB of memory and five minutes; `--entries 20000` shows that it runs. `--only PART...`
leaves out the other parts, `--policy arc` has the index evict by another policy.
"""

import argparse
import os
import socket
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from kvdepot import SchedulerClient
from kvdepot.client.operator import ask_depot
from kvdepot.config import HTTP_TOKEN
from kvdepot.index.eviction import POLICIES
from kvdepot.lab.filler import ENTRY_BYTES, IndexFiller, filler_spec, prompt_key
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import GroupKind
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o

FOLDER = "LOOP_FOLDER"
NOTES = Path("/dev/shm")
BUCKET_MICROSECONDS = 50
NUM_BUCKETS = 4000
NUM_PHASES = 40
SLOW_MILLISECONDS = 20.0
PRIORITY = -20  # as of `nice`
PROMPT_CHUNKS = 1000
LONGEST_CHUNKS = 16_384  # a million tokens in chunks of 64
LONGEST_RECURRENT_CHUNKS = 4096  # and in chunks of 256
MOST_TENANTS = 60_000
NUM_CACHES = 4_090  # as many models or layouts
TIER_PROMPT_CHUNKS = 4096
SPEC = filler_spec(64)
SPARSE_SPEC = m.CacheSpec(64, (m.GroupShape(GroupKind.RECURRENT, 64),), "bytes", "recurrent")

Ledger = np.memmap[tuple[int, int], np.dtype[np.int64]]


def open_ledger(folder: Path, mode: str) -> Ledger:
    """Return turns by phase and bucket of their length; the phase of now is in the last row's first place."""
    return np.memmap(folder / "ledger", np.int64, mode, shape=(NUM_PHASES + 1, NUM_BUCKETS))  # pyright: ignore[reportCallIssue, reportArgumentType]


def loop_core() -> int:
    """Return the core on which loops run."""
    return max(os.sched_getaffinity(0))


def serve() -> None:
    """Be a depot that counts its turns in the ledger."""
    from kvdepot.ops import cli
    from kvdepot.server.watch import TurnWatch

    ledger = open_ledger(Path(os.environ[FOLDER]), "r+")
    core = loop_core()
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)

    class Watch(TurnWatch):
        """Counts every turn."""

        def __init__(self) -> None:
            super().__init__()
            os.sched_setaffinity(0, {core})  # this thread

        def begin(self) -> float:
            self.began = super().begin()
            return self.began

        def end(self) -> None:
            bucket = min(int((time.monotonic() - self.began) * 1e6) // BUCKET_MICROSECONDS, NUM_BUCKETS - 1)
            ledger[int(ledger[NUM_PHASES, 0]), bucket] += 1

    with patch("kvdepot.server.loop.TurnWatch", Watch):
        raise SystemExit(cli.main(sys.argv[1:]))


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    entries: int
    seconds: float  # of what goes on and on
    policy: str
    folder: Path | None  # on the disk that is a tier


class Phases:
    """Says which kind of work the turns are counted under, and prints a line for each."""

    def __init__(self, folder: Path) -> None:
        self._ledger = open_ledger(folder, "w+")
        self._number = 0
        self.total = self.num_slow = 0

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count what happens in the body as one kind."""
        self._number += 1
        self._ledger[NUM_PHASES, 0] = self._number
        began = time.monotonic()
        yield
        seconds = time.monotonic() - began
        self._ledger[NUM_PHASES, 0] = 0
        time.sleep(0.1)  # the turn that is under way still counts
        self._say(name, seconds, self._ledger[self._number])

    def _say(self, name: str, seconds: float, counts: npt.NDArray[np.int64]) -> None:
        total = int(counts.sum())
        if not total:
            print(f"{name:56} no turns")
            return
        longest = int(np.flatnonzero(counts)[-1]) * BUCKET_MICROSECONDS / 1e3
        p99 = int(np.searchsorted(np.cumsum(counts), 0.99 * total)) * BUCKET_MICROSECONDS / 1e3
        slow = int(counts[int(SLOW_MILLISECONDS * 1e3) // BUCKET_MICROSECONDS :].sum())
        print(
            f"{name:56} {seconds:6.1f} s {total:8} turns  p99 {p99:6.2f}  ",
            f"longest {longest:6.2f} ms  above {SLOW_MILLISECONDS:.0f}: {slow}", sep="", flush=True,
        )  # fmt: skip
        self.total += total
        self.num_slow += slow


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


def read_metrics(url: str, token: str) -> None:
    """Ask for metrics as Prometheus does."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    for _ in range(50):
        with urllib.request.urlopen(request, timeout=60) as reply:
            assert b"kvdepot_entries" in reply.read()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


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
    large = IndexFiller(depot.url, chunk_tokens=65, entry_bytes=4 * ENTRY_BYTES)
    with phases.phase("a worker storing chunks four times as large"):
        for prompt in range(max(8, num_prompts // 50)):
            large.store(prompt_key(prompt, PROMPT_CHUNKS), whole=False)  # what leaves need not be neighbours
    large.close()
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
        ask_depot(o.SetQuota("b", ENTRY_BYTES * num_entries // 2), depot.url, 60)
    with phases.phase("a worker that leaves 10,000 unfinished entries"):
        for number in range(10_000 // m.MAXIMUM_STORE_ENTRIES):
            filler.prepare(prompt_key(10_000_000 + number, m.MAXIMUM_STORE_ENTRIES))
        filler.close()
        time.sleep(1)
    client.close()
    sparse.close()


def run_index(phases: Phases, options: Options) -> None:
    """A full index: in service, killed and read back, cleared."""
    seconds = options.seconds
    with index_depot(options, options.entries) as depot:
        in_service(phases, depot, options.entries, seconds)
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
                ask_depot(o.Clear(tenant), depot.url, 120)


@contextmanager
def index_depot(options: Options, num_entries: int, *flags: str) -> Generator[DepotProcess]:
    """A depot with room for so many entries, whose pool is there."""
    pool_size, flags = f"{(num_entries + 20_000) * ENTRY_BYTES}", ("--policy", options.policy, *flags)
    with DepotProcess("--max-entries", str(num_entries), *flags, pool_size=pool_size, module="loop") as depot:
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 120)
        yield depot


def run_tier(phases: Phases, options: Options) -> None:
    """Memory as a tier."""
    tier = TierWork(options, "a tier", 8)
    with tier.depot("memory://") as depot:
        tier.fill(phases, depot)


def run_disk(phases: Phases, options: Options) -> None:
    """A disk as a tier, which lists its files when the depot is started again."""
    tier = TierWork(options, "a disk", 2)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, tier.depot(f"disk://{folder}") as depot:
        tier.fill(phases, depot)
        depot.kill()
        with phases.phase("started again, while the disk is listed, with two clients"):
            depot.start(60)
            together(*[(busy, (depot.url, range(k, k + 8), options.seconds)) for k in range(2)])
        with phases.phase("clearing it"):
            ask_depot(o.Clear(None), depot.url, 120)


class TierWork:
    """Prompts go down to a tier, leave the pool and come back."""

    def __init__(self, options: Options, what: str, num_prompts: int) -> None:
        self._options = options
        self._what = what
        self._num_prompts = num_prompts
        self._num_chunks = min(TIER_PROMPT_CHUNKS, options.entries // 16)
        self._num_bytes = num_prompts * self._num_chunks * ENTRY_BYTES

    def depot(self, url: str) -> DepotProcess:
        """Return a depot with the tier."""
        tier = f"{url}?capacity={16 * self._num_bytes}&deadline=30"
        flags = "--policy", self._options.policy, "--promote-seconds", "30"  # all comes, however busy the machine is
        return DepotProcess("--tier", tier, *flags, pool_size=f"{2 * self._num_bytes}", module="loop")

    def fill(self, phases: Phases, depot: DepotProcess) -> None:
        """Store prompts, and others until those have left the pool; look them up."""
        filler = IndexFiller(depot.url)

        def store(prompts: range) -> None:
            for prompt in prompts:
                filler.store(prompt_key(prompt, self._num_chunks))
                wait_until(lambda: not depot.status().tiers[0].queued_write_bytes, 120)

        with phases.phase(f"storing prompts of {self._num_chunks:,} chunks, written to {self._what}"):
            store(range(self._num_prompts))
        with phases.phase("other prompts, until those have left the pool"):
            store(range(100, 100 + 5 * self._num_prompts // 2))
        client = SchedulerClient(SPEC, "filler", url=depot.url, deadline_seconds=30)
        client.wait_until_connected(30)
        with phases.phase(f"lookups of {self._num_chunks:,} chunks that {self._what} has"):
            found = look_up(client, self._num_prompts, self._num_chunks)
        print(f"{found} of {self._num_prompts * self._num_chunks} chunks came from {self._what}")
        client.close()
        filler.close()


def run_tenants(phases: Phases, options: Options) -> None:
    """Tenants by themselves."""
    address = f"127.0.0.1:{free_port()}"
    has_http = find_spec("uvicorn") is not None and find_spec("prometheus_client") is not None
    with index_depot(options, options.entries, *(("--http", address) if has_http else ())) as depot:
        filler = IndexFiller(depot.url)
        store_for_tenants(phases, filler, options.entries)
        for number in range(options.entries // 20):
            filler.store(prompt_key(30_000_000 + number, 1, f"the {'other' if number % 2 else 'one'}"))
        if has_http:
            with phases.phase("metrics over HTTP, fifty times, with a client"):
                asks = read_metrics, (f"http://{address}/metrics", (depot.directory / HTTP_TOKEN).read_text().strip())
                together(asks, (busy, (depot.url, range(8), options.seconds)))
        with phases.phase("clearing every other chunk of very many"):
            ask_depot(o.Clear("the other"), depot.url, 60)
        filler.close()


def run_caches(phases: Phases, options: Options) -> None:
    """Very many models, and what operators ask that has to look into every cache."""
    num_caches = min(NUM_CACHES, options.entries // 20)
    key = prompt_key(0, 16)
    with index_depot(options, 16 * num_caches) as depot:
        with phases.phase(f"first stores of {num_caches:,} caches"):
            for chunk_tokens in range(1, num_caches + 1):
                filler = IndexFiller(depot.url, chunk_tokens=chunk_tokens)
                filler.store(key)
                filler.close()
        with phases.phase(f"warm and find in {num_caches:,} caches"):
            for _ in range(50):
                ask_depot(o.Warm("default", key.digests), depot.url, 60)
                ask_depot(o.Find(key.digests), depot.url, 60)


PARTS: dict[str, Callable[[Phases, Options], None]] = {
    "index": run_index, "tier": run_tier, "disk": run_disk, "tenants": run_tenants, "caches": run_caches,
}  # fmt: skip


def main() -> None:
    """Print a line for each kind of work."""
    parser = argparse.ArgumentParser(description="How long the server's loop blocks.")
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0, help="of what goes on and on")
    parser.add_argument("--policy", default="lru", choices=POLICIES)
    parser.add_argument("--folder", type=Path, help="on the disk that is a tier; a temporary one if not given")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parser.parse_args()
    options = Options(arguments.entries, arguments.seconds, arguments.policy, arguments.folder)
    with tempfile.TemporaryDirectory(dir=NOTES if NOTES.is_dir() else None) as folder:
        os.environ[FOLDER] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        phases = Phases(Path(folder))
        for part in arguments.only:
            PARTS[part](phases, options)
    if phases.total:
        print(f"{phases.num_slow} of {phases.total:,} turns took more than {SLOW_MILLISECONDS:.0f} ms")


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve()
    main()
