"""Engines in processes of their own, for tests that kill them."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvdepot.lab.processes import DepotProcess

CHUNK = 4 * 4 * 16384  # bytes


class Engine:
    """An engine process that obeys; `prefix` is a command that runs it, its only child."""

    def __init__(self, depot: DepotProcess, instance: str, prefix: Sequence[str] = ()) -> None:
        script = str(Path(__file__).with_name("engine_child.py"))
        self.process = subprocess.Popen(
            [*prefix, sys.executable, script, depot.url, instance],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.listen() == ["ready"]

    def say(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def listen(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def ask(self, command: str) -> list[str]:
        self.say(command)
        return self.listen()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
