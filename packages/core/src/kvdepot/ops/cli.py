"""The `kvdepot` command: parses its arguments and runs one subcommand."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from kvdepot.backends import list_backends
from kvdepot.config import ServerConfig, format_size, parse_size
from kvdepot.errors import ConfigError, KVDepotError, RemoteError, describe_os_error, printable
from kvdepot.index.eviction import AUTO, POLICIES
from kvdepot.logs import set_up_logs
from kvdepot.ops.cleanup import add_pools
from kvdepot.ops.commandline import ASKS_NO_DEPOT, add_settings, count_argument, number_argument, show, size_argument
from kvdepot.ops.operate import add_commands
from kvdepot.ops.serve import add_serve, run_serve
from kvdepot.ops.sizing import VALUE_BYTES, size_model
from kvdepot.ops.status import add_status

if TYPE_CHECKING:
    from kvdepot.lab.cluster import ClusterTable
    from kvdepot.lab.simulate import SimulationTable

logger = logging.getLogger(__name__)

_SETTINGS_OF_DOCTOR: Final = ("directory", "pool_size_bytes", "pool_directory")


class _Parser(argparse.ArgumentParser):
    """Report wrong arguments in one line instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see '{self.prog} --help')\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command. Exit with 0, 1 (failed, with one line that says why) or 2 (wrong arguments)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        options = make_parser().parse_args(arguments)
        if options.run is not run_serve:
            set_up_logs(options.log_level)
        status = options.run(options)
    except RemoteError as error:
        print(f"kvdepot: {error.reason}", file=sys.stderr)
        status = 1
    except KVDepotError as error:
        print(f"kvdepot: {printable(str(error))}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 0
    except OSError as error:  # wrong path or address from the user
        logger.debug("%s", error, exc_info=True)
        print(f"kvdepot: {printable(describe_os_error(error))}", file=sys.stderr)
        status = 1
    sys.exit(status)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    place = _Parser(add_help=False)
    add_settings(place, ServerConfig, ("directory",))
    parser = _Parser(
        prog="kvdepot",
        parents=[place],
        description="Run one server per node that keeps the KV caches of all inference engines there.",
    )
    parser.add_argument("--version", action="version", version=f"kvdepot {version('kvdepot')}")
    common = _Parser(add_help=False, parents=[place])
    common.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="warning",
        help="lowest level to log to standard error (default %(default)s)",
    )
    json_output = _Parser(add_help=False)
    json_output.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_serve(commands)
    add_status(commands, common, json_output)
    add_commands(commands, common, json_output)
    add_pools(commands, common, json_output)

    backends = commands.add_parser(
        "backends",
        parents=[common, json_output],
        help="list accelerator backends",
        description="List the installed accelerator backends, and say whether each is usable here.",
        epilog=ASKS_NO_DEPOT,
    )
    backends.set_defaults(run=_backends)

    demo = commands.add_parser(
        "demo",
        parents=[common, json_output],
        help="watch engines with and without a depot",
        description="Serve the same conversations with and without a depot, side by side, then kill the depot and start"
        " it again. Needs no model and no GPU.",
        epilog=ASKS_NO_DEPOT,
    )
    demo.set_defaults(run=_demo)

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
        "--plot", type=Path, metavar="FILE", help="with --simulate: draw hit rate against pool size as an SVG"
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

    doctor = commands.add_parser(
        "doctor",
        parents=[common, json_output],
        help="check this machine for problems",
        description="Check the kernel, memory, limits and packages of this machine, and say what to change. Exits with"
        " 1 if something keeps a depot from working.",
    )
    doctor.set_defaults(run=_doctor)
    add_settings(doctor, ServerConfig, _SETTINGS_OF_DOCTOR[1:])

    sizing = commands.add_parser(
        "sizing",
        parents=[common, json_output],
        help="bound the size of a model's tokens",
        description="Compute from a model's config.json how much a token takes at most, and how many tokens a pool"
        " holds at least. 'kvdepot status' is exact while an engine is attached.",
        epilog=ASKS_NO_DEPOT,
    )
    sizing.set_defaults(run=_sizing)
    sizing.add_argument("model", type=Path, metavar="MODEL_CONFIG.json", help="the model's config.json, or its folder")
    sizing.add_argument(
        "--kv-cache-dtype",
        choices=("auto", *VALUE_BYTES),
        default="auto",
        help="dtype of the cache (default auto: as vLLM and SGLang choose it)",
    )
    sizing.add_argument(
        "--pool-size", type=size_argument, metavar="SIZE", default=64 << 30, help="size of the pool (default 64GiB)"
    )

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
        whats.add_parser(what, parents=[common, json_output], help=described, epilog=ASKS_NO_DEPOT)
    return parser


def _backends(options: argparse.Namespace) -> int:
    found = list_backends()
    lines = [
        f"{each.name:6} {each.distribution or '-':20}"
        f" {each.why_unavailable or 'usable (' + ', '.join(each.capabilities) + ')'}"
        for each in found
    ]
    show(options, msgspec.to_builtins(found), lambda: "\n".join(lines))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from kvdepot.lab.demo import run_demo

    summary = run_demo(quiet=options.json)
    if options.json:
        print(json.dumps(summary, indent=2))
    return 1 if summary["wrong_bytes"] or summary["restart"]["wrong_bytes"] else 0


def _replay(options: argparse.Namespace) -> int:
    from kvdepot.lab.trace import read_trace

    for option in ("plot", "nodes", "shared", "routing"):
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
    from kvdepot.lab.replay import run_replay

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
    from kvdepot.lab.simulate import parse_pool_sizes, simulate
    from kvdepot.lab.trace import read_trace

    for option in ("shared", "routing"):
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
    from kvdepot.lab import cluster
    from kvdepot.lab.simulate import parse_pool_sizes
    from kvdepot.lab.trace import read_trace

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
        on_row=lambda row: print(f"{row.name}: {row.hit_rate:.1%}", file=sys.stderr),
    )


def _doctor(options: argparse.Namespace) -> int:
    from kvdepot.ops.doctor import Verdict, diagnose, read_facts

    config = ServerConfig(**{name: getattr(options, name) for name in _SETTINGS_OF_DOCTOR if name in options})
    findings = diagnose(read_facts(config))
    lines: list[str] = []
    for finding in findings:
        mark = "" if finding.verdict is Verdict.FINE else f"{finding.verdict.upper()}: "
        lines.append(printable(f"{finding.subject:13} {mark}{finding.text}"))
        if finding.way_out:
            lines.append(printable(f"{'':13} -> {finding.way_out}"))
    show(options, msgspec.to_builtins(findings), lambda: "\n".join(lines))
    return any(finding.verdict is Verdict.BROKEN for finding in findings)


def _sizing(options: argparse.Namespace) -> int:
    sizing = size_model(options.model, options.kv_cache_dtype)
    show(options, sizing.as_dict(options.pool_size), lambda: sizing.describe(options.pool_size))
    return 0


def _bench(options: argparse.Namespace) -> int:
    from kvdepot.lab import bench

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    say(bench.describe_machine())
    result = bench.bench_transfer(say) if options.what == "transfer" else bench.bench_lookup(say)
    result["machine"] = bench.describe_machine()
    if options.json:
        print(json.dumps(result, indent=2))
    return 0
