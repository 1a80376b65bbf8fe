"""The simulation of a node: `python -m simulation --seconds N --seed S`.

Each seed is one history. The server may be killed at any write to its table and names. A failing history is shrunk and
printed as a story; `--story SEED` prints the story of one seed.

With `--real-time`, the node is a depot and engines in processes, whose numbers are printed as JSON. Exits with 1 if the
audit found something wrong, late or left over.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path

from kvdepot.operate.commandline import count_argument
from kvdepot.wire import messages as m
from simulation.history import run_seed, story
from simulation.processes import Processes, run_in_real_time
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
    real = parser.add_argument_group("real time")
    real.add_argument("--real-time", action="store_true", help="real processes under load")
    real.add_argument("--engines", type=count_argument, default=3, help="number of engine processes (default 3)")
    real.add_argument("--disk", type=Path, metavar="DIR", help="use a smaller pool with a disk tier in this folder")
    real.add_argument("--verify", choices=[*m.Verify], default="all", help="as for kvdepot serve (default all)")
    options = parser.parse_args()
    if options.real_time:
        node = Processes(
            options.seed, options.engines, options.verify, options.disk, lambda told: print(told, file=sys.stderr)
        )
        result = run_in_real_time(node, options.seconds)
        print(json.dumps(result, indent=2))
        return bool(result["failures"])
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
