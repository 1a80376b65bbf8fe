"""KV events at a router: they announce exactly the chunks that lookups find."""

import random
import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from kvdepot.client.operator import ask_depot
from kvdepot.config import ServerConfig
from kvdepot.errors import ConfigError, ErrorCode, RemoteError
from kvdepot.features.routers.desk import NewsDesk, _Early  # pyright: ignore[reportPrivateUsage]
from kvdepot.features.routers.events import END, EventPublisher, _joined, check_endpoint  # pyright: ignore[reportPrivateUsage]
from kvdepot.features.routers.feed import Description
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import DescribeChunks, DescribedGroup
from kvdepot.features.routers.numbers import NUMBERS_FILE, Numbers
from kvdepot.features.routers.reader import Reader
from kvdepot.features.routers.tokens import TOKENS_FILE, TokensFile
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.operate import operations as o
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.pool.folder import PoolFolder
from kvdepot.wire import messages as m
from support.events import (
    FLAGS,
    MODEL,
    NAMESPACE,
    Context,
    Engine,
    Router,
    View,
    anonymous_bytes,
    block_id,
    description,
    events_of,
    ids_of,
    kept,
    plain,
    tokens_of,
)
from support.index import HYBRID, PLAIN, SHARDED, Bench
from support.index import prompt as chunks
from support.peer import prompt


@pytest.fixture
def engine(depot: DepotProcess) -> Iterator[Engine]:
    engine = Engine(depot)
    yield engine
    engine.close()


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess(*FLAGS, "--events-topic", "kv@here@{model}", pool_size="1MiB") as depot:
        yield depot


def test_a_router_knows_what_can_be_found(depot: DepotProcess, engine: Engine, context: Context) -> None:
    router, run = Router(depot, context), prompt(5, "a")
    assert engine.store(run) == 5
    wait_until(lambda: router.knows(run))
    assert router.topics == {b"kv@here@served"}
    assert [token for each in ids_of(run) for token in router.tokens[each]] == tokens_of(run, 64)
    for number in range(60):
        engine.store(prompt(9, f"b{number}"))
    ask_depot(o.Clear(), depot.url, 30)
    wait_until(lambda: (router.take_all(), not router.found)[1], 20)
    assert depot.status().counters["chunks_evicted"] > 0


def test_a_run_is_one_event_with_its_parent_and_everything_that_routers_read(
    depot: DepotProcess, engine: Engine, context: Context
) -> None:
    router, run = Router(depot, context), prompt(6, "a")
    engine.worker.store(run)
    groups = (DescribedGroup(0, "full_attention"), DescribedGroup(2, "sliding_window", 128))
    extra = tuple(((f"salt{n}", ("picture", n)) if n % 2 else None) for n in range(6))
    assert engine.describe(run, groups=groups, lora_name="poet", extra_keys=extra) == 6
    wait_until(lambda: router.knows(run))
    stored = [event for event in router.events if event["type"] == "BlockStored"]
    told = [(e["group_idx"], e["kv_cache_spec_kind"], e.get("kv_cache_spec_sliding_window")) for e in stored]
    assert told == [(0, "full_attention", None), (2, "sliding_window", 128)]
    for event in stored:
        assert event["block_hashes"] == ids_of(run)
        assert event["token_ids"] == tokens_of(run, 64)
        assert (event["parent_block_hash"], event["block_size"], event["lora_name"]) == (None, 64, "poet")
        assert event["extra_keys"] == [[f"salt{n}", ["picture", n]] if n % 2 else None for n in range(6)]
        assert "lora_id" in event
    ask_depot(o.Clear(), depot.url, 30)
    wait_until(lambda: (router.take_all(), not router.found)[1])
    assert {event["group_idx"] for event in router.events if event["type"] == "BlockRemoved"} == {0, 2}


def test_a_router_that_comes_late_or_again_is_told_of_everything(
    depot: DepotProcess, engine: Engine, context: Context
) -> None:
    runs = [prompt(4, f"{number}") for number in range(8)]
    for run in runs:
        engine.store(run)
    for _ in range(2):
        router = Router(depot, context)
        wait_until(lambda: all(map(router.knows, runs)))  # noqa: B023
        assert router.num_clears >= 1


def test_a_depot_that_starts_empty_says_so_and_goes_on_with_higher_numbers(context: Context) -> None:
    """Dynamo ignores a batch with a lower number than the last as old."""
    last = 0
    for _ in range(2):
        with DepotProcess(*FLAGS, "--events-topic", "", pool_size="1MiB") as depot:
            router = Router(depot, context)
            wait_until(lambda: (router.take_all(), router.num_clears)[1])  # noqa: B023
            assert router.topics == {b""}
            assert router.next > last
            last = router.next


def test_missed_batches_are_sent_again(depot: DepotProcess, engine: Engine, context: Context) -> None:
    router = Router(depot, context)
    wait_until(lambda: (router.take_all(), router.next)[1])
    first, held = router.next, set[int](router.found)
    for number in range(50):
        run = prompt(1, str(number))
        engine.store(run)
        wait_until(lambda: router.knows(run))  # noqa: B023
    batches = router.ask_again(first)
    numbers = [number for number, _ in batches]
    assert len(numbers) >= 50
    assert numbers == list(range(first, first + len(numbers)))
    assert [number for number, _ in router.ask_again(numbers[-9])][:9] == numbers[-9:]
    assert router.ask_again(router.next + 1000) == []
    again = View()
    again.found = held
    again.apply(batches)
    assert again.found == router.found


def test_a_subscriber_that_lacks_old_batches_gets_a_snapshot_alone(
    depot: DepotProcess, engine: Engine, context: Context
) -> None:
    router, runs = Router(depot, context), [prompt(3, name) for name in "abc"]
    for run in runs:
        engine.store(run)
    wait_until(lambda: all(map(router.knows, runs)))
    clears = router.num_clears
    for asked in (0, 7, router.next - 5000):
        batches, view = router.ask_again(asked), View()
        view.apply(batches)
        assert view.found == router.found
        assert [number for number, _ in batches] == list(range(batches[0][0], router.next))
        assert batches[0][1] == [{"type": "AllBlocksCleared"}]
    late = Router(depot, context)
    wait_until(lambda: all(map(late.knows, runs)))
    engine.store(prompt(1, "d"))
    wait_until(lambda: router.knows(prompt(1, "d")) and late.knows(prompt(1, "d")))
    assert router.num_clears == clears


