"""Commands that inspect or change a running depot. Each sends requests and prints the replies."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast, get_args, get_origin

import msgspec
from msgspec.structs import fields

from kvdepot.client.operator import ask_depot
from kvdepot.config import counted, exact_size, format_size
from kvdepot.errors import ConfigError, printable, reason_of
from kvdepot.keys import Namespace, NamespaceDigest, hash_prefix, num_digests
from kvdepot.layout import MINIMUM_CHUNK_TOKENS
from kvdepot.ops.cleanup import add_tier_gc
from kvdepot.ops.commandline import as_argument, named_depot, show
from kvdepot.wire import operations as o
from kvdepot.wire.operation import (
    Argument,
    Command,
    Operation,
    OperatorRequest,
    R,
    body_type,
    is_bytes,
    known_operations,
    request_of,
)

_POLL_SECONDS: Final = 0.2  # too short for a person to notice
_GROUPS: Final = {
    "session": (
        "keep a session of an agent, or bring it back",
        "Choose what happens to the last prefix of a session between its requests.",
    ),
    "tier": (
        "add a tier to a running depot, remove one, or remove old objects from one",
        "Add a tier to a running depot, or remove one, until the depot stops; or remove old objects from a store.",
    ),
}


def add_commands(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add the commands of operations to the subparsers of `kvdepot`.

    Args:
        commands: the result of `add_subparsers`.
        common: has `--log-level`, and `--dir` to name a depot.
        json_output: has `--json`.
    """
    groups: dict[str, Any] = {"": commands}
    for operation in known_operations():
        command = operation.command
        if command is None:
            continue
        group, _, name = command.name.rpartition(" ")
        if group not in groups:
            texts = _GROUPS[group]
            made = commands.add_parser(group, help=texts[0], description=texts[1])
            groups[group] = made.add_subparsers(required=True, metavar="COMMAND")
        parser = groups[group].add_parser(
            name,
            parents=[common, json_output] if command.has_json else [common],
            help=command.help,
            description=command.description,
        )
        parser.set_defaults(run=_RUN.get(operation) or partial(_run, operation, command))
        for option, argument in command.options:
            _add_argument(parser, option, argument, argument.default)
        for each in fields(operation):
            kind, *metadata = get_args(each.type) or (each.type,)
            for argument in metadata:
                if isinstance(argument, Argument):
                    further: dict[str, Any] = {}
                    if get_origin(kind) is Literal:
                        further["choices"] = get_args(kind)
                    elif is_bytes(each) and argument.read is None:
                        further["nargs"] = "+"  # words in hex, as in the list of an HTTP body
                    _add_argument(parser, each.name, argument, each.default, **further)
    add_tier_gc(groups["tier"], common)


def _add_argument(parser: argparse.ArgumentParser, name: str, argument: Argument, default: Any, **options: Any) -> None:
    options["help"] = argument.help
    if isinstance(default, bool):
        options |= {"action": "store_const", "const": not default}
    else:
        options |= {"type": as_argument(argument.read or str), "metavar": argument.metavar}
    if default is msgspec.NODEFAULT:
        parser.add_argument(name, **options)
    else:
        parser.add_argument(argument.flag or f"--{name}", dest=name, default=default, **options)


def _run(operation: type[OperatorRequest], command: Command, options: argparse.Namespace) -> int:
    given: dict[str, Any] = {}
    for each in fields(operation):
        value = getattr(options, each.name, each.default)
        if value is not each.default:
            given[each.encode_name] = value
    try:
        request = request_of(operation, msgspec.convert(given, body_type(operation), strict=False))
    except ValueError as error:
        raise ConfigError(f"{command.name}: {error}") from error
    print(command.says(request, _ask(options, request)))
    return 0


def _ask(options: argparse.Namespace, request: Operation[R]) -> R:
    return ask_depot(request, named_depot(options), request.seconds)


# --- files of prefixes ----------------------------------------------------------------------------------------------


