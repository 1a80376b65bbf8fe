"""Measures the server itself: `python benchmarks/depot/server.py`.

Its start, its memory, requests a second, the cost of counting them, and the slowdown by an index of a million entries,
compared with one of 1,000. The depot takes 4 KiB of memory for each entry.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from kvdepot.config import format_size
from kvdepot.features.estimates.feature import HitRateCurve
from kvdepot.lab.bench import (
    ENTRY_BYTES,
    NUM_CLIENTS,
    ClientTask,
    IndexFiller,
    describe_machine,
    latencies,
    prompt_key,
    run_clients,
)
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate.metrics import render_metrics
from kvdepot.wire.status import Histogram

_SINGLE: Final = range(10_000_000, 10_000_100)  # prompts of one chunk


def measure(num_entries: int, seconds: float) -> None:
    """Print all figures; each load lasts `seconds`."""
    alone, with_client = _import_ms("import kvdepot"), _import_ms("import kvdepot; kvdepot.SchedulerClient")
    print(f"import kvdepot: {alone:.1f} ms, with its client {with_client:.1f} ms", flush=True)
    pool_size = num_entries * ENTRY_BYTES + (64 << 20)
    started = time.perf_counter()
    with DepotProcess("--max-entries", str(num_entries + 8192), pool_size=str(pool_size)) as depot:
        print(
            f"answers after {time.perf_counter() - started:.3f} s with a pool of {format_size(pool_size)};"
            f" resident {format_size(_resident_bytes(depot.pid))}",
            flush=True,
        )
        wait_until(lambda: depot.status().pool_ready_bytes == depot.status().pool_size_bytes, 600)
        filler = IndexFiller(depot.url)
        filler.store(prompt_key(0, 1000))
        for prompt in _SINGLE:
            filler.store(prompt_key(prompt, 1))
        before = _cpu_seconds(depot.pid)
        times, per_second = run_clients([ClientTask(depot.url, 64, tuple(_SINGLE), 1, seconds)] * NUM_CLIENTS)
        cores = (_cpu_seconds(depot.pid) - before) / seconds
        of_lookup, observing = cores / per_second, _observing_seconds()
        took = latencies(times)
        print(
            f"{per_second:,.0f} one-chunk lookups a second from {NUM_CLIENTS} clients, {cores:.2f} cores of the server,"
            f" p50 {took['p50_ms']:.3f} ms, p99 {took['p99_ms']:.3f} ms\n"
            f"of {of_lookup * 1e6:.1f} us of the server a lookup, histograms and hit rate curve take"
            f" {observing * 1e6:.2f} us ({observing / max(1e-8, of_lookup):.1%})",
            flush=True,
        )
        small = ClientTask(depot.url, 64, (0,), 1000, seconds)
        few, _ = run_clients([small])
        resident, entries = _resident_bytes(depot.pid), depot.status().num_entries
        for prompt in range(1, num_entries // 1000):
            filler.store(prompt_key(prompt, 1000))
        added = depot.status().num_entries - entries
        per_entry = (_resident_bytes(depot.pid) - resident) / added
        many, _ = run_clients([replace(small, prompts=tuple(range(0, num_entries // 1000, 37)))])
        answers = statistics.median(_seconds_of(depot.status) for _ in range(21))
        scrapes = statistics.median(_seconds_of(lambda: render_metrics(depot.status())) for _ in range(21))
        before_ms, after_ms = latencies(few)["p50_ms"], latencies(many)["p50_ms"]
        print(
            f"{entries + added:,} entries: {per_entry:.0f} bytes each; the status takes {answers * 1e3:.2f} ms,"
            f" /metrics {scrapes * 1e3:.2f} ms\nlookup of 1,000 chunks p50 {after_ms:.3f} ms against {before_ms:.3f} ms"
            f" at about 1,000 entries ({after_ms / before_ms:.2f}x)"
        )
        filler.close()


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in fields if line.startswith("VmRSS")) << 10


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_bytes().rsplit(b")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _observing_seconds(num_lookups: int = 20_000, rounds: int = 7) -> float:
    """Return the seconds that counting a lookup of one chunk takes: in the sample, the tokens and a histogram."""
    hit_rates, histogram = HitRateCurve(1 << 30), Histogram(0.000016)
    keys = [prompt_key(prompt, 1).digests for prompt in _SINGLE]
    tokens = {"default": [0, 0, 0]}

    def observed() -> None:
        began = time.monotonic()
        for _ in range(num_lookups // len(keys)):
            for key in keys:
                hit_rates.looked_up(key, 1 << 20)
                row = tokens.get("default") or [0]
                row[0] += 64
                row[1] += 64
                ended = time.monotonic()
                histogram.add(ended - began)
                began = ended

    def bare() -> None:
        for _ in range(num_lookups // len(keys)):
            for _key in keys:
                pass

    return min(_seconds_of(observed) - _seconds_of(bare) for _ in range(rounds)) / num_lookups


def _import_ms(code: str, rounds: int = 9) -> float:
    """Return the milliseconds that `code` adds to the start of an interpreter that finds bytecode."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    times: dict[str, list[float]] = {"pass": [], code: []}
    for number in range(rounds + 1):
        for program, seconds in times.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True, env=environment)
            if number:  # the first run may write bytecode
                seconds.append(time.perf_counter() - started)
    empty, full = (statistics.median(seconds) for seconds in times.values())
    return (full - empty) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    print(describe_machine())
    measure(options.entries, options.seconds)


if __name__ == "__main__":
    main()
