"""Runs a command in a terminal of its own, as a user sees it."""

import os
import re
import select
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Terminal:
    """A command's outputs, each `(seconds since its start, text)`, and its exit status."""

    outputs: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    status: int = 0

    @property
    def text(self) -> str:
        return "".join(text for _, text in self.outputs)

    @property
    def lines(self) -> list[str]:
        """The drawn lines, without empty ones."""
        drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.text)
        return [line for line in re.split(r"[\r\n]+", drawn) if line.strip()]


def run_in_terminal(
    command: Sequence[str],
    *,
    columns: int = 80,
    rows: int = 40,
    timeout_seconds: float = 120.0,
    environment: Mapping[str, str] | None = None,
    on_output: Callable[[Terminal, Callable[[str], object]], None] | None = None,
) -> Terminal:
    """Run a command until it ends.

    Args:
        command: the program and its arguments.
        columns: width of the terminal.
        rows: height of the terminal.
        timeout_seconds: time after which the command is killed.
        environment: further environment variables.
        on_output: called after each output with all outputs so far and a function that types text.
    """
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (rows, columns))
    variables = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS", "LINES")}
    terminal = Terminal()
    started = time.monotonic()
    process = subprocess.Popen(
        ["setsid", "--ctty", "--wait", *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**variables, "TERM": "xterm-256color", **(environment or {})},
    )
    os.close(theirs)
    try:
        while time.monotonic() < started + timeout_seconds:
            if not select.select([ours], [], [], 1.0)[0]:
                continue
            try:
                written = os.read(ours, 1 << 16)
            except OSError:  # no process has the terminal open any more
                break
            terminal.outputs.append((time.monotonic() - started, written.decode(errors="replace")))
            if on_output:
                on_output(terminal, lambda text: os.write(ours, text.encode()))
        else:
            raise TimeoutError(terminal.text[-2000:])
    finally:
        os.close(ours)  # the hang-up ends processes that still run
        try:
            terminal.status = process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return terminal
