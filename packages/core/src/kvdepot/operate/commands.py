"""Adds the commands of operations: each sends a request to a running depot and prints the reply."""

import argparse
from functools import partial
from typing import Any, Literal, get_args, get_origin

import msgspec
from msgspec.structs import fields

from kvdepot.errors import ConfigError, reason_of_invalid
from kvdepot.operate.cleanup import add_tier_gc
from kvdepot.operate.commandline import as_argument, ask
from kvdepot.operate.extensions import add_extensions
from kvdepot.operate.operations.tiers import TIER
from kvdepot.wire.operation import (
    Argument,
    Command,
    Group,
    OperatorRequest,
    body_type,
    is_bytes,
    known_operations,
    request_of,
)


def add_commands(commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser) -> None:
    """Add the commands of operations to the subparsers of `kvdepot`.

    Args:
        commands: the result of `add_subparsers`.
        common: has `--log-level`, and `--dir` to name a depot.
        json_output: has `--json`.
    """
    groups: dict[Group | None, Any] = {None: commands}
    for operation in known_operations():
        command = operation.command
        if command is None:
            continue
        group = command.group
        if group is not None and group not in groups:
            made = commands.add_parser(group.name, help=group.help, description=group.description)
            groups[group] = made.add_subparsers(required=True, metavar="COMMAND")
        parser = groups[group].add_parser(
            command.name,
            parents=[common, json_output] if command.has_json else [common],
            help=command.help,
            description=command.description,
        )
        parser.set_defaults(run=command.run or partial(_run, operation, command))
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
    add_tier_gc(groups[TIER], common)
    add_extensions(groups[TIER], common, json_output, TIER.name)


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
    except (ValueError, msgspec.MsgspecError) as error:  # before msgspec 0.20, these are not ValueErrors
        raise ConfigError(f"{command.name}: {reason_of_invalid(error)}") from error
    print(command.says(request, ask(options, request)))
    return 0
