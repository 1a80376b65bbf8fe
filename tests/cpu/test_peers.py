"""Depots that read from each other's pools, and engines: right bytes or a miss, whatever the peer does."""

import contextlib
import os
import random
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError
from kvdepot.features.peers import protocol as p
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.server.app import DepotServer
from kvdepot.testing.engine import EngineProcess
from kvdepot.wire.status import TierStatus
from support.commands import run_kvdepot
from support.cpu.engines import CHUNK, large_engine
from support.lying_peer import CHANGES, Forger, LyingPeer

pytestmark = pytest.mark.slow

NUM_CHUNKS = 8
FAILURES = ("tiers_failed", "chores_failed", "hooks_failed", "requests_failed")
NUM_KILLS = int(os.environ.get("KVDEPOT_TEST_KILLS", "5"))
LOOKUP_SECONDS = 2.5  # a client's deadline, and some time of a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


class Node:
    """A depot that peers may read from, and its engine."""

    def __init__(self, token: Path, *options: str, pool_size: str = "64MiB") -> None:
        self.port = free_port()
        self.token = token.read_text().encode()
        self.address = f"127.0.0.1:{self.port}"
        peers = ("--peers", self.address, "--peer-token", str(token), "--peer-hints", "127.0.0.1:*")
        self.depot = DepotProcess(*peers, *options, pool_size=pool_size)
        self.engine: EngineProcess = large_engine(self.depot, "engine")

    def store(self, salt: int) -> None:
        self.engine.expect(str(NUM_CHUNKS), f"store {salt} {NUM_CHUNKS}")

    def find(self, salt: int, peer: str = "") -> int:
        """Return how many chunks the engine finds and retrieves. Check their bytes."""
        found = int(self.engine.ask(f"lookup {peer} {salt} {NUM_CHUNKS}"))
        if found:
            self.engine.expect(str(found), f"retrieve {salt} {found}")
        return found

    def counter(self, name: str) -> int:
        return self.depot.status().counters[name]

    def peer(self, name: str) -> TierStatus:
        return next(tier for tier in self.depot.status().tiers if tier.name == f"peer {name}")

    @property
    def listener(self) -> int:
        """The process that peers read through, 0 while there is none."""
        tasks = Path(f"/proc/{self.depot.pid}/task").glob("*/children")
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
        listeners = [pid for pid in children if b"peers.listener" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return next(iter(listeners), 0)

    def is_back(self) -> bool:
        status = self.depot.status()
        return len(status.contexts) == 2 and not status.recovering

    def check(self) -> None:
        counters = self.depot.status().counters
        assert {name: counters[name] for name in FAILURES} == dict.fromkeys(FAILURES, 0)

    def close(self) -> None:
        self.engine.close()
        self.depot.close()


MakeNode = Callable[..., Node]


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(secrets.token_hex(16))
    return path


@pytest.fixture
def make(token: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(*options: str, pool_size: str = "64MiB") -> Node:
        nodes.append(Node(token, *options, pool_size=pool_size))
        return nodes[-1]

    yield make
    for node in nodes:
        node.check()
        node.close()


def test_a_lookup_reads_from_the_peer_that_it_names_and_from_no_other(make: MakeNode) -> None:
    owner, reader = make(), make()
    owner.store(1)
    wait_until(lambda: owner.counter("listener_starts"))
    assert reader.find(1) == 0
    assert owner.counter("peer_questions") == 0
    assert reader.find(1, owner.address) == NUM_CHUNKS
    assert owner.counter("peer_reads") == NUM_CHUNKS
    assert reader.find(1) == NUM_CHUNKS
    assert owner.counter("peer_reads") == NUM_CHUNKS
    wait_until(lambda: owner.depot.status().num_leases == 0)


def test_listed_peers_are_asked_without_a_name(make: MakeNode) -> None:
    owner = make()
    owner.store(1)
    reader = make("--peer", f"one={owner.address}")
    assert reader.find(1) == NUM_CHUNKS
    assert reader.peer("one").counters["read_entries"] == NUM_CHUNKS


def test_a_depot_that_drains_hands_its_last_prefixes_to_another_one(make: MakeNode, token: Path) -> None:
    goes, stays = make(), make()
    for salt in range(12):
        goes.store(salt)
    wait_until(lambda: stays.counter("listener_starts") and goes.counter("listener_starts"))
    size = goes.depot.status().pool_used_bytes // 12
    most = 64 * 2**20 // 4 // size  # prefixes in a quarter of the pool
    assert 2 <= most < 12
    drained = run_kvdepot("drain", "--url", goes.depot.url, "--to", stays.address, "--peer-token", str(token))
    assert (drained.returncode, drained.stderr) == (0, "")
    assert f"handed over to {stays.address}: {most} of {most} prefixes" in drained.stdout
    assert "drained: " in drained.stdout
    assert [stays.find(salt) for salt in range(12 - most, 12)] == [NUM_CHUNKS] * most
    assert stays.counter("chunks_evicted") == 0
    assert goes.counter("peer_reads") == most * NUM_CHUNKS


def test_a_hand_over_that_is_impossible_says_why_and_drains(make: MakeNode, token: Path, tmp_path: Path) -> None:
    goes, other = make(), tmp_path / "other"
    other.write_text("another token, as long as needed")

    def drain(*options: str) -> CompletedProcess[str]:
        return run_kvdepot("drain", "--url", goes.depot.url, *options)

    nobody = f"127.0.0.1:{free_port()}"
    drained = drain("--to", nobody, "--peer-token", str(token))
    assert (drained.returncode, "drained: " in drained.stdout) == (0, True)
    assert f"not handed over to {nobody}: " in drained.stderr
    assert "another token" in drain("--to", goes.address, "--peer-token", str(other)).stderr
    drain("--resume")
    assert "needs --peer-token" in drain("--to", nobody).stderr
    assert not goes.depot.status().draining


def test_offers_of_nothing_and_of_half_a_key_are_dropped(make: MakeNode) -> None:
    node = make()
    node.store(1)
    wait_until(lambda: node.listener)
    with contextlib.closing(p.Stream(socket.create_connection(("127.0.0.1", node.port)))) as stream:
        stream.until = time.monotonic() + 30.0
        stream.greet_as_reader(node.token)

        def offer(digests: bytes) -> p.Taking:
            stream.send_frame(p.Take(f":{free_port()}", "default", digests))
            reply = p.decode_from_peer(stream.receive_frame())
            assert isinstance(reply, p.Taking)
            return reply

        assert offer(bytes(33)).is_taken
        assert offer(bytes(64)).is_taken, "its sender does not listen"
        wait_until(lambda: not offer(b"").num_prefixes, what="the end of both")
        assert not offer(b"").is_taken
    assert node.find(1) == NUM_CHUNKS


def test_a_stranger_to_the_token_reads_nothing(make: MakeNode, tmp_path: Path) -> None:
    owner = make()
    owner.store(1)
    other = tmp_path / "other"
    other.write_text("another token, as long as needed")
    stranger = Node(other)
    assert stranger.find(1, owner.address) == 0
    wait_until(lambda: "token" in stranger.peer(owner.address).why_open)
    stranger.close()
    assert owner.counter("peer_questions") == 0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """An owner and a reader for tests that name other peers to the reader."""
    nodes: list[Node] = []
    path = tmp_path_factory.mktemp("pair") / "token"
    path.write_text(secrets.token_hex(16))
    nodes.extend(Node(path, pool_size="128MiB") for _ in range(2))
    yield nodes[0], nodes[1]
    for node in nodes:
        node.check()
        node.close()


@pytest.mark.parametrize("change", CHANGES)
def test_entries_changed_on_their_way_are_misses_and_the_peer_is_left_alone(
    change: str, pair: tuple[Node, Node]
) -> None:
    (owner, reader), salt = pair, 1 + list(CHANGES).index(change)
    owner.store(salt)
    liar = LyingPeer(owner.port, owner.token, CHANGES[change])
    began = time.monotonic()
    assert reader.find(salt, liar.address) < NUM_CHUNKS
    assert time.monotonic() - began < LOOKUP_SECONDS
    num_changed = liar.num_changed
    assert num_changed > 0
    assert reader.find(salt, liar.address) < NUM_CHUNKS
    assert liar.num_changed == num_changed
    assert reader.find(salt, owner.address) == NUM_CHUNKS
    liar.close()


def test_a_relay_without_the_token_can_forge_no_entry(pair: tuple[Node, Node]) -> None:
    owner, reader = pair
    owner.store(99)
    forger = Forger(owner.port)
    assert reader.find(99, forger.address) == 0
    assert forger.num_changed == 1
    assert reader.find(99, owner.address) == NUM_CHUNKS
    forger.close()


def test_bytes_after_the_entries_are_not_taken_for_an_answer(pair: tuple[Node, Node]) -> None:
    owner, reader = pair
    liar = LyingPeer(owner.port, owner.token, lambda coming, payloads: (coming, *payloads, bytes(100)))
    for salt in (100, 101):
        owner.store(salt)
        assert reader.find(salt, liar.address) == NUM_CHUNKS
    liar.close()


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request", b"KVPEER99" + bytes(32)])
def test_a_process_that_is_no_depot_of_this_version_is_a_miss_and_is_left_alone(words: bytes, make: MakeNode) -> None:
    reader = make()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    connections.append(connection)
                    connection.sendall(words)

        connections: list[socket.socket] = []
        threading.Thread(target=answer, daemon=True).start()
        assert reader.find(1, address) == 0
        wait_until(lambda: reader.peer(address).state == "open")
        for connection in connections:
            connection.close()


def test_a_port_for_peers_that_is_taken_is_an_error_in_words(token: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"--peers {address}: .*in use"):
            DepotServer(
                ServerConfig(token.parent, pool_size_bytes=1 << 20, ephemeral=True, peers=address, peer_token=token)
            )


def test_a_lookup_that_names_a_host_of_its_own_opens_no_connection(make: MakeNode) -> None:
    reader = make()
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        stranger.setblocking(False)
        port = stranger.getsockname()[1]
        for number, name in enumerate((f"127.0.0.2:{port}", f"tcp://127.0.0.2:{port}", "nobody", "127.0.0.1:x"), 1):
            assert reader.find(1, name) == 0
            assert reader.counter("peers_unknown") == number
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert not reader.depot.status().tiers


def test_a_stopped_peer_costs_one_deadline_and_answers_again_when_it_continues(make: MakeNode) -> None:
    owner, reader = make(), make()
    for salt in range(2):
        owner.store(salt)
    assert reader.find(0, owner.address) == NUM_CHUNKS
    os.kill(owner.listener, signal.SIGSTOP)
    began = time.monotonic()
    assert reader.find(1, owner.address) == 0
    assert time.monotonic() - began < LOOKUP_SECONDS
    os.kill(owner.listener, signal.SIGCONT)
    wait_until(lambda: reader.peer(owner.address).state == "closed")
    wait_until(lambda: reader.find(1, owner.address) == NUM_CHUNKS)


def test_a_reader_that_hangs_keeps_nothing_pinned_after_it_is_killed(make: MakeNode) -> None:
    owner, reader = make(), make()
    owner.store(1)
    wait_until(lambda: owner.listener)
    stuck = LyingPeer(owner.port, owner.token, CHANGES["silence"])
    assert reader.find(1, stuck.address) == 0
    stuck.close()
    reader.depot.kill()
    wait_until(lambda: owner.depot.status().num_leases == 0, what="the end of its leases")
    reader.depot.start()


def test_a_reader_that_takes_no_bytes_has_its_entries_pinned_for_a_while_only(make: MakeNode) -> None:
    owner, reader = make(), make()
    owner.store(1)
    wait_until(lambda: owner.listener)
    between = LyingPeer(owner.port, owner.token, lambda coming, payloads: (coming, *payloads))
    assert reader.find(1, between.address) == NUM_CHUNKS
    between.close()
    with contextlib.closing(p.Stream(socket.create_connection(("127.0.0.1", owner.port)))) as greedy:
        greedy.until = time.monotonic() + 30
        greedy.greet_as_reader(owner.token)
        greedy.send_frame(p.Read((between.keys * p.MOST_READ)[: p.MOST_READ]))  # more than the kernel buffers
        wait_until(lambda: owner.depot.status().num_leases == 1)
        wait_until(lambda: owner.depot.status().num_leases == 0, 20.0, "the end of the lease")


def test_entries_without_checksums_are_read(make: MakeNode) -> None:
    owner, reader = make("--verify", "off"), make()
    owner.store(1)
    wait_until(lambda: owner.listener)
    assert reader.find(1, owner.address) == NUM_CHUNKS


@pytest.mark.parametrize("victim", ["listener", "owner", "reader"])
def test_a_killed_side_leaves_no_wrong_byte_and_no_lease(victim: str, make: MakeNode) -> None:
    pool_size = str(NUM_KILLS * NUM_CHUNKS * CHUNK + (64 << 20))  # whole, so that nothing is evicted
    owner, reader = make("--lease-seconds", "300", pool_size=pool_size), make(pool_size=pool_size)
    for salt in range(NUM_KILLS):
        owner.store(salt)
        wait_until(lambda: owner.listener)
        reader.engine.say(f"lookup {owner.address} {salt} {NUM_CHUNKS}")
        kill_at = time.monotonic() + random.uniform(0, 0.02)
        wait_until(lambda at=kill_at: time.monotonic() >= at)
        if victim == "listener":
            os.kill(owner.listener, signal.SIGKILL)
        else:
            {"owner": owner, "reader": reader}[victim].depot.kill()
        began = time.monotonic()
        num_chunks = int(reader.engine.listen())
        assert time.monotonic() - began < LOOKUP_SECONDS
        if num_chunks and victim != "reader":
            reader.engine.expect(str(num_chunks), f"retrieve {salt} {num_chunks}")
        if victim != "listener":
            node = {"owner": owner, "reader": reader}[victim]
            node.depot.start()
            wait_until(node.is_back, what="the depot and its engine")
        for earlier in range(salt + 1):
            reader.find(earlier)
    wait_until(lambda: owner.depot.status().num_leases == 0, what="the end of its leases")
    for salt in range(NUM_KILLS):
        wait_until(lambda salt=salt: reader.find(salt, owner.address) == NUM_CHUNKS)
        reader.engine.expect(str(NUM_CHUNKS), f"retrieve {salt} {NUM_CHUNKS}")
