"""Bad input gets a typed error within a second, and all other peers are served on."""

import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvdepot.client.connection import open_session
from kvdepot.client.operator import ask_depot
from kvdepot.config import CONTROL_SOCKET, ServerConfig
from kvdepot.errors import ErrorCode, RemoteError
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.layout import GroupKind
from kvdepot.operate import operations as o
from kvdepot.server.app import DepotServer
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.peer import DETAIL, FULL, Peer, RawSocket, frame, prompt, registration


@pytest.fixture
def depot(emptied_depot: DepotProcess) -> DepotProcess:
    return emptied_depot


@pytest.fixture
def bystander(depot: DepotProcess) -> Iterator[Peer]:
    """Another client, which must still be served after each test."""
    bystander = Peer(depot, registration(instance="bystander"))
    assert bystander.store(prompt(3, "bystander")) == 3
    yield bystander
    assert bystander.find(prompt(3, "bystander")).num_chunks == 3
    bystander.close()


@pytest.fixture
def raw(depot: DepotProcess) -> Iterator[RawSocket]:
    raw = RawSocket(depot)
    yield raw
    raw.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", ErrorCode.MALFORMED),
        (b"abc", ErrorCode.MALFORMED),
        (bytes(8), ErrorCode.MALFORMED),
        (bytes(8) + b"\xc1\xff", ErrorCode.MALFORMED),
        (bytes(8) + b"\x91" * 100_000, ErrorCode.MALFORMED),
        (frame(["make_coffee", 1]), ErrorCode.UNKNOWN_OPERATION),
        (frame({"type": "hello"}), ErrorCode.MALFORMED),
        (bytes(8) + b"\x92\x81\x80\x01\x01", ErrorCode.MALFORMED),  # a map as a key of a map
        (bytes(8) + b"\x92\xa6lookup\x81\x80\x01", ErrorCode.MALFORMED),
        (frame(["hello", "one"]), ErrorCode.MALFORMED),
        (frame(["hello", -1]), ErrorCode.MALFORMED),
        (frame(["lookup", 1, "r", b"x" * 32]), ErrorCode.UNKNOWN_SESSION),
        (frame(["lookup", 1, "r" * 5000, b""]), ErrorCode.MALFORMED),
        (frame(["lookup", 1, "r", b"x" * (65_537 * 32)]), ErrorCode.MALFORMED),
        (frame(["release", 1, list(range(5000))]), ErrorCode.MALFORMED),
    ],
    ids=lambda value: value.hex()[:48] if isinstance(value, bytes) else None,  # some are too long for os.environ
)
@pytest.mark.promise(2, 4)
def test_a_bad_frame_gets_a_typed_error(
    data: bytes, code: ErrorCode, raw: RawSocket, depot: DepotProcess, bystander: Peer
) -> None:
    reply = raw.error(data)
    assert reply.code == code
    assert reply.message
    assert reply.epoch == depot.status().epoch


@pytest.mark.promise(2)
def test_an_error_names_an_unknown_operation_and_carries_the_number_of_its_request(raw: RawSocket) -> None:
    raw.send(frame(["make_coffee"]))
    data = raw.receive()
    reply = frames.decode_reply(data)
    assert isinstance(reply, m.ErrorReply)
    assert "make_coffee" in reply.message
    assert frames.sequence_of(data) == 7


@pytest.mark.promise(2, 60)
def test_random_frames_hurt_nobody(raw: RawSocket, depot: DepotProcess, bystander: Peer) -> None:
    rng = random.Random(5)
    tags = sorted(set(map(frames.operation_of, frames.request_types())) - {"clear", "drain", "set_log_level"})
    for _ in range(10_000):
        data = rng.randbytes(rng.randrange(60))
        if rng.random() < 0.5:
            fields = [rng.choice([0, 1, -1, 2**63, "x", b"y" * 31, None, [1], 1.5]) for _ in range(rng.randrange(8))]
            data = frame([rng.choice(tags), *fields])
        raw.send(data)
        frames.decode_reply(raw.receive())
    assert depot.status().num_entries == 3
    assert depot.status().counters.get("requests_failed", 0) == 0


