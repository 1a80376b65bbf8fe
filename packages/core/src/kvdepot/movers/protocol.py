"""Movers: processes of the depot that hold a worker's device memory, so that the depot's own never does.

A backend whose memory can be opened by another process names a module under the entry point group `kvdepot.movers`,
which calls `run_mover`. The depot starts one such process for each worker that offers its memory (`server.movers`),
sends `Setup` and waits for `Ready`; then it sends a `Copy` for each ticket or lease, at most one a direction, and gets
one answer for each. Messages are frames of a stream socket: u32 length, then msgpack. They name extents, which the
depot chose, and block ids, which a worker chose: a mover checks both before it copies the first byte.

A mover is disposable. It ends when its socket closes, and the kernel kills it when the depot dies, even inside a call
that hangs. What its device cannot do it says by `Failed` and ends: only its death makes sure that nothing is copied any
more. Signals that a terminal or a service manager sends to the whole group are for the depot, not for it.
"""

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Final, NoReturn, TypeAlias

import msgspec
from msgspec import Struct

from kvdepot.errors import KVDepotError
from kvdepot.pool.files import PoolMemory
from kvdepot.processes.children import be_a_child
from kvdepot.processes.logs import set_up_logs
from kvdepot.wire.messages import RegisterKVCache

logger = logging.getLogger(__name__)

MAXIMUM_FRAME_BYTES: Final = 8 << 20
MAXIMUM_ANSWER_BYTES: Final = 1 << 16
_MAXIMUM_TEXT: Final = 1000


class MoverError(KVDepotError):
    """A mover cannot do its work here; `is_final` if a new one could not, either."""

    def __init__(self, text: str, *, is_final: bool = False) -> None:
        super().__init__(text)
        self.is_final = is_final


class CopyRefused(KVDepotError):
    """A copy that would touch what is neither the worker's nor the pool's. Nothing was copied."""


class Setup(Struct, frozen=True, array_like=True, tag="setup"):
    """What to open; answered by `Ready` or `Failed`. The registration has an offer."""

    pool_size_bytes: int
    registration: RegisterKVCache


class Copy(Struct, frozen=True, array_like=True, tag="copy"):
    """Copy between extents and blocks; fields as in `kvdepot.backends.CopyBatch`, block ids as packed i32."""

    number: int
    is_store: bool
    extents: bytes
    block_ids: tuple[bytes, ...]
    first_covered: tuple[int, ...]
    skip_blocks: tuple[int, ...]


class Ready(Struct, frozen=True, array_like=True, tag="ready"):
    """The worker's memory is open."""


class Copied(Struct, frozen=True, array_like=True, tag="copied"):
    """The bytes are in place."""

    number: int
    is_settled: bool = False  # as in `Moved`


class Refused(Struct, frozen=True, array_like=True, tag="refused"):
    """A copy was not begun, because it does not fit the cache; the mover goes on."""

    number: int
    text: str


class Failed(Struct, frozen=True, array_like=True, tag="failed"):
    """The mover's last word."""

    text: str
    is_final: bool = False


ToMover: TypeAlias = Setup | Copy
FromMover: TypeAlias = Ready | Copied | Refused | Failed

_encoder = msgspec.msgpack.Encoder()
_to_mover: msgspec.msgpack.Decoder[ToMover] = msgspec.msgpack.Decoder(ToMover)
_from_mover: msgspec.msgpack.Decoder[FromMover] = msgspec.msgpack.Decoder(FromMover)


def encode(message: ToMover | FromMover) -> bytes:
    """Return the frame of a message."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "little") + body


def take_answers(received: bytearray) -> list[FromMover]:
    """Take the answers that are complete out of what was received from a mover.

    Raises:
        MoverError: they are none.
    """
    answers: list[FromMover] = []
    try:
        while len(received) >= 4:
            length = int.from_bytes(received[:4], "little")
            if length > MAXIMUM_ANSWER_BYTES:
                raise MoverError(f"an answer of {length} bytes")
            if len(received) < 4 + length:
                break
            answers.append(_from_mover.decode(bytes(received[4 : 4 + length])))
            del received[: 4 + length]
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise MoverError(f"an answer that is none: {error}") from error
    return answers


CopyNow: TypeAlias = Callable[[Copy], bool | None]
"""Copies, and returns when the bytes are in place; called by two threads, one for each direction.

Returns True if it makes nothing ready any more: later copies will be no faster. Raises `CopyRefused` before the first
byte; whatever else it raises ends the process."""


def run_mover(arguments: Sequence[str], open_device: Callable[[Setup, PoolMemory], CopyNow]) -> None:
    """Be a mover until the depot has no use for it any more; does not return.

    Args:
        arguments: of the command line: `PARENT_PID POOL_FD SOCKET_FD`.
        open_device: opens what the offer of a registration names; raises `MoverError`.
    """
    parent_pid, pool_fd, socket_fd = map(int, arguments)
    be_a_child(parent_pid)
    set_up_logs("warning", text=f"mover {os.getpid()}: %(message)s")
    depot = _Depot(socket.socket(fileno=socket_fd))
    setup = depot.receive()
    if not isinstance(setup, Setup):
        os._exit(0)
    try:
        copy = open_device(setup, PoolMemory(pool_fd, setup.pool_size_bytes))
    except Exception as error:
        depot.send_last(error)
    else:
        depot.send(Ready())
        _serve(depot, copy)


def _serve(depot: "_Depot", copy: CopyNow) -> NoReturn:
    lanes = [_Lane(depot, copy) for _ in range(2)]
    while True:
        request = depot.receive()
        if not isinstance(request, Copy):
            os._exit(0)
        lanes[request.is_store].put(request)


class _Depot:
    """The depot, as a mover sees it."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def receive(self) -> ToMover | None:
        """Return the next message, None if there will be none."""
        try:
            length = int.from_bytes(self._read(4), "little")
            return _to_mover.decode(self._read(length)) if 0 < length <= MAXIMUM_FRAME_BYTES else None
        except (OSError, EOFError, msgspec.DecodeError):
            return None

    def send(self, answer: FromMover) -> None:
        with self._lock:
            try:
                self._socket.sendall(encode(answer))
            except OSError:
                os._exit(0)

    def send_last(self, error: Exception) -> NoReturn:
        """Say what went wrong and end."""
        text = str(error) if isinstance(error, KVDepotError) else repr(error)
        self.send(Failed(text[:_MAXIMUM_TEXT], isinstance(error, MoverError) and error.is_final))
        os._exit(1)

    def _read(self, num_bytes: int) -> bytes:
        parts = bytearray()
        while len(parts) < num_bytes:
            part = self._socket.recv(min(num_bytes - len(parts), 1 << 20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)


class _Lane:
    """One direction: what was asked for, in order, on a thread."""

    def __init__(self, depot: _Depot, copy: CopyNow) -> None:
        self._depot = depot
        self._copy = copy
        self._requests: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="kvdepot-mover-lane", daemon=True).start()

    def put(self, request: Copy) -> None:
        self._requests.put(request)

    def _loop(self) -> None:
        while True:
            request = self._requests.get()
            try:
                is_settled = bool(self._copy(request))
            except CopyRefused as error:
                self._depot.send(Refused(request.number, str(error)[:_MAXIMUM_TEXT]))
            except BaseException as error:
                self._depot.send_last(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            else:
                self._depot.send(Copied(request.number, is_settled))
