"""The control socket: whole frames in turn, and bounds on the memory that a peer can make the depot hold."""

import os
import random
import resource
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from kvdepot.client.connection import Connection
from kvdepot.client.operator import ask_depot
from kvdepot.config import CONTROL_SOCKET, ServerConfig
from kvdepot.errors import DepotUnavailable, ErrorCode, RemoteError
from kvdepot.features.routers import zeromq
from kvdepot.features.routers.events import EventPublisher
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.numbers import Numbers
from kvdepot.features.routers.zeromq import BoundEndpoint, Listeners, MessageReader
from kvdepot.index.index import ChunkIndex
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.server import access
from kvdepot.server import connections as module
from kvdepot.server.access import Access
from kvdepot.server.app import DepotServer
from kvdepot.server.connections import SILENCE_SECONDS, ConnectionTable
from kvdepot.server.connections import Connection as Served
from kvdepot.server.contexts import MAXIMUM_CONTEXTS
from kvdepot.server.depot import Depot
from kvdepot.server.turns import PendingReply, Refused, Steps, run
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.peer import SPEC, Peer, RawSocket, frame, prompt, registration

TOKEN = bytes(range(frames.TOKEN_BYTES))
JOINED = frames.encode_greeting(frames.JoinSession(TOKEN))


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


# --- descriptors ----------------------------------------------------------------------------------------------------


@pytest.mark.promise(73)
def test_without_descriptors_connected_clients_are_served_and_others_wait(depot: DepotProcess) -> None:
    """Regression: connections to the control socket ended the depot."""
    peer = Peer(depot)
    assert peer.store(prompt(3)) == 3
    _, hard = resource.prlimit(depot.pid, resource.RLIMIT_NOFILE)
    limit = num_descriptors(depot.pid) + 40
    resource.prlimit(depot.pid, resource.RLIMIT_NOFILE, (limit, hard))
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(150)]
    for stranger in strangers:
        stranger.settimeout(10)
        with suppress(BlockingIOError):  # the kernel's queue is also full
            stranger.connect(str(depot.directory / CONTROL_SOCKET))
    wait_until(lambda: num_descriptors(depot.pid) >= limit - 20)
    assert all(peer.find(prompt(3)).num_chunks == 3 for _ in range(100))
    assert num_descriptors(depot.pid) < limit, "a reserve is left"
    for stranger in strangers:
        stranger.close()
    newcomer = Peer(depot, registration(instance="newcomer"))
    assert newcomer.find(prompt(3)).num_chunks == 3
    assert peer.find(prompt(3)).num_chunks == 3
    newcomer.close()
    peer.close()


