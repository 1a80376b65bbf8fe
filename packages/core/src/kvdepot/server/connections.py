"""Connections of the control socket: receive and send whole frames, without one connection delaying another.

A connection begins with a greeting. The greeting opens a session, joins one by its token, or is empty, as an
operator's. A connection that opens a session moves to `SessionTable`. On the others, every further frame is a request.
The server's loop calls `serve` when `fileno` is readable. A turn serves the connections round-robin, one frame each,
until its time is up.

The table keeps its bounds by not reading, so that the kernel makes the sender wait. It does not read a connection
with an unread reply or too many bytes of waiting requests, and reads none while all of them together hold too much. It
closes a connection that breaks the framing, does not complete a frame in time, or falls silent without a session. If
the unread replies of all connections exceed their bound, it closes the connection with the most. When it closes a
connection of a session, the session ends, so its engine notices and reconnects.
"""

import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvdepot.errors import require
from kvdepot.server.access import Access, Listener, Warnings
from kvdepot.wire import frames

SILENCE_SECONDS: Final = 5.0  # for a greeting, for the rest of a frame, and between an operator's requests
MAXIMUM_OF_OWNER: Final = 64  # connections per session; a worker needs 3
MAXIMUM_HELD_BYTES: Final = 64 << 20  # in total, of requests that wait for an answer or for the rest of their frame
MAXIMUM_HELD_BY_ONE_BYTES: Final = 16 << 20  # per connection: at least four greedy clients are needed to fill the total
MAXIMUM_UNREAD_BYTES: Final = 64 << 20  # in total, of replies

_WAITING_BYTES: Final = 4096  # memory of a waiting request beside its frame: 3.4 KiB, measured
_READ_BYTES: Final = 64 << 10  # per read; a frame that fits needs no room set aside
_EVENTS: Final = 64  # per poll: a turn serves requests for 0.8 ms, at 10 us and more each
_LENGTH_BYTES: Final = frames.LENGTH.size


@dataclass(slots=True, eq=False)
class Connection:
    """One connection. Other classes may use only `owner`."""

    socket: socket.socket
    owner: bytes | None = None  # None before the greeting, b"" for an operator
    is_open: bool = True
    received: bytearray = field(default_factory=bytearray)  # part of a frame, or more than one
    unread: bytearray = field(default_factory=bytearray)  # bytes of replies that the kernel did not accept yet
    held_bytes: int = 0  # of requests that wait for an answer
    set_aside_bytes: int = 0  # reserved for the rest of a frame
    events: int = select.EPOLLIN
    is_queued: bool = False
    is_parked: bool = False  # not read until others hold less
    wanted_bytes: int = 0  # that must be free before it is read again


