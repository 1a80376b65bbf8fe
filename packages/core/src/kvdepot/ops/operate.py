"""Commands that inspect or change a running depot. Each sends requests and prints the replies."""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Final, cast

import msgspec

from kvdepot.client.operator import ask_depot
from kvdepot.config import counted, exact_size, format_size, parse_size
from kvdepot.errors import ConfigError, printable, reason_of
from kvdepot.keys import DIGEST_BYTES, Namespace, hash_prefix
from kvdepot.layout import MINIMUM_CHUNK_TOKENS
from kvdepot.ops.settings import as_argument, number_argument
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.operation import Operation, R

_WARM_SECONDS: Final = 90.0  # for one prefix; the depot waits for a minute at most
_PATIENT_SECONDS: Final = 30.0  # for requests that take many steps
_CLEAR_SECONDS: Final = 600.0  # for tiers with very many entries
_POLL_SECONDS: Final = 0.2
_KEYS_HELP: Final = (
    " The file has one prefix per line, as JSON. A prefix is either the keys of its chunks as hex strings,"
    ' {"digests": ["9f..", ..], "tenant": "default"}, or a prompt as the engine sees it, {"tokens": [1, 2, ..],'
    ' "namespace": {"model": ..}, "chunk_tokens": 64}. Use - for standard input.'
)