def test_a_reply_that_is_declared_after_the_first_reply_is_known() -> None:
    assert frames.decode_reply(bytes(frames.encode_frame(1, m.Done(2)))) == m.Done(2)

    class Late(frames.Reply, tag="late", frozen=True):
        """A feature's reply, as if an engine had imported the feature only now."""

    assert frames.decode_reply(bytes(frames.encode_frame(1, Late(2)))) == Late(2)


@pytest.mark.promise(1)
def test_a_handler_that_raises_gives_an_error_reply(tmp_path: Path) -> None:
    """No known input makes a handler raise, so a server in this process gets a handler that does."""
    server = DepotServer(ServerConfig(tmp_path, pool_size_bytes=1 << 20, ephemeral=True))
    server.depot.operations[o.Status] = lambda _request: 1 // 0  # type: ignore[assignment,return-value]
    thread = threading.Thread(target=server.run)
    thread.start()
    with pytest.raises(RemoteError) as caught:
        ask_depot(o.Status(), str(tmp_path), 1.0)
    assert caught.value.code is ErrorCode.INTERNAL
    assert isinstance(ask_depot(m.Hello(m.PROTOCOL_VERSION), str(tmp_path), 1.0), m.HelloReply)
    server.stop()
    thread.join(10)


@pytest.mark.promise(1)
def test_a_reply_that_cannot_be_encoded_becomes_an_error_reply(tmp_path: Path) -> None:
    pool = tmp_path / os.fsdecode(b"pool\xff")
    with DepotProcess("--pool-dir", str(pool), "--ephemeral") as depot, closing(Peer(depot)) as peer:
        with pytest.raises(RemoteError, match="UnicodeEncodeError") as caught:
            ask_depot(o.Configuration(), depot.url)
        assert caught.value.code is ErrorCode.INTERNAL
        assert peer.store(prompt(3)) == peer.find(prompt(3)).num_chunks == 3


@pytest.mark.parametrize(
    "request_",
    [
        registration(m.CacheSpec(60, (m.GroupShape(FULL, 16),), "bytes")),
        registration(m.CacheSpec(64, (m.GroupShape(GroupKind.SLIDING_WINDOW, 16),), "bytes")),
        registration(m.CacheSpec(64, (m.GroupShape(FULL, 16, 128),), "bytes")),
        registration(details=(DETAIL, DETAIL)),
        registration(details=(m.GroupDetail((64,), 8, part=1 << 16),)),
        registration(rank=3, world_size=2),
    ],
)
@pytest.mark.promise(20)
def test_a_layout_that_does_not_add_up_is_refused(request_: m.RegisterKVCache, peer: Peer, bystander: Peer) -> None:
    assert peer.refusal(request_) is ErrorCode.BAD_LAYOUT


@pytest.mark.promise(7)
def test_another_protocol_version_is_refused_in_one_line_that_names_both(peer: Peer, depot: DepotProcess) -> None:
    with pytest.raises(RemoteError, match=r"protocol 99, this depot 1") as caught:
        peer.ask(registration(version=99))
    assert caught.value.code is ErrorCode.VERSION_MISMATCH
    for version in (m.OLDEST_PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(depot.directory / CONTROL_SOCKET))
            connection.sendall(frames.encode_greeting(frames.OpenSession(version, "another")))
            reply = frames.decode_session_reply(connection.recv(4096)[4:])
        assert isinstance(reply, m.ErrorReply)
        assert reply.code is ErrorCode.VERSION_MISMATCH
        assert f"protocol {version}, this depot 1" in reply.message
    assert depot.status().counters["versions_refused"] == 2


