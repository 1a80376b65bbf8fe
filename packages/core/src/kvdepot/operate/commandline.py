"""The command line of all commands: their flags and arguments, and their results as text or JSON."""

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection
from typing import Any, Final, TypeVar

from kvdepot.client.operator import ask_depot
from kvdepot.config import parse_count, parse_number, parse_size, settings_in
from kvdepot.errors import KVDepotError
from kvdepot.wire.operation import Operation, R

ASKS_NO_DEPOT: Final = "Asks no depot: --dir has no effect here."  # at the end of a command's help

_START: Final = re.compile(r" *(?:[\w ]{1,13}?  +|\[\d+\] |-> )*")  # an indent, a label, a number, an arrow

_T = TypeVar("_T")


def add_settings(parser: argparse.ArgumentParser, kind: type[Any], only: Collection[str] | None = None) -> None:
    """Add the flags of a dataclass of settings to a parser.

    The parser's result has an attribute for each flag that was given, named and typed like the field.

    Args:
        parser: receives the flags.
        kind: the dataclass.
        only: names of fields; None adds all.
    """
    for name, setting in settings_in(kind).items():
        if only is not None and name not in only:
            continue
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": setting.help}
        if setting.is_switch:
            parser.add_argument(setting.flag, action="store_true", **options)
        else:
            action = "store" if setting.collect is None else "append"
            read = as_argument(setting.parse)
            flags = [setting.flag, "--url"] if setting.flag == "--dir" else [setting.flag]
            parser.add_argument(*flags, action=action, type=read, metavar=setting.metavar, **options)


def named_depot(options: argparse.Namespace) -> str | None:
    """Return the directory that `--dir` names; None for the default one."""
    return str(options.directory) if "directory" in options else None


def ask(options: argparse.Namespace, request: Operation[R]) -> R:
    """Send a request to the depot that `--dir` names, and return the reply."""
    return ask_depot(request, named_depot(options), request.seconds)


def as_argument(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return `parse` as a `type` for argparse, which then reports its `KVDepotError` as a wrong argument."""

    def read(text: str) -> _T:
        try:
            return parse(text)
        except KVDepotError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


count_argument: Final = as_argument(parse_count)
number_argument: Final = as_argument(parse_number)
size_argument: Final = as_argument(parse_size)


def show(options: argparse.Namespace, value: object, describe: Callable[[], str]) -> None:
    """Print a plain value as JSON if the user gave `--json`, else its description, fitted to the terminal.

    JSON is all ASCII, so that clients' names cannot send control sequences to the terminal.
    """
    print(json.dumps(value, indent=2) if options.json else fitted(describe()))


def fitted(text: str) -> str:
    """Return text for standard output. If that is a terminal, break long lines between words.

    Continuation lines are indented to the word after the label or number. Words longer than a line, such as paths,
    stay whole, so that they can be copied.
    """
    if not sys.stdout.isatty():
        return text
    width = shutil.get_terminal_size().columns
    return "\n".join(_broken(line, width) for line in text.splitlines())


def _broken(line: str, width: int) -> str:
    start = _START.match(line)
    indent = min(start.end() if start else 0, width // 2)
    return textwrap.fill(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