def test_nonsense_at_the_replay_hurts_nobody(depot: DepotProcess, engine: Engine, context: Context) -> None:
    router = Router(depot, context)
    asking = router.context.socket(zmq.DEALER)
    kept.append(asking)
    asking.connect(router.replay_endpoint)
    for frames in ([b""], [b"", b"x"], [b"x"] * 9, [b"", b"", b""], [b"", bytes(60)], [b"", bytes(100)]):
        asking.send_multipart(frames)
    run = prompt(1, "a")
    engine.store(run)
    wait_until(lambda: router.knows(run))
    assert router.ask_again(0)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": b"\0" * 4},
        {"tokens": b"\0" * 255},
        {"block_ids": b"\0" * 7},
        {"block_ids": b""},
        {"block_ids": b"\0" * 8 * 3},
        {"parent_id": b"\0" * 8},
        {"extra_keys": (("a",), ("b",))},
        {"digests": b"\0" * 31},
    ],
)
def test_a_description_that_contradicts_itself_is_refused(engine: Engine, change: dict[str, Any]) -> None:
    run = prompt(1, "a")
    engine.worker.store(run)
    (request,) = description(run).requests(engine.scheduler.context, run)
    code = engine.scheduler.refusal(msgspec.structs.replace(request, **change))
    assert code in (ErrorCode.MALFORMED, ErrorCode.BAD_KEY)
    assert engine.describe(run) == 1


@pytest.mark.slow
@pytest.mark.promise(74)
def test_descriptions_of_chunks_that_are_not_here_leave_nothing_behind(depot: DepotProcess, engine: Engine) -> None:
    # Regression: each namespace and each list of groups that an engine ever sent was kept, here 46 MB.
    run, groups = prompt(1, "a"), [(DescribedGroup(number, "x" * 200),) * 64 for number in range(2000)]
    engine.describe(run, groups=groups[0])
    before = anonymous_bytes(depot.pid)
    for each in groups:
        assert engine.describe(run, groups=each) == 0
    assert anonymous_bytes(depot.pid) - before < 8 << 20
    assert engine.store(run) == 0, "the last of these descriptions has waited for it"
    assert not engine.scheduler.find(run).wants_tokens


def test_chunks_that_were_described_before_are_announced_by_their_commit(
    depot: DepotProcess, engine: Engine, context: Context
) -> None:
    """An engine that falls idle after a store could describe it only with its next request."""
    router, run = Router(depot, context), prompt(9, "a")
    extra = tuple((f"salt{n}",) for n in range(9))
    assert engine.worker.store(run.slice(0, 2)) == 2
    assert engine.describe(run, extra_keys=extra) == 2
    for start, stop in ((2, 4), (4, 9)):
        assert engine.worker.store(run.slice(start, stop)) == stop - start
        wait_until(lambda: router.knows(run.slice(0, stop)))  # noqa: B023
    assert [token for each in ids_of(run) for token in router.tokens[each]] == tokens_of(run, 64)
    assert [router.parents[each] for each in ids_of(run)] == [None, *ids_of(run)[:-1]]
    keys = [each for event in router.events if event["type"] == "BlockStored" for each in event["extra_keys"]]
    assert keys == [[f"salt{n}"] for n in range(9)]
    assert not engine.scheduler.find(run).wants_tokens


def test_descriptions_that_wait_for_their_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    described = Described()
    depot_of = described.bench.depot
    desk = NewsDesk(depot_of.state, described.holdings, depot_of.background.queue(1))
    described.bench.worker()
    space, runs = described.bench.index.spaces[0], [chunks(2, name) for name in range(4)]
    requests = [next(description(run, 1).requests(0, run)) for run in runs]
    text = described.holdings.read(space, MODEL, requests[0])
    assert text is not None
    each = _Early(space, MODEL, requests[0], text).num_bytes
    monkeypatch.setattr("kvdepot.features.routers.desk.MOST_EARLY_BYTES", 3 * each)
    scheduler = SimpleNamespace(space=space, served_model=MODEL)
    for request in (*requests, requests[3]):
        assert desk.describe(scheduler, request).count == 0  # type: ignore[arg-type]
    for run in runs:
        described.bench.worker().store(run)
        desk.stored(space, run.digests)
    found = follow(described.reader(), View()).found
    assert found == {each for run in runs[1:] for each in ids_of(run)}, "the oldest made room"


def test_without_events_no_engine_is_asked_for_tokens() -> None:
    with DepotProcess(pool_size="1MiB") as depot:
        engine = Engine(depot)
        assert not engine.scheduler.session.wants_tokens
        with pytest.raises(RemoteError, match="without the feature that answers describe_chunks"):
            engine.store(prompt(2, "a"))
        reply = engine.scheduler.find(prompt(2, "a"))
        assert (reply.num_chunks, reply.wants_tokens) == (2, False)
        engine.close()


def test_a_hit_that_nobody_described_asks_for_its_tokens(engine: Engine) -> None:
    run = prompt(3, "a")
    engine.worker.store(run)
    assert engine.scheduler.session.wants_tokens
    assert engine.scheduler.find(run).wants_tokens
    assert not engine.worker.find(run).wants_tokens, "it publishes no events"
    assert engine.describe(run.slice(1, 3)) == 0, "a router would not know where these blocks belong"
    assert engine.describe(run) == 3
    assert not engine.scheduler.find(run).wants_tokens


class Described:
    """A bench whose stored chunks are described."""

    def __init__(self, groups: tuple[m.GroupShape, ...] = PLAIN, holdings: Holdings | None = None) -> None:
        self.holdings = holdings or Holdings()
        self.bench = Bench(groups, pages=20, num_records=24, holdings=self.holdings)

    def reader(self, namespace: bytes | None = None) -> Reader:
        return Reader(self.holdings, self.holdings.shelf_of(MODEL) or pytest.fail(), namespace)

    def describe(self, request: DescribeChunks, model: str = MODEL) -> int:
        space = self.bench.index.spaces[0]
        above, nodes = self.bench.index.visibility.find_run(space, request.digests, request.first_chunk)
        text = self.holdings.read(space, model, request)
        return 0 if text is None else self.holdings.describe(text, request.digests, above, nodes)

    def store(self, run: KeyRun, model: str = MODEL) -> int:
        self.bench.worker().store(run)
        (request,) = description(run, 1).requests(0, run)
        return self.describe(request, model)

    def check_integrity(self) -> None:
        self.holdings.check_integrity(self.bench.index.visibility.is_visible)


