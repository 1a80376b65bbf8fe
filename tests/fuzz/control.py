"""The control socket as a target: clients send any bytes in any pieces, stop reading, and hang up.

Every whole frame of a connection is served once and in order until the connection breaks the framing. When all clients
have left, the table holds nothing.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

from fuzz.depot import Bytes
from fuzz.tiers import FOLDER
from kvdepot.server import connections as module
from kvdepot.server.access import Access
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.wire import frames
from kvdepot.wire import messages as m

TOKEN: Final = bytes(range(frames.TOKEN_BYTES))
_CLIENTS: Final = 3
_PATH: Final = FOLDER / "control.sock"
_SMALL_BOUNDS: Final = {  # small, so that an input of some hundred bytes reaches them
    "MAXIMUM_OF_OWNER": 2,
    "MAXIMUM_HELD_BYTES": 40_000,
    "MAXIMUM_HELD_BY_ONE_BYTES": 10_000,
    "MAXIMUM_UNREAD_BYTES": 600_000,
    "_READ_BYTES": 4096,
}


def frames_in(sent: bytes) -> list[bytes] | None:
    """Return the whole frames after the greeting, up to a length that is too large.

    Return None if there is no greeting, or if it opens a session, as that connection leaves the table.
    """
    length = int.from_bytes(sent[:4], "little")
    if len(sent) < 4 or length > frames.MAXIMUM_GREETING_BYTES or len(sent) < 4 + length:
        return None
    try:
        if length and isinstance(frames.decode_greeting(sent[4 : 4 + length]), frames.OpenSession):
            return None
    except frames.FrameError:
        return None
    found: list[bytes] = []
    place = 4 + length
    while len(sent) >= place + 4:
        length = int.from_bytes(sent[place : place + 4], "little")
        if length > frames.MAXIMUM_FRAME_BYTES or len(sent) < place + 4 + length:
            break
        found.append(sent[place + 4 : place + 4 + length])
        place += 4 + length
    return found


@dataclass(eq=False)
class Client:
    """One connection, from its peer's side."""

    socket: socket.socket
    sent: bytearray = field(default_factory=bytearray)
    answers: bytearray = field(default_factory=bytearray)

    def receive(self) -> None:
        with suppress(OSError):  # no data, or the socket is closed
            while data := self.socket.recv(1 << 20):
                self.answers += data


