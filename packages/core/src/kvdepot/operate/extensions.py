"""Adds the commands of other distributions, which name them in the entry point group `kvdepot.commands`.

An entry point has the name of its command and loads a function like `add_status`, which is called with the subparsers
of `kvdepot` and its two parsers of common flags. Commands of `kvdepot tier` are in the group `kvdepot.commands.tier`.
`kvdepot` loads every entry point for every command, so their modules stay light.
"""

import argparse
import logging
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, NoReturn

from kvdepot.errors import ConfigError
from kvdepot.installing import install_line

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP: Final = "kvdepot.commands"
KNOWN_COMMANDS: Final = {"": {"replay": "plan"}, "tier": {"cost": "plan"}}  # by first word; then extras by command


def add_extensions(
    commands: Any, common: argparse.ArgumentParser, json_output: argparse.ArgumentParser, word: str = ""
) -> None:
    """Add the commands of all installed distributions, and one that names the `pip` command for each known other one.

    Args:
        commands: the result of `add_subparsers`.
        common: has `--log-level`, and `--dir` to name a depot.
        json_output: has `--json`.
        word: the first word of the commands, if they have two.
    """
    for entry in entry_points(group=f"{ENTRY_POINT_GROUP}.{word}" if word else ENTRY_POINT_GROUP):
        try:
            entry.load()(commands, common, json_output)
        except Exception as error:
            # Without this, one broken distribution would end `kvdepot serve` and every other command.
            logger.warning("leaving out the command %s (%s): %r", entry.name, entry.value, error)
    for name, extra in KNOWN_COMMANDS.get(word, {}).items():
        if name not in commands.choices:
            # No argument begins with NUL, so all of them, flags and `--help` too, are words that nobody reads.
            missing = commands.add_parser(name, prefix_chars="\0", help=f"needs kvdepot[{extra}]")
            missing.add_argument("words", nargs="*")
            missing.set_defaults(run=partial(_refuse, f"{word} {name}".strip(), extra), log_level="warning")


def _refuse(name: str, extra: str, _options: argparse.Namespace) -> NoReturn:
    raise ConfigError(f"kvdepot {name} needs a package: {install_line(extra)}")
