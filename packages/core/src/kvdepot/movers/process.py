"""One mover process from the depot's side: its socket, its pidfd, and the copies under way.

Nothing here waits. A request that the socket does not accept at once stays in a buffer until `flush`.
"""

import os
import socket
import subprocess
import sys
import time
from typing import Generic, Self, TypeVar

from kvdepot.movers.protocol import FromMover, MoverError, ToMover, encode, take_answers
from kvdepot.pool.table import Writer
from kvdepot.processes import process_start_time

_Pending = TypeVar("_Pending")


class MoverProcess(Generic[_Pending]):
    """A mover process, from its start until it is reaped. Start it on a thread that outlives it."""

    def __init__(self, process: "subprocess.Popen[bytes]", connection: socket.socket, pidfd: int) -> None:
        self.pid, self.pidfd = process.pid, pidfd
        self.socket_fd = connection.fileno()
        self.writer = Writer(process.pid, process_start_time(process.pid))
        self.started_at = time.monotonic()
        self.start_timer = 0  # the table's timer for the start
        self.copies: dict[int, _Pending] = {}  # by the number in `Copy`
        self.is_ready = False
        self.is_warm = False  # as in `Copied`
        self.is_lost = False  # killed, but perhaps not dead yet
        self._process = process
        self._socket = connection
        self._inbox = bytearray()
        self._outbox = bytearray()

    @classmethod
    def start(cls, module: str, pool_fd: int) -> Self:
        """Start a mover.

        Args:
            module: a module that calls `run_mover`.
            pool_fd: the pool's file, which the mover inherits.

        Raises:
            MoverError: the process cannot be started or watched.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fds = (pool_fd, theirs.fileno())
            command = [sys.executable, "-P", "-m", module, str(os.getpid()), *map(str, fds)]
            process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            ours.close()
            raise MoverError(f"a mover cannot be started: {error}") from error
        finally:
            theirs.close()
        try:
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            ours.close()
            process.kill()
            process.wait()
            raise MoverError(f"a mover cannot be watched: {error}") from error
        ours.setblocking(False)
        return cls(process, ours, pidfd)

    @property
    def has_output(self) -> bool:
        """Whether `flush` has bytes left to send."""
        return bool(self._outbox)

    def send(self, message: ToMover) -> None:
        """Queue a message for `flush`."""
        self._outbox += encode(message)

    def flush(self) -> None:
        """Send as much as the socket accepts.

        Raises:
            MoverError: the connection is lost.
        """
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError as error:
            raise MoverError(f"the connection to it was lost: {error}") from error

    def receive(self) -> list[FromMover]:
        """Return the answers that have arrived.

        Raises:
            MoverError: the mover has exited, or sent an invalid message.
        """
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise MoverError("it exited")
        self._inbox += data
        return take_answers(self._inbox)

    def kill(self) -> None:
        """Kill the process. Its copies may still be running until `reap` returns its status."""
        self._process.kill()

    def reap(self) -> int | None:
        """Return the exit status, None while the process is alive."""
        return self._process.poll()

    def close(self) -> None:
        """Close the descriptors."""
        self._socket.close()
        os.close(self.pidfd)
