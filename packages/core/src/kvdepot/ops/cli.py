"""The `kvdepot` command. The only place below which nothing reads the environment or prints."""

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from kvdepot.backends import DeviceBench, find_benches, list_backends
from kvdepot.client.connection import ask_depot
from kvdepot.config import HTTP_TOKEN, Demotion, ServerConfig, default_directory, format_size, parse_size
from kvdepot.errors import BackendUnavailable, ConfigError, KVDepotError, printable
from kvdepot.index.eviction import POLICIES
from kvdepot.ops.http_process import HttpServer, HttpSettings
from kvdepot.ops.operate import add_commands, client_keys, number
from kvdepot.ops.settings import with_settings
from kvdepot.processes.logs import set_up_logs
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.curve import generate_keys

_LEVELS = ("debug", "info", "warning", "error")
_TELLING_CHUNKS = 10_000  # asked for, until estimates are shown


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; exits with 0, 1 (it failed, one line says why) or 2 (wrong arguments)."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    benches = find_benches() if arguments[:1] == ["bench"] else {}
    actions: list[argparse.Action] = []
    parser = _parser(benches, actions)
    try:
        if arguments[:1] == ["serve"]:
            arguments = ["serve", *with_settings(arguments[1:], actions, os.environ)]
        options = parser.parse_args(arguments)
        set_up_logs(options.log_level, getattr(options, "log_format", "text"))
        status = options.run(options)
    except KVDepotError as error:
        print(f"kvdepot: {printable(str(error))}", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:
        sys.stderr.close()
        status = 0
    sys.exit(status)


def _parser(
    benches: Mapping[str, DeviceBench | BackendUnavailable] | None = None,
    serve_actions: list[argparse.Action] | None = None,
) -> argparse.ArgumentParser:
    """Return the parser; what `serve` takes is added to `serve_actions`."""
    parser = argparse.ArgumentParser(
        prog="kvdepot", description="One server a node that keeps the KV caches of every inference engine there."
    )
    parser.add_argument("--version", action="version", version=f"kvdepot {version('kvdepot')}")
    common = _log_options("warning")
    client = argparse.ArgumentParser(add_help=False, parents=[common])
    client.add_argument(
        "--url", help=f"the depot: its directory, ipc://DIR or tcp://HOST:PORT (default {default_directory()})"
    )
    client.add_argument("--curve-secret", type=Path, metavar="FILE", help="over TCP: this side's keys, *.key_secret")
    client.add_argument("--curve-server", type=Path, metavar="FILE", help="over TCP: the depot's public key, *.key")
    json_output = argparse.ArgumentParser(add_help=False)
    json_output.add_argument("--json", action="store_true", help="print JSON")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="run a depot", allow_abbrev=False,
        description="Run a depot. Every flag can stand in the file of --config (pool_size = \"8GiB\") and in the"
        " environment (KVDEPOT_POOL_SIZE=8GiB): a flag counts before the environment, that before the file.",
    )  # fmt: skip
    serve.set_defaults(run=_serve)
    actions = [] if serve_actions is None else serve_actions

    def add(flag: str, **options: Any) -> None:
        actions.append(serve.add_argument(flag, **options))

    add("--config", type=Path, metavar="FILE", help="settings as TOML")
    add("--log-level", choices=_LEVELS, default="info", help="what goes to standard error")
    add("--log-format", choices=("text", "json"), default="text", help="one line, or one JSON object, a message")
    add("--dir", type=Path, default=default_directory(), help="where its sockets are (default %(default)s)")
    add("--pool-size", type=_size, help="memory for KV caches (default: a quarter of the free memory)")
    add("--pool-dir", type=Path, help="where the pool lies, on tmpfs (default: below /dev/shm, by --dir)")
    add("--max-entries", type=int, help="entries of the index (default: one for each 64 KiB of pool)")
    add(
        "--listen", action="append", default=[], metavar="URL",
        help="a further control endpoint: ipc://PATH, or tcp://HOST:PORT with CURVE keys (operators only)",
    )  # fmt: skip
    add("--curve-secret", type=Path, metavar="FILE", help="over TCP: the depot's keys, *.key_secret")
    add("--curve-clients", type=Path, metavar="DIR|FILE", help="over TCP: public keys (*.key) of those who may connect")
    add("--socket-group", metavar="GROUP", help="members of this group may connect, too (default: this user and root)")
    add(
        "--tier", action="append", default=[], metavar="URL",
        help="storage below the pool, for example 'disk:///var/cache/kvdepot?capacity=200GiB'; in order",
    )  # fmt: skip
    add(
        "--demote", choices=[*Demotion], default="store",
        help="when an entry is written to the tiers: when it is stored, used again, or about to leave (default store)",
    )  # fmt: skip
    add("--demote-min-tokens", type=int, default=0, metavar="N", help="prefixes of fewer tokens stay in the pool")
    add(
        "--promote-min-tokens", type=int, default=0, metavar="N",
        help="tiers are not asked for fewer tokens than that, which an engine computes faster",
    )  # fmt: skip
    add("--promote-seconds", type=number, default=1.0, help="the most that a lookup waits for tiers (default 1)")
    add(
        "--events", metavar="URL", help="tell which chunks can be found, as vLLM does; for example tcp://127.0.0.1:5557"
    )
    add("--events-replay", metavar="URL", help="tell it again to whoever missed something")
    add(
        "--http", metavar="HOST:PORT",
        help="health, metrics and operations over HTTP; all but health, and metrics without tenants, takes a token",
    )  # fmt: skip
    add(
        "--http-token", type=Path, metavar="FILE",
        help=f"has the bearer token (default, on loopback: a new one at each start, in DIR/{HTTP_TOKEN})",
    )  # fmt: skip
    add(
        "--http-host", action="append", default=[], metavar="NAME",
        help="a name that HTTP is asked by, beside its addresses, localhost and HOST",
    )  # fmt: skip
    add("--policy", choices=sorted(POLICIES), default="lru", help="which chunks leave first (default lru)")
    add("--lease-seconds", type=number, default=300.0, help="the longest life of a lease (default 300)")
    add(
        "--quota", action="append", default=[], type=_quota, metavar="TENANT=SIZE",
        help="bytes that a tenant can keep against others; idle space may be borrowed (several times)",
    )  # fmt: skip
    add(
        "--verify", choices=[*m.Verify], default="off",
        help="checksums of the pool's entries, compared when they are retrieved: one chunk in 16, or all (default off)",
    )  # fmt: skip
    add(
        "--mover-start-seconds", type=number, default=30.0, metavar="SECONDS",
        help="until a process that copies for a worker has opened its memory (default 30)",
    )  # fmt: skip
    add(
        "--move-seconds", type=number, default=5.0, metavar="SECONDS", help="for one copy of such a process (default 5)"
    )
    add("--ephemeral", action="store_true", help="remove the pool at the end instead of keeping it warm")
    add("--fresh", action="store_true", help="forget what an earlier server left")

    status = commands.add_parser("status", parents=[client, json_output], help="show what a depot holds and for whom")
    status.set_defaults(run=_status)

    top = commands.add_parser("top", parents=[client], help="watch a depot at work")
    top.set_defaults(run=_top)
    top.add_argument("--interval", type=number, default=1.0, metavar="SECONDS", help="between two frames (default 1)")
    top.add_argument("--frames", type=int, metavar="N", help="stop after so many (default: one without a terminal)")

    add_commands(commands, client, json_output)

    keys = commands.add_parser("keys", help="make the CURVE keys that TCP needs")
    keys_commands = keys.add_subparsers(required=True, metavar="COMMAND")
    generate = keys_commands.add_parser(
        "generate", parents=[common], help="make a key pair",
        description="Make a key pair, for a depot or for a client: NAME.key is public, NAME.key_secret stays here.",
    )  # fmt: skip
    generate.set_defaults(run=_generate_keys)
    generate.add_argument("dir", type=Path, metavar="DIR", help="where the two files go")
    generate.add_argument("--name", default="kvdepot", help="of the files, and of a client in the list of a depot")

    backends = commands.add_parser("backends", parents=[common, json_output], help="list accelerator backends")
    backends.set_defaults(run=_backends)

    demo = commands.add_parser("demo", parents=[common, json_output], help="watch two engines share a depot")
    demo.set_defaults(run=_demo)

    replay = commands.add_parser("replay", parents=[common, json_output], help="replay a trace in Mooncake's format")
    replay.set_defaults(run=_replay)
    replay.add_argument("trace", type=Path, help="JSON lines: timestamp, input_length, output_length, hash_ids")
    replay.add_argument("--requests", type=int, help="only the first so many (default 500; all with --simulate)")
    replay.add_argument("--simulate", action="store_true", help="index and policies only: hit rate by pool size")
    replay.add_argument("--pool-size", help="of the depot (default 1GiB); with --simulate a list, as in 64GiB,256GiB")
    replay.add_argument(
        "--session-ends", type=number, default=0.0, help="with --simulate: share of the sessions that say when they end"
    )
    replay.add_argument("--policy", choices=sorted(POLICIES), help="with --simulate only this one (default: all)")
    replay.add_argument(
        "--bytes-per-token", type=_size, default=128 << 10, help="with --simulate (default 128KiB: an 8B model in bf16)"
    )

    doctor = commands.add_parser(
        "doctor", parents=[common, json_output], help="what of this machine stands in a depot's way",
        description="Look at kernel, memory, limits and packages as a depot would find them, and say what to change."
        " Ends with 1 if something keeps a depot from working.",
    )  # fmt: skip
    doctor.set_defaults(run=_doctor)
    doctor.add_argument("--dir", type=Path, default=default_directory(), help="as in serve (default %(default)s)")
    doctor.add_argument("--pool-size", type=_size, help="as in serve")
    doctor.add_argument("--pool-dir", type=Path, help="as in serve")

    sizing = commands.add_parser(
        "sizing", parents=[common, json_output], help="how many tokens of a model a pool holds",
        description="How many bytes a model's KV cache takes, and how many tokens a pool holds.",
    )  # fmt: skip
    sizing.set_defaults(run=_sizing)
    sizing.add_argument("model", metavar="MODEL_CONFIG.json", help="the model's config.json, or the folder it is in")
    sizing.add_argument("--kv-cache-dtype", default="auto", help="as in vLLM (default: the model's own)")
    sizing.add_argument("--pool-size", type=_size, default=64 << 30, help="default 64GiB")

    soak = commands.add_parser(
        "soak", parents=[common, json_output], help="load, random kills, and an audit",
        description="Engines under load, killed and stopped at random with the depot; then an audit.",
    )  # fmt: skip
    soak.set_defaults(run=_soak)
    soak.add_argument("--seconds", type=number, default=60.0, help="how long (default %(default)s)")
    soak.add_argument("--engines", type=int, default=3, help="engine processes (default %(default)s)")
    soak.add_argument("--seed", type=int, default=1, help="of prompts and kills (default %(default)s)")
    soak.add_argument("--disk", type=Path, metavar="DIR", help="a tier on disk below a smaller pool, in this folder")
    soak.add_argument("--verify", choices=[*m.Verify], default="all", help="as in serve (default all)")

    bench = commands.add_parser(
        "bench", help="measure, as ratios within one run",
        description="Measure, as ratios within one run; each WHAT takes --json. Backends bring their own:"
        " kvdepot[cuda] has cuda.",
    )  # fmt: skip
    bench.set_defaults(run=_bench)
    whats = bench.add_subparsers(required=True, metavar="WHAT", dest="what")
    for what, described in (
        ("transfer", "stores and retrieves against one memcpy"),
        ("lookup", "lookups of long prompts"),
        ("server", "the server itself"),
    ):
        one = whats.add_parser(what, parents=[common, json_output], help=described)
        one.set_defaults(bench=None)
        if what == "server":
            one.add_argument("--entries", type=int, default=1_000_000, help="of its index (default %(default)s)")
    for what, found in (benches or {}).items():
        is_broken = isinstance(found, BackendUnavailable)
        one = whats.add_parser(what, parents=[common, json_output], help=str(found) if is_broken else found.help)
        one.set_defaults(bench=found)
        if not is_broken:
            found.add_arguments(one)
    return parser


