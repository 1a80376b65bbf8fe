"""Sessions of connected clients, and the deaths of their processes.

A client that greets the depot with `OpenSession` gets a token and the descriptors of the pool and the table. Its
further connections begin with the token, which proves that their messages come from that process. Later bytes on the
first connection are pings, which the depot echoes. The session ends when that connection closes or the process dies,
since a forked child can keep the connection of a dead process open. A killed process can live on for up to 150 ms after
its connection closed (measured), so its unfinished extents are freed only once its pidfd reports its death. A later
server recognises a living process of another PID namespace by the lock that its mapping keeps on the pool.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.counting import Counts, depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.ownership import peer_credentials
from kvdepot.pool.table import Writer
from kvdepot.processes import EXHAUSTED, process_start_time, raise_if_exhausted
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_VERSIONS_REFUSED: Final = depot_counter("versions_refused", "Sessions refused because an engine is of another release")

MAXIMUM_SESSIONS: Final = 4096  # each takes a descriptor for its socket and a pidfd

_SO_PEERPIDFD: Final = 77  # Linux 6.5
_FIRST_LOCK: Final = 1 << 61  # lock offsets lie beyond the end of any pool


@dataclass(slots=True)
class Session:
    """The session of one client process, and its first connection."""

    number: int
    socket: socket.socket
    writer: Writer
    pidfd: int | None
    token: bytes


class SessionTable:
    """All open sessions, and the processes whose death is awaited. The server's loop polls its epoll set.

    Args:
        welcome: makes the answer to a greeting, with the descriptors to send. The table closes them.
        on_end: called with a session whose connection closed or whose process died.
        on_death: called with an awaited process that has died.
        is_awaited: returns whether anything waits for the death of a process.
        is_mapping: returns whether a process without a pid here still maps the pool.
        epoch: the server's epoch.
    """

    def __init__(
        self,
        welcome: Callable[[bytes, Writer], tuple[frames.SessionOpened, list[int]]],
        on_end: Callable[[Session], None],
        on_death: Callable[[Writer], None],
        is_awaited: Callable[[Writer], bool],
        is_mapping: Callable[[Writer], bool],
        epoch: int,
        counters: Counts,
    ) -> None:
        self._counters = counters
        self._welcome = welcome
        self._on_end = on_end
        self._on_death = on_death
        self._is_awaited = is_awaited
        self.is_mapping = is_mapping
        self._epoch = epoch
        self.by_token: dict[bytes, Session] = {}  # the open sessions
        self._by_fd: dict[int, Session] = {}  # the open sessions by their connection's descriptor, and by their pidfd
        self._dying: dict[int, Writer] = {}  # by pidfd, each process once
        self._watched: set[Writer] = set()  # the values of `_dying`
        self._unnumbered: set[Writer] = set()  # processes without a pid here, polled by `find_dead`
        self._next = 1
        self._epoll = select.epoll()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is work."""
        return self._epoll.fileno()

    def __len__(self) -> int:
        return len(self.by_token)

    def open(self, connection: socket.socket, request: frames.OpenSession) -> None:
        """Open a session over a connection that greeted with `request`, or refuse it. Take over the connection."""
        pid, _, _ = peer_credentials(connection)
        reason = m.check_protocol_version(request.protocol_version)
        if reason:
            self._counters[_VERSIONS_REFUSED] += 1
            self._refuse(connection, pid, ErrorCode.VERSION_MISMATCH, reason)
            return
        if len(self.by_token) >= MAXIMUM_SESSIONS:
            self._refuse(connection, pid, ErrorCode.OUT_OF_RANGE, f"there are {MAXIMUM_SESSIONS} sessions")
            return
        try:
            started_at = process_start_time(pid) if pid > 0 else _FIRST_LOCK + secrets.randbits(61)
            pidfd = _peer_pidfd(connection, pid)
        except OSError:
            connection.close()  # its death could not be detected reliably
            return
        # A process of another PID namespace has no pid here, but its pidfd still reports its death.
        token = secrets.token_bytes(frames.TOKEN_BYTES)
        session = Session(self._next, connection, Writer(max(pid, 0), started_at), pidfd, token)
        self._next += 1
        self._by_fd[connection.fileno()] = self.by_token[token] = session
        self._epoll.register(connection.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        if pidfd is not None:
            # Without it, a forked child that keeps a copy of the connection would hide the death of the process.
            self._by_fd[pidfd] = session
            self._epoll.register(pidfd, select.EPOLLIN)
        descriptors: list[int] = []
        try:
            opened, descriptors = self._welcome(token, session.writer)
            socket.send_fds(connection, [frames.encode_greeting(opened)], descriptors)
        except OSError as error:
            logger.warning("session %d of process %d ends: %s", session.number, pid, error)
            self._end(session)
            return
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        logger.info("session %d: process %d (%s)", session.number, session.writer.pid, request.client)

    def end(self, token: bytes) -> None:
        """End the session with this token, if it is open."""
        session = self.by_token.get(token)
        if session is not None:
            self._end(session)

    def hand_over(self, number: int, fd: int) -> bool:
        """Send a session a mover's pidfd. Return False if it cannot be sent."""
        for session in self.by_token.values():
            if session.number == number:
                try:
                    socket.send_fds(session.socket, [frames.MOVER_NOTE], [fd])
                except OSError:
                    return False
                return True
        return False

    def serve(self, is_over: Callable[[], bool]) -> None:
        """Do waiting work until `is_over`, but at least one item. Never wait.

        Poll for one event at a time: the kernel then puts a served connection behind all others, so a flood on one
        connection does not delay the rest.
        """
        while events := self._epoll.poll(0, 1):
            fd, _ = events[0]
            if fd in self._dying:
                self._bury(fd)
            elif fd == self._by_fd[fd].pidfd:
                self._end(self._by_fd[fd])
            else:
                self._read(self._by_fd[fd])
            if is_over():
                return

    def find_dead(self, is_over: Callable[[], bool]) -> None:
        """Report processes without a pid here that no longer map the pool, until `is_over` but at least one."""
        for writer in [writer for writer in self._unnumbered if not self.is_mapping(writer)]:
            self._unnumbered.discard(writer)
            logger.info("a process of another PID namespace is dead or has unmapped the pool")
            self._on_death(writer)
            if is_over():
                return

    def await_death(self, writer: Writer) -> bool:
        """Watch a writer named in an earlier server's table. Return False if it is dead."""
        if not writer.pid:
            is_mapping = self.is_mapping(writer)
            if is_mapping:
                self._unnumbered.add(writer)
            return is_mapping
        try:
            pidfd = os.pidfd_open(writer.pid)
        except OverflowError:
            return False  # no server wrote this pid
        except OSError as error:
            return error.errno in EXHAUSTED  # undecidable without descriptors: assume alive
        try:
            is_another = process_start_time(writer.pid) != writer.start_time
        except OSError:
            is_another = False
        # The number was reused. Waiting for this process would hold the extents of a dead one as long as it lives.
        if is_another:
            os.close(pidfd)
            return False
        self._watch(pidfd, writer)
        return True

    def close(self) -> None:
        """Close all connections, which clients notice at once."""
        for session in self.by_token.values():
            session.socket.close()
            if session.pidfd is not None:
                os.close(session.pidfd)
        for pidfd in self._dying:
            os.close(pidfd)
        self._epoll.close()

    def _read(self, session: Session) -> None:
        try:
            data = session.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            if data:
                session.socket.send(data)  # pings
                return
        except OSError:
            pass
        self._end(session)

    def _refuse(self, connection: socket.socket, pid: int, code: ErrorCode, reason: str) -> None:
        logger.warning("refused a session of process %d: %s", pid, reason)
        with contextlib.suppress(OSError):
            connection.send(frames.encode_greeting(m.ErrorReply(self._epoch, code, reason)))
        connection.close()

    def _end(self, session: Session) -> None:
        for fd in (session.socket.fileno(), session.pidfd):
            if fd is not None:
                self._epoll.unregister(fd)
                del self._by_fd[fd]
        session.socket.close()
        del self.by_token[session.token]
        self._on_end(session)
        if session.pidfd is None:
            # The process died before it could be watched, or the kernel is too old for pidfds of peers.
            if not self.await_death(session.writer):
                self._on_death(session.writer)
        elif self._is_awaited(session.writer):
            self._watch(session.pidfd, session.writer)
        else:
            os.close(session.pidfd)

    def _watch(self, pidfd: int, writer: Writer) -> None:
        """Wait for a death. Take over the pidfd, and close it at once if that process is watched already."""
        if writer in self._watched:
            os.close(pidfd)
            return
        self._watched.add(writer)
        self._dying[pidfd] = writer
        self._epoll.register(pidfd, select.EPOLLIN)

    def _bury(self, pidfd: int) -> None:
        self._epoll.unregister(pidfd)
        os.close(pidfd)
        writer = self._dying.pop(pidfd)
        self._watched.discard(writer)
        logger.info("process %d is dead", writer.pid)
        self._on_death(writer)


def _peer_pidfd(connection: socket.socket, pid: int) -> int | None:
    """Return a pidfd of the client process, None if it is dead.

    Raises:
        OSError: this process has no descriptor left.
    """
    try:
        return connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError as error:
        raise_if_exhausted(error)
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise_if_exhausted(error)
        return None
