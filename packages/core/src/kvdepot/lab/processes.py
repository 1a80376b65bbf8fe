"""Depots as real processes that can be stopped, killed and started again, and ways to wait for a condition."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Self

from kvdepot.client.operator import ask_depot
from kvdepot.config import format_size, parse_size
from kvdepot.errors import DepotUnavailable, KVDepotError
from kvdepot.operate import operations as o
from kvdepot.pool.files import ENLARGE_TMPFS
from kvdepot.pool.inventory import SHARED_MEMORY
from kvdepot.processes import interrupts_blocked
from kvdepot.wire import messages as m
from kvdepot.wire.status import DepotStatus

_PATIENCE_SECONDS: Final = 120.0  # six tries of 20 s: a shorter wait would take a busy machine for a server that hangs
BESIDE_POOL_BYTES: Final = 32 << 20  # the index of a pool below 16 GiB takes 8 MiB, names and tokens a few more


# The default is far beyond what tests wait for, even on a busy machine: only a fault reaches it.
def wait_until(condition: Callable[[], object], timeout_seconds: float = 30.0, what: str = "") -> None:
    """Wait for `condition` to become true.

    Raises:
        AssertionError: it was false for `timeout_seconds`.
    """
    end = time.monotonic() + timeout_seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"not within {timeout_seconds} s: {what or condition}")
        time.sleep(0.005)


def start_child(
    command: Sequence[str], *, has_pipes: bool = False, new_session: bool = False
) -> subprocess.Popen[bytes]:
    """Start a command, with pipes for its input and output or without input."""
    return subprocess.Popen(
        command,
        bufsize=0,
        stdin=subprocess.PIPE if has_pipes else subprocess.DEVNULL,
        stdout=subprocess.PIPE if has_pipes else None,
        start_new_session=new_session,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )


def choose_pool_place(size_bytes: int) -> Path:
    """Return the folder for a pool of a demo or benchmark: /dev/shm, or that of temporary files if /dev/shm is small.

    Raises:
        KVDepotError: neither has room.
    """
    rooms = {place: shutil.disk_usage(place).free for place in (SHARED_MEMORY, Path(tempfile.gettempdir()))}
    for place, room in rooms.items():
        if room >= size_bytes + BESIDE_POOL_BYTES:
            return place
    found = " and ".join(f"{place} has {format_size(room)}" for place, room in rooms.items())
    raise KVDepotError(f"no room for a pool of {format_size(size_bytes)} and its index: {found}: {ENLARGE_TMPFS}")


def note_on_place(size_bytes: int) -> str:
    """Return a line for people if a pool of that size has to leave memory, else "".

    Raises:
        KVDepotError: there is no room for it.
    """
    place = choose_pool_place(size_bytes)
    if place == SHARED_MEMORY:
        return ""
    return (
        f"Note: {SHARED_MEMORY} has no room for a pool of {format_size(size_bytes)}, so it is a file in {place}."
        " Copies may wait for a disk there."
    )


class DepotProcess:
    """A depot in a process of its own, by default in a new directory, with a pool that `close` removes.

    Args:
        arguments: further flags of `kvdepot serve`.
        pool_size: as in `--pool-size`.
        directory: as in `--dir`; None for a temporary one.
        new_session: start the server in a session of its own, to which Linux's autogroups give its own share of the
            cores. In the session of its tests, a depot beside vLLM on a busy machine stood in the run queue for half a
            minute at a time. The server then outlives tests that are killed.
    """

    start_child = staticmethod(start_child)  # tests replace it by a faster way

    def __init__(
        self,
        *arguments: str,
        pool_size: str = "64MiB",
        directory: Path | None = None,
        log_level: str = "warning",
        new_session: bool = False,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="kvdepot-") if directory is None else None
        self.directory = Path(self._temporary.name) if self._temporary else directory or Path()
        self.url = str(self.directory)
        place = choose_pool_place(parse_size(pool_size))
        self.pool_directory = Path(tempfile.mkdtemp(prefix=f"kvdepot-pool-{os.getsid(0)}-", dir=place))
        self._new_session = new_session
        self._arguments = [
            sys.executable,
            "-m",
            "kvdepot",
            "serve",
            "--dir",
            self.url,
            "--pool-size",
            pool_size,
            "--pool-dir",
            str(self.pool_directory),
            "--log-level",
            log_level,
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def start(self, timeout_seconds: float = 60.0) -> None:  # 0.3 s, unless the machine is busy
        """Start the server and wait until it answers.

        Raises:
            DepotUnavailable: the server ended, with the reason on standard error, or does not answer in time.
        """
        with interrupts_blocked():
            self._process = self.start_child(self._arguments, new_session=self._new_session)
        end = time.monotonic() + timeout_seconds
        while True:
            status = self._process.poll()
            if status is not None:
                raise DepotUnavailable(f"the depot could not start (exit status {status})")
            try:
                ask_depot(m.Hello(m.PROTOCOL_VERSION, "test"), self.url, 1.0)
            except DepotUnavailable:
                if time.monotonic() > end:
                    self.kill()
                    raise
                time.sleep(0.01)
            else:
                return

    def status(self) -> DepotStatus:
        """Return the server's status. Wait long, because the machine may be busy, then abort the server with a dump."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return ask_depot(o.Status(), self.url, 20.0).status
            except DepotUnavailable:
                if self._process is None or self._process.poll() is not None:
                    raise
                if time.monotonic() > end:
                    self.signal(signal.SIGABRT)
                    raise

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, SIGSTOP and SIGCONT for example."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End the server as a crash would; its pool stays."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def terminate(self, timeout_seconds: float = 10.0) -> int:  # as a container has between TERM and KILL
        """End the server as an operator would; return its exit status."""
        assert self._process is not None
        os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(timeout_seconds)

    def close(self) -> None:
        """End the server if it runs, and remove its pool and its temporary directory."""
        self.kill()
        shutil.rmtree(self.pool_directory, ignore_errors=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
