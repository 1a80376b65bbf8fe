"""The deterministic simulation: `python -m simulation --seconds N --seed S`.

Each seed is one history of a node. The server may be killed at any write to its table and names. A failing history is
shrunk and printed as a story; `--story SEED` prints the story of one seed.
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time

from simulation.history import run_seed, story
from support.arguments import seconds_argument

_SEEDS_AT_ONCE = 25


def run_seeds(seeds: range) -> tuple[int, int, int, list[int]]:
    """Run histories in a process of the pool. Return events, crashes, chunks read, and the failing seeds."""
    logging.disable(logging.CRITICAL)
    num_events = num_crashes = num_reads = 0
    failed: list[int] = []
    for seed in seeds:
        outcome = run_seed(seed)
        num_events += len(outcome.events)
        num_crashes += outcome.num_crashes
        num_reads += outcome.num_reads
        if outcome.failure is not None:
            failed.append(seed)
    return num_events, num_crashes, num_reads, failed


def main() -> int:
    """Run histories until the time is up or one fails."""
    parser = argparse.ArgumentParser(prog="python -m simulation", description="simulate a node with crashes")
    parser.add_argument("--seconds", type=seconds_argument, default=120, help="how long (default 120)")
    parser.add_argument("--crashes", type=int, default=0, help="end earlier, after so many crashes")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one a core")
    parser.add_argument("--story", type=int, metavar="SEED", help="print what happens with one seed that fails")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if options.story is not None:
        print(story(options.story))
        return 0
    began = time.monotonic()
    num_histories = num_events = num_crashes = num_reads = 0
    failed: list[int] = []
    seeds = (range(first, first + _SEEDS_AT_ONCE) for first in range(options.seed, 1 << 62, _SEEDS_AT_ONCE))
    with multiprocessing.Pool(options.processes) as pool:
        while not failed and time.monotonic() - began < options.seconds:
            batches = [next(seeds) for _ in range(2 * options.processes)]
            for events, crashes, reads, failing in pool.imap_unordered(run_seeds, batches):
                num_histories += _SEEDS_AT_ONCE
                num_events, num_crashes, num_reads = num_events + events, num_crashes + crashes, num_reads + reads
                failed += failing
            if options.crashes and num_crashes >= options.crashes:
                break
    print(
        f"{num_histories:,} histories from seed {options.seed}: {num_events:,} events, {num_crashes:,} crashes of the"
        f" server, {num_reads:,} chunks retrieved, {time.monotonic() - began:.0f} s; {len(failed)} fail",
        flush=True,
    )
    if failed:
        print(story(min(failed)))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