def _log_options(default: str) -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--log-level", choices=_LEVELS, default=default, help="what goes to standard error")
    return options


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except KVDepotError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _quota(text: str) -> tuple[str, int]:
    name, separator, size = text.rpartition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: give TENANT=SIZE")
    return name, _size(size)


def _serve(options: argparse.Namespace) -> int:
    from kvdepot.processes.descriptors import raise_descriptor_limit
    from kvdepot.server.app import DepotServer

    if not 0 < options.promote_seconds <= 60:
        raise ConfigError(f"--promote-seconds {options.promote_seconds:g}: above 0, at most 60")
    config = ServerConfig(
        directory=options.dir, pool_directory=options.pool_dir, pool_size_bytes=options.pool_size,
        max_entries=options.max_entries, listen=tuple(options.listen), policy=options.policy,
        lease_seconds=options.lease_seconds, verify=options.verify, quotas=dict(options.quota),
        ephemeral=options.ephemeral, fresh=options.fresh, tiers=tuple(options.tier),
        demotion=Demotion(options.demote), demotion_least_tokens=options.demote_min_tokens,
        promotion_seconds=options.promote_seconds, promotion_least_tokens=options.promote_min_tokens,
        mover_start_seconds=options.mover_start_seconds, move_seconds=options.move_seconds,
        events=options.events, events_replay=options.events_replay, curve_secret=options.curve_secret,
        curve_clients=options.curve_clients, socket_group=options.socket_group,
    )  # fmt: skip
    raise_descriptor_limit()
    serve_http = _http_of(options)
    server = DepotServer(config)
    server.stop_on_signals()
    try:
        http = serve_http()
    except ConfigError:
        server.close()
        raise
    try:
        server.run()
    finally:
        if http is not None:
            http.close()
    if config.tiers:
        # Libraries of tiers have threads of their own, which may hang in a call that nobody can end.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(0)
    return 0


