"""The mover's side: the loop of a process that opens a worker's device memory and copies for the depot.

A mover is disposable. It exits when its socket closes, and the kernel kills it when the depot dies, even inside a hung
call. If its device fails, it sends `Failed` and exits, because only its death guarantees that no copy is running any
more. It ignores signals that a terminal or a service manager sends to the process group, which are meant for the depot.
"""

import faulthandler
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeAlias

import msgspec

from kvdepot.errors import KVDepotError
from kvdepot.logs import set_up_logs
from kvdepot.movers import protocol as p
from kvdepot.pool.files import PoolMemory
from kvdepot.processes import be_a_child

_MAXIMUM_TEXT: Final = 1000  # characters of an error: a driver's text may be long, but answers are bounded
_TRACE_SECONDS: Final = 20.0  # below the depot's limit for a start

CopyNow: TypeAlias = Callable[[p.Copy], bool | None]
"""Copies, and returns when the bytes are in place. Two threads call it, one per direction.

It returns True once it has nothing left to warm up: later copies will not be faster. It raises `CopyRefused` before the
first byte; any other exception ends the process."""


def run_mover(
    arguments: Sequence[str],
    open_device: Callable[[p.Setup, PoolMemory], CopyNow],
    trace_seconds: float = _TRACE_SECONDS,
) -> None:
    """Run the mover's loop until the depot closes the connection. Does not return.

    Args:
        arguments: the arguments of the command: `PARENT_PID POOL_FD SOCKET_FD`.
        open_device: opens the device memory of a registration's offer, or raises `MoverError`.
        trace_seconds: if the start takes longer, print its traceback into the depot's log before the depot kills it.
    """
    faulthandler.dump_traceback_later(trace_seconds)
    parent_pid, pool_fd, socket_fd = map(int, arguments)
    be_a_child(parent_pid)
    set_up_logs("warning", text=f"mover {os.getpid()}: %(message)s")
    depot = _Depot(socket.socket(fileno=socket_fd))
    setup = depot.receive()
    if not isinstance(setup, p.Setup):
        os._exit(0)
    try:
        copy = open_device(setup, PoolMemory(pool_fd, setup.pool_size_bytes))
    except Exception as error:
        depot.send_last(error)
    else:
        faulthandler.cancel_dump_traceback_later()
        depot.send(p.Ready())
        _serve(depot, copy)


def _serve(depot: "_Depot", copy: CopyNow) -> NoReturn:
    queues = [queue.SimpleQueue[p.Copy]() for _ in range(2)]  # of retrieves, of stores
    for requests in queues:
        threading.Thread(target=_copy_all, args=(depot, copy, requests), name="kvdepot-mover-copy", daemon=True).start()
    while True:
        request = depot.receive()
        if not isinstance(request, p.Copy):
            os._exit(0)
        queues[request.is_store].put(request)


class _Depot:
    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._lock = threading.Lock()

    def receive(self) -> p.ToMover | None:
        """Return the next message, or None when the connection is closed."""
        try:
            length = int.from_bytes(self._reader.read(4), "little")  # 0 at the end
            return p.decode_request(self._reader.read(length)) if 0 < length <= p.MAXIMUM_FRAME_BYTES else None
        except (OSError, msgspec.DecodeError):
            return None

    def send(self, answer: p.FromMover) -> None:
        with self._lock:
            try:
                self._socket.sendall(p.encode(answer))
            except OSError:
                os._exit(0)

    def send_last(self, error: Exception) -> NoReturn:
        """Report an error and exit."""
        text = str(error) if isinstance(error, KVDepotError) else repr(error)
        self.send(p.Failed(text[:_MAXIMUM_TEXT], isinstance(error, p.MoverError) and error.is_final))
        os._exit(1)


def _copy_all(depot: _Depot, copy: CopyNow, requests: "queue.SimpleQueue[p.Copy]") -> None:
    """Make the copies of one direction, in order."""
    while True:
        request = requests.get()
        try:
            is_warm = bool(copy(request))
        except p.CopyRefused as error:
            depot.send(p.NotCopied(request.number, str(error)[:_MAXIMUM_TEXT]))
        except BaseException as error:
            depot.send_last(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        else:
            depot.send(p.Copied(request.number, is_warm))
