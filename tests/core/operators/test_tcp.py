# pyright: reportPrivateUsage=false
"""TCP with CURVE: listed keys are served, everybody else gets nothing and costs nothing."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import zmq

from kvdepot.client.operator import ask_depot
from kvdepot.client.remote import RemoteChannel
from kvdepot.errors import ConfigError, DepotUnavailable, ErrorCode, RemoteError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.curve import ClientKeys, KeyPair, generate_keys, load_pair
from support.peer import Peer, frame, prompt, registration

CURVE_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)


@dataclass
class RemoteDepot:
    process: DepotProcess
    url: str  # tcp://127.0.0.1:PORT
    listed: ClientKeys
    unlisted: ClientKeys

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


def pair(directory: Path, name: str) -> KeyPair:
    return load_pair(generate_keys(directory, name)[1], "--curve-secret")


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[RemoteDepot]:
    server = pair(tmp_path / "server", "depot")
    listed, unlisted = pair(tmp_path / "listed", "alice"), pair(tmp_path / "unlisted", "mallory")
    with DepotProcess(
        "--listen", "tcp://127.0.0.1:*",
        "--curve-secret", str(tmp_path / "server" / "depot.key_secret"), "--curve-clients", str(tmp_path / "listed"),
    ) as process:  # fmt: skip
        (url,) = (endpoint for endpoint in process.status().endpoints if endpoint.startswith("tcp://"))
        yield RemoteDepot(process, url, ClientKeys(listed, server.public), ClientKeys(unlisted, server.public))


@pytest.fixture
def engine(remote: RemoteDepot) -> Iterator[Peer]:
    """A worker on the depot's machine: after whatever a test did, it is still served."""
    engine = Peer(remote.process, registration(instance="bystander"))
    assert engine.store(prompt(3, "bystander")) == 3
    yield engine
    assert engine.find(prompt(3, "bystander")).num_chunks == 3
    engine.close()


def test_a_listed_key_is_served(remote: RemoteDepot) -> None:
    reply = ask_depot(o.Status(), remote.url, keys=remote.listed)
    assert isinstance(reply, o.StatusReply)
    assert reply.status.epoch == remote.process.status().epoch
    assert remote.url in reply.status.endpoints
    peer = Peer(remote.process)
    peer.store(prompt(3))
    peer.close()
    assert ask_depot(o.Clear(), remote.url, keys=remote.listed) == m.Done(reply.epoch, 3)


def test_a_key_that_is_not_listed_gets_nothing(remote: RemoteDepot, engine: Peer) -> None:
    with pytest.raises(DepotUnavailable, match=r"does its --curve-clients list ours\?"):
        ask_depot(o.Clear(), remote.url, 0.5, remote.unlisted)
    assert engine.find(prompt(3, "bystander")).num_chunks == 3
    assert remote.process.status().counters["keys_refused"] == 1  # it was told, and did not ask again


def test_a_wrong_server_key_gets_nothing(remote: RemoteDepot, engine: Peer) -> None:
    with pytest.raises(DepotUnavailable, match=r"is --curve-server its key"):
        ask_depot(o.Clear(), remote.url, 0.5, replace(remote.listed, server=remote.unlisted.own.public))
    assert remote.process.status().counters["keys_refused"] == 0


def test_without_keys_nothing_comes_back(remote: RemoteDepot, engine: Peer) -> None:
    with pytest.raises(ConfigError, match="needs --curve-secret"):
        ask_depot(m.Hello(m.PROTOCOL_VERSION), remote.url)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for plain in (False, True):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        if plain:
            dealer.setsockopt(zmq.PLAIN_USERNAME, b"root")
            dealer.setsockopt(zmq.PLAIN_PASSWORD, b"root")
        dealer.connect(remote.url)
        dealer.send(frame(["clear"]))
        assert not dealer.poll(500)
        dealer.close()
    context.term()