def test_a_second_commit_is_refused_and_changes_nothing(peer: Peer, bystander: Peer) -> None:
    ticket = peer.prepare(prompt(2)).ticket
    assert peer.ask(m.CommitStore(peer.context, ticket)) == m.Done(peer.session.epoch, 2)
    assert peer.refusal(m.CommitStore(peer.context, ticket)) is ErrorCode.UNKNOWN_TICKET
    assert peer.find(prompt(2)).num_chunks == 2


@pytest.mark.promise(9)
def test_an_abort_frees_at_once_and_a_second_is_harmless(peer: Peer, depot: DepotProcess) -> None:
    ticket = peer.prepare(prompt(2)).ticket
    assert peer.ask(m.AbortStore(peer.context, ticket)) == m.Done(peer.session.epoch, 2)
    assert depot.status().pool_used_bytes == 0
    assert peer.ask(m.AbortStore(peer.context, ticket)) == m.Done(peer.session.epoch, 0)
    assert peer.find(prompt(2)).num_chunks == 0


def test_digests_of_the_wrong_length_are_refused(peer: Peer, bystander: Peer) -> None:
    assert peer.refusal(m.Lookup(peer.context, "r", b"x" * 33)) is ErrorCode.BAD_KEY
    run = prompt(1)
    odd = m.PrepareStore(peer.context, "r", "t", run.digests[:-1], 0, run.parent, (1,))
    assert peer.refusal(odd) is ErrorCode.BAD_KEY


@pytest.mark.promise(60)
def test_a_chunk_number_that_no_prompt_has_is_refused_and_changes_nothing(
    peer: Peer, bystander: Peer, depot: DepotProcess
) -> None:
    """Regression: in a space without full attention, the second chunk's number overflowed and its node stayed."""
    windows = m.CacheSpec(64, (m.GroupShape(GroupKind.SLIDING_WINDOW, 16, 64),), "bytes", "test")
    registered = peer.ask(registration(windows))
    assert isinstance(registered, m.Registered)
    run = prompt(2)
    for first_chunk, refused in ((2**32 - 1, True), (2**31, True), (2**31 - 1, False)):
        request = m.PrepareStore(registered.context, "r", "t", run.digests, first_chunk, run.parent, (2,))
        if refused:
            assert peer.refusal(request) is ErrorCode.MALFORMED
            assert depot.status().num_chunks == 3
        else:
            peer.ask(request)
    assert peer.ask(m.Unregister(registered.context)) == m.Done(peer.session.epoch, 1)
    assert depot.status().num_chunks == 3


def test_coverage_that_does_not_fit_the_layout_is_refused(peer: Peer, bystander: Peer) -> None:
    run = prompt(2)
    for covered in ((), (3,), (2, 2)):
        message = m.PrepareStore(peer.context, "r", "t", run.digests, 0, run.parent, covered)
        assert peer.refusal(message) is ErrorCode.BAD_LAYOUT


@pytest.mark.promise(10)
def test_leases_end_with_their_request_their_release_or_their_session(peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(2))
    lease = peer.find(prompt(2)).lease
    assert depot.status().num_leases == 1
    assert peer.ask(m.Release(peer.context, (lease, lease, 999))) == m.Done(peer.session.epoch, 1)
    peer.find(prompt(2))
    peer.find(prompt(1))
    assert peer.ask(m.EndRequest(peer.context, "r")) == m.Done(peer.session.epoch, 2)
    other = Peer(depot, registration(instance="other"))
    other.find(prompt(2))
    assert depot.status().num_leases == 1
    other.close()
    wait_until(lambda: depot.status().num_leases == 0, 1.0)


def prepare_retrieve(peer: Peer, run: KeyRun) -> m.RetrievePlan:
    reply = peer.ask(m.PrepareRetrieve(peer.context, "r", run.digests, run.first_chunk, (run.num_chunks,)))
    assert isinstance(reply, m.RetrievePlan)
    return reply