class Published(Described):
    """A bench whose described chunks are published, by a clock that tests set."""

    def __init__(self, context: Context, folder: Path, *, replays: bool = False, topic: str = "") -> None:
        super().__init__(holdings=Holdings(topic))
        self.context, self.now = context, 100.0
        replay = f"ipc://{folder}/replay" if replays else None
        self.publisher = EventPublisher(
            context, self.holdings, f"ipc://{folder}/events", replay, Numbers(), clock=lambda: self.now
        )
        kept.append(self.publisher)

    def subscribe(self) -> "zmq.Socket[bytes]":
        """Subscribe, and wait until the publisher could see it. The publisher has not sent anything for it yet."""
        subscriber = self.context.socket(zmq.SUB)
        kept.append(subscriber)
        subscriber.subscribe(b"")
        subscriber.connect(self.publisher.endpoint)
        wait_until(lambda: self.publisher.socket.poll(0))
        return subscriber

    def serve_all(self, seconds: float = 10.0) -> None:
        self.now += seconds
        seen = -1
        while self.publisher.has_work or self.publisher.due <= self.now or seen != self.holdings.num_changes:
            seen = self.holdings.num_changes
            self.publisher.serve()


def follow(reader: Reader, view: View, most: int = 100) -> View:
    """Take all events of a reader."""
    while reader.has_more:
        for event in plain(reader.take(most)):
            view.take(event)
    return view


def test_chunks_of_two_tenants_with_the_same_ids_leave_with_the_last_one() -> None:
    described, view = Described(), View()
    bench, reader = described.bench, described.reader()
    worker = bench.worker()
    runs = [chunks(2, name) for name in (1, 2)]
    for number, run in enumerate(runs):
        worker.store(run)
        request = next(Description(bytes([number]) * 32, [1, 2], [7, 8]).requests(0, run))
        assert described.describe(request) == 2
    assert follow(reader, view).found == {7, 8}
    for run, rest in zip(runs, ({7, 8}, set[int]()), strict=True):
        space = bench.index.spaces[0]
        for start in (32, 0):
            assert bench.index.evictor.evict(space.nodes[run.digests[start : start + 32]])
        assert follow(reader, view).found == rest
    described.check_integrity()


def test_chunks_of_a_second_tenant_appear_once_those_of_the_first_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.features.routers.holdings.COUNTED_AT_ONCE", 2)
    described, view = Described(), View()
    bench, reader = described.bench, described.reader()
    worker, runs = bench.worker(), [chunks(3, name) for name in range(4)]

    def describe(run: int, tenant: int, first_id: int) -> int:
        names = range(first_id, first_id + 3)
        num_new = described.describe(next(Description(bytes([tenant]) * 32, [1] * 3, names).requests(0, runs[run])))
        described.check_integrity()
        return num_new

    def evict(run: int, chunk: int) -> set[int]:
        key = runs[run].digests[chunk * 32 : (chunk + 1) * 32]
        assert bench.index.evictor.evict(bench.index.spaces[0].nodes[key])
        described.check_integrity()
        return {*follow(reader, view).found}

    for run in runs:
        worker.store(run)
    assert [describe(0, 1, 10), describe(1, 1, 20), describe(2, 2, 10)] == [3, 3, 0]
    assert evict(0, 2) == {10, 11, 20, 21, 22}, "it is not counted again"
    assert evict(1, 2) == {10, 11, 20, 21}, "it is not counted yet"
    assert [describe(3, 1, 30), describe(2, 2, 10)] == [3, 0]
    assert [describe(2, 2, 10) for _ in range(4)] == [0, 0, 0, 3], "12 nodes by twos"
    assert evict(2, 2) == {10, 11, 20, 21, 30, 31, 32}
    assert [evict(0, 1), evict(2, 1)] == [{10, 11, 20, 21, 30, 31, 32}, {10, 20, 21, 30, 31, 32}]


def test_a_restart_finds_the_descriptions_of_two_tenants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, runs = tmp_path / TOKENS_FILE, [chunks(3, name) for name in range(4)]
    requests = [
        next(Description(bytes([number % 2]) * 32, [1] * 3, [1, 2, 3]).requests(0, run))
        for number, run in enumerate(runs)
    ]

    def start(file: TokensFile) -> Described:
        described = Described()
        for run in runs:
            described.bench.worker().store(run)
        depot_of = described.bench.depot
        desk = NewsDesk(depot_of.state, described.holdings, depot_of.background.queue(1))
        desk.keep_in(file)
        desk.restore()
        depot_of.background.work()
        for request in requests:
            desk.describe(SimpleNamespace(space=described.bench.index.spaces[0], served_model=MODEL), request)  # type: ignore[arg-type]
        file.close()
        return described

    start(TokensFile.create(path))
    size = path.stat().st_size
    monkeypatch.setattr("kvdepot.features.routers.holdings.COUNTED_AT_ONCE", 1)
    requests, described = [], start(TokensFile.open(path))
    described.check_integrity()
    assert described.holdings.num_bytes == 4 * 3 * (4 + 8)
    assert path.stat().st_size == size