def test_a_reserve_that_is_touched_does_not_wake_the_loop_again_and_again(
    table: "Table", monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = [True]

    def is_touched(_fd: int) -> bool:
        return touched[0]

    monkeypatch.setattr(access, "is_reserve_touched", is_touched)
    with table.connect() as client:
        table.serve()
        assert not select.select([table.table], [], [], 0)[0]
        touched[0] = False
        table.table.sweep(lambda: False)
        client.sendall(frames.encode_greeting(None) + framed(b"hello"))
        assert table.serve_until(1) == [b"hello"]


@pytest.mark.promise(73)
def test_a_process_that_is_waited_for_costs_one_descriptor_however_many_sessions_it_had(depot: DepotProcess) -> None:
    quarantined = before = 0
    for number in range(10):
        peer = Peer(depot, registration(instance=f"engine {number}"))
        peer.prepare(prompt(1, str(number)))
        peer.close()
        wait_until(lambda quarantined=quarantined: depot.status().quarantined_bytes > quarantined)
        quarantined = depot.status().quarantined_bytes
        before = before or num_descriptors(depot.pid)
    wait_until(lambda: num_descriptors(depot.pid) <= before, what="one pidfd for this process")


def test_unfinished_stores_of_a_worker_that_has_renewed_its_session_do_not_wait_for_its_process(
    depot: DepotProcess,
) -> None:
    """The worker registers again before the depot sees the end of its earlier session."""
    earlier = Peer(depot)
    assert earlier.prepare(prompt(2)).ticket
    renewed = Peer(depot)
    earlier.close()
    wait_until(lambda: depot.status().num_tickets == depot.status().pool_used_bytes == 0)
    assert depot.status().quarantined_bytes == 0
    assert renewed.store(prompt(2)) == 2
    renewed.close()


@pytest.mark.promise(74)
def test_a_session_has_a_bounded_number_of_contexts() -> None:
    index = ChunkIndex(ExtentAllocator(1 << 20), IndexTable.in_memory(16))
    depot = Depot(index, epoch=1, lease_seconds=1.0, clock=lambda: 0.0)
    requests: Sequence[frames.Request] = (
        registration(),
        m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", SPEC),
    )
    last = 0
    for number in range(MAXIMUM_CONTEXTS):
        registered = depot.handle(1, Writer(1, 1), requests[number % 2])
        assert isinstance(registered, m.Registered)
        last = registered.context
    for request in requests:
        with pytest.raises(Refused, match="64 contexts at most") as caught:
            depot.handle(1, Writer(1, 1), request)
        assert caught.value.code is ErrorCode.OUT_OF_RANGE
    assert len(depot.contexts.by_number) == MAXIMUM_CONTEXTS
    assert isinstance(depot.handle(2, Writer(1, 1), requests[0]), m.Registered)
    depot.handle(1, Writer(1, 1), m.Unregister(last))
    assert isinstance(depot.handle(1, Writer(1, 1), requests[0]), m.Registered)
    depot.end_session(1)
    assert isinstance(depot.handle(1, Writer(1, 1), requests[0]), m.Registered)


# --- frames and turns -----------------------------------------------------------------------------------------------


def framed(data: bytes) -> bytes:
    return frames.LENGTH.pack(len(data)) + data


class Table:
    """A table of connections that keeps their frames and answers them with `answer`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.frames: list[bytes] = []
        self.waiting: list[Callable[[], None]] = []
        self.ended: list[bytes] = []
        self.answer: Callable[[bytes], bytes | None] = lambda _data: b"ok"
        self.table = ConnectionTable(
            path,
            Access(),
            is_owner=lambda token: token == TOKEN,
            end_owner=self._end,
            open_session=lambda opened, _greeting: opened.close(),
            handle=self._handle,
        )

    def _end(self, token: bytes) -> None:
        self.ended.append(token)
        self.table.close_owner(token)

    def _handle(self, _table: ConnectionTable, connection: Served, data: memoryview) -> None:
        self.frames.append(bytes(data))
        reply = self.answer(bytes(data))
        if reply is not None:
            self.table.send(connection, reply)
            return
        num_bytes = len(data)
        self.table.hold(connection, num_bytes)

        def late() -> None:
            self.table.release(connection, num_bytes)
            self.table.send(connection, b"late")

        self.waiting.append(late)

    def connect(self) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(10)
        client.connect(str(self.path))
        return client

    def serve(self) -> None:
        self.table.serve(time.monotonic() + 0.01)

    def serve_until(self, num_frames: int) -> list[bytes]:
        wait_until(lambda: self.serve() or len(self.frames) >= num_frames)
        return self.frames

    def serve_all(self) -> None:
        """Serve until there is no more work."""
        while select.select([self.table], [], [], 0.0)[0] or self.table.has_work:  # local sends arrive at once
            self.serve()


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path / "control.sock")
    with closing(table.table):
        yield table


def test_a_copy_of_a_closed_connection_in_a_child_is_no_event(table: Table) -> None:
    """Regression: a child process at its start, for example HTTP's, ended the depot."""
    client = table.connect()
    client.sendall(frames.LENGTH.pack(0))
    table.serve_all()
    (served,) = table.table
    with closing(served.socket.dup()):
        client.close()
        table.serve_all()
        assert len(table.table) == 0
        assert not select.select([table.table], [], [], 0)[0]


def in_pieces(client: socket.socket, data: bytes, rng: random.Random) -> None:
    start = 0
    while start < len(data):
        size = rng.choice((1, 3, 4, 5, 20, 1000, 100_000, 1 << 20))
        client.sendall(data[start : start + size])
        start += size


@pytest.mark.parametrize("seed", range(5))
def test_frames_come_whole_and_in_order_however_they_are_cut(seed: int, table: Table) -> None:
    rng = random.Random(seed)
    sent = [rng.randbytes(rng.choice((0, 1, 8, 100, 65_532, 65_533, 70_000))) for _ in range(40)]
    sent.append(rng.randbytes(frames.MAXIMUM_FRAME_BYTES))
    with table.connect() as client:
        data = JOINED + b"".join(map(framed, sent))
        sender = threading.Thread(target=in_pieces, args=(client, data, rng))
        sender.start()
        assert table.serve_until(len(sent)) == sent
        sender.join()
        received = b""
        while len(received) < 6 * len(sent):
            received += client.recv(4096)
        assert received == framed(b"ok") * len(sent)


@pytest.mark.promise(60)
@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_nothing_stays_when_the_peer_is_gone(seed: int, table: Table) -> None:
    rng = random.Random(seed)
    table.answer = lambda _data: rng.choice((b"ok", bytes(300_000), None))
    for _ in range(100):
        sent = [framed(rng.randbytes(rng.choice((0, 5, 70_000)))) for _ in range(rng.randrange(5))]
        data = bytearray(
            rng.choice((JOINED, frames.encode_greeting(None), frames.LENGTH.pack(16) + b"?" * 16)) + b"".join(sent)
        )
        for _ in range(rng.randrange(3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        with table.connect() as client:
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.send(data[: rng.randrange(len(data) + 1)])
            table.serve_all()
        table.serve_all()
    for answer in table.waiting:
        answer()
    assert len(table.table) == 0
    assert (table.table.held_bytes, table.table.unread_bytes) == (0, 0)
    table.table.check_integrity()


@pytest.mark.promise(74)
def test_one_frame_of_each_connection_is_served_in_turn(table: Table) -> None:
    with table.connect() as flood, table.connect() as other, table.connect() as third:
        flood.sendall(JOINED + framed(b"flood") * 5000)
        table.serve_until(10)
        for client, name in ((other, b"other"), (third, b"third")):
            client.sendall(frames.encode_greeting(None) + framed(name) * 3)
        before = len(table.frames)
        wait_until(lambda: table.table.serve(0.0) or table.frames.count(b"third") == 3)
        assert len(table.frames) - before < 30


@pytest.mark.promise(74)
@pytest.mark.parametrize(
    "data",
    [
        frames.LENGTH.pack(15) + b"x" * 15,
        frames.encode_greeting(None) + frames.LENGTH.pack(frames.MAXIMUM_FRAME_BYTES + 1),
        b"\xff\xff\xff\xff",
    ],
)
def test_a_malformed_frame_ends_its_connection(data: bytes, table: Table) -> None:
    with table.connect() as client:
        client.sendall(data)
        wait_until(lambda: table.serve() or not len(table.table))
        assert table.frames == []


@pytest.mark.promise(74)
@pytest.mark.parametrize(
    ("data", "is_closed"),
    [
        (b"", True),
        (frames.encode_greeting(None), True),
        (frames.encode_greeting(None) + framed(b"x"), True),
        (frames.encode_greeting(frames.JoinSession(b"unknown token...")), True),
        (JOINED, False),
        (JOINED + framed(b"x"), False),
        (JOINED + framed(b"x")[:-1], True),
        (JOINED + framed(bytes(1 << 20))[:-1], True),
    ],
)
def test_only_a_session_may_be_silent_and_only_between_its_frames(
    data: bytes, is_closed: bool, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    with table.connect() as client:
        sender = threading.Thread(target=client.sendall, args=(data,))
        sender.start()
        wait_until(lambda: table.serve_all() or not sender.is_alive())
        table.serve_all()
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + SILENCE_SECONDS + 0.01)
        table.table.sweep(lambda: False)
        assert len(table.table) == 1
        monkeypatch.setattr(module, "time", later)
        table.table.sweep(lambda: False)
        assert len(table.table) == (not is_closed)
        assert table.table.held_bytes == 0
        assert table.ended == ([TOKEN] if is_closed and data.startswith(JOINED) else [])


@pytest.mark.parametrize(("data", "is_closed"), [(b"", False), (framed(b"x")[:-1], True)])
def test_a_session_that_was_not_read_for_a_while_may_be_silent_between_its_frames(
    data: bytes, is_closed: bool, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = bytes(4 << 20)
    table.answer = lambda _data: reply
    with table.connect() as client:
        client.sendall(JOINED + framed(b"x") + data)
        table.serve_until(1)
        (served,) = table.table
        monkeypatch.setattr(module, "MAXIMUM_HELD_BYTES", 1000)
        table.table.held_bytes += 2000  # others hold too much
        received = 0
        while received < frames.LENGTH.size + len(reply):
            table.serve_all()
            received += len(client.recv(1 << 20))
        table.serve_all()
        assert served.is_parked
        table.table.held_bytes -= 2000
        table.table.has_work = True
        table.serve_all()
        assert not served.is_parked
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + SILENCE_SECONDS + 0.01)
        monkeypatch.setattr(module, "time", later)
        table.table.sweep(lambda: False)
        assert table.ended == ([TOKEN] if is_closed else [])


def test_a_client_that_waits_for_the_depot_is_not_silent(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table.answer = lambda _data: None
    with table.connect() as waiting, table.connect() as unread:
        waiting.sendall(frames.encode_greeting(None) + framed(b"x"))
        unread.sendall(frames.encode_greeting(None))
        table.serve_until(1)
        table.serve_all()
        unread.sendall(framed(b"x"))
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + SILENCE_SECONDS + 0.01)
        monkeypatch.setattr(module, "time", later)
        table.table.sweep(lambda: False)
        assert len(table.table) == 2


# --- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.promise(74)
def test_requests_that_wait_are_bounded_in_bytes_and_all_are_answered(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, one = 4 << 20, 1 << 20
    monkeypatch.setattr(module, "MAXIMUM_HELD_BYTES", limit)
    monkeypatch.setattr(module, "MAXIMUM_HELD_BY_ONE_BYTES", one)
    table.answer = lambda _data: None
    num_clients, num_frames = 24, 10
    clients = [table.connect() for _ in range(num_clients)]
    data = JOINED + framed(bytes(300_000)) * num_frames
    senders = [threading.Thread(target=client.sendall, args=(data,)) for client in clients]
    for sender in senders:
        sender.start()
    most = num_answered = 0

    def is_served() -> bool:
        table.serve_all()
        return bool(table.waiting)

    while num_answered < num_clients * num_frames:
        wait_until(is_served, what="a request; a busy machine lets senders wait")
        most = max(most, table.table.held_bytes)
        assert max(each.held_bytes for each in table.table) < one + 310_000
        num_answered += len(table.waiting)
        answers, table.waiting = table.waiting, []
        for answer in answers:
            answer()
    assert one < most < 2 * limit + 310_000
    assert table.table.held_bytes == 0
    for sender, client in zip(senders, clients, strict=True):
        sender.join()
        client.close()


@pytest.mark.promise(74)
def test_requests_of_a_client_that_leaves_stay_on_the_account(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 1 << 20
    monkeypatch.setattr(module, "MAXIMUM_HELD_BYTES", limit)
    table.answer = lambda _data: None
    for _ in range(100):
        with table.connect() as client:
            client.sendall(frames.encode_greeting(None) + framed(bytes(60_000)))
            table.serve_all()
        table.serve_all()
    assert sum(map(len, table.frames)) < 2 * limit + 60_000
    for answer in table.waiting:
        answer()
    assert table.table.held_bytes == 0


@pytest.mark.promise(74)
def test_unread_replies_are_bounded_in_bytes_and_whoever_reads_gets_all_of_them(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, reply = 3 << 20, bytes(2 << 20)
    monkeypatch.setattr(module, "MAXIMUM_UNREAD_BYTES", limit)
    table.answer = lambda _data: reply
    with table.connect() as modest, table.connect() as greedy, table.connect() as third:
        for client, number in ((modest, 1), (greedy, 5), (third, 2)):
            client.sendall((JOINED if client is third else frames.encode_greeting(None)) + framed(b"x") * number)
        table.serve_all()
        assert len(table.frames) <= 3, "one reply each: clients that have not read it are not read"
        assert 0 < table.table.unread_bytes <= limit
        assert len(table.table) < 3
    table.serve_all()
    assert len(table.table) == 0
    assert table.table.unread_bytes == 0
    table.frames.clear()
    with table.connect() as reader:
        reader.sendall(frames.encode_greeting(None) + framed(b"x") * 5)
        received = 0
        while received < 5 * (len(reply) + frames.LENGTH.size):
            table.serve_all()
            received += len(reader.recv(1 << 20))
        assert len(table.frames) == 5


@pytest.mark.slow
@pytest.mark.promise(74)
def test_a_depot_holds_few_of_the_lookups_that_wait_for_its_tiers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it held as many as clients sent, gigabytes of them."""
    server = DepotServer(ServerConfig(tmp_path, tmp_path / "pool", pool_size_bytes=1 << 20, ephemeral=True))
    taken: list[Callable[[], None]] = []
    num_bytes = 0
    handle = server.depot.handle

    def wait_for_ever(session: int, writer: Writer, request: frames.Request) -> frames.Reply | PendingReply:
        nonlocal num_bytes
        if not isinstance(request, m.Lookup):
            return handle(session, writer, request)
        num_bytes += len(request.digests)
        return run(wait(), server.depot.state.fail)

    def wait() -> Steps:
        yield lambda resume: taken.append(resume) is None
        raise AssertionError("nobody resumes it")

    monkeypatch.setattr(server.depot, "handle", wait_for_ever)
    thread = threading.Thread(target=server.run)
    thread.start()
    scheduler = m.RegisterScheduler(m.PROTOCOL_VERSION, "engine", "model", SPEC)
    connection = Connection(str(tmp_path), "test", scheduler, maps_pool=False)
    session = connection.wait_until_open(10)
    lookup = m.Lookup(session.context, "r", bytes(32 * 65_536))
    channels = [connection.channel(session) for _ in range(8)]

    def push() -> None:
        for channel in channels:
            with suppress(DepotUnavailable):  # the depot holds no more of them either
                channel.submit(lookup)
            channel.drain()

    try:
        wait_until(lambda: push() or num_bytes > 40 << 20)
        for _ in range(100):
            push()
            assert isinstance(ask_depot(m.Hello(m.PROTOCOL_VERSION), str(tmp_path), 10.0), m.HelloReply)
        assert num_bytes < 100 << 20
    finally:
        for channel in channels:
            channel.close()
        connection.close()
        server.stop()
        thread.join(10)


# --- ZeroMQ, which remains ------------------------------------------------------------------------------------------


@pytest.mark.promise(74)
def test_a_message_of_very_many_frames_is_dropped_in_steps() -> None:
    """Regression: one message blocked the loop for seconds."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sender, receiver = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
    receiver.bind("inproc://frames")
    sender.connect("inproc://frames")
    reader = MessageReader(receiver, most_frames=2)
    try:
        sender.send_multipart([b""] * 100_000)
        sender.send_multipart([b"id", b"request"])
        num_steps = 1
        while (taken := reader.take()) is None:
            num_steps += 1
        assert num_steps > 100
        assert taken == [b""] * 3
        assert reader.take() == [b"id", b"request"]
        with pytest.raises(zmq.Again):
            reader.take()
    finally:
        context.destroy(linger=0)


@pytest.mark.promise(74)
def test_a_subscriber_that_asks_in_very_many_frames_is_dropped_in_steps() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        publisher = EventPublisher(context, Holdings(), "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", Numbers())
        assert publisher.replay is not None
        asker = context.socket(zmq.DEALER)
        asker.connect(publisher.replay_endpoint)
        asker.send_multipart([b""] * 20_000)
        assert publisher.replay.poll(10_000)
        assert publisher.serve() is None
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        wait_until(publisher.serve)
    finally:
        context.destroy(linger=0)


@pytest.mark.promise(73)
@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://[::1]:*", "ipc://{}/socket"])
def test_zeromq_serves_the_connected_and_has_newcomers_wait_while_the_reserve_is_touched(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    touched = [False]

    def is_touched(_fd: int) -> bool:
        return touched[0]

    monkeypatch.setattr(zeromq, "is_reserve_touched", is_touched)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    listener = BoundEndpoint(router, endpoint.format(tmp_path))
    listeners = Listeners([listener])

    def connected() -> "zmq.Socket[bytes]":
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(listener.endpoint)
        return dealer

    try:
        friend = connected()
        friend.send(b"before")
        assert router.poll(10_000)
        assert router.recv_multipart()[1] == b"before"
        listeners.look(0)
        touched[0] = True
        listeners.look(0)
        newcomer = connected()
        newcomer.send(b"newcomer")
        friend.send(b"meanwhile")
        assert router.poll(10_000)
        name, question = router.recv_multipart()
        assert question == b"meanwhile"
        router.send_multipart((name, b"answer"))
        assert friend.poll(10_000)
        assert not router.poll(500), "the newcomer waits"
        touched[0] = False
        listeners.look(0)
        assert router.poll(10_000)
        assert router.recv_multipart()[1] == b"newcomer"
        touched[0] = True
        listeners.look(0)
    finally:
        listeners.close()
        context.destroy(linger=0)
    assert [each.name for each in tmp_path.iterdir() if each.name != "socket"] == []


def test_a_session_that_breaks_the_framing_is_over_and_its_engine_comes_back(depot: DepotProcess) -> None:
    with closing(Peer(depot)) as peer, closing(RawSocket(depot, peer.session.token)) as raw:
        raw.send(frame(["lookup", peer.context, "r", b"x" * 32]))
        assert isinstance(frames.decode_reply(raw.receive()), m.LookupReply)
        raw.socket.sendall(frames.LENGTH.pack(frames.MAXIMUM_FRAME_BYTES + 1))
        assert raw.is_closed()
        wait_until(lambda: not peer.session.mark_lost.alive)
        with pytest.raises((DepotUnavailable, RemoteError)):  # the session is lost, or the depot does not know it
            peer.ask(m.Lookup(peer.context, "r", b"x" * 32))
        session = peer.connection.wait_until_open(10)
        with closing(peer.connection.channel(session)) as channel:
            assert isinstance(channel.call(m.Lookup(session.context, "r", b"x" * 32), 1.0), m.LookupReply)


# --- the client's side ----------------------------------------------------------------------------------------------


@pytest.mark.promise(4)
def test_requests_to_a_depot_that_hangs_never_wait_and_are_served_when_it_goes_on(depot: DepotProcess) -> None:
    peer = Peer(depot)
    request = m.Lookup(peer.context, "r", bytes(32 * 65_536))
    depot.signal(signal.SIGSTOP)
    sequences: list[int] = []
    began = time.monotonic()
    with pytest.raises(DepotUnavailable, match="has not yet read"):
        while time.monotonic() < began + 10:
            sequences.append(peer.channel.submit(request))
    assert len(sequences) > 5
    assert peer.channel.num_owed == 1, "something is to be sent by whoever tidies up"
    depot.signal(signal.SIGCONT)
    for sequence in sequences:
        assert isinstance(peer.channel.wait(sequence, 10.0), m.LookupReply)
    assert peer.channel.num_owed == 0
    peer.close()