@pytest.mark.promise(11)
def test_the_same_request_id_in_two_engines_changes_nothing_for_either(peer: Peer, depot: DepotProcess) -> None:
    other = Peer(depot, registration(instance="other"))
    mine, theirs = prompt(2, "mine"), prompt(2, "theirs")
    first, second = peer.prepare(mine), other.prepare(theirs)
    assert first.ticket != second.ticket
    assert peer.ask(m.CommitStore(peer.context, first.ticket)) == m.Done(peer.session.epoch, 2)
    assert other.ask(m.CommitStore(other.context, second.ticket)) == m.Done(peer.session.epoch, 2)
    leases = [prepare_retrieve(who, run).lease for who, run in ((peer, mine), (other, theirs))]
    assert peer.ask(m.EndRequest(peer.context, "r")) == m.Done(peer.session.epoch, 1)
    assert depot.status().num_leases == 1
    assert other.ask(m.Release(other.context, (leases[1],))) == m.Done(peer.session.epoch, 1)
    other.close()


@pytest.mark.promise(11)
def test_a_request_id_that_is_used_again_stores_and_finds_as_if_it_were_new(peer: Peer, depot: DepotProcess) -> None:
    for number in range(3):
        run = prompt(2, f"turn {number}")
        assert peer.store(run) == 2
        assert peer.find(run).num_chunks == 2
        peer.ask(m.EndRequest(peer.context, "r"))
    assert (depot.status().num_entries, depot.status().num_leases) == (6, 0)


@pytest.mark.promise(12)
def test_two_identical_requests_of_one_worker_share_no_reservation(peer: Peer, depot: DepotProcess) -> None:
    first, second = peer.prepare(prompt(2)), peer.prepare(prompt(2))
    assert first.ticket
    assert (second.ticket, second.extents, second.num_present) == (0, b"", 2), "each extent has one writer"
    peer.ask(m.CommitStore(peer.context, first.ticket))
    one, two = prepare_retrieve(peer, prompt(2)), prepare_retrieve(peer, prompt(2))
    assert one.extents == two.extents
    assert one.lease != two.lease
    peer.ask(m.Release(peer.context, (one.lease,)))
    assert depot.status().num_leases == 1, "the other one still reads"


@pytest.mark.promise(42)
def test_a_thousand_leases_on_one_chunk_work(peer: Peer, depot: DepotProcess) -> None:
    peer.store(prompt(1))
    assert all(peer.find(prompt(1)).num_chunks == 1 for _ in range(1000))
    status = depot.status()
    assert status.num_leases == 1000
    assert next(c for c in status.contexts if c.context == peer.context).num_leases == 1000


@pytest.mark.promise(8)
def test_a_lookup_of_128k_tokens_carries_digests_only() -> None:
    run = hash_prefix(Namespace("model"), 64, range(128 * 1024))
    assert len(frames.encode_frame(1, m.Lookup(1, "request", run.digests))) <= 70_000


@pytest.mark.promise(2)
def test_silent_and_garbled_session_connections_hurt_nobody(depot: DepotProcess, bystander: Peer) -> None:
    connections: list[socket.socket] = []
    for number in range(200):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(depot.directory / CONTROL_SOCKET))
        if number % 2:
            connection.sendall(os.urandom(number) if number % 4 == 1 else (100).to_bytes(4, "little"))
        connections.append(connection)
    assert bystander.find(prompt(3, "bystander")).num_chunks == 3
    for connection in connections:
        connection.close()
    wait_until(lambda: depot.status().num_sessions == 1)


@pytest.mark.promise(53)
def test_the_socket_is_for_this_user_alone(depot: DepotProcess) -> None:
    assert (depot.directory / CONTROL_SOCKET).stat().st_mode & 0o777 == 0o600


def test_a_session_hands_over_pool_and_table(depot: DepotProcess) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        opened, mapping = open_session(connection, depot.directory / CONTROL_SOCKET, "test", True, m.PROTOCOL_VERSION)
    assert mapping is not None
    assert mapping.size_bytes == opened.pool_size_bytes == 64 << 20
    with pytest.raises(TypeError):
        mapping.table.headers[0] = 1  # workers must not write to the table