class Peers:
    """A table of connections, and the actions of an input on it."""

    def __init__(self, source: Bytes) -> None:
        self.source = source
        self.clients: list[Client] = []
        self.served: dict[int, list[bytes]] = {}  # by id of the server's connection
        self.held: list[tuple[Connection, bytes]] = []
        self.connections: list[Connection] = []  # all served ones, so that no id is reused
        self.ended: set[bytes] = set()
        _PATH.unlink(missing_ok=True)
        self.table = ConnectionTable(
            _PATH, Access(), self.is_owner, self.end_owner, lambda opened, _greeting: opened.close(), self.handle
        )

    def is_owner(self, token: bytes) -> bool:
        return token == TOKEN and token not in self.ended

    def end_owner(self, token: bytes) -> None:
        assert token == TOKEN
        self.ended.add(token)
        self.table.close_owner(token)

    def handle(self, _table: ConnectionTable, connection: Connection, frame: memoryview) -> None:
        data = bytes(frame)
        self.served.setdefault(id(connection), []).append(data)
        self.connections.append(connection)
        if data[:1] == b"h":
            self.table.hold(connection, len(data))
            self.held.append((connection, data))
        else:
            self.table.send(connection, data * (200 if data[:1] == b"x" else 1))

    def run(self) -> None:
        steps: list[Callable[[], None]] = [
            self.connect,
            self.send,
            self.send_frame,
            self.send_frame,
            self.receive,
            self.close,
            self.release,
            self.sweep,
        ]
        try:
            while not self.source.is_over:
                steps[self.source.below(len(steps))]()
                self.serve()
            self.finish()
        finally:
            self.table.close()
            for client in self.clients:
                client.socket.close()

    def serve(self) -> None:
        for _ in range(200):
            self.table.serve(time.monotonic() + 60.0)
            if not self.table.has_work:
                break
        else:
            raise AssertionError("the table never comes to rest")

    # --- steps ----------------------------------------------------------------------------------------------------

    def client(self) -> Client | None:
        return self.clients[self.source.byte() % len(self.clients)] if self.clients else None

    def connect(self) -> None:
        """Connect, mostly with a greeting that joins or opens a session, or is an operator's or a stranger's."""
        choice = self.source.byte()
        if len([each for each in self.clients if each.socket.fileno() >= 0]) >= _CLIENTS:
            return
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(str(_PATH))
        connected.setblocking(False)
        self.clients.append(Client(connected))
        join = frames.JoinSession(TOKEN)
        nobody, session = frames.JoinSession(bytes(frames.TOKEN_BYTES)), frames.OpenSession(m.PROTOCOL_VERSION, "fuzz")
        greeting = frames.encode_greeting((join, join, None, nobody, join, session)[choice % 6])
        if choice < 0xE0:
            self.send_bytes(self.clients[-1], greeting[: None if choice < 0xD0 else choice & 15])

    def send(self) -> None:
        """Send the next bytes of the input unchanged."""
        client, data = self.client(), self.source.take(self.source.below(32))
        if client is not None:
            self.send_bytes(client, data)

    def send_frame(self) -> None:
        """Send a frame, perhaps a large one, perhaps only its beginning."""
        client, kind, size, cut = self.client(), self.source.byte(), self.source.byte(), self.source.byte()
        data = (b"hxa"[kind % 3 : kind % 3 + 1] * (size * (1 if kind < 0xC0 else 100)))[:60_000]
        whole = frames.LENGTH.pack(len(data)) + data
        if client is not None:
            self.send_bytes(client, whole if cut < 0xC0 else whole[: cut * len(whole) // 256])

    def send_bytes(self, client: Client, data: bytes) -> None:
        if client.socket.fileno() >= 0:
            with suppress(OSError):
                client.sent += data[: client.socket.send(data)]

    def receive(self) -> None:
        client = self.client()
        if client is not None and client.socket.fileno() >= 0:
            client.receive()

    def close(self) -> None:
        client = self.client()
        if client is not None:
            client.socket.close()

    def release(self) -> None:
        """Answer a held request."""
        if self.held:
            connection, data = self.held.pop(self.source.byte() % len(self.held))
            self.table.release(connection, len(data))
            self.table.send(connection, data)

    def sweep(self) -> None:
        """Let some clients be silent for too long."""
        later = time.monotonic() + module.SILENCE_SECONDS + 1
        with patch("time.monotonic", lambda: later):
            self.table.sweep(lambda: True)

    # --- invariants -----------------------------------------------------------------------------------------------

    def finish(self) -> None:
        is_moving = True
        while is_moving:
            is_moving = bool(self.held)
            self.release()
            for client in self.clients:
                before = len(client.answers)
                client.receive()
                is_moving |= len(client.answers) > before
            self.serve()
        for client in self.clients:
            client.socket.close()
        self.serve()
        for served in self.served.values():
            assert any(served == (frames_in(bytes(client.sent)) or [])[: len(served)] for client in self.clients), (
                "a frame that nobody sent"
            )
        table = self.table
        assert not len(table)
        assert (table.held_bytes, table.unread_bytes) == (0, 0)
        table.check_integrity()


def talk(data: bytes) -> None:
    """Run one input on a table with small bounds."""
    before = len(os.listdir("/proc/self/fd"))
    with ExitStack() as bounds:
        for name, bound in _SMALL_BOUNDS.items():
            bounds.enter_context(patch.object(module, name, bound))
        Peers(Bytes(data[:400])).run()
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left open"


def seeds() -> list[bytes]:
    """Return conversations of a session, an operator and a stranger: whole, cut, large, held and unread frames."""
    greet = [bytes([0, kind]) for kind in (0, 2, 3, 5, 0xD3, 0xE0)]
    frame = [bytes([2, 0, kind, 40, cut]) for kind in (0, 1, 2, 0xC0, 0xC1, 0xC2) for cut in (0, 0xE0)]
    raw = [bytes([1, 0, 8]) + (5).to_bytes(4, "little") + b"abcd", bytes([1, 0, 5]) + b"\xff\xff\xff\xffa"]
    rest = [bytes([4, 0]), bytes([6, 0]), bytes([7]), bytes([5, 0])]
    found = [hello + step * count + b"".join(rest) for hello in greet for step in [*frame, *raw] for count in (1, 4)]
    everybody = b"".join(greet[:3]) + b"".join(bytes([2, who, 1, 200, 0]) for who in range(3)) * 8
    return [*found, everybody + b"".join(rest)]