def _generate_keys(options: argparse.Namespace) -> int:
    public, secret = generate_keys(options.dir, options.name)
    print(f"""secret  {secret}  stays here, readable by its user
public  {public}  goes to the other side, unchanged

A depot listens with its own secret key and a folder of its clients' public keys:
    kvdepot serve --listen tcp://HOST:PORT --curve-secret DEPOT.key_secret --curve-clients FOLDER
A client has its own secret key and the depot's public key:
    kvdepot status --url tcp://HOST:PORT --curve-secret CLIENT.key_secret --curve-server DEPOT.key""")
    return 0


def _http_of(options: argparse.Namespace) -> Callable[[], HttpServer | None]:
    """Return what starts the HTTP server once the depot is there; it does nothing where none is wanted."""
    if not options.http:
        if options.http_token or options.http_host:
            raise ConfigError("--http-token and --http-host need --http HOST:PORT")
        return lambda: None
    settings = HttpSettings.parse(options.http, options.http_token, options.http_host)

    def serve_http() -> HttpServer:
        if options.http_token is None:
            settings.write_token(options.dir / HTTP_TOKEN)
        return HttpServer(str(options.dir), settings)

    return serve_http


def _status(options: argparse.Namespace) -> int:
    reply = ask_depot(o.Status(), options.url, keys=client_keys(options))
    assert isinstance(reply, o.StatusReply)
    if options.json:
        print(json.dumps(_as_dict(reply.status), indent=2))  # in ASCII: names of others have no meaning there
    else:
        print(describe_status(reply.status))
    return 0


