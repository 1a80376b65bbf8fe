"""KV events as a router gets them: they announce exactly the chunks that can be found."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot.client.operator import ask_depot
from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operators.events import END, BlockRemoved, EventPublisher, check_endpoint
from kvdepot.server import commands
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from support.index import HYBRID, PLAIN, SHARDED, Bench
from support.index import prompt as chunks
from support.peer import Peer, prompt, registration

Context = zmq.Context[zmq.Socket[bytes]]
_kept: list[object] = []
Batch = tuple[int, list[dict[str, Any]]]


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Decode a batch as plain values: `[ts, events]`."""
    _, events, *_ = msgspec.msgpack.decode(payload)
    return events


class Router:
    """A subscriber that knows which chunks can be found."""

    def __init__(self, depot: DepotProcess, context: Context) -> None:
        events, self.replay_endpoint = depot.status().event_endpoints
        self.context = context
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(b"")
        self.socket.connect(events)
        self.found: set[bytes] = set()
        self.next = 0
        _kept.append(self.socket)  # closed with the context, not before

    def take(self) -> list[Batch]:
        batches: list[Batch] = []
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b""
            batches.append((int.from_bytes(number, "big"), events_of(payload)))
        self.apply(batches)
        return batches

    def apply(self, batches: list[Batch]) -> None:
        for number, events in batches:
            if number < self.next:
                continue  # it came by replay
            self.next = number + 1
            for event in events:
                assert event["medium"] == "CPU"
                hashes = set(event["block_hashes"])
                assert len(hashes) == len(event["block_hashes"])
                if event["type"] == "BlockStored":
                    assert not hashes & self.found
                    self.found |= hashes
                else:
                    assert hashes <= self.found, "only what was announced is taken back"
                    self.found -= hashes

    def ask_again(self, first: int) -> list[Batch]:
        asking = self.context.socket(zmq.DEALER)
        asking.setsockopt(zmq.LINGER, 0)
        asking.connect(self.replay_endpoint)
        asking.send_multipart([b"", first.to_bytes(8, "big")])
        batches: list[Batch] = []
        while True:
            assert asking.poll(10_000)
            _, _, number, payload = asking.recv_multipart()
            if number == END:
                asking.close()
                return batches
            batches.append((int.from_bytes(number, "big"), events_of(payload)))


@pytest.fixture
def context() -> Iterator[Context]:
    context: Context = zmq.Context()
    yield context
    context.destroy(linger=0)
    _kept.clear()


@pytest.fixture
def peer(depot: DepotProcess) -> Iterator[Peer]:
    peer = Peer(depot, registration(instance="engine"))
    yield peer
    peer.close()


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    flags = ("--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0")
    with DepotProcess(*flags, pool_size="1MiB") as depot:
        yield depot


def subscribed(depot: DepotProcess, peer: Peer, context: Context) -> Router:
    """Return a router that surely gets what is stored from now on."""
    router = Router(depot, context)
    number = 0

    def heard() -> bool:
        nonlocal number
        number += 1
        peer.store(prompt(1, f"hello {number}"))
        return bool(router.take())

    wait_until(heard, 20)
    router.found.clear()
    router.next = 0
    router.apply(router.ask_again(0))
    return router


def test_a_router_knows_what_can_be_found(depot: DepotProcess, peer: Peer, context: Context) -> None:
    router = subscribed(depot, peer, context)
    run = prompt(5, "a")
    peer.store(run)
    wait_until(lambda: (router.take(), run.digests[-32:] in router.found)[1])
    assert {run.digests[n * 32 : n * 32 + 32] for n in range(5)} <= router.found
    for number in range(60):
        peer.store(prompt(9, f"b{number}"))
    ask_depot(o.Clear(), depot.url, 30)
    wait_until(lambda: (router.take(), not router.found)[1], 20)
    assert depot.status().counters["chunks_evicted"] > 0
    assert depot.status().counters["event_batches"] == router.next


