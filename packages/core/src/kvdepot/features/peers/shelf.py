"""The depot's side of its listener: starts the process, and tells it which entries the pool has and where.

Everything runs on the loop's thread, and nothing waits. Entries that the listener sends are leased, so that their bytes
stay. A lease ends when the listener says so, when it dies, or at the age of any lease.
"""

import errno
import logging
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ConfigError
from kvdepot.features.peers import protocol as p
from kvdepot.pool.table import Entry
from kvdepot.server.depot import Depot
from kvdepot.tiers import keys as k

logger = logging.getLogger(__name__)

_LISTENER_STARTS: Final = depot_counter("listener_starts", "Starts of the process through which peers read")
_PEER_QUESTIONS: Final = depot_counter("peer_questions", "Entries that peers asked for")
_PEER_READS: Final = depot_counter("peer_reads", "Entries sent to peers")
_PEER_READ_BYTES: Final = depot_counter("peer_read_bytes", "Bytes sent to peers")

_MODULE: Final = "kvdepot.features.peers.listener"
_BACKLOG: Final = 128
_PAUSE_SECONDS: Final = 1.0  # before another listener is started, so that one that fails at once costs little
_PORT_SECONDS: Final = 2.0  # to wait for a port at the start
_PORT_PAUSE_SECONDS: Final = 0.02
_MESSAGES_A_TURN: Final = 4  # of up to 512 keys, each about 2 us


class Shelf:
    """The listener of one depot, and the answers to its questions.

    Args:
        depot: the depot whose pool is read.
        pool_fd: the pool's file.
        address: host and port to listen on.
        token: readers must know it.
        on_take: answers an offer of a peer.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(
        self,
        depot: Depot,
        pool_fd: int,
        address: tuple[str, int],
        token: bytes,
        on_take: Callable[[p.Take], p.Taking],
    ) -> None:
        self._state = depot.state
        self._index = depot.index
        self._pool_fd = pool_fd
        self._token = token
        self._on_take = on_take
        self._context = next(depot.state.numbers)  # owns the leases
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._pidfd = -1
        self._start_at = 0.0
        self._listening = _listen(address)
        self._epoll = select.epoll()
        depot.state.watched[self._epoll.fileno()] = self._serve

    @property
    def pid(self) -> int:
        """The id of the listener's process, 0 while there is none."""
        return 0 if self._process is None else self._process.pid

    def swept(self, now: float) -> None:
        """Start the listener if there is none. Called on the thread that outlives it, twice a second."""
        if self._process is None and now >= self._start_at:
            self._start_at = now + _PAUSE_SECONDS
            try:
                self._start()
            except OSError as error:
                logger.error("peers cannot read: their listener does not start: %s", error)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            fds = self._pool_fd, self._listening.fileno(), theirs.fileno()
            command = [sys.executable, "-P", "-m", _MODULE, str(os.getpid()), *map(str, fds)]
            process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._socket = process, ours
        ours.setblocking(False)
        self._pidfd = os.pidfd_open(process.pid)
        self._epoll.register(self._pidfd, select.EPOLLIN)
        self._epoll.register(ours, select.EPOLLIN)
        ours.send(p.encode(p.Setup(self._index.extents.capacity_bytes, self._token)))
        self._state.counters[_LISTENER_STARTS] += 1

    def _serve(self) -> None:
        """Answer some questions, and notice the death of the listener."""
        for fd, _ in self._epoll.poll(0):
            if fd == self._pidfd:
                self._end()
                return
        for _ in range(_MESSAGES_A_TURN):
            try:
                if self._socket is None or not self._answer(self._socket):
                    return
            except (OSError, p.PeerError):
                logger.exception("the listener for peers is killed")
                self._kill()
                return

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()  # its pidfd tells when it is dead

    def _answer(self, connection: socket.socket) -> bool:
        """Answer one question. Return False if there is none."""
        try:
            body = connection.recv(p.FRAME_BYTES)
        except BlockingIOError:
            return False
        if not body:
            return False  # its process is about to be reaped
        match request := p.decode_from_listener(body):
            case p.Find(keys):
                self._state.counters[_PEER_QUESTIONS] += len(keys)
                connection.send(p.encode(p.Have(bytes(self._find(key) is not None for key in keys))))
            case p.Pin(keys):
                connection.send(p.encode(self._pin(keys)))
            case p.Take():
                connection.send(p.encode(self._on_take(request)))
            case p.Unpin(lease):
                self._state.leases.release(self._context, lease)
        return True

    def _find(self, key: bytes) -> tuple[int, Entry] | None:
        """Return the node and the sealed entry of a tier key. Its tenant and weights are in the chunk's key, too."""
        index, digest, depth = self._index, k.digest_of(key), k.depth_of(key)
        place = k.place_in(key)
        for space in index.spaces:
            node = index.nodes.find(space, digest, depth)
            if node is None:
                continue
            for entry in index.entries.sealed(node):
                group, part = index.table.place_of(entry)
                num_bytes, check = index.table.extent(entry)[1], index.table.check_of(entry)
                if k.place_of(space.digest, group, part, check, num_bytes).startswith(place):
                    return node, entry
        return None

    def _pin(self, keys: list[bytes]) -> p.Pinned:
        found = [self._find(key) for key in keys]
        table, counters = self._index.table, self._state.counters
        # A sealed record has its checksum in the owner's place.
        places = [(0, 0, b"") if each is None else (*table.extent(each[1]), table.owner_of(each[1])) for each in found]
        nodes = tuple(dict.fromkeys(each[0] for each in found if each is not None))
        counters[_PEER_READS] += sum(each is not None for each in found)
        counters[_PEER_READ_BYTES] += sum(size for _, size, _ in places)
        return p.Pinned(self._state.leases.grant(self._context, "", nodes, self._state.clock()), places)

    def _end(self) -> None:
        """End the listener's leases. Its connections wait for the next one."""
        logger.error("the listener for peers (pid %d) has ended", self.pid)
        self._stop()
        leases = self._state.leases
        self._state.background.add_urgent(leases.end_context(self._context), leases.count_of(self._context))

    def _stop(self) -> None:
        if self._process is not None and self._socket is not None:
            self._process.kill()
            self._process.wait()
            self._socket.close()
            self._epoll.unregister(self._pidfd)
            os.close(self._pidfd)
            self._process = self._socket = None

    def close(self) -> None:
        """Kill the listener, and stop listening. Idempotent."""
        self._stop()
        self._listening.close()
        self._epoll.close()


def _listen(address: tuple[str, int]) -> socket.socket:
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    until = time.monotonic() + _PORT_SECONDS
    while True:
        try:
            return socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            # The listener of a killed depot dies with it, but perhaps a little later.
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise ConfigError(f"--peers {address[0]}:{address[1]}: {error}") from error
            time.sleep(_PORT_PAUSE_SECONDS)
