"""Processes of other users of the machine, which only root can start.

They are forked from a process that has imported what they need, as another user may be unable to read this Python. Run
as a script, this module becomes that user: `other_users.py USER SCRIPT ARGUMENTS...`.
"""

import atexit
import contextlib
import os
import sys
import tempfile
from collections.abc import Generator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Final

import pytest

from support.nursery import Fork, Nursery

STRANGER: Final = 65_534
USER: Final = 54_321  # runs a depot or an engine, and is neither root nor the stranger

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start processes of other users")

_MODULES: Final = (
    *("email.parser", "importlib.metadata", "socketserver", "statistics"),  # imported when a depot needs them
    *(
        "kvdepot.operate.cli",
        "kvdepot.operate.commands",
        "kvdepot.operate.serve",
        "kvdepot.server.app",
        "kvdepot.tiers.disk.tier",
    ),
    *("support.other_users", "support.peer"),
    *(feature.module for feature in entry_points(group="kvdepot.features")),
)

_IMPORTS: Final = """
import os, socket, sys
from pathlib import Path
import kvdepot.operate.cli
from kvdepot.client.connection import Connection
from kvdepot.client.operator import ask_depot
from kvdepot.errors import KVDepotError
from kvdepot.pool.files import open_pool
from kvdepot.server.access import Access
from kvdepot.operate import operations as o
from support.peer import registration
"""


@cache
def _nursery() -> Nursery:
    nursery = Nursery(*_MODULES)
    atexit.register(nursery.close)
    return nursery


def start_as(user: int, script: str, *arguments: object) -> Fork:
    """Start a script as another user. `sys.argv[1:]` are its arguments, and `stdout` has its log, too."""
    return _nursery().fork(Path(__file__), str(user), script, *map(str, arguments))


def run_as(user: int, script: str, *arguments: object, given: str = "") -> str:
    """Run a script as another user to its end, and return its output."""
    child = start_as(user, script, *arguments)
    with child.stdout, child.stdin:
        child.stdin.write(given.encode())
        child.stdin.close()
        printed = child.stdout.read().decode()
    assert child.wait(60) == 0, printed
    return printed.strip()


def serve_as(user: int, *flags: object) -> Fork:
    """Start a depot as another user, or as root."""
    return start_as(user, "kvdepot.operate.cli.main(['serve', *sys.argv[1:]])", *flags)


def log_until(process: Fork, word: str) -> list[str]:
    """Return the lines that a process prints, up to one with `word` or the end."""
    lines: list[str] = []
    while line := process.stdout.readline().decode():
        lines.append(line.rstrip("\n"))
        if word in line:
            break
    return lines


def end(process: Fork) -> int:
    """End a process as an operator would, and return its exit status."""
    process.send_signal(15)
    with process.stdout, process.stdin:
        return process.wait(30)


@contextlib.contextmanager
def open_place(parent: Path | None = None) -> Generator[Path]:
    """Return a new folder that every user may pass, by default below /tmp."""
    with tempfile.TemporaryDirectory(prefix="kvdepot-", dir=parent) as outer:
        Path(outer).chmod(0o755)
        yield Path(outer)


def _become() -> None:
    user, script = int(sys.argv.pop(1)), sys.argv.pop(1)
    os.dup2(1, 2)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    os.umask(0o022)
    exec(_IMPORTS + script, {})  # noqa: S102 (the tests' own)


if __name__ == "__main__":
    _become()