def test_strangers_are_hung_up_on_and_leave_nothing(remote: RemoteDepot, engine: Peer) -> None:
    descriptors, resident = remote.num_descriptors(), remote.resident_bytes()
    strangers: list[socket.socket] = []
    for number in range(400):
        strangers.append(socket.create_connection(remote.address))
        if number % 3:
            half_a_command = b"\x06" + (60_000).to_bytes(8, "big") + bytes(30_000)
            strangers[-1].sendall(CURVE_GREETING + half_a_command if number % 3 == 1 else os.urandom(200))
    assert engine.find(prompt(3, "bystander")).num_chunks == 3
    newcomer = Peer(remote.process, registration(instance="newcomer"))
    newcomer.close()
    assert isinstance(ask_depot(o.Status(), remote.url, keys=remote.listed), o.StatusReply)
    wait_until(lambda: remote.num_descriptors() <= descriptors)
    for stranger in strangers:
        stranger.close()
    assert remote.resident_bytes() - resident < 64 << 20


@pytest.mark.promise(73)
def test_strangers_that_take_every_descriptor_keep_nobody_from_being_served(remote: RemoteDepot, engine: Peer) -> None:
    operator = RemoteChannel(remote.url, remote.listed)

    def is_served() -> bool:
        return isinstance(operator.call(o.Status(), 10.0), o.StatusReply)

    assert is_served()
    descriptors = remote.num_descriptors()
    _, hard = resource.prlimit(remote.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(remote.process.pid, resource.RLIMIT_NOFILE, (descriptors + 20, hard))
    strangers: list[socket.socket] = []
    with suppress(TimeoutError):  # the last ones wait
        for _ in range(60):
            strangers.append(socket.create_connection(remote.address, timeout=0.2))
            assert strangers[-1].recv(1), "ZeroMQ greets whom it accepted"
    assert len(strangers) < 60
    assert engine.find(prompt(3, "bystander")).num_chunks == 3
    assert is_served()
    with suppress(DepotUnavailable):  # it may have to wait: Regression: this ended the depot
        ask_depot(o.Status(), remote.process.url, 0.5)
    assert engine.find(prompt(3, "bystander")).num_chunks == 3
    for stranger in strangers:
        stranger.close()
    newcomer = Peer(remote.process, registration(instance="newcomer"))
    assert newcomer.find(prompt(3, "bystander")).num_chunks == 3
    newcomer.close()

    def lets_newcomers_in() -> bool:
        with suppress(DepotUnavailable):
            return isinstance(ask_depot(o.Status(), remote.url, 1.0, remote.listed), o.StatusReply)
        return False

    wait_until(lets_newcomers_in)
    assert is_served()
    operator.close()


def test_a_frame_that_no_request_needs_ends_the_connection(remote: RemoteDepot, engine: Peer) -> None:
    channel = RemoteChannel(remote.url, remote.listed)
    assert isinstance(channel.call(m.Hello(m.PROTOCOL_VERSION), 2.0), m.HelloReply)
    with pytest.raises(DepotUnavailable):
        channel.call(m.Lookup(1, "r", bytes(32 * 4096)), 0.5)
    channel.close()


def test_a_message_of_several_frames_is_refused(remote: RemoteDepot, engine: Peer) -> None:
    channel = RemoteChannel(remote.url, remote.listed)
    hello = bytes(frames.encode_frame(7, m.Hello(m.PROTOCOL_VERSION)))
    for parts in ([hello, b""], [b""] * 10_000, [hello] * 1000):
        channel._socket.send_multipart(parts)
        assert channel._socket.poll(5000)
        reply = frames.decode_reply(channel._socket.recv())
        assert isinstance(reply, m.ErrorReply)
        assert reply.code is ErrorCode.MALFORMED
    assert isinstance(channel.call(m.Hello(m.PROTOCOL_VERSION), 2.0), m.HelloReply)
    channel.close()


def test_a_session_is_not_to_be_had_over_tcp(remote: RemoteDepot, engine: Peer) -> None:
    channel = RemoteChannel(remote.url, remote.listed)
    digests = prompt(3, "bystander").digests
    for request in (m.Lookup(engine.context, "r", digests), m.Unregister(engine.context), registration()):
        with pytest.raises(RemoteError, match="over TCP only operators") as caught:
            channel.call(request, 2.0)
        assert caught.value.code is ErrorCode.UNKNOWN_SESSION
    assert isinstance(channel.call(m.Hello(m.PROTOCOL_VERSION), 2.0), m.HelloReply)
    channel.close()
    assert remote.process.status().num_leases == 0
    assert len(remote.process.status().contexts) == 1
