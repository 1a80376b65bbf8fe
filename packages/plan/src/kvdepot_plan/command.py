"""The flags of `kvdepot replay` and `kvdepot tier cost`, and the choice between a real depot and a simulation."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdepot.config import format_size, parse_size
from kvdepot.errors import ConfigError
from kvdepot.index.eviction import AUTO, POLICIES
from kvdepot.operate.commandline import ASKS_NO_DEPOT, count_argument, number_argument, show, size_argument
from kvdepot.processes import stopped_once

if TYPE_CHECKING:  # `kvdepot` loads this module for every command
    from kvdepot_plan.cluster import ClusterTable
    from kvdepot_plan.simulate import SimulationTable


def add_replay(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `replay` to the subparsers of `kvdepot`. See `kvdepot.operate.extensions`."""
    replay = commands.add_parser(
        "replay",
        parents=[common, json_output],
        help="replay a trace in Mooncake's format",
        description="Replay a trace in Mooncake's format through engines without a model, and print its hit rates.",
        epilog=ASKS_NO_DEPOT,
    )
    replay.set_defaults(run=_replay)
    replay.add_argument("trace", type=Path, help="JSON lines with timestamp, input_length, output_length and hash_ids")
    replay.add_argument(
        "--requests",
        type=count_argument,
        metavar="N",
        help="replay the first N requests (default 500; all with --simulate)",
    )
    replay.add_argument(
        "--simulate", action="store_true", help="run only index and eviction policies, and print hit rates by pool size"
    )
    replay.add_argument(
        "--pool-size", metavar="SIZE", help="size of the pool (default 1GiB); with --simulate a list, e.g. 64GiB,256GiB"
    )
    replay.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="with --simulate: draw hit rate against pool size as an SVG; with --nodes, the time to the first token",
    )
    replay.add_argument(
        "--session-ends",
        type=number_argument,
        default=0.0,
        metavar="SHARE",
        help="with --simulate: share of sessions that announce their end, 0 to 1 (default 0)",
    )
    replay.add_argument(
        "--policy", choices=sorted(POLICIES), help="eviction policy (default auto; all of them with --simulate)"
    )
    replay.add_argument(
        "--bytes-per-token",
        type=size_argument,
        default=128 << 10,
        metavar="SIZE",
        help="with --simulate: size of one token (default 128KiB: an 8B model in bf16)",
    )
    cluster = replay.add_argument_group("several nodes, with --simulate")
    cluster.add_argument(
        "--nodes", type=count_argument, metavar="N", help="compare routers and shared tiers on N nodes, with LRU pools"
    )
    cluster.add_argument(
        "--engines", type=count_argument, default=1, metavar="N", help="engines on each node, on one pool (default 1)"
    )
    cluster.add_argument(
        "--routing",
        metavar="LIST",
        help="random, least-loaded, sticky (by conversation), engine-aware (by what each engine stored), kv-aware (by"
        " what each node holds); default: all",
    )
    cluster.add_argument(
        "--shared",
        metavar="LIST",
        help="sizes of a tier that all nodes share, e.g. 0,4TiB,unlimited (default 0: none)",
    )
    cluster.add_argument(
        "--p2p",
        action="store_true",
        help="compare with nodes that read from each other's pools, as with serve --peers",
    )
    cluster.add_argument(
        "--copies",
        type=count_argument,
        default=1,
        metavar="N",
        help="replay the traffic N times at once, each with other prompts behind the common first block (default 1)",
    )
    cluster.add_argument(
        "--prefill-rate",
        type=number_argument,
        metavar="N",
        help="tokens that an engine computes in a second (default 10000: an 8B model on an H100)",
    )