def test_a_prompt_whose_parts_become_visible_out_of_order_is_described(tmp_path: Path) -> None:
    described, run = Described(), chunks(100)
    bench = described.bench = Bench(pages=256, num_records=256, holdings=described.holdings)
    desk = NewsDesk(bench.depot.state, described.holdings, bench.depot.background.queue(1))
    desk.keep_in(TokensFile.create(tmp_path / TOKENS_FILE))
    worker, parts = bench.worker(), [run.slice(start, start + 10) for start in range(0, 100, 10)]
    (request,) = description(run, 1).requests(0, run)
    who = SimpleNamespace(space=bench.index.spaces[0], served_model=MODEL)
    assert desk.describe(who, request).count == 0  # type: ignore[arg-type]
    tickets = [worker.prepare(part) for part in parts]
    found: list[int] = []
    for number in (0, 2, 3, 1, *range(5, 10), 4):
        worker.commit(tickets[number])
        desk.stored(who.space, parts[number].digests)
        described.check_integrity()
        found.append(described.holdings.num_bytes // 12)
    assert found == [10, 10, 10, 40, 40, 40, 40, 40, 40, 100]
    file = TokensFile.open(tmp_path / TOKENS_FILE)
    assert len([*file.bodies()]) == 1, "its description is kept once"
    file.close()


def test_tokens_beyond_the_bound_are_declined() -> None:
    described = Described(holdings=Holdings(most_bytes=30))
    assert described.store(chunks(5, 1)) == 2
    assert (described.holdings.num_declined, described.holdings.num_bytes) == (3, 24)
    assert described.store(chunks(2, 2)) == 0
    assert (described.holdings.num_declined, described.holdings.num_bytes) == (5, 24)


def test_models_beyond_the_bound_are_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.features.routers.holdings.MOST_TOPICS", 1)
    described, run = Described(holdings=Holdings("{model}")), chunks(2)
    bench = described.bench
    desk = NewsDesk(bench.depot.state, described.holdings, bench.depot.background.queue(1))
    bench.worker().store(run)
    (request,) = description(run, 1).requests(0, run)
    for model, count in ((MODEL, 2), ("another", 0)):
        context = SimpleNamespace(space=bench.index.spaces[0], served_model=model)
        assert desk.describe(context, request).count == count  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [PLAIN, SHARDED, HYBRID], ids=["plain", "sharded", "hybrid"])
def test_random_traffic_announces_exactly_what_can_be_found(groups: tuple[m.GroupShape, ...]) -> None:
    rng = random.Random(6)
    described = Described(groups)
    bench, holdings = described.bench, described.holdings
    workers = [bench.worker(shard) for shard in range(2 if groups is SHARDED else 1)]
    followers = [(described.reader(namespace), View(is_exact=namespace is None)) for namespace in (None, NAMESPACE)]
    index, num_told = bench.index, 0
    for _ in range(300):
        run = chunks(rng.randint(1, 6), rng.randrange(12))
        plans = [(worker, worker.prepare(run)) for worker in workers]
        for worker, plan in plans:
            if plan.ticket and rng.random() < 0.9:
                worker.commit(plan)
            elif plan.ticket:
                worker.ask(m.AbortStore(worker.context, plan.ticket))
        for request in description(run, 1).requests(0, run):
            described.describe(request)
        if rng.random() < 0.1:
            records = [record for record in index.table.records() if record.state == 2]
            if records:
                index.remove_entry(rng.choice(records).entry)
        if rng.random() < 0.05:
            sum(clear_pool(bench.depot, None))
        described.check_integrity()
        expected = {
            block_id(key)
            for key, node in index.spaces[0].nodes.items()
            if holdings.is_described(node) and index.visibility.is_reachable(node)
        }
        for reader, view in followers:
            if rng.random() < 0.05:
                reader.restart()
            if rng.random() < 0.7:
                while reader.has_more:
                    for event in plain(reader.take(rng.choice((1, 3, 1000)))):
                        view.take(event)
                        num_told += 1
                assert view.reached() == expected
    assert num_told > 100


def test_a_log_that_is_too_long_keeps_its_last_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.features.routers.shelves.LONGEST_LOG", 4)
    described = Described()
    shelf = described.holdings.shelf_of(MODEL)
    assert shelf is not None
    for name in range(12):
        described.store(chunks(1, name))
        assert shelf.end == name + 2
        assert min(name + 1, 4) <= len(shelf.log) <= 8


def test_a_follower_that_is_far_behind_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.features.routers.shelves.LONGEST_LOG", 4)
    described = Described()
    reader = described.reader()
    follow(reader, View())
    for name in range(12):
        described.store(chunks(1, name))
    view, is_first = View(), True
    view.found = {1, 2, 3}
    while reader.has_more:
        for event in plain(reader.take(3)):
            assert not is_first or event["type"] == "AllBlocksCleared"
            is_first = False
            view.take(event)
    assert len(view.found) == 12


def test_a_store_has_no_follower_start_again() -> None:
    """Regression: each chunk that had a next one in its run made followers start again."""
    described, view = Described(), View()
    reader = described.reader()
    for _ in range(2):
        follow(reader, view)
        described.store(chunks(5, 1))
    assert (len(view.found), view.num_clears) == (5, 1)