def _top(options: argparse.Namespace) -> int:
    try:
        from kvdepot.ops.top import run_top
    except ImportError as error:
        raise ConfigError(f"kvdepot top needs {error.name}: pip install 'kvdepot[cli]'") from error
    keys = client_keys(options)

    def ask() -> o.DepotStatus:
        reply = ask_depot(o.Status(), options.url, keys=keys)
        assert isinstance(reply, o.StatusReply)
        return reply.status

    run_top(ask, interval_seconds=max(0.1, options.interval), num_frames=options.frames)
    return 0


def describe_status(status: o.DepotStatus) -> str:
    """Return the status for people."""
    used = status.pool_used_bytes / max(1, status.pool_size_bytes)
    counters = status.counters
    asked, hit = counters.get("lookup_chunks", 0), counters.get("lookup_chunks_hit", 0)
    ready, size = status.pool_ready_bytes, status.pool_size_bytes
    version_line = f"kvdepot {status.server_version}, process {status.pid}, up {status.uptime_seconds:.0f} s"
    pool_line = f"pool     {format_size(status.pool_used_bytes)} of {format_size(size)} used ({used:.0%})"
    if ready < size:
        pool_line += f", {format_size(ready)} ready"
    if status.quarantined_bytes:
        pool_line += f", {format_size(status.quarantined_bytes)} in quarantine"
    entries_line = f"entries  {status.num_entries:,} of at most {status.max_entries:,}; policy {status.policy}"
    lookups_line = f"lookups  {counters.get('lookups', 0):,}; {hit:,} of {asked:,} chunks found"
    leases_line = f"leases   {status.num_leases:,} in {status.num_sessions:,} sessions"
    lines = [
        f"{version_line}, epoch {status.epoch}",
        pool_line,
        f"{entries_line}, {counters.get('chunks_evicted', 0):,} chunks evicted",
        lookups_line + (f" ({hit / asked:.1%})" if asked else ""),
        f"{leases_line}; {status.num_tickets:,} stores under way",
    ]
    if status.prefill_seconds_saved:
        lines.append(f"saved    about {status.prefill_seconds_saved:,.1f} s of computing prompts")
    slow = f"; {status.loop_slow_turns:,} of more than 20 ms" if status.loop_slow_turns else ""
    lines.append(f"loop     longest turn {status.loop_longest_seconds * 1e3:.1f} ms{slow}")
    if status.estimated_chunks >= _TELLING_CHUNKS:
        rates = [f"{e.hit_chunks / status.estimated_chunks:.0%} with {e.scale:g}x" for e in status.estimates]
        lines.append(f"sizing   about {', '.join(rates)} of the pool would be found there")
    if status.draining:
        lines.append("draining: stores are declined; end that with 'kvdepot drain --resume'")
    if status.recovering:
        lines.append("reading back the entries of an earlier server")
    for name, usage in sorted(status.tenants.items()):
        quota = f" of a quota of {format_size(usage['quota_bytes'])}" if "quota_bytes" in usage else ""
        lines.append(f"tenant   {name}: {format_size(usage['used_bytes'])}{quota}")
    lines += [_describe_tier(tier) for tier in status.tiers]
    for context in status.contexts:
        lines.append("")
        if context.role == "scheduler":
            lines.append(
                f"[{context.context}] scheduler of {context.instance}, model {context.model or '?'},"
                f" {context.num_leases} leases"
            )
            continue
        lines.append(
            f"[{context.context}] {context.instance} rank {context.rank} of {context.world_size} on {context.device}"
            f" ({context.transfer_mode}, process {context.pid}), model {context.model or '?'}"
        )
        if context.mover:
            why = f"; the one before: {context.why_no_mover}" if context.mover_pid else f": {context.why_no_mover}"
            process = f", process {context.mover_pid}" if context.mover_pid else ""
            lines.append(f"    mover {context.mover}{process}{why if context.why_no_mover else ''}")
        if context.fallback:
            lines.append(f"    copies by itself: {context.fallback}")
        lines.append(
            f"    {context.dtype}, chunks of {context.chunk_tokens} tokens,"
            f" {format_size(context.bytes_per_token)} a token"
            + (f", format {context.format}" if context.format else "")
        )
        lines += [f"    {_describe_group(number, group)}" for number, group in enumerate(context.groups)]
    return "\n".join(map(printable, lines))


