"""The protocol of Valkey and Redis (RESP2), as far as a tier needs it, without copies of large values.

Payloads are sent as they lie in the pool, and replies are read into it: 2.8 to 3.5 GB/s on one connection where
redis-py, which builds `bytes` of them, had 0.42 to 0.48 (`docs/performance.md`, "Other tiers"). A connection belongs to
one thread at a time; `Connections` lends them. One that raised is closed, as what comes next on it may belong to an
earlier question.
"""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Final

_CRLF: Final = b"\r\n"
_LARGEST_REPLY: Final = 64 << 20  # of one string; nothing that a tier wrote is larger
_MOST_ITEMS: Final = 1 << 20
_SMALL: Final = 4096  # strings up to here are copied into one send


@dataclass(frozen=True, slots=True)
class ReplyError:
    """The server's refusal of a command: a value, as the replies behind it are read all the same."""

    text: str


Reply = bytes | memoryview | int | None | ReplyError | list["Reply"]
Argument = bytes | memoryview
Command = Sequence[Argument]


@dataclass(frozen=True, slots=True)
class Server:
    """Where a server is and how to get in."""

    host: str
    port: int = 6379
    unix_path: str = ""  # instead of host and port
    user: str = ""
    password: str = ""
    database: int = 0
    tls: ssl.SSLContext | None = None
    timeout_seconds: float = 0.75  # of connecting, of sending a command, and of each wait for bytes

    def __repr__(self) -> str:  # no password in tracebacks
        return f"Server({self.unix_path or f'{self.host}:{self.port}'})"


class Connection:
    """One connection.

    Raises:
        OSError: no connection, or the server does not let us in.
    """

    def __init__(self, server: Server) -> None:
        self._socket = _connect(server)
        self._reader = BufferedReader(self._socket.makefile("rb", buffering=0), 4096)
        try:
            commands: list[Command] = []
            if server.password:
                user = [server.user.encode()] if server.user else []
                commands.append([b"AUTH", *user, server.password.encode()])
            if server.database:
                commands.append([b"SELECT", b"%d" % server.database])
            for reply in self.call(commands):
                if isinstance(reply, ReplyError):
                    raise ConnectionRefusedError(f"the server says: {reply.text}")
        except BaseException:
            self.close()
            raise

    def call(self, commands: Sequence[Command], targets: Sequence[memoryview | None] = ()) -> list[Reply]:
        """Send commands and return their replies, in one round trip.

        Args:
            commands: names and arguments.
            targets: for each command (or for none) where its reply shall be read to if it is a string of exactly this
                size; the reply is the target then.

        Raises:
            OSError: the connection is of no use any more.
        """
        small = bytearray()
        for command in commands:
            small += b"*%d\r\n" % len(command)
            for argument in command:
                small += b"$%d\r\n" % len(argument)
                if len(argument) <= _SMALL:
                    small += argument
                else:
                    self._socket.sendall(small)
                    self._socket.sendall(argument)
                    small.clear()
                small += _CRLF
        if small:
            self._socket.sendall(small)
        return [self._receive(target) for target in targets or [None] * len(commands)]

    @property
    def is_stale(self) -> bool:
        """Whether an idle connection has something to read: its end, or what belongs to nobody."""
        return bool(_readable(self._socket))

    def shut_down(self) -> None:
        """Make whoever waits on this connection fail now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close it."""
        self._reader.close()
        self._socket.close()

    def _receive(self, target: memoryview | None = None) -> Reply:
        line = self._reader.readline(65536)
        if not line.endswith(_CRLF):
            raise ConnectionResetError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        match kind:
            case b"+":
                return rest
            case b"-":
                return ReplyError(rest.decode(errors="replace"))
            case b":":
                return _number(rest)
            case b"$":
                return self._receive_string(_number(rest), target)
            case b"*":
                count = _number(rest)
                if count > _MOST_ITEMS:
                    raise ConnectionAbortedError(f"a reply of {count} items")
                return None if count < 0 else [self._receive() for _ in range(count)]
            case _:
                raise ConnectionAbortedError(f"not a reply: {line[:20]!r}")

    def _receive_string(self, size: int, target: memoryview | None) -> bytes | memoryview | None:
        if size < 0:
            return None
        if size > _LARGEST_REPLY:
            raise ConnectionAbortedError(f"a reply of {size} bytes")
        fits = target is not None and target.nbytes == size
        place = target if target is not None and fits else memoryview(bytearray(size))
        done = 0
        while done < size:
            read = self._reader.readinto(place[done:])
            if not read:
                raise ConnectionResetError("the server closed the connection")
            done += read
        if self._reader.read(2) != _CRLF:
            raise ConnectionAbortedError("a string that does not end")
        return place if fits else bytes(place)


class Connections:
    """Connections to one server, lent to threads."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self) -> Generator[Connection]:
        """Lend a connection, an idle one if there is one that is sound."""
        connection = self._take() or Connection(self._server)
        with self._lock:
            self._lent.add(connection)
            if self._is_closed:
                connection.shut_down()
        try:
            yield connection
        except BaseException:
            self._give_back(connection, is_sound=False)
            raise
        self._give_back(connection, is_sound=True)

    def close(self) -> None:
        """Close those that are idle and end what happens on the others; they are closed as they come back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.shut_down()
        for connection in idle:
            connection.close()

    def _take(self) -> Connection | None:
        while True:
            with self._lock:
                if self._is_closed:
                    raise OSError("the tier is closed")
                if not self._idle:
                    return None
                connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()

    def _give_back(self, connection: Connection, *, is_sound: bool) -> None:
        with self._lock:
            self._lent.discard(connection)
            if is_sound and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


def _connect(server: Server) -> socket.socket:
    if server.unix_path:
        connected = socket.socket(socket.AF_UNIX)
    else:
        connected = socket.create_connection((server.host, server.port), min(1.0, server.timeout_seconds))
    try:
        connected.settimeout(server.timeout_seconds)
        if server.unix_path:
            connected.connect(server.unix_path)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connected if server.tls is None else server.tls.wrap_socket(connected, server_hostname=server.host)
    except BaseException:
        connected.close()
        raise


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise ConnectionAbortedError(f"not a number: {text[:20]!r}") from error


def _readable(waiting: socket.socket) -> list[tuple[int, int]]:
    poll = select.poll()
    poll.register(waiting, select.POLLIN)
    return poll.poll(0)
