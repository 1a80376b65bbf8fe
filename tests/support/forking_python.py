"""Runs scripts in forks of a nursery's process, for programs that start Python themselves: examples and their scripts.

The nursery runs this file with the path of a socket, where each connection is the wish of one process.
`ForkingPython.python` is an executable that takes the place of Python: `python SCRIPT ARGUMENTS...` or
`python -m MODULE ARGUMENTS...` forks, and stays until the fork has ended. It passes on the exit status and, to the
fork, SIGTERM. If it is killed, so is the fork.
"""

import json
import os
import select
import signal
import socket
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Self

if TYPE_CHECKING:
    from support.nursery import Nursery

_PACKET_BYTES = 1 << 20


class ForkingPython:
    """An executable `python` that forks a nursery's process.

    Args:
        nursery: the process with all modules that the scripts need.
    """

    def __init__(self, nursery: "Nursery") -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="kv")
        self.python = Path(self._folder.name) / "python"
        path = self.python.with_name("socket")
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} ask {path} "$@"\n')
        self.python.chmod(0o755)
        self._server = nursery.fork(Path(__file__), "serve", str(path))
        assert self._server.stdout.readline() == b"ready\n"

    def close(self) -> None:
        """End the server. No fork may run any more."""
        self._server.kill()
        self._server.wait()
        self._server.stdin.close()
        self._server.stdout.close()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask(path: str, argv: list[str]) -> NoReturn:
    """Let the server run a script or module with this process' environment and streams. Exit as it does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.connect(path)
        is_module = argv[0] == "-m"
        command = {
            "is_module": is_module,
            "argv": argv[is_module:],
            "environment": dict(os.environ),
            "directory": os.getcwd(),
        }
        socket.send_fds(asking, [json.dumps(command).encode()], [0, 1, 2])
        signal.signal(signal.SIGTERM, lambda _number, _frame: asking.send(b"end"))
        status = int(asking.recv(16) or b"1")
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def serve(path: str) -> NoReturn:
    """Fork for each connection."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        print("ready", flush=True)  # noqa: T201
        while True:
            asking, _ = listening.accept()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks below
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                _watch(asking)
            asking.close()


def _watch(asking: socket.socket) -> NoReturn:
    """Fork once more, and be the parent of the script's process."""
    from support.nursery import become

    packet, files, _, _ = socket.recv_fds(asking, _PACKET_BYTES, 3)
    pid = os.fork()
    if pid == 0:
        asking.close()
        become(json.loads(packet), files)
    for file in files:
        os.close(file)
    ended = os.pidfd_open(pid)
    while True:
        ready, _, _ = select.select([asking, ended], [], [])
        if ended in ready:
            break
        if not asking.recv(16):  # the asking process was killed
            break
        os.kill(pid, signal.SIGTERM)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(OSError):
        asking.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "ask":
        ask(sys.argv[2], sys.argv[3:])
    serve(sys.argv[2])