@pytest.mark.parametrize("endpoint", ["", "tcp://", "tcp://127.0.0.1", "ipc://", "udp://x:1", "127.0.0.1:5557"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        check_endpoint(endpoint, "--events")


@pytest.mark.parametrize("setting", [{"events_topic": "kv-events"}, {"events_replay": "tcp://127.0.0.1:1"}])
def test_a_topic_and_a_replay_need_events(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs --events tcp"):
        ServerConfig(**setting)


def test_a_port_that_is_taken_is_an_error_in_words(depot: DepotProcess, context: Context) -> None:
    with pytest.raises(ConfigError, match="--events"):
        EventPublisher(context, Holdings(), depot.status().event_endpoints[0], None, Numbers())


@pytest.mark.slow
def test_a_slow_subscriber_misses_no_message_within_the_bound(context: Context, tmp_path: Path) -> None:
    """Regression: the bound was set after binding, so ZMQ's default of 1,000 held, also for batches sent again."""
    described, num_batches = Described(), 3000
    bench = described.bench
    publisher = EventPublisher(
        context, described.holdings, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", Numbers()
    )
    kept.append(publisher)
    slow = context.socket(zmq.SUB)
    kept.append(slow)
    slow.subscribe(b"")
    slow.set_hwm(1)
    slow.connect(publisher.endpoint)
    run, worker = chunks(1, 1), bench.worker()
    (request,) = description(run, 1).requests(0, run)

    def tell() -> None:
        worker.store(run)
        described.describe(request)
        publisher.serve()
        assert bench.index.evictor.evict(bench.index.spaces[0].nodes[run.digests])
        publisher.serve()

    wait_until(lambda: (tell(), slow.poll(10))[1])
    for _ in range(4):
        tell()  # past the end of the snapshot, whose first batch is followed by steps without a batch
    num_before = publisher.num_batches
    for _ in range(num_batches // 2):
        tell()
    first = int.from_bytes(slow.recv_multipart()[1], "big")
    for number in range(first + 1, first + publisher.num_batches):
        assert slow.poll(10_000)
        assert int.from_bytes(slow.recv_multipart()[1], "big") == number
    assert publisher.num_batches - num_before == num_batches


def test_subscribers_that_come_again_and_again_leave_each_snapshot_its_end(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.features.routers.events.BATCH_TOKENS", 1)
    published = Published(context, tmp_path)
    publisher = published.publisher
    for name in range(5):
        published.store(chunks(1, name))
    first = published.subscribe()
    while publisher.num_batches < 2:  # a clear, and one chunk
        publisher.serve()
    published.subscribe()
    publisher.serve()
    assert publisher.due == published.now + 0.25
    published.serve_all()
    events: list[dict[str, Any]] = []
    while first.poll(1000):
        events += events_of(first.recv_multipart()[2])
    kinds = [event["type"] for event in events]
    assert kinds == ["AllBlocksCleared", *["BlockStored"] * 5] * 2
    assert publisher.due >= published.now + 1.0, "an empty batch follows"


def test_a_newcomer_beside_stores_gets_the_state_of_the_last_published_batch(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It scans in many steps, while chunks come and go. What it is told fits the batches that follow."""
    monkeypatch.setattr("kvdepot.features.routers.holdings.SCANNED_AT_ONCE", 2)
    monkeypatch.setattr("kvdepot.features.routers.reader.TAKEN_AT_ONCE", 2)
    monkeypatch.setattr("kvdepot.features.routers.events.SNAPSHOT_TOKENS", 2)
    rng, published = random.Random(1), Published(context, tmp_path, replays=True, topic="{model}")
    publisher, bench = published.publisher, published.bench
    router, asking, first = published.subscribe(), context.socket(zmq.DEALER), View()
    kept.append(asking)
    asking.connect(publisher.replay_endpoint)
    published.serve_all()
    published.store(chunks(1, 99), "one")
    published.serve_all()

    def change() -> None:
        number = rng.randrange(8)
        if rng.random() < 0.6:
            published.store(chunks(rng.randint(1, 4), number), ("one", "two")[number % 2])
        else:
            bench.index.evictor.make_room(1, rng.randint(1, 3))

    def live() -> list[tuple[int, list[dict[str, Any]]]]:
        batches: list[tuple[int, list[dict[str, Any]]]] = []
        while router.poll(20):
            _, number, payload = router.recv_multipart()
            batches.append((int.from_bytes(number, "big"), events_of(payload)))
        return batches

    first.num_clears = 1
    first.apply(live())
    for _ in range(20):
        for _ in range(6):
            change()
        published.serve_all(0.0)
        asking.send_multipart([b"", bytes(8)])
        steps: Iterator[int] | None = None
        while steps is None:
            steps = publisher.serve()
        for _ in steps:
            if rng.random() < 0.5:
                change()
            if rng.random() < 0.7:
                publisher.serve()
        view, number = View(), b""
        while number != END:
            assert asking.poll(10_000)
            _, _, number, payload = asking.recv_multipart()
            if number != END:
                view.apply([(int.from_bytes(number, "big"), events_of(payload))])
        for _ in range(3):
            change()
        published.serve_all(0.0)
        batches = live()
        view.apply(batches)
        first.apply(batches)
        assert view.num_clears == 2, "one of each topic"
        assert view.found == first.found
        assert view.next == first.next == batches[-1][0] + 1
    assert first.num_clears == 1, "nobody else was told to forget"


def test_a_newcomer_to_a_node_that_never_rests_gets_its_snapshot(context: Context, tmp_path: Path) -> None:
    """Regression: it waited for a step before which nothing was published, and the subscriber for its answer."""
    published = Published(context, tmp_path, replays=True, topic="{model}")
    publisher, asking = published.publisher, context.socket(zmq.DEALER)
    kept.append(asking)
    asking.connect(publisher.replay_endpoint)
    published.subscribe()
    published.serve_all()
    published.store(chunks(1, 99), "one")
    published.serve_all()
    asking.send_multipart([b"", bytes(8)])
    steps: Iterator[int] | None = None
    while steps is None:
        steps = publisher.serve()
    for number, _ in enumerate(steps):
        assert number < 20
        published.store(chunks(1, number), "one")
        publisher.serve()


def test_a_snapshot_has_no_more_batches_than_its_subscriber_lacks() -> None:
    batches = [(topic, [number]) for number, topic in enumerate([b"a", b"b", *[b"a"] * 5, *[b"b"] * 5])]
    assert _joined(batches, 100) == batches
    joined = _joined(batches, 4)
    assert [topic for topic, _ in joined] == [b"a", b"b", b"a", b"a", b"b", b"b"]
    assert [number for _, numbers in joined for number in numbers] == list(range(12))
    assert batches[2] == (b"a", [2]), "the caller's lists stay"


def test_empty_batches_follow_the_last_one(context: Context, tmp_path: Path) -> None:
    """Without them, a subscriber that lost the last batch of an idle node would never notice."""
    published = Published(context, tmp_path, replays=True, topic="{model}")
    publisher, router = published.publisher, published.subscribe()
    published.store(chunks(1, 1), "one")
    published.serve_all(0.0)
    empty: list[float] = []
    for _ in range(2000):
        published.now += 0.1
        num_batches = publisher.num_batches
        publisher.serve()
        if publisher.num_batches > num_batches:
            empty.append(published.now)
    assert len(empty) >= 4
    assert empty[0] <= 101.2
    assert empty[1] - empty[0] <= 4.2
    assert empty[-1] - empty[-2] >= 60, "an idle hour must leave kept batches room"
    for _ in empty:
        assert router.poll(10_000)
        assert events_of(router.recv_multipart()[2]) == []


def test_readers_that_lost_track_ask_for_a_snapshot(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.features.routers.shelves.LONGEST_LOG", 4)
    published = Published(context, tmp_path, replays=True, topic="{model}")
    router = published.subscribe()
    published.store(chunks(1, 1), "one")
    published.serve_all(0.0)
    for name in range(2, 14):
        published.store(chunks(1, name), "one")
    published.serve_all(0.0)
    numbers: list[int] = []
    while router.poll(100):
        _, number, payload = router.recv_multipart()
        assert "AllBlocksCleared" not in [event["type"] for event in events_of(payload)]
        numbers.append(int.from_bytes(number, "big"))
    assert numbers[-1] > numbers[-2] + 1, "a gap"


def test_a_second_model_of_a_topic_without_models_is_not_published(
    context: Context, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Routers would credit the node with the same tokens of the other model. Attached engines get news of both."""
    published = Published(context, tmp_path, topic="all")
    router, view = published.subscribe(), View()
    published.store(chunks(2, 1), "one")
    published.store(chunks(3, 2), "two")
    published.serve_all()
    while router.poll(100):
        view.apply([(0, events_of(router.recv_multipart()[2]))])
        view.next = 0
    assert view.found == set(ids_of(chunks(2, 1)))
    assert caplog.text.count("blocks of the model 'two' are not published") == 1
    shelf = published.holdings.shelf_of("two")
    assert shelf is not None
    assert follow(Reader(published.holdings, shelf), View()).found == set(ids_of(chunks(3, 2)))


def test_as_a_union_a_block_leaves_when_neither_pool_nor_tier_has_it() -> None:
    in_tier = True
    described = Described(holdings=Holdings(in_tier=lambda nodes: nodes if in_tier else (), is_union=True))
    view, run, bench, reader = View(), chunks(3, 1), described.bench, described.reader()
    described.store(run)
    assert follow(reader, view).found == set(ids_of(run))
    while bench.index.evictor.make_room(1, 1):
        pass
    assert follow(reader, view).found == set(ids_of(run))
    assert follow(described.reader(), View()).found == set(ids_of(run)), "of a new reader, too"
    described.store(run)
    in_tier = False
    assert follow(reader, view).found == set(ids_of(run))
    while bench.index.evictor.make_room(1, 1):
        pass
    assert (follow(reader, view).found, view.in_tier) == (set(), set())
    described.check_integrity()


def test_a_router_that_listens_is_connected_to(context: Context, tmp_path: Path) -> None:
    router, view = context.socket(zmq.SUB), View()
    kept.append(router)
    router.subscribe(b"kv@node:")
    router.bind(f"ipc://{tmp_path}/router")
    flags = ("--events-connect", f"ipc://{tmp_path}/router", "--events-topic", "kv@node:a@{model}")
    with DepotProcess(*flags, pool_size="1MiB") as depot:
        engine, run = Engine(depot), prompt(4, "a")
        engine.store(run)

        def knows() -> bool:
            while router.poll(0):
                topic, number, payload = router.recv_multipart()
                assert topic == b"kv@node:a@served"
                view.apply([(int.from_bytes(number, "big"), events_of(payload))])
            return view.found == set(ids_of(run))

        wait_until(knows)
        engine.close()


def test_numbers_only_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10**18
    monkeypatch.setattr("time.time_ns", lambda: now)
    path, last = tmp_path / NUMBERS_FILE, 0
    numbers = Numbers(path)
    for _ in range(3):
        numbers = Numbers(path)
        assert numbers.first > last
        for last in range(numbers.first, numbers.first + 10):
            numbers.use(last)
        now -= 3600 * 10**9
    assert Numbers().first < last, "none are kept"
    last = Numbers(path).first + (1 << 21)
    numbers.use(last)
    assert Numbers(path).first > last
    for damaged in (b"", b"1234567", b"\xff" * 8, bytes(9)):
        path.write_bytes(damaged)
        assert Numbers(path).first == now // 1000
    path.unlink()
    path.mkdir()
    Numbers(path).use(now)  # it logs that it cannot keep them


def test_a_busy_topic_leaves_room_to_keep_batches_of_others(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: once one topic held all bytes, the others kept none, and each replay of theirs caused a snapshot."""
    monkeypatch.setattr("kvdepot.features.routers.events.KEPT_BYTES", 400)  # two batches
    published = Published(context, tmp_path, replays=True, topic="{model}")
    publisher, router, asking = published.publisher, published.subscribe(), context.socket(zmq.DEALER)
    kept.append(asking)
    asking.connect(publisher.replay_endpoint)

    def store(model: str, run: KeyRun, seconds: float = 0.0) -> None:
        published.store(run, model)
        published.serve_all(seconds)

    store("busy", chunks(1, 100))
    store("quiet", chunks(1, 101))
    for number in range(16):
        store("busy", chunks(1, number), 1.0)
    store("quiet", chunks(1, 102))
    numbers: dict[bytes, int] = {}
    while b"quiet" not in numbers or router.poll(1000):
        topic, number, _ = router.recv_multipart()
        numbers[topic] = int.from_bytes(number, "big")
    asking.send_multipart([b"", numbers[b"quiet"].to_bytes(8, "big")])
    wait_until(lambda: (sum(publisher.serve() or ()), asking.poll(10))[1])
    told: list[tuple[bytes, int]] = []
    while asking.poll(1000):
        _, topic, number, _ = asking.recv_multipart()
        told.append((topic, int.from_bytes(number, "big")))
    assert (b"quiet", numbers[b"quiet"]) in told


def test_a_topic_that_fell_behind_lists_all_topics_again(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: it cleared its topic alone, and llm-d drops the blocks of all topics of the node then."""
    monkeypatch.setattr("kvdepot.features.routers.shelves.LONGEST_LOG", 4)
    published = Published(context, tmp_path, topic="{model}")
    router = published.subscribe()

    def told() -> list[tuple[bytes, str]]:
        published.serve_all()
        events: list[tuple[bytes, str]] = []
        while router.poll(1000):
            topic, _, payload = router.recv_multipart()
            events += ((topic, event["type"]) for event in events_of(payload))
        return events

    published.store(chunks(1, 1), "one")
    published.store(chunks(1, 2), "two")
    first = told()
    published.store(chunks(10, 2), "two")
    for events in (first, told()):
        assert events[:2] == [(b"one", "AllBlocksCleared"), (b"two", "AllBlocksCleared")]
        assert sorted(events[2:]) == [(b"one", "BlockStored"), (b"two", "BlockStored")]


def test_no_message_of_a_stranger_unsubscribes_others(context: Context, tmp_path: Path) -> None:
    """Regression: ZeroMQ does not say who sent an unsubscription, and passes other messages on, too."""
    published = Published(context, tmp_path)
    publisher, subscriber = published.publisher, published.subscribe()
    published.serve_all()
    stranger = socket.socket(socket.AF_UNIX)
    stranger.settimeout(10)
    stranger.connect(f"{tmp_path}/events")
    greeting = b"\xff".ljust(9, b"\0") + b"\x7f\3\0" + b"NULL".ljust(52, b"\0")  # ZMTP 3.0
    ready, answer = b"\5READY\x0bSocket-Type\0\0\0\3SUB", b""
    stranger.sendall(greeting)
    while not answer.endswith(b"XPUB"):
        answer += stranger.recv(100)
    stranger.sendall(b"\4" + bytes([len(ready)]) + ready)
    for message in (b"\0", b"\2"):
        frame = b"\0" + bytes([len(message)]) + message
        wait_until(lambda: (stranger.sendall(frame), publisher.socket.poll(10))[1])  # noqa: B023
        published.serve_all()
    published.store(chunks(1, 1))
    published.serve_all()
    kinds: list[str] = []
    while "BlockStored" not in kinds:
        assert subscriber.poll(10_000)
        kinds += [event["type"] for event in events_of(subscriber.recv_multipart()[2])]
    stranger.close()


@pytest.mark.slow
@pytest.mark.promise(74)
def test_many_subscriptions_of_a_stranger_take_no_memory_and_routers_come_back(
    depot: DepotProcess, engine: Engine, context: Context
) -> None:
    """ZeroMQ keeps each topic: 1,000,000 of 60 bytes took 2.9 GB, which the depot kept after the stranger had left."""
    router, before = Router(depot, context), resident_bytes(depot)
    engine.store(prompt(5, "a"))
    wait_until(lambda: router.knows(prompt(5, "a")))
    stranger = context.socket(zmq.SUB)
    stranger.setsockopt(zmq.SNDHWM, 0)
    stranger.setsockopt(zmq.RECONNECT_IVL, -1)
    stranger.connect(depot.status().event_endpoints[0])
    for _ in range(200_000):
        stranger.subscribe(random.randbytes(50))
    wait_until(lambda: depot.status().counters["event_floods"], 60)
    engine.store(prompt(5, "b"))
    wait_until(lambda: router.knows(prompt(5, "a")) and router.knows(prompt(5, "b")), 60)
    stranger.close(linger=0)
    # The publisher first reads the subscriptions that ZeroMQ had taken.
    wait_until(lambda: resident_bytes(depot) - before < 64 << 20, 30, "the memory of the flood to be freed")


def resident_bytes(depot: DepotProcess) -> int:
    pages = Path(f"/proc/{depot.pid}/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [1, 2])
def test_tokens_survive_a_killed_depot(num_kills: int, depot: DepotProcess, context: Context) -> None:
    engine, run = Engine(depot), prompt(5, "a")
    engine.store(run)
    engine.close()
    for _ in range(num_kills):
        depot.kill()
        depot.start()
    router = Router(depot, context)
    wait_until(lambda: router.knows(run))
    assert [token for each in ids_of(run) for token in router.tokens[each]] == tokens_of(run, 64)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "missing"), [(-1, 0), (0, 1)], ids=["space", "digests"])
def test_tokens_that_no_depot_keeps_describe_nothing(space: int, missing: int, depot: DepotProcess) -> None:
    """Regression: the space -1 was taken for the last one, and a part of a digest ended the reading of the file."""
    engine, run = Engine(depot), prompt(2, "a")
    engine.store(run)
    (request,) = description(run).requests(1, run)
    engine.close()
    depot.kill()
    file = TokensFile.create(depot.pool_directory / TOKENS_FILE)
    request = msgspec.structs.replace(request, digests=request.digests[: len(request.digests) - missing])
    file.append(msgspec.msgpack.encode((space, MODEL, request)))
    file.close()
    depot.start()
    engine = Engine(depot)
    wait_until(lambda: (depot.pool_directory / TOKENS_FILE).stat().st_size < 100, what="a file without that message")
    assert engine.scheduler.find(run).wants_tokens
    engine.close()


@pytest.mark.slow
def test_damaged_tokens_end_the_file_and_nothing_else(depot: DepotProcess, context: Context) -> None:
    engine, runs = Engine(depot), [prompt(2, name) for name in "abc"]
    for run in runs:
        engine.store(run)
    engine.close()
    depot.kill()
    path = depot.pool_directory / TOKENS_FILE
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    depot.start()
    router = Router(depot, context)
    wait_until(lambda: router.knows(runs[0]))
    assert not router.knows(runs[2])
    engine = Engine(depot)
    assert engine.scheduler.find(runs[2]).wants_tokens
    assert engine.describe(runs[2]) == 2
    wait_until(lambda: router.knows(runs[2]))
    engine.close()


def test_a_file_of_tokens_keeps_wanted_messages_and_those_that_come_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / TOKENS_FILE
    file = TokensFile.create(path)
    for number in range(10):
        file.append(bytes([number]) * 100)
    steps = file.rewrite(lambda body: body[0] % 2 == 0)
    next(steps)
    file.append(b"new")
    assert TokensFile.open(path).size_bytes > 1000, "a server that is killed now has lost nothing"
    with PoolFolder(tmp_path) as folder:
        assert len(folder.pool_files()) == 2, "the next start would not remove the new file"
    for _ in steps:
        pass
    told: list[bytes] = []
    for _ in TokensFile.open(path).rewrite(lambda body: told.append(body) is None):
        pass
    assert sorted(told) == sorted([b"new", *(bytes([number]) * 100 for number in range(0, 10, 2))])


@pytest.mark.slow
def test_chunks_that_only_a_tier_has_are_announced_there(tmp_path: Path, context: Context) -> None:
    """They leave the tier's medium when a lookup or a command promotes them. No engine describes them again."""
    tier = f"disk://{tmp_path}/tier?capacity=64MiB"
    flags = (*FLAGS, "--tier", tier, "--promote-seconds", "10", "--policy", "lru")
    with DepotProcess(*flags, pool_size="1MiB") as depot:
        engine, router, run = Engine(depot), Router(depot, context), prompt(5, "a")
        engine.store(run)
        wait_until(lambda: depot.status().tiers[0].counters.get("written_entries", 0) >= 5)
        others = iter(range(1000))

        def is_only_in_tier() -> bool:
            engine.store(prompt(9, f"b{next(others)}"))
            router.take_all()
            return set(ids_of(run)) <= router.in_tier

        wait_until(is_only_in_tier, 20)
        assert not set(ids_of(run)) & router.found
        late = Router(depot, context)
        wait_until(lambda: (late.take_all(), set(ids_of(run)) <= late.in_tier)[1])

        ask_depot(o.Warm(tenant=run.tenant, digests=run.digests), depot.url, 30)
        wait_until(lambda: router.knows(run))
        assert not set(ids_of(run)) & router.in_tier
        wait_until(is_only_in_tier, 20)
        request = m.Lookup(engine.scheduler.context, "r", run.digests, run.tenant, wait_seconds=10.0)
        reply = engine.scheduler.channel.call(request, 20)
        assert isinstance(reply, m.LookupReply)
        assert (reply.num_chunks, reply.num_promoted, reply.wants_tokens) == (5, 5, False)
        wait_until(lambda: router.knows(run))
        assert not set(ids_of(run)) & router.in_tier
        engine.close()


@pytest.mark.slow
def test_a_corrupt_chunk_that_a_tier_brought_back_is_described_again(tmp_path: Path, context: Context) -> None:
    tier = f"disk://{tmp_path}/tier?capacity=64MiB"
    with DepotProcess(*FLAGS, "--tier", tier, "--promote-seconds", "10", pool_size="1MiB") as depot:
        engine, router, run, other = Engine(depot), Router(depot, context), prompt(5, "a"), prompt(4, "b")
        engine.store(run)
        engine.store(other)
        wait_until(lambda: depot.status().tiers[0].counters.get("written_entries", 0) >= 9)
        wait_until(lambda: router.knows(run))
        plan = engine.worker.ask(m.PrepareRetrieve(engine.worker.context, "r", run.digests, 0, (5,)))
        assert isinstance(plan, m.RetrievePlan)
        (wrong,) = [(extent[3], extent[5]) for extent in m.EXTENT.iter_unpack(plan.extents) if extent[0] == 2]
        engine.worker.ask(m.Release(engine.worker.context, (plan.lease,)))
        assert engine.worker.ask(m.ReportCorrupt(engine.worker.context, (wrong,))) == m.Done(depot.status().epoch, 1)
        request = m.Lookup(engine.scheduler.context, "r", run.digests, run.tenant, wait_seconds=10.0)
        reply = engine.scheduler.channel.call(request, 20)
        assert isinstance(reply, m.LookupReply)
        assert (reply.num_chunks, reply.wants_tokens) == (5, True)
        assert not engine.scheduler.find(run.slice(0, 2)).wants_tokens, "the chunks before it are described"
        assert not engine.scheduler.find(other).wants_tokens
        assert engine.describe(run) == 1
        assert not engine.scheduler.find(run).wants_tokens
        late = Router(depot, context)
        wait_until(lambda: router.knows(run) and late.knows(run))
        engine.close()


def test_promoted_chunks_are_announced_as_far_as_their_descriptions_were_kept() -> None:
    described = Described(holdings=Holdings(in_tier=lambda nodes: nodes, most_bytes=12 * 8))
    view, run, bench, reader = View(), chunks(3, 1), described.bench, described.reader()
    assert described.store(run) == 3
    while bench.index.evictor.make_room(1, 1):
        pass
    follow(reader, view)
    assert (view.in_tier, view.found) == (set(ids_of(run)[:2]), set()), "there is room for 24 bytes: two chunks"
    bench.worker().store(run)
    bench.index.visibility.promoted(bench.index.spaces[0], run.digests, 0, 3)
    follow(reader, view)
    assert (view.in_tier, view.found) == (set(), set(ids_of(run)[:2]))
    described.check_integrity()
    assert described.store(run) == 1, "an engine describes the rest"
    assert follow(reader, view).found == set(ids_of(run))
    described.check_integrity()


def test_a_prompt_that_is_described_again_in_parts_leaves_the_tier() -> None:
    described = Described(holdings=Holdings(in_tier=lambda nodes: nodes))
    view, run, bench, reader = View(), chunks(6, 1), described.bench, described.reader()
    assert described.store(run) == 6
    while bench.index.evictor.make_room(1, 1):
        pass
    assert (follow(reader, view).found, view.in_tier) == (set(), set(ids_of(run)))
    desk = NewsDesk(bench.depot.state, described.holdings, bench.depot.background.queue(1))
    context, worker = SimpleNamespace(space=bench.index.spaces[0], served_model=MODEL), bench.worker()
    (request,) = description(run, 1).requests(0, run)
    desk.describe(context, request)  # type: ignore[arg-type]
    for start in range(0, 6, 2):
        part = run.slice(start, start + 2)
        worker.store(part)
        desk.stored(context.space, part.digests)
        ids = ids_of(run)
        assert (follow(reader, view).found, view.in_tier) == ({*ids[: start + 2]}, {*ids[start + 2 :]})
        described.check_integrity()


def test_chunks_of_a_cleared_tier_are_taken_back_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.features.routers.holdings.LEFT_AT_ONCE", 2)
    described, view, run = Described(holdings=Holdings(in_tier=lambda nodes: nodes)), View(), chunks(3, 1)
    watchers, reader = described.bench.index.watchers, described.reader()
    described.store(run)
    while described.bench.index.evictor.make_room(1, 1):
        pass
    assert follow(reader, view).in_tier == set(ids_of(run))
    assert watchers.forget_tiers()
    assert len(follow(reader, view).in_tier) == 1
    assert not watchers.forget_tiers()
    assert (follow(reader, view).in_tier, view.found) == (set(), set())
    described.check_integrity()


def test_chunks_that_a_tier_lost_are_taken_back_by_the_lookup_that_misses_them() -> None:
    described = Described(holdings=Holdings(in_tier=lambda nodes: nodes, most_bytes=12 * 8))
    view, run = View(), chunks(3, 1)
    bench, reader = described.bench, described.reader()
    for name in (1, 2):
        run = chunks(3, name)
        assert described.store(run) == 3
        for start in range(len(run.digests) - 32, -1, -32):
            bench.index.evictor.make_room(1, 1)
            assert run.digests[start : start + 32] not in bench.index.spaces[0].nodes
        described.check_integrity()
    told = follow(reader, view).in_tier
    assert told == set(ids_of(run)[:2]), "there is room for 24 bytes: two chunks, the last evicted ones"
    described.holdings.missed(bench.index.spaces[0], run.digests, 0)
    assert (follow(reader, view).in_tier, view.found) == (set(), set())
    described.check_integrity()