def add_tier_cost(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add `cost` to the subparsers of `kvdepot tier`. See `kvdepot.operate.extensions`."""
    cost = commands.add_parser(
        "cost",
        parents=[common, json_output],
        help="estimate the requests, bytes and dollars of a shared object store",
        description="Simulate a trace in Mooncake's format on nodes that share an object store, and print the requests,"
        " bytes and dollars of a day with --demote store and reuse. The store is not asked.",
        epilog=ASKS_NO_DEPOT,
    )
    cost.set_defaults(run=_cost)
    cost.add_argument(
        "tier", metavar="URL", help="as for serve --tier; without an endpoint, the cloud's list prices apply"
    )
    cost.add_argument("trace", type=Path, help="JSON lines with timestamp, input_length, output_length and hash_ids")
    cost.add_argument("--nodes", type=count_argument, default=8, metavar="N", help="nodes that share it (default 8)")
    cost.add_argument(
        "--copies", type=count_argument, default=1, metavar="N", help="replay the traffic N times at once (default 1)"
    )
    cost.add_argument(
        "--pool-size", type=size_argument, default=125 << 30, metavar="SIZE", help="pool of a node (default 125GiB)"
    )
    cost.add_argument("--routing", default="kv-aware", metavar="NAME", help="as for replay (default kv-aware)")
    cost.add_argument(
        "--bytes-per-token",
        type=size_argument,
        default=128 << 10,
        metavar="SIZE",
        help="size of one token (default 128KiB: an 8B model in bf16)",
    )
    cost.add_argument(
        "--chunk-tokens", type=count_argument, default=64, metavar="N", help="tokens of a chunk (default 64)"
    )
    cost.add_argument(
        "--prices",
        default="",
        metavar="LIST",
        help="dollars, e.g. put=0.005,get=0.0004 (for 1,000), read=0 (for a GiB), month=0.023 (for a GiB kept a month)",
    )


def _cost(options: argparse.Namespace) -> int:
    from kvdepot_plan import cluster, cost
    from kvdepot_plan.trace import read_trace

    prices = cost.prices_of(options.tier, options.prices)
    fleet = cluster.Cluster(options.nodes, copies=options.copies, bytes_per_token=options.bytes_per_token)
    routings = cluster.parse_routings(options.routing)
    if len(routings) > 1:
        raise ConfigError(f"--routing {options.routing}: name one")
    bills = cost.simulate_cost(
        read_trace(options.trace), fleet, options.pool_size, routings[0], prices, options.chunk_tokens
    )
    show(options, cost.bills_as_dict(bills, fleet, prices), lambda: cost.describe_bills(bills, fleet))
    return 0


def _replay(options: argparse.Namespace) -> int:
    from kvdepot_plan.trace import read_trace

    for option in ("plot", "nodes", "shared", "routing", "p2p"):
        if getattr(options, option) and not options.simulate:
            raise ConfigError(f"--{option} needs --simulate")
    if options.simulate:
        # Fail before minutes of work, not after.
        if options.plot and not os.access(options.plot.absolute().parent, os.W_OK):
            raise ConfigError(f"--plot {options.plot}: its folder does not exist or cannot be written")
        table = _simulate_nodes(options) if options.nodes else _simulate_pool(options)
        show(options, table.as_dict(), table.describe)
        if options.plot:
            options.plot.write_text(table.plot())
            print(f"the plot is in {options.plot}", file=sys.stderr)
        return 0
    from kvdepot_plan.replay import run_replay

    with stopped_once():
        summary = run_replay(
            read_trace(options.trace, options.requests or 500),
            pool_bytes=parse_size(options.pool_size or "1GiB"),
            policy=options.policy or AUTO,
            quiet=options.json,
        )
    if options.json:
        print(json.dumps(summary, indent=2))
    return 1 if summary["wrong_bytes"] else 0


def _simulate_pool(options: argparse.Namespace) -> "SimulationTable":
    from kvdepot_plan.simulate import parse_pool_sizes, simulate
    from kvdepot_plan.trace import read_trace

    for option in ("shared", "routing", "p2p"):
        if getattr(options, option):
            raise ConfigError(f"--{option} needs --nodes")
    return simulate(
        read_trace(options.trace, options.requests),
        parse_pool_sizes(options.pool_size) if options.pool_size else (),
        (options.policy,) if options.policy else tuple(POLICIES),
        options.bytes_per_token,
        options.session_ends,
        on_row=lambda row: print(f"{row.policy} {format_size(row.pool_bytes)}: {row.hit_rate:.1%}", file=sys.stderr),
    )


def _simulate_nodes(options: argparse.Namespace) -> "ClusterTable":
    from kvdepot_plan import cluster
    from kvdepot_plan.simulate import parse_pool_sizes
    from kvdepot_plan.trace import read_trace

    if options.policy or options.session_ends:
        raise ConfigError("--nodes simulates LRU without hints: leave --policy and --session-ends out")
    return cluster.simulate_cluster(
        read_trace(options.trace, options.requests),
        cluster.Cluster(
            options.nodes,
            options.engines,
            options.copies,
            options.bytes_per_token,
            options.prefill_rate or cluster.PREFILL_TOKENS_PER_SECOND,
        ),
        parse_pool_sizes(options.pool_size) if options.pool_size else (),
        cluster.parse_routings(options.routing) if options.routing else cluster.ROUTINGS,
        cluster.parse_shared_sizes(options.shared or "0"),
        (False, True) if options.p2p else (False,),
        on_row=lambda row: print(f"{row.name}: {row.hit_rate:.1%}", file=sys.stderr),
    )
