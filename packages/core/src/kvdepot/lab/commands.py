"""`kvdepot demo` and `kvdepot bench`: see `kvdepot.operate.extensions` for the arguments."""

import argparse
import json
from typing import Any

from kvdepot.operate.commandline import ASKS_NO_DEPOT
from kvdepot.processes import stopped_once


def add_demo(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `kvdepot demo`."""
    demo = commands.add_parser(
        "demo",
        parents=[common, json_output],
        help="watch engines with and without a depot",
        description="Serve the same conversations with and without a depot, side by side, then kill the depot and start"
        " it again. Needs no model and no GPU.",
        epilog=ASKS_NO_DEPOT,
    )
    demo.set_defaults(run=_demo)


def add_bench(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `kvdepot bench`."""
    bench = commands.add_parser(
        "bench",
        help="measure speed, as ratios within one run",
        description="Measure speed, as ratios within one run. Each WHAT takes --json.",
    )
    bench.set_defaults(run=_bench)
    whats = bench.add_subparsers(required=True, metavar="WHAT", dest="what")
    for what, described in (
        ("transfer", "stores and retrieves, compared with one memcpy"),
        ("lookup", "lookups of long prompts"),
    ):
        described_as = f"Measure {described}, in a depot of its own."
        whats.add_parser(
            what, parents=[common, json_output], help=described, description=described_as, epilog=ASKS_NO_DEPOT
        )


def _demo(options: argparse.Namespace) -> int:
    from kvdepot.lab.demo import run_demo

    with stopped_once():
        summary = run_demo(quiet=options.json)
    if options.json:
        print(json.dumps(summary, indent=2))
    return 1 if summary["wrong_bytes"] or summary["restart"]["wrong_bytes"] else 0


def _bench(options: argparse.Namespace) -> int:
    from kvdepot.lab import bench

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    say(bench.describe_machine())
    with stopped_once():
        result = bench.bench_transfer(say) if options.what == "transfer" else bench.bench_lookup(say)
    result["machine"] = bench.describe_machine()
    if options.json:
        print(json.dumps(result, indent=2))
    return 0