def _describe_tier(tier: o.TierStatus) -> str:
    counters = tier.counters
    parts = [f"tier     {tier.name}: {format_size(tier.used_bytes)}"]
    if tier.capacity_bytes:
        parts[0] += f" of {format_size(tier.capacity_bytes)}"
    parts[0] += f" in {tier.num_entries:,} entries" if tier.num_entries else ""
    parts.append(f"{format_size(counters.get('written_bytes', 0))} written")
    parts.append(f"{format_size(counters.get('read_bytes', 0))} read")
    if tier.queued_write_bytes:
        parts.append(f"{format_size(tier.queued_write_bytes)} wait to be written")
    if counters.get("corrupt"):
        parts.append(f"{counters['corrupt']:,} were damaged")
    if tier.num_hung_calls:
        parts.append(f"{tier.num_hung_calls} calls hang")
    if tier.why_open:
        parts.append(f"LEFT ALONE: {tier.why_open}")
    return "; ".join(parts)


def _describe_group(number: int, group: o.GroupStatus) -> str:
    parts = [
        f"group {number}: {group.kind.replace('_', ' ')}",
        f"{group.num_layers} layers",
        f"{group.num_blocks:,} blocks of {group.block_tokens} tokens ({format_size(group.block_size_bytes)})",
    ]
    if group.physical_block_tokens != group.block_tokens:
        parts.append(f"physical blocks of {group.physical_block_tokens}")
    if group.window_tokens:
        parts.append(f"window {group.window_tokens}")
    if group.num_shards > 1:
        parts.append(f"shard {group.shard} of {group.num_shards}")
    if group.is_mla:
        parts.append("MLA")
    if group.compress_ratio > 1:
        parts.append(f"compressed {group.compress_ratio}:1")
    if group.hidden_dims:
        parts.append(f"hidden {'+'.join(map(str, group.hidden_dims))}")
    if group.shape:
        parts.append(f"tensors {'x'.join(map(str, group.shape))}")
    if group.attention_backend:
        parts.append(group.attention_backend)
    return ", ".join(parts)


