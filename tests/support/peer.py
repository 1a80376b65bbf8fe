"""Peers of a depot: a registered worker that copies nothing, and a socket that sends arbitrary bytes."""

import socket

import msgspec
import pytest

from kvdepot.client.connection import Connection
from kvdepot.config import CONTROL_SOCKET
from kvdepot.errors import ErrorCode, RemoteError
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.server.connections import SILENCE_SECONDS
from kvdepot.wire import frames
from kvdepot.wire import messages as m

FULL = GroupKind.FULL_ATTENTION
SPEC = m.CacheSpec(64, (m.GroupShape(FULL, 16),), "bytes", "test")
DETAIL = m.GroupDetail(page_sizes_bytes=(64,), num_blocks=8)


def registration(
    spec: m.CacheSpec = SPEC,
    *,
    version: int = m.PROTOCOL_VERSION,
    rank: int = 0,
    world_size: int = 1,
    details: tuple[m.GroupDetail, ...] = (DETAIL,),
    instance: str = "engine",
) -> m.RegisterKVCache:
    return m.RegisterKVCache(version, instance, rank, world_size, "none", "none", "model", spec, details)


def prompt(num_chunks: int, salt: str = "") -> KeyRun:
    return hash_prefix(Namespace("model", tenant_salt=salt), 64, range(64 * num_chunks))


class Peer:
    """A registered worker that copies nothing."""

    maps_pool = False

    def __init__(self, depot: DepotProcess, request: m.RegisterKVCache | m.RegisterScheduler | None = None) -> None:
        self.connection = Connection(depot.url, "test", request or registration(), maps_pool=self.maps_pool)
        self.session = self.connection.wait_until_open(10)
        self.channel = self.connection.channel(self.session)
        self.context = self.session.context

    def ask(self, request: frames.Request) -> frames.Reply:
        return self.channel.call(request, 10.0)  # a lookup may wait half of this for tiers

    def prepare(self, run: KeyRun) -> m.StorePlan:
        message = m.PrepareStore(
            self.context, "r", run.tenant, run.digests, run.first_chunk, run.parent, (run.num_chunks,)
        )
        reply = self.ask(message)
        assert isinstance(reply, m.StorePlan)
        return reply

    def store(self, run: KeyRun) -> int:
        reply = self.ask(m.CommitStore(self.context, self.prepare(run).ticket))
        assert isinstance(reply, m.Done)
        return reply.count

    def find(self, run: KeyRun) -> m.LookupReply:
        reply = self.ask(m.Lookup(self.context, "r", run.digests))
        assert isinstance(reply, m.LookupReply)
        return reply

    def refusal(self, request: frames.Request) -> ErrorCode:
        with pytest.raises(RemoteError) as caught:
            self.ask(request)
        return caught.value.code

    def close(self) -> None:
        self.channel.close()
        self.connection.close()


def find(peer: Peer, run: KeyRun) -> int:
    """Look up a prefix and wait for tiers. Return the number of chunks found."""
    reply = peer.ask(m.Lookup(peer.context, "r", run.digests, run.tenant, 5.0))
    assert isinstance(reply, m.LookupReply)
    if reply.lease:
        peer.ask(m.Release(peer.context, (reply.lease,)))
    return reply.num_chunks


class RawSocket:
    """A connection to the control socket that sends arbitrary bytes. Without a session's token it is an operator's."""

    def __init__(self, depot: DepotProcess, token: bytes = b"") -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(1.0)
        self.socket.connect(str(depot.directory / CONTROL_SOCKET))
        self.socket.sendall(frames.encode_greeting(frames.JoinSession(token) if token else None))

    def send(self, frame: bytes | bytearray) -> None:
        self.socket.sendall(frames.LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes:
        """Return the depot's next frame, which must come within a second."""
        (length,) = frames.LENGTH.unpack(self._exactly(frames.LENGTH.size))
        return self._exactly(length)

    def _exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            more = self.socket.recv(num_bytes - len(data))
            assert more, "the depot closed the connection"
            data += more
        return data

    def is_closed(self) -> bool:
        """Return whether the depot closes this connection within some seconds without sending more."""
        self.socket.settimeout(3 * SILENCE_SECONDS)
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def error(self, frame: bytes) -> m.ErrorReply:
        self.send(frame)
        reply = frames.decode_reply(self.receive())
        assert isinstance(reply, m.ErrorReply)
        return reply

    def close(self) -> None:
        self.socket.close()


def frame(value: object) -> bytes:
    return (7).to_bytes(8, "little") + msgspec.msgpack.encode(value)