class ConnectionTable:
    """All connections of the control socket that opened no session. The server's loop polls its epoll set.

    Args:
        path: the socket to listen on.
        access: decides which processes may connect.
        is_owner: returns whether a token belongs to an open session.
        end_owner: ends the session of a token, and thereby calls `close_owner`.
        open_session: takes over a socket whose greeting opens a session.
        handle: called with this table, a connection and one frame, which is valid only during the call. It answers by
            `send`, now or after `hold`.

    Attributes:
        has_work: whether there may be work that `fileno` does not show. False means that there is none.

    Raises:
        ConfigError: the socket cannot be created.
    """

    def __init__(
        self,
        path: Path,
        access: Access,
        is_owner: Callable[[bytes], bool],
        end_owner: Callable[[bytes], None],
        open_session: Callable[[socket.socket, frames.OpenSession], None],
        handle: "Callable[[ConnectionTable, Connection, memoryview], None]",
    ) -> None:
        self.has_work = False
        self._is_owner = is_owner
        self._end_owner = end_owner
        self._open_session = open_session
        self._handle = handle
        self._connections: dict[int, Connection] = {}
        self._of_owner: dict[bytes, set[Connection]] = {}
        self._unfinished: dict[Connection, float] = {}  # deadlines of those that owe a frame, the earliest first
        self._queue: deque[Connection] = deque()  # connections that may have a frame, in the order of their turns
        self._parked: deque[Connection] = deque()
        self.held_bytes = 0  # of requests that wait for an answer or for the rest of their frame
        self.unread_bytes = 0  # of replies
        self._buffer = bytearray(_READ_BYTES)
        self._view = memoryview(self._buffer)
        self._warnings = Warnings()
        self._epoll = select.epoll()
        try:
            self._listener = Listener(path, access, self._epoll, self._warnings)
        except BaseException:
            self._epoll.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is work."""
        return self._epoll.fileno()

    def __len__(self) -> int:
        return len(self._connections)

    def __iter__(self) -> Iterator[Connection]:
        return iter(self._connections.values())

    def serve(self, until: float) -> None:
        """Serve frames until the time `until`, but at least one if there is one. Never wait."""
        queue = self._queue
        while True:
            for fd, events in self._epoll.poll(0, _EVENTS):
                connection = self._connections.get(fd)
                if connection is None:
                    if fd == self._listener.fileno():
                        self._accept()
                elif events & select.EPOLLHUP and not connection.events & select.EPOLLIN:
                    # The kernel reports it unasked, and would do so in each turn: the client reads no replies any more.
                    self._close(connection)
                elif not connection.is_queued:
                    connection.is_queued = True
                    queue.append(connection)
            if self._parked and self._can_unpark():
                self._unpark(self._parked.popleft())
            if not queue:
                self.has_work = bool(self._parked) and self._can_unpark()
                return
            for _ in range(len(queue)):
                connection = queue.popleft()
                connection.is_queued = False
                if connection.is_open:
                    self._attend(connection)
                if time.monotonic() >= until:
                    self.has_work = bool(queue or self._parked)
                    return

    def send(self, connection: Connection, frame: bytes | bytearray) -> None:
        """Send a reply, which is lost if the connection is closed. Never wait."""
        if not connection.is_open:
            return
        data = frames.LENGTH.pack(len(frame)) + frame
        # Sent now, it would arrive in the middle of the reply before it.
        if connection.unread:
            connection.unread += data
            self.unread_bytes += len(data)
        else:
            try:
                sent = connection.socket.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._close(connection)
                return
            if sent == len(data):
                return
            connection.unread += memoryview(data)[sent:]
            self.unread_bytes += len(data) - sent
            self._update(connection)
        while self.unread_bytes > MAXIMUM_UNREAD_BYTES:
            greediest = max(self._connections.values(), key=lambda each: len(each.unread))
            self._warnings.warn("closed a connection that left %d bytes of replies unread", len(greediest.unread))
            self._break(greediest)

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """Count the bytes of a request whose answer comes later, until `release` is called with the same arguments."""
        connection.held_bytes += num_bytes + _WAITING_BYTES
        self.held_bytes += num_bytes + _WAITING_BYTES
        self._update(connection)

    def release(self, connection: Connection, num_bytes: int) -> None:
        """End a `hold`: the request has been answered."""
        connection.held_bytes -= num_bytes + _WAITING_BYTES
        self.held_bytes -= num_bytes + _WAITING_BYTES
        self.has_work |= bool(self._parked)
        self._update(connection)

    def close_owner(self, owner: bytes) -> None:
        """Close the connections of a session that has ended."""
        for connection in list(self._of_owner.get(owner, ())):
            self._close(connection)

    def sweep(self, is_over: Callable[[], bool]) -> None:
        """Close connections that were silent for too long, until `is_over` but at least one.

        Listen again if possible.
        """
        now = time.monotonic()
        while self._unfinished:
            connection, due = next(iter(self._unfinished.items()))
            if due > now:
                break
            if connection.held_bytes or (not connection.unread and _has_more(connection.socket)):
                self._expect(connection)  # the client has sent data that the depot has not read yet
            else:
                self._break(connection)
            if is_over():
                break
        self._listener.resume()

    def listen_again(self) -> None:
        """Make the control socket again after its file was removed. Connections stay.

        Raises:
            ConfigError: the socket cannot be created.
        """
        self._listener.listen_again()

    def check_integrity(self) -> None:
        """Check that sums and lists agree with the open connections.

        Requests that are still held count even after their connection was closed.

        Raises:
            IntegrityError: they disagree.
        """
        connections = set(self)
        require(self.unread_bytes == sum(len(each.unread) for each in connections), "unread bytes are miscounted")
        held_bytes = sum(each.held_bytes + each.set_aside_bytes for each in connections)
        require(self.held_bytes >= held_bytes, "held bytes are miscounted")
        require(self._unfinished.keys() <= connections, "a closed connection owes a frame")
        for owner, siblings in self._of_owner.items():
            require(bool(siblings) and siblings <= connections, "a session has a closed connection")
            require(all(each.owner == owner for each in siblings), "a session has another's connection")

    def close(self) -> None:
        """Close every connection and remove the socket. Idempotent."""
        self._listener.close()
        for connection in list(self._connections.values()):
            connection.is_open = False
            connection.socket.close()
        self._connections.clear()
        self._epoll.close()

    def _accept(self) -> None:
        accepted = self._listener.accept()
        if accepted is None:
            return
        connection = Connection(accepted)
        self._connections[accepted.fileno()] = connection
        self._unfinished[connection] = time.monotonic() + SILENCE_SECONDS
        self._epoll.register(accepted.fileno(), connection.events)

    # --- one connection's turn ------------------------------------------------------------------------------------

    def _attend(self, connection: Connection) -> None:
        """Send unread replies, or receive and serve one frame."""
        if connection.unread and not self._flush(connection):
            return
        if not self._may_read(connection):
            return
        try:
            frame = self._next_frame(connection)
        except ConnectionAbortedError as error:
            self._warnings.warn("closed a connection: %s", error)
            self._break(connection)
            return
        except OSError:
            self._close(connection)
            return
        if frame is None:
            return
        # An engine may be silent for hours. An operator's connection, which anyone with access can open, is not kept
        # idle.
        if connection.owner:
            self._unfinished.pop(connection, None)
        else:
            self._expect(connection)
        self._handle(self, connection, frame)
        if len(connection.received) >= _LENGTH_BYTES:
            self._requeue(connection)

    def _next_frame(self, connection: Connection) -> memoryview | None:
        """Return the next frame if it is here whole, reading once at most.

        Raises:
            OSError: the connection ended, or the bytes are not a frame.
        """
        received = connection.received
        frame = self._take(connection) if received else None
        # The greeting may have moved the socket to `SessionTable`, whose pings would be read here, or there is no room
        # for the rest of the frame.
        if frame is not None or not connection.is_open or connection.is_parked:
            return frame
        try:
            num_read = connection.socket.recv_into(self._buffer)
        except BlockingIOError:
            return None
        if not num_read:
            raise ConnectionResetError
        if (
            not received
            and connection.owner is not None
            and num_read >= _LENGTH_BYTES
            and frames.LENGTH.unpack_from(self._buffer)[0] == num_read - _LENGTH_BYTES
        ):
            return self._view[_LENGTH_BYTES:num_read]  # the common case: exactly one frame, which needs no copy
        received += self._view[:num_read]
        return self._take(connection)

    def _take(self, connection: Connection) -> memoryview | None:
        """Return the first received frame after the greeting, if it is whole."""
        if connection.owner is None and not self._greet(connection):
            return None
        received = connection.received
        if len(received) < _LENGTH_BYTES:
            return None
        end = _LENGTH_BYTES + frames.LENGTH.unpack_from(received)[0]
        if end > _LENGTH_BYTES + frames.MAXIMUM_FRAME_BYTES:
            raise ConnectionAbortedError("a frame is too long")
        if len(received) >= end:
            with memoryview(received) as view:
                frame = memoryview(bytes(view[_LENGTH_BYTES:end]))
            del received[:end]
            self._give_back_set_aside(connection)
            return frame
        if not connection.set_aside_bytes:
            if end > _READ_BYTES:
                # Room for the whole frame comes first. Without it, many halves of long frames could fill the bound, and
                # none of them would ever be complete.
                if self.held_bytes + end >= MAXIMUM_HELD_BYTES:
                    self._park(connection, end)
                    return None
                connection.set_aside_bytes = end
                self.held_bytes += end
            self._expect(connection)
        return None

    def _greet(self, connection: Connection) -> bool:
        """Read the greeting, which sets the owner. Return False if it is incomplete or opened a session.

        Raises:
            OSError: the bytes are not a greeting, or the session has too many connections.
        """
        received = connection.received
        if len(received) < _LENGTH_BYTES:
            return False
        length = frames.LENGTH.unpack_from(received)[0]
        if length > frames.MAXIMUM_GREETING_BYTES:
            raise ConnectionAbortedError("no greeting")
        if len(received) < _LENGTH_BYTES + length:
            return False
        greeting = bytes(received[_LENGTH_BYTES : _LENGTH_BYTES + length])
        del received[: _LENGTH_BYTES + length]
        owner = b""
        if greeting:
            try:
                decoded = frames.decode_greeting(greeting)
            except frames.FrameError as error:
                raise ConnectionAbortedError(str(error)) from error
            if isinstance(decoded, frames.OpenSession):
                self._forget(connection)
                self._open_session(connection.socket, decoded)
                return False
            owner = decoded.token
        # Its session has ended, or never was. Requests get `unknown_session`, which tells the client to connect again;
        # a closed connection would look like a dead depot.
        if not self._is_owner(owner):
            connection.owner = b""
            return True
        siblings = self._of_owner.setdefault(owner, set())
        if len(siblings) >= MAXIMUM_OF_OWNER:
            self._end_owner(owner)
            raise ConnectionAbortedError(f"a session may have {MAXIMUM_OF_OWNER}")
        siblings.add(connection)
        connection.owner = owner
        self._unfinished.pop(connection, None)
        return True

    def _flush(self, connection: Connection) -> bool:
        """Send as much as the kernel accepts. Return whether that was everything."""
        try:
            sent = connection.socket.send(memoryview(connection.unread)[:_READ_BYTES])
        except BlockingIOError:
            return False
        except OSError:
            self._close(connection)
            return False
        del connection.unread[:sent]
        self.unread_bytes -= sent
        self._update(connection)
        return not connection.unread

    # --- reading ----------------------------------------------------------------------------------------------

    def _may_read(self, connection: Connection) -> bool:
        """Return whether to read a connection now; park it if the others hold too much.

        A connection without a waiting request may be read up to twice the bound.
        """
        if not connection.events & select.EPOLLIN:
            return False
        if self.held_bytes < (MAXIMUM_HELD_BYTES if connection.held_bytes else 2 * MAXIMUM_HELD_BYTES):
            return True
        self._park(connection)
        return False

    def _park(self, connection: Connection, wanted_bytes: int = 0) -> None:
        """Stop reading a connection until others hold less and `wanted_bytes` fit."""
        connection.wanted_bytes = wanted_bytes
        connection.is_parked = True
        self._parked.append(connection)
        self._unfinished.pop(connection, None)
        self._update(connection)

    def _can_unpark(self) -> bool:
        return self.held_bytes + self._parked[0].wanted_bytes < MAXIMUM_HELD_BYTES

    def _unpark(self, connection: Connection) -> None:
        connection.is_parked = False
        if connection.is_open:
            if connection.received or not connection.owner:  # a session may be silent between its frames
                self._expect(connection)
            self._update(connection)
            self._requeue(connection)

    def _give_back_set_aside(self, connection: Connection) -> None:
        if connection.set_aside_bytes:
            num_bytes, connection.set_aside_bytes = connection.set_aside_bytes, 0
            self.held_bytes -= num_bytes
            self.has_work |= bool(self._parked)

    def _expect(self, connection: Connection) -> None:
        """Give a connection `SILENCE_SECONDS` from now for its next frame."""
        self._unfinished.pop(connection, None)
        self._unfinished[connection] = time.monotonic() + SILENCE_SECONDS

    def _requeue(self, connection: Connection) -> None:
        if connection.is_open and not connection.is_queued:
            connection.is_queued = True
            self._queue.append(connection)
            self.has_work = True

    def _update(self, connection: Connection) -> None:
        """Tell the kernel which events of a changed connection wake the loop."""
        if not connection.is_open:
            return
        may_read = not (connection.unread or connection.is_parked or connection.held_bytes >= MAXIMUM_HELD_BY_ONE_BYTES)
        events = (select.EPOLLIN if may_read else 0) | (select.EPOLLOUT if connection.unread else 0)
        if events != connection.events:
            connection.events = events
            self._epoll.modify(connection.socket.fileno(), events)
            # A whole frame may be here already, of which the kernel knows nothing.
            if may_read and connection.received:
                self._requeue(connection)

    def _break(self, connection: Connection) -> None:
        """Close a connection from this side, and end its session."""
        owner = connection.owner
        self._close(connection)
        if owner:
            self._end_owner(owner)

    def _close(self, connection: Connection) -> None:
        if connection.is_open:
            self._forget(connection)
            connection.socket.close()

    def _forget(self, connection: Connection) -> None:
        """Take a connection out of the table without closing its socket."""
        connection.is_open = False
        fd = connection.socket.fileno()
        del self._connections[fd]
        self._epoll.unregister(fd)  # close would not do it: a child that is being started may have a copy
        self._unfinished.pop(connection, None)
        self.unread_bytes -= len(connection.unread)
        connection.unread, connection.received = bytearray(), bytearray()
        self._give_back_set_aside(connection)
        if connection.owner:
            siblings = self._of_owner[connection.owner]
            siblings.discard(connection)
            if not siblings:
                del self._of_owner[connection.owner]


def _has_more(connection: socket.socket) -> bool:
    try:
        return bool(connection.recv(1, socket.MSG_PEEK))
    except OSError:
        return False
