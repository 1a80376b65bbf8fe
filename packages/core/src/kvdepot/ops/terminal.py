"""Prints the results of commands: text that fits the terminal, or JSON."""

import argparse
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Callable
from typing import Final

_START: Final = re.compile(r" *(?:[\w ]{1,13}?  +|\[\d+\] |-> )*")  # an indent, a label, a number, an arrow


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
