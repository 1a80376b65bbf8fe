"""Connections to a Valkey or Redis server, each used by one thread at a time.

After a call raised, its connection is closed, because later bytes may belong to an earlier command.
"""

import contextlib
import select
import socket
import ssl
import threading
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from kvdepot.tiers.valkey.resp import Command, Reply, ReplyError, receive, send


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Names of PEM files, "" for none: the trusted authority (otherwise the system's), the own certificate, its key."""

    authority: str = ""
    certificate: str = ""
    key: str = ""

    def read(self) -> ssl.SSLContext:
        """Read the files.

        Raises:
            OSError: a file is missing or malformed.
        """
        context = ssl.create_default_context(cafile=self.authority or None)
        if self.certificate:
            context.load_cert_chain(self.certificate, self.key or None)
        return context


@dataclass(frozen=True, slots=True)
class Server:
    """The address and credentials of a server.

    Files are read for each connection: passwords and certificates are replaced while the depot runs.
    """

    host: str
    port: int = 6379
    unix_path: str = ""  # replaces host and port
    user: str = ""
    password: str = ""
    password_file: str = ""  # replaces the password
    database: int = 0
    tls: TlsFiles | None = None
    timeout_seconds: float = 0.75  # limit to connect, to send a command, and for each wait for bytes

    def __repr__(self) -> str:  # keeps the password out of tracebacks
        return f"Server({self.unix_path or f'{self.host}:{self.port}'})"

    def read_password(self) -> str:
        """Return the password, "" for none.

        Raises:
            OSError: its file cannot be read.
        """
        return Path(self.password_file).read_text().strip() if self.password_file else self.password


class ValkeyConnection:
    """One connection.

    Raises:
        OSError: the server cannot be reached, or refuses the credentials.
    """

    def __init__(self, server: Server) -> None:
        self._socket = connect(server)
        self._reader = BufferedReader(self._socket.makefile("rb", buffering=0), 4096)
        try:
            commands: list[Command] = []
            password = server.read_password()
            if password:
                user = [server.user.encode()] if server.user else []
                commands.append([b"AUTH", *user, password.encode()])
            if server.database:
                commands.append([b"SELECT", b"%d" % server.database])
            for reply in self.call(commands):
                if isinstance(reply, ReplyError):
                    raise ConnectionRefusedError(f"the server says: {reply.text}")
        except BaseException:
            self.close()
            raise

    def call(self, commands: Sequence[Command], targets: Sequence[memoryview | None] = ()) -> list[Reply]:
        """Send commands, and return their replies in one round trip.

        Args:
            commands: names and arguments.
            targets: empty, or the memory for each command's reply. A string of exactly this size is read into it, and
                the target itself is returned.

        Raises:
            OSError: the connection is unusable from now on.
        """
        send(self._socket, commands)
        return [receive(self._reader, target) for target in targets or [None] * len(commands)]

    @property
    def is_stale(self) -> bool:
        """Return whether an idle connection is readable: it was closed, or has bytes that belong to no command."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def shut_down(self) -> None:
        """Make the call that waits on this connection fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection."""
        self._reader.close()
        self._socket.close()


class Connections:
    """A pool of connections to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._idle: list[ValkeyConnection] = []
        self._lent: set[ValkeyConnection] = set()
        self._is_closed = False

    @contextlib.contextmanager
    def lend(self) -> Generator[ValkeyConnection]:
        """Lend a connection to this thread: an idle and usable one, or a new one."""
        connection = self._take() or ValkeyConnection(self.server)
        with self._lock:
            self._lent.add(connection)
            # It was made while `close` ran, which knew nothing of it. The call would last until the server answers.
            if self._is_closed:
                connection.shut_down()
        try:
            yield connection
        except BaseException:
            self._give_back(connection, is_sound=False)
            raise
        self._give_back(connection, is_sound=True)

    def close(self) -> None:
        """Close idle connections. Make calls on the others fail, which are closed when they are returned."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
            for connection in self._lent:
                connection.shut_down()
        for connection in idle:
            connection.close()

    def _take(self) -> ValkeyConnection | None:
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

    def _give_back(self, connection: ValkeyConnection, *, is_sound: bool) -> None:
        with self._lock:
            self._lent.discard(connection)
            if is_sound and not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()


def connect(server: Server) -> socket.socket:
    """Connect to a server. Each wait for bytes then ends after its timeout.

    Raises:
        OSError: it cannot be reached, or its certificate is not trusted.
    """
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
        if server.tls is not None:
            connected = server.tls.read().wrap_socket(connected, server_hostname=server.host)
        return connected
    except BaseException:
        connected.close()
        raise
