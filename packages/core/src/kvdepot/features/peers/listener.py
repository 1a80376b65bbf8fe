"""The listener: the process through which other depots read this depot's pool.

    python -m kvdepot.features.peers.listener PARENT_PID POOL_FD LISTENING_FD DEPOT_FD

It is a process of its own, so that foreign bytes and the network reach neither the depot's loop nor its interpreter
lock. It inherits the listening socket, the pool and a socket to the depot, and serves each connection on a thread. It
names entries to the depot, which leases them, and sends their bytes from the pool without copying them.

It ends with its depot. If it dies, the depot ends its leases and starts another one, and connections wait meanwhile.
"""

import contextlib
import logging
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final, TypeVar

from kvdepot.features.peers import protocol as p
from kvdepot.logs import set_up_logs
from kvdepot.processes import be_a_child
from kvdepot.tiers.keys import KEY_BYTES
from kvdepot.tiers.trailer import checksum_of, make_trailer

logger = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 256  # a thread each: 64 peers that read with 4 threads
_GREETING_SECONDS: Final = 5.0
_EXCHANGE_SECONDS: Final = 10.0  # from a request to `Done`; a reader gives up after a second
_SILENT_SECONDS: Final = 600.0  # between two exchanges
_PAUSE_SECONDS: Final = 0.05

T = TypeVar("T")


class _Depot:
    """The depot, asked by one thread at a time. If it does not answer, this process ends."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._lock = threading.Lock()

    def setup(self) -> p.Setup:
        """Return the first message."""
        return self._received(p.Setup)

    def ask(self, question: p.Find | p.Pin | p.Take, kind: type[T]) -> T:
        """Send a question, and return its answer."""
        with self._lock:
            self._send(question)
            return self._received(kind)

    def unpin(self, lease: int) -> None:
        """End a lease."""
        with self._lock:
            self._send(p.Unpin(lease))

    def _send(self, message: p.FromListener) -> None:
        try:
            self._socket.send(p.encode(message))
        except OSError:
            os._exit(0)

    def _received(self, kind: type[T]) -> T:
        try:
            message = p.decode_from_depot(self._socket.recv(p.FRAME_BYTES))
        except (OSError, p.PeerError):  # an empty packet is the end of the depot
            os._exit(0)
        if not isinstance(message, kind):
            os._exit(1)
        return message


class _Listener:
    def __init__(self, setup: p.Setup, pool_fd: int, depot: _Depot) -> None:
        self._token = setup.token
        self._pool_fd = pool_fd
        self._pool = memoryview(mmap.mmap(pool_fd, setup.pool_bytes, prot=mmap.PROT_READ))
        self._depot = depot
        self._free = threading.BoundedSemaphore(MOST_CONNECTIONS)

    def run(self, listening: socket.socket) -> None:
        """Accept connections. Does not return."""
        while True:
            self._free.acquire()  # beyond the bound, they wait in the kernel's queue
            try:
                connection, _ = listening.accept()
            except OSError:  # no descriptor is left, or the connection is gone already
                self._free.release()
                time.sleep(_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._serve, args=(p.Stream(connection),), daemon=True).start()

    def _serve(self, reader: p.Stream) -> None:
        try:
            reader.until = time.monotonic() + _GREETING_SECONDS
            reader.greet_as_listener(self._token)
            while True:
                reader.until = time.monotonic() + _SILENT_SECONDS
                request = p.decode_from_reader(reader.receive_frame())
                reader.until = time.monotonic() + _EXCHANGE_SECONDS
                match request:
                    case p.Ask(keys):
                        reader.send_frame(self._depot.ask(p.Find(keys), p.Have))
                    case p.Read(keys):
                        self._send_entries(reader, keys)
                    case p.Take(address, tenant, digests):
                        if address.startswith(":"):
                            host = reader.host
                            address = (f"[{host}]" if ":" in host else host) + address
                        reader.send_frame(self._depot.ask(p.Take(address, tenant, digests), p.Taking))
                    case p.Done():
                        raise p.PeerError("nothing was under way")
        except OSError:
            pass  # the reader went, or is too slow
        except p.PeerError as error:
            logger.warning("a reader was disconnected: %s", error)
        finally:
            reader.close()
            self._free.release()

    def _send_entries(self, reader: p.Stream, keys: Sequence[bytes]) -> None:
        """Send entries, pinned until the reader has them. Pages on their way in the network are the pool's own."""
        pinned = self._depot.ask(p.Pin(list(keys)), p.Pinned)
        try:
            trailers = [self._trailer(key, *place) for key, place in zip(keys, pinned.places, strict=True)]
            reader.send_frame(p.Coming([size for _, size, _ in pinned.places], trailers))
            for offset, size, _ in pinned.places:
                reader.send_file(self._pool_fd, offset, size)
            if not isinstance(p.decode_from_reader(reader.receive_frame()), p.Done):
                raise p.PeerError("it sent another request before it had the entries")
        finally:
            self._depot.unpin(pinned.lease)

    def _trailer(self, key: bytes, offset: int, size: int, checksum: bytes) -> bytes:
        """Return the trailer of an entry, with the checksum of its writer if there is one."""
        if not size:
            return b""
        if not any(checksum):
            checksum = checksum_of(self._pool[offset : offset + size])
        return make_trailer(key[:KEY_BYTES], size, checksum)


def main(arguments: Sequence[str]) -> None:
    """Serve one depot's pool. See the module."""
    parent_pid, pool_fd, listening_fd, depot_fd = map(int, arguments)
    be_a_child(parent_pid)
    set_up_logs("warning", text=f"listener {os.getpid()}: %(message)s")
    depot = _Depot(socket.socket(fileno=depot_fd))
    with contextlib.closing(socket.socket(fileno=listening_fd)) as listening:
        _Listener(depot.setup(), pool_fd, depot).run(listening)


if __name__ == "__main__":
    main(sys.argv[1:])
