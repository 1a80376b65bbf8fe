"""Importing torch or vLLM takes longer than most tests: here it is done once, and each child is a fork of what came of
it. A child shares nothing with the next: the imports started no thread of torch, no device and no engine, and
kvdepot is imported by each anew. It has the same PID, pipes and end as a process started by `subprocess.Popen`.

Run by `Nursery`: python -P nursery.py SOCKET MODULE..., the descriptor of a Unix socket with a JSON command a packet.
"""

import gc
import importlib
import json
import os
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self

_PACKET_BYTES: Final = 1 << 20


class Fork:
    """A process that a nursery made; as much of `subprocess.Popen` as is needed."""

    def __init__(self, nursery: "Nursery", pid: int, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self.pid, self.stdin, self.stdout = pid, stdin, stdout
        self._nursery = nursery
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self._returncode is None:
            self._returncode = self._nursery.ask({"op": "poll", "pid": self.pid})
        return self._returncode

    def wait(self) -> int:
        """Wait for its end."""
        if self._returncode is None:
            self._returncode = self._nursery.ask({"op": "wait", "pid": self.pid})
            assert self._returncode is not None
        return self._returncode

    def send_signal(self, number: int) -> None:
        """Send a signal unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it as a crash would."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that imports modules and forks.

    Args:
        modules: what is imported; none of kvdepot's.
        environment: variables beside those of the tests.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *modules],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=self._environment,
                start_new_session=True,
            )

    def ask(self, command: dict[str, Any], files: Sequence[int] = ()) -> Any:
        """Send a command with file descriptors and return its answer."""
        socket.send_fds(self._socket, [json.dumps(command).encode()], list(files))
        answer = self._socket.recv(_PACKET_BYTES)
        assert answer, "the process that forks others has ended"
        return json.loads(answer)

    def fork(
        self, what: Path | str, *arguments: str, environment: Mapping[str, str] | None = None, stderr: int = 2
    ) -> Fork:
        """Run a script, or a module by its name, in a session of its own, with pipes for its input and output."""
        (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
        try:
            pid = self.ask(
                {
                    "op": "fork",
                    "is_module": isinstance(what, str),
                    "argv": [str(what), *arguments],
                    "environment": dict(environment or self._environment),
                },
                (stdin, stdout, stderr),
            )
        finally:
            os.close(stdin)
            os.close(stdout)
        return Fork(self, pid, open(to_it, "wb", buffering=0), open(from_it, "rb"))  # who takes it closes

    def run(self, script: Path, *arguments: str, given: str = "") -> str:
        """Run a script to its end on an input of a few KiB and return what it printed.

        Raises:
            AssertionError: it failed.
        """
        with tempfile.TemporaryFile() as stderr:
            fork = self.fork(script, *arguments, stderr=stderr.fileno())
            with fork.stdout:
                with fork.stdin:
                    fork.stdin.write(given.encode())
                output = fork.stdout.read().decode()
            returncode = fork.wait()
            stderr.seek(0)
            assert returncode == 0, stderr.read().decode()[-3000:]
            return output

    def close(self) -> None:
        """End it; nobody uses its children any more."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _be(argv: list[str], environment: dict[str, str], files: list[int], *, is_module: bool) -> NoReturn:
    """Be the script, in a process just forked."""
    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    random.seed()
    sys.argv = argv
    if not is_module:
        sys.path.insert(0, str(Path(argv[0]).parent))
    status = 1
    try:
        if is_module:
            runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main() -> None:
    for module in sys.argv[2:]:
        importlib.import_module(module)
    assert "kvdepot" not in sys.modules
    gc.collect()
    gc.freeze()  # vLLM collects often while it starts, each time through all that was imported
    with socket.socket(fileno=int(sys.argv[1])) as asking:
        while True:
            packet, files, _, _ = socket.recv_fds(asking, _PACKET_BYTES, 3)
            if not packet:
                os._exit(0)
            command = json.loads(packet)
            answer: int | None = None
            if command["op"] == "fork":
                answer = os.fork()
                if answer == 0:
                    asking.close()
                    _be(command["argv"], command["environment"], files, is_module=command["is_module"])
                for file in files:
                    os.close(file)
            else:
                pid, status = os.waitpid(command["pid"], os.WNOHANG if command["op"] == "poll" else 0)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            asking.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