class _Keys(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a file: a prefix given by the keys of its chunks."""

    digests: list[str]
    tenant: str = "default"

    def packed(self) -> tuple[str, bytes]:
        return self.tenant, b"".join(map(bytes.fromhex, self.digests))


class _Traced(msgspec.Struct, forbid_unknown_fields=True):
    """One line of a trace: a prompt, from which the keys are computed.

    The namespace is given in full, or by its digest as a running engine logs it.
    """

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    namespace: Namespace | str
    chunk_tokens: Annotated[int, msgspec.Meta(ge=1)] = MINIMUM_CHUNK_TOKENS
    tenant: str = "default"  # used with a digest; a namespace in full has its own tenant

    def packed(self) -> tuple[str, bytes]:
        namespace = self.namespace
        if isinstance(namespace, str):
            namespace = NamespaceDigest(bytes.fromhex(namespace), self.tenant)
        run = hash_prefix(namespace, self.chunk_tokens, self.tokens)
        return run.tenant, run.digests


def _prefixes_in(file: str) -> list[tuple[str, bytes]]:
    """Return the tenant and the packed digests of each line of a file.

    Raises:
        ConfigError: the file cannot be read, or a line is malformed.
    """
    try:
        lines = sys.stdin.readlines() if file == "-" else Path(file).read_text().splitlines()
        return [_prefix_of(line) for line in lines if line.strip()]
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file}: {reason_of(error)}") from error


def _prefix_of(line: str) -> tuple[str, bytes]:
    given = msgspec.json.decode(line)
    is_traced = isinstance(given, dict) and "tokens" in given
    return msgspec.convert(given, _Traced if is_traced else _Keys).packed()


# --- commands -------------------------------------------------------------------------------------------------------


def _find(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    lines: list[str] = []
    for number, (_, digests) in enumerate(_prefixes_in(options.digests), 1):
        count, prefixes = num_digests(digests), _ask(options, o.Find(digests)).prefixes
        found.append({"num_chunks": count, "found": msgspec.to_builtins(prefixes)})
        if not prefixes:
            lines.append(f"{number}: nothing of {count:,} chunks")
        for here in prefixes:
            held = ", held" if here.is_held else ""
            more = f", {here.num_children} continue it" if here.num_children else ""
            lines.append(
                f"{number}: {here.num_chunks:,} of {count:,} chunks ({here.num_tokens:,} tokens), tenant {here.tenant},"
                f" model {here.model or '?'}, {here.dtype}, idle {here.idle_seconds:.0f} s{held}{more}"
            )
    show(options, found, lambda: "\n".join(map(printable, lines)))
    return 0


def _clear(options: argparse.Namespace) -> int:
    if not (options.all or options.tenant or options.model or options.digests):
        raise ConfigError("name what to clear by --tenant, --model or --prefix, or clear everything with --all")
    if options.all and (options.tenant or options.model or options.digests):
        raise ConfigError("--all clears everything: leave --tenant, --model and --prefix out, or --all")
    prefixes = [b""]
    if options.digests != b"":  # the user named a file
        prefixes = [digests for _, digests in _prefixes_in(options.digests) if digests]
    count = 0
    for digests in prefixes:
        count += _ask(options, o.Clear(options.tenant, options.model, digests)).count
    print(f"{count:,} {'entry' if count == 1 else 'entries'} removed")
    return 0


def _warm(options: argparse.Namespace) -> int:
    found = asked = 0
    for tenant, digests in _prefixes_in(options.digests):
        found += _ask(options, o.Warm(tenant=tenant, digests=digests)).count
        asked += num_digests(digests)
    print(f"{found:,} of {asked:,} chunks are in the pool")
    return 0


def _drain(options: argparse.Namespace) -> int:
    if not options.is_draining:
        _ask(options, o.Drain(False))
        print("stores are accepted again")
        return 0
    _ask(options, o.Drain())
    end = time.monotonic() + options.wait
    while True:
        status = _ask(options, o.Status()).status
        waiting = sum(tier.queued_write_bytes for tier in status.tiers)
        if not status.num_tickets and not status.num_unwritten and not waiting:
            print("drained: no store is in progress, nothing waits to be written")
            return 0
        if time.monotonic() >= end:
            print(
                f"not drained within {options.wait:g} s: {counted(status.num_tickets, 'store')} in progress,"
                f" {counted(status.num_unwritten, 'stored prompt')} and {format_size(waiting)} waiting to be written",
                file=sys.stderr,
            )
            return 1
        time.sleep(_POLL_SECONDS)


def _config(options: argparse.Namespace) -> int:
    settings = _ask(options, o.Configuration()).settings
    if options.json:
        print(json.dumps(settings, indent=2))
        return 0
    print("# For 'kvdepot serve --config FILE'. Credentials of tiers are left out.")
    for name, value in settings.items():
        if value is not None:
            print(printable(_describe_setting(name, value)))
    return 0


def _describe_setting(name: str, value: Any) -> str:
    """Return a line of `kvdepot.toml`."""
    match name, value:
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


# Commands that send several requests or print more than a line.
_RUN: Final[dict[type, Callable[[argparse.Namespace], int]]] = {
    o.Find: _find,
    o.Clear: _clear,
    o.Warm: _warm,
    o.Drain: _drain,
    o.Configuration: _config,
}