def _backends(options: argparse.Namespace) -> int:
    found = list_backends()
    if options.json:
        print(json.dumps([_as_dict(backend) for backend in found], indent=2))
        return 0
    for backend in found:
        state = backend.why_unavailable or f"usable ({', '.join(backend.capabilities)})"
        print(f"{backend.name:6} {backend.distribution or '-':20} {state}")
    return 0


def _demo(options: argparse.Namespace) -> int:
    from kvdepot.lab.demo import run_demo

    summary = run_demo(quiet=options.json)
    if options.json:
        print(json.dumps(summary, indent=2))
    return 1 if summary["wrong_bytes"] or summary["restart"]["wrong_bytes"] else 0


def _replay(options: argparse.Namespace) -> int:
    from kvdepot.lab.trace import read_trace

    if options.simulate:
        from kvdepot.lab.simulate import parse_pool_sizes, simulate

        table = simulate(
            read_trace(options.trace, options.requests),
            parse_pool_sizes(options.pool_size) if options.pool_size else (),
            (options.policy,) if options.policy else tuple(POLICIES),
            options.bytes_per_token,
            options.session_ends,
            on_row=lambda row: print(
                f"{row.policy} {format_size(row.pool_bytes)}: {row.hit_rate:.1%}", file=sys.stderr
            ),
        )
        print(json.dumps(table.as_dict(), indent=2) if options.json else table.describe())
        return 0
    from kvdepot.lab.replay import run_replay

    summary = run_replay(
        read_trace(options.trace, options.requests or 500),
        pool_bytes=parse_size(options.pool_size or "1GiB"),
        policy=options.policy or "lru",
        quiet=options.json,
    )
    if options.json:
        print(json.dumps(summary, indent=2))
    return 1 if summary["wrong_bytes"] else 0


def _doctor(options: argparse.Namespace) -> int:
    from kvdepot.ops.doctor import Verdict, diagnose, read_facts

    config = ServerConfig(directory=options.dir, pool_directory=options.pool_dir, pool_size_bytes=options.pool_size)
    findings = diagnose(read_facts(config))
    if options.json:
        print(json.dumps([_as_dict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            mark = "" if finding.verdict is Verdict.FINE else f"{finding.verdict.upper()}: "
            print(printable(f"{finding.subject:13} {mark}{finding.text}"))
            if finding.way_out:
                print(printable(f"{'':13} -> {finding.way_out}"))
    return any(finding.verdict is Verdict.BROKEN for finding in findings)


def _sizing(options: argparse.Namespace) -> int:
    from kvdepot.ops.sizing import read_model_config, size_model

    sizing = size_model(read_model_config(options.model), options.kv_cache_dtype)
    if options.json:
        print(json.dumps(sizing.as_dict(options.pool_size), indent=2))
    else:
        print(sizing.describe(options.pool_size))
    return 0


def _soak(options: argparse.Namespace) -> int:
    from kvdepot.lab.soak import Soak

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    result = Soak(options.seconds, options.engines, options.seed, options.verify, options.disk, say).run()
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):28} {value}")
    return 1 if result["failures"] else 0


def _bench(options: argparse.Namespace) -> int:
    from kvdepot.lab import bench

    def say(line: str) -> None:
        if not options.json:
            print(line, flush=True)

    if isinstance(options.bench, BackendUnavailable):
        raise options.bench
    say(bench.describe_machine())
    match options.what:
        case _ if options.bench is not None:
            result = options.bench.run(options, say)
            result["machine"] = bench.describe_machine()
        case "transfer":
            result = bench.bench_transfer(say=say)
        case "lookup":
            result = bench.bench_lookup(say=say)
        case _:
            result = bench.bench_server(num_entries=options.entries, say=say)
    if options.json:
        print(json.dumps(result, indent=2))
    return 0


def _as_dict(value: object) -> dict[str, Any]:
    return msgspec.to_builtins(value)
