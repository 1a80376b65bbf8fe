"""Runs a depot that ends, with its files, when the process that started it does.

`python -m kvdepot.lab.dependent serve ...` is the depot. Its input is a pipe. When the parent dies, even by SIGKILL,
the kernel closes the other end and sends SIGTERM. Unlike `PR_SET_PDEATHSIG`, this does not depend on the thread that
started the depot. If the depot itself is killed, its files stay for its next start.
"""

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from kvdepot.lab.processes import DepotProcess
from kvdepot.operate.cli import main


class DependentDepot(DepotProcess):
    """A depot in a temporary directory that ends with this process, however that ends."""

    @staticmethod
    def start_child(
        command: Sequence[str], *, has_pipes: bool = False, new_session: bool = False
    ) -> subprocess.Popen[bytes]:
        """Start `python -m kvdepot serve ...` as a child of a pipe."""
        arguments = command[command.index("serve") :]
        return subprocess.Popen(
            [sys.executable, "-m", __name__, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            env={**os.environ, "PYTHONFAULTHANDLER": "1"},
        )

    def kill(self) -> None:
        """End the server as a crash would; its pool stays."""
        super().kill()
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def run(arguments: Sequence[str]) -> None:
    """Run a depot until it ends or its input is closed, then remove its files."""
    folders = [arguments[arguments.index(flag) + 1] for flag in ("--dir", "--pool-dir")]
    signal.signal(signal.SIGTERM, _stop)
    try:
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGTERM)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)
        if select.select([0], [], [], 0)[0]:  # closed before that
            return
        main(arguments)
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Stop a depot that does not serve yet. Later it has a handler of its own."""
    sys.exit(1)


if __name__ == "__main__":
    run(sys.argv[1:])
