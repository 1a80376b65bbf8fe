"""A process that imports a depot's modules, torch or vLLM once and forks children: imports take longer than most tests.

Children share nothing: the imports start no thread of torch, no device and no engine. A child has a PID, pipes and an
end like a process started by `subprocess.Popen`. Those that are left end with the process of the tests.

`Nursery` runs `python -P nursery.py SOCKET MODULE...`. SOCKET is the descriptor of a Unix socket; each packet is one
command in JSON.
"""

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self

_PACKET_BYTES: Final = 1 << 20


class Fork:
    """A process that a nursery forked, with the part of `subprocess.Popen` that tests need.

    Args:
        pipes: to its input and from its output; the caller closes them.
    """

    def __init__(self, nursery: "Nursery", pid: int, pipes: tuple[IO[bytes], IO[bytes]]) -> None:
        self.pid = pid
        self.stdin, self.stdout = pipes
        self._nursery = nursery
        self._returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)  # the nursery has not waited for the process yet, so it exists

    def poll(self) -> int | None:
        """Return the exit status, None while the process runs."""
        if self._returncode is None:
            self._returncode = self._nursery.ask({"op": "poll", "pid": self.pid})
            if self._returncode is not None:
                os.close(self._pidfd)
        return self._returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process to end and return its exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs after `timeout` seconds.
        """
        if self._returncode is None:
            poller = select.poll()  # not in the nursery, which others may ask meanwhile
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        returncode = self.poll()
        assert returncode is not None
        return returncode

    def send_signal(self, number: int, /) -> None:
        """Send a signal unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process, as in a crash."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """A process that imports modules and forks. Threads may share it.

    Args:
        modules: modules to import.
        environment: further environment variables.
    """

    def __init__(self, *modules: str, environment: Mapping[str, str] | None = None) -> None:
        self._environment = {**os.environ, **(environment or {})}
        self._environment.pop("PYTHONDONTWRITEBYTECODE", None)
        self._lock = threading.Lock()
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
        with self._lock:
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
            pid = self._fork(what, arguments, environment or self._environment, (stdin, stdout, stderr))
        finally:
            os.close(stdin)
            os.close(stdout)
        return Fork(self, pid, (open(to_it, "wb", buffering=0), open(from_it, "rb", buffering=0)))

    def fork_silent(self, module: str, *arguments: str, environment: Mapping[str, str]) -> Fork:
        """Run a module in a session of its own, without input and with this process's output."""
        with open(os.devnull, "rb") as nothing:
            return Fork(self, self._fork(module, arguments, environment, (nothing.fileno(), 1, 2)), (nothing, nothing))

    def _fork(
        self, what: Path | str, arguments: Sequence[str], environment: Mapping[str, str], files: Sequence[int]
    ) -> int:
        command = {
            "op": "fork",
            "is_module": isinstance(what, str),
            "argv": [str(what), *arguments],
            "environment": dict(environment),
            "directory": os.getcwd(),
        }
        return self.ask(command, files)

    def run(self, script: Path, *arguments: str, given: str = "") -> str:
        """Run a script to its end on an input of a few KiB and return its output.

        Raises:
            AssertionError: the script failed.
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
        """End the process. Its children must not be used any more."""
        self._socket.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def become(command: dict[str, Any], files: list[int]) -> NoReturn:
    """Run the script or module in the forked process."""
    os.setsid()
    for place, file in enumerate(files):
        os.dup2(file, place)
        os.close(file)
    os.environ.clear()
    os.environ.update(command["environment"])
    os.chdir(command["directory"])
    # Python reads the variable only when it starts, and a test may have set it since then.
    sys.path[:0] = [
        path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path
    ]
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    random.seed()
    sys.argv = command["argv"]
    if command["is_module"]:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        sys.exit()  # as usual: wait for threads, call exit functions
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    status = 1
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # at once: an engine's own end takes seconds


def main() -> None:
    gc.disable()  # a search for garbage after each few modules takes a third of the import of an engine's 5,700
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.enable()
    gc.collect()
    gc.freeze()  # vLLM collects garbage often while it starts, each time through all imported objects
    children = set[int]()
    asking = socket.socket(fileno=int(sys.argv[1]))
    while True:
        packet, files, _, _ = socket.recv_fds(asking, _PACKET_BYTES, 3)
        if not packet:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            os._exit(0)
        command = json.loads(packet)
        answer: int | None = None
        if command["op"] == "fork":
            answer = os.fork()
            if answer == 0:
                asking.close()
                become(command, files)
            children.add(answer)
            for file in files:
                os.close(file)
        else:
            pid, status = os.waitpid(command["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            children.discard(pid)
        asking.send(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