def test_a_run_is_one_event_with_its_parent(depot: DepotProcess, peer: Peer, context: Context) -> None:
    router = subscribed(depot, peer, context)
    run = prompt(6, "a")
    peer.store(run.slice(0, 2))
    peer.store(run.slice(2, 6))
    batches = router.ask_again(router.next)
    stored = [event for _, events in batches for event in events]
    assert len(stored) <= 2, "one for each store, or for both if one turn served them"
    told = b""
    for event in stored:
        assert event["parent_block_hash"] == (told[-32:] or None)
        assert (event["block_size"], event["token_ids"]) == (64, [])
        told += b"".join(event["block_hashes"])
    assert told == run.digests


def test_what_was_missed_is_sent_again(depot: DepotProcess, peer: Peer, context: Context) -> None:
    for number in range(200):
        peer.store(prompt(1, str(number)))
    router = Router(depot, context)
    batches = router.ask_again(0)
    count = len(batches)  # a turn that serves several stores makes one batch of them
    assert count > 20
    assert [number for number, _ in batches] == list(range(count))
    assert [number for number, _ in router.ask_again(count - 9)] == list(range(count - 9, count))
    assert router.ask_again(1000) == []
    router.apply(batches)
    assert len(router.found) == 200


def test_who_is_slow_misses_nothing_of_what_may_wait(context: Context, tmp_path: Path) -> None:
    """Regression: the bound was set after binding, so it was ZMQ's thousand, for batches sent again as well."""
    bench, num_batches = Bench(pages=2, num_records=4), 4000
    publisher = EventPublisher(context, bench.index, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay")
    _kept.append(publisher)
    slow = context.socket(zmq.SUB)
    asking = context.socket(zmq.DEALER)
    _kept.extend((slow, asking))
    slow.subscribe(b"")
    for listener, endpoint in ((slow, publisher.endpoint), (asking, publisher.replay_endpoint)):
        listener.set_hwm(1)
        listener.connect(endpoint)

    def tell() -> None:
        publisher.pending.append(BlockRemoved([bytes(32)] * 100, "CPU"))
        publisher.flush()

    def is_subscribed() -> bool:
        tell()
        return bool(slow.poll(10))

    wait_until(is_subscribed)
    num_before = publisher.num_batches
    for _ in range(num_batches):
        tell()
    told: list[int] = []
    while not told or told[-1] + 1 < num_before + num_batches:
        assert slow.poll(10_000)
        told.append(int.from_bytes(slow.recv_multipart()[1], "big"))
    assert told[-num_batches:] == list(range(num_before, num_before + num_batches))
    asking.send_multipart([b"", bytes(8)])
    assert publisher.replay is not None
    assert publisher.replay.poll(10_000)
    replay = publisher.take_replay()
    assert replay is not None
    for _ in replay:
        pass
    for number in range(publisher.num_batches):
        assert asking.poll(10_000)
        assert asking.recv_multipart()[2] == number.to_bytes(8, "big")
    assert asking.recv_multipart()[2] == END


def test_nonsense_at_the_replay_hurts_nobody(depot: DepotProcess, peer: Peer, context: Context) -> None:
    router = Router(depot, context)
    asking = router.context.socket(zmq.DEALER)
    _kept.append(asking)
    asking.connect(router.replay_endpoint)
    for frames in ([b""], [b"", b"x"], [b"x"] * 9, [b"", b"", b""], [b"", bytes(60)], [b"", bytes(100)]):
        asking.send_multipart(frames)
    peer.store(prompt(1, "a"))
    assert len(router.ask_again(0)) == 1


def test_who_asks_again_and_again_waits_once(context: Context) -> None:
    bench = Bench(pages=20, num_records=24)
    publisher = EventPublisher(context, bench.index, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0")
    _kept.append(publisher)
    worker = bench.worker()
    for name in range(3):
        worker.store(chunks(1, name))
        publisher.flush()
    asking = [context.socket(zmq.DEALER) for _ in range(2)]
    _kept.extend(asking)
    for asker in asking:
        asker.connect(publisher.replay_endpoint)
        for first in (0, 1, 2) * 10:
            asker.send_multipart([b"", first.to_bytes(8, "big")])
    replays: list[Iterator[int]] = []
    num_taken = 0

    def has_taken_all() -> bool:
        nonlocal num_taken
        while publisher.replay is not None and publisher.replay.poll(0):
            replay = publisher.take_replay()
            replays.extend([] if replay is None else [replay])
            num_taken += 1
        return num_taken == 60

    wait_until(has_taken_all)
    assert len(replays) == 1
    assert sum(1 for _ in replays[0]) == len(asking)
    for asker in asking:
        assert asker.poll(10_000)
        assert [int.from_bytes(asker.recv_multipart()[2], "big", signed=True) for _ in range(2)] == [2, -1]
        assert not asker.poll(0)
        asker.send_multipart([b"", bytes(8)])
    assert publisher.replay is not None
    assert publisher.replay.poll(10_000)
    assert publisher.take_replay() is not None


@pytest.mark.parametrize("groups", [PLAIN, SHARDED, HYBRID], ids=["plain", "sharded", "hybrid"])
def test_random_traffic_announces_exactly_what_can_be_found(groups: tuple[m.GroupShape, ...], context: Context) -> None:
    rng = random.Random(6)
    bench = Bench(groups, pages=20, num_records=24)
    publisher = EventPublisher(context, bench.index, "tcp://127.0.0.1:0", None)
    _kept.append(publisher)
    workers = [bench.worker(shard) for shard in range(2 if groups is SHARDED else 1)]
    found: set[bytes] = set()
    taken = 0
    for _ in range(300):
        run = chunks(rng.randint(1, 6), rng.randrange(12))
        plans = [(worker, worker.prepare(run)) for worker in workers]
        for worker, plan in plans:
            if plan.ticket and rng.random() < 0.9:
                worker.commit(plan)
            elif plan.ticket:
                worker.ask(m.AbortStore(worker.context, plan.ticket))
        if rng.random() < 0.1:
            records = [record for record in bench.index.table.records() if record.state == 2]
            if records:
                bench.index.remove_entry(rng.choice(records).number)
        if rng.random() < 0.05:
            sum(commands.clear_pool(bench.depot, None))
        publisher.flush()
        for number, payload in list(publisher.kept)[taken:]:
            assert number == taken
            taken += 1
            for event in events_of(payload):
                hashes = set(event["block_hashes"])
                assert not hashes & found if event["type"] == "BlockStored" else hashes <= found
                found ^= hashes
        index = bench.index
        assert found == {
            index.nodes.key_of(n) for s in index.spaces for _, n in s.nodes.items() if index.visibility.is_visible[n]
        }
    assert taken > 100


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://127.0.0.1", "ipc://", "udp://x:1", "127.0.0.1:5557"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        check_endpoint(endpoint, "--events")


def test_a_subscriber_of_one_topic_hears_a_depot_that_publishes_under_it(context: Context) -> None:
    """vLLM's example subscribes to kv-events."""
    flags = ("--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0", "--events-topic", "kv-events")
    with DepotProcess(*flags, pool_size="1MiB") as depot:
        peer = Peer(depot, registration(instance="engine"))
        events, replay_endpoint = depot.status().event_endpoints
        subscriber = context.socket(zmq.SUB)
        subscriber.subscribe("kv-events")
        subscriber.connect(events)

        numbers = iter(range(1000))
        wait_until(lambda: (peer.store(prompt(1, f"{next(numbers)}")), subscriber.poll(20))[1])
        topic, number, payload = subscriber.recv_multipart()
        assert topic == b"kv-events"
        assert events_of(payload)[0]["type"] == "BlockStored"

        replay = context.socket(zmq.DEALER)
        replay.connect(replay_endpoint)
        replay.send_multipart((b"", number))
        assert replay.poll(10_000)
        assert replay.recv_multipart() == [b"", topic, number, payload]
        for each in (subscriber, replay, peer):
            each.close()


def test_a_topic_needs_events() -> None:
    with pytest.raises(ConfigError, match="--events-topic needs --events"):
        ServerConfig(events_topic="kv-events")


def test_a_replay_needs_events() -> None:
    with pytest.raises(ConfigError, match="--events"):
        ServerConfig(events_replay="tcp://127.0.0.1:1")


def test_a_port_that_is_taken_is_an_error_in_words(depot: DepotProcess, peer: Peer, context: Context) -> None:
    with pytest.raises(ConfigError, match="--events"):
        EventPublisher(context, Bench().index, depot.status().event_endpoints[0], None)