def add_commands(commands: Any, client: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add the commands to the subparsers of `kvdepot`.

    Args:
        commands: what `add_subparsers` returned.
        client: has the options that name a depot.
        json_output: has `--json`.
    """
    find = commands.add_parser(
        "find", parents=[client, json_output], help="show how much of prefixes the pool holds",
        description="Show how much of each prefix the pool holds." + _KEYS_HELP,
    )  # fmt: skip
    find.set_defaults(run=_find)
    find.add_argument("keys", metavar="KEYS|TRACE", help="file of prefixes, or - for standard input")

    clear = commands.add_parser(
        "clear", parents=[client], help="remove entries that are not in use",
        description="Remove entries that are not in use from the pool and the tiers. With --prefix, remove only from"
        " the pool, and only entries that no other prefix needs." + _KEYS_HELP,
    )  # fmt: skip
    clear.set_defaults(run=_clear)
    clear.add_argument("--all", action="store_true", help="remove everything")
    clear.add_argument("--tenant", help="remove only entries of this tenant")
    clear.add_argument("--model", help="remove only entries of this model, by the name that engines registered")
    clear.add_argument("--prefix", metavar="KEYS|TRACE", help="remove only the prefixes in this file")

    warm = commands.add_parser(
        "warm", parents=[client], help="load prefixes from the tiers, and pin them",
        description="Load prefixes from the tiers into the pool." + _KEYS_HELP,
    )  # fmt: skip
    warm.set_defaults(run=_warm)
    warm.add_argument("keys", metavar="KEYS|TRACE", help="file of prefixes, or - for standard input")
    warm.add_argument(
        "--pin", type=number_argument, default=0.0, metavar="SECONDS", help="keep them in the pool for this long"
    )

    unpin = commands.add_parser(
        "unpin", parents=[client], help="end pins set by warm --pin",
        description="End all pins that 'kvdepot warm --pin' set. The entries stay until the pool needs their space.",
    )  # fmt: skip
    unpin.set_defaults(run=_unpin)
    unpin.add_argument("--tenant", help="end only pins of this tenant")

    quota = commands.add_parser(
        "quota", parents=[client], help="change a tenant's quota",
        description="Change the share of the pool reserved for a tenant, until the server stops. Use serve --quota to"
        " keep it.",
    )  # fmt: skip
    quota.set_defaults(run=_quota)
    quota.add_argument("tenant", metavar="TENANT")
    quota.add_argument("size", metavar="SIZE|none", type=as_argument(_parse_quota_size), help="for example 8GiB")

    tier = commands.add_parser(
        "tier", help="add a tier to a running depot, or remove one",
        description="Add a tier to a running depot, or remove one, until the depot stops.",
    )  # fmt: skip
    tier_commands = tier.add_subparsers(required=True, metavar="COMMAND")
    add = tier_commands.add_parser(
        "add", parents=[client], help="add a tier",
        description="Add a tier below the existing ones, until the server stops. Use serve --tier to keep it.",
    )  # fmt: skip
    add.set_defaults(run=_add_tier)
    add.add_argument("tier", metavar="URL", help="as for serve --tier; - reads it from standard input")
    remove = tier_commands.add_parser(
        "remove", parents=[client], help="stop using a tier",
        description="Stop using a tier. Its entries stay in storage; writes still waiting for it are dropped.",
    )  # fmt: skip
    remove.set_defaults(run=_remove_tier)
    remove.add_argument("tier", metavar="NAME", help="as shown by 'kvdepot status'")

    drain = commands.add_parser(
        "drain", parents=[client], help="decline new stores before a stop",
        description="Decline new stores; cached prefixes are still found. Exits with 0 once no store is in progress and"
        " all waiting entries are written to the tiers, with 1 if that takes longer than --wait.",
    )  # fmt: skip
    drain.set_defaults(run=_drain)
    drain.add_argument("--resume", action="store_true", help="accept stores again")
    drain.add_argument(
        "--wait", type=number_argument, default=60.0, metavar="SECONDS", help="longest time to wait (default 60)"
    )

    level = commands.add_parser(
        "loglevel", parents=[client], help="change the log level of a running depot",
        description="Change the log level of a running depot, until it stops. Use serve --log-level to keep it.",
    )  # fmt: skip
    level.set_defaults(run=_log_level)
    level.add_argument("level", choices=("debug", "info", "warning", "error"))

    config = commands.add_parser(
        "config", parents=[client, json_output], help="show a running depot's settings",
        description="Show the settings of a running depot as a file for 'kvdepot serve --config'.",
    )  # fmt: skip
    config.set_defaults(run=_config)


def _ask(options: argparse.Namespace, request: Operation[R], seconds: float = 2.0) -> R:
    return ask_depot(request, options.url, seconds)


def _count(options: argparse.Namespace, request: Operation[m.Done], seconds: float = 2.0) -> int:
    return _ask(options, request, seconds).count


def _parse_quota_size(text: str) -> int:
    return 0 if text == "none" else parse_size(text)


# --- files of prefixes ----------------------------------------------------------------------------------------------


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a file: a prefix given by the keys of its chunks."""

    digests: list[str]
    tenant: str = "default"

    def packed(self) -> tuple[str, bytes]:
        return self.tenant, b"".join(map(bytes.fromhex, self.digests))


class _Traced(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a trace: a prompt, from which the keys are computed."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    namespace: Namespace
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = MINIMUM_CHUNK_TOKENS

    def packed(self) -> tuple[str, bytes]:
        run = hash_prefix(self.namespace, self.chunk_tokens, self.tokens)
        return run.tenant, run.digests


def _prefixes_in(file: str) -> list[tuple[str, bytes]]:
    """Return tenant and packed digests of each line of a file.

    Raises:
        ConfigError: it cannot be read, or a line has another form.
    """
    try:
        lines = sys.stdin.readlines() if file == "-" else Path(file).read_text().splitlines()
        return [_prefix_of(line) for line in lines if line.strip()]
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: {reason_of(error)}") from error


def _prefix_of(line: str) -> tuple[str, bytes]:
    fields = msgspec.json.decode(line)
    is_traced = isinstance(fields, dict) and "tokens" in fields
    return msgspec.convert(fields, _Traced if is_traced else _Keys).packed()


# --- commands -------------------------------------------------------------------------------------------------------


def _find(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for _, digests in _prefixes_in(options.keys):
        reply = _ask(options, o.Find(digests))
        found.append(
            {"num_chunks": len(digests) // DIGEST_BYTES, "found": [msgspec.to_builtins(p) for p in reply.prefixes]}
        )
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    for number, prefix in enumerate(found, 1):
        if not prefix["found"]:
            print(f"{number}: nothing of {prefix['num_chunks']:,} chunks")
        for here in prefix["found"]:
            held = ", held" if here["is_held"] else ""
            more = f", {here['num_children']} continue it" if here["num_children"] else ""
            line = (
                f"{number}: {here['num_chunks']:,} of {prefix['num_chunks']:,} chunks ({here['num_tokens']:,} tokens),"
                f" tenant {here['tenant']}, model {here['model'] or '?'}, {here['dtype']}, idle"
                f" {here['idle_seconds']:.0f} s{held}{more}"
            )
            print(printable(line))
    return 0


def _clear(options: argparse.Namespace) -> int:
    if not (options.all or options.tenant or options.model or options.prefix):
        raise ConfigError("name what to clear by --tenant, --model or --prefix, or clear everything with --all")
    if options.all and (options.tenant or options.model or options.prefix):
        raise ConfigError("--all clears everything: leave --tenant, --model and --prefix out, or --all")
    prefixes = [b""] if options.prefix is None else [digests for _, digests in _prefixes_in(options.prefix) if digests]
    count = 0
    for digests in prefixes:
        count += _count(options, o.Clear(options.tenant, options.model, digests), _CLEAR_SECONDS)
    print(f"{count:,} {'entry' if count == 1 else 'entries'} removed")
    return 0


def _warm(options: argparse.Namespace) -> int:
    found = asked = 0
    for tenant, digests in _prefixes_in(options.keys):
        found += _count(options, o.Warm(tenant=tenant, digests=digests, pin_seconds=options.pin), _WARM_SECONDS)
        asked += len(digests) // DIGEST_BYTES
    print(f"{found:,} of {asked:,} chunks are in the pool{' and pinned' if options.pin else ''}")
    return 0


def _unpin(options: argparse.Namespace) -> int:
    print(f"{counted(_count(options, o.Unpin(options.tenant), _PATIENT_SECONDS), 'pin')} ended")
    return 0


def _quota(options: argparse.Namespace) -> int:
    moved = _count(options, o.SetQuota(options.tenant, options.size), _PATIENT_SECONDS)
    quota = format_size(options.size) if options.size else "none"
    counts = "count" if options.size else "no longer count"
    print(f"the quota of {options.tenant} is now {quota}; existing chunks that {counts} against it: {moved:,}")
    return 0


def _add_tier(options: argparse.Namespace) -> int:
    url = sys.stdin.readline().strip() if options.tier == "-" else options.tier
    print(f"tiers in use: {_count(options, o.AddTier(url), _PATIENT_SECONDS)}")
    return 0


def _remove_tier(options: argparse.Namespace) -> int:
    print(f"tiers in use: {_count(options, o.RemoveTier(options.tier))}")
    return 0


def _drain(options: argparse.Namespace) -> int:
    if options.resume:
        _count(options, o.Drain(False))
        print("stores are accepted again")
        return 0
    _count(options, o.Drain())
    end = time.monotonic() + options.wait
    while True:
        reply = _ask(options, o.Status())
        status = reply.status
        waiting = sum(tier.queued_write_bytes for tier in status.tiers)
        if not status.num_tickets and not waiting:
            print("drained: no store is in progress, nothing waits to be written")
            return 0
        if time.monotonic() >= end:
            print(
                f"not drained within {options.wait:g} s: {counted(status.num_tickets, 'store')} in progress,"
                f" {format_size(waiting)} waiting to be written",
                file=sys.stderr,
            )
            return 1
        time.sleep(_POLL_SECONDS)


def _log_level(options: argparse.Namespace) -> int:
    _count(options, o.SetLogLevel(options.level))
    print(f"the depot's log level is now {options.level}")
    return 0


def _config(options: argparse.Namespace) -> int:
    reply = _ask(options, o.Configuration())
    if options.json:
        print(json.dumps(reply.settings, indent=2))
        return 0
    print("# For 'kvdepot serve --config FILE'. Credentials of tiers are left out.")
    for line in map(_describe_setting, reply.settings, reply.settings.values()):
        if line:
            print(printable(line))
    return 0


def _describe_setting(name: str, value: Any) -> str:
    """Return a line of `kvdepot.toml`, none for a setting that is not set."""
    match name, value:
        case _, None:
            return ""
        case "pool_size", int():
            value = exact_size(value)
        case "quota", dict():
            quotas = cast("dict[str, int]", value)
            pairs = (f"{_quoted(tenant)} = {_quoted(exact_size(size))}" for tenant, size in quotas.items())
            return f"quota = {{{', '.join(pairs)}}}"
        case _:
            pass
    return f"{name} = {_quoted(value)}"


def _quoted(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # which TOML reads, too
