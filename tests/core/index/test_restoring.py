"""Requests and failures while the table of an earlier server is read back."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvdepot.config import Demotion, ServerConfig
from kvdepot.features.sessions.messages import Hint
from kvdepot.index.entries import Entries
from kvdepot.index.index import ChunkIndex
from kvdepot.index.restore import restore
from kvdepot.index.shares import Shares
from kvdepot.index.visibility import Visibility
from kvdepot.layout import GroupKind
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.files import open_pool
from kvdepot.pool.names import Label
from kvdepot.pool.table import FREE, SEALED, WRITING, Entry, IndexTable, Writer
from kvdepot.processes import process_start_time
from kvdepot.server.app import DepotServer
from kvdepot.server.depot import Depot
from kvdepot.testing.tier_traffic import make_pool
from kvdepot.tiers.memory import MemoryTier
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.tiering import TieringSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.features import STANDARD, needs
from support.index import PAGE, SHARDED, Bench, prompt
from support.integrity import check_empty
from support.operate import put_tiers_below

NUM_RECORDS = 256
LONG = prompt(60)
SHORT = [prompt(2, name) for name in range(1, 31)]
UNFINISHED = prompt(61).slice(60)
THIS_PROCESS = Writer(os.getpid(), process_start_time(os.getpid()))


@pytest.fixture(scope="module")
def memory() -> bytearray:
    """The table of a killed server: both shards of all chunks, sealed far apart in time, and one unfinished entry."""
    bench = Bench(SHARDED, pages=NUM_RECORDS, num_records=NUM_RECORDS)
    workers = [bench.worker(shard) for shard in (0, 1)]
    for worker in workers:
        for run in (LONG, *SHORT):
            for start in range(0, run.num_chunks, m.MAXIMUM_STORE_ENTRIES):
                bench.now += 1
                worker.store(run.slice(start, min(run.num_chunks, start + m.MAXIMUM_STORE_ENTRIES)))
        bench.now += 5000
    assert workers[0].prepare(UNFINISHED).ticket
    return bench.memory


class Successor:
    """A depot that reads a table back step by step."""

    def __init__(self, memory: bytearray, num_labels: int = 1) -> None:
        self.now = 20_000.0
        self.table = IndexTable(bytearray(memory), NUM_RECORDS)
        self.index = ChunkIndex(ExtentAllocator(NUM_RECORDS * PAGE), self.table)
        self.depot = depot = Depot(self.index, epoch=2, lease_seconds=10.0, clock=lambda: self.now, features=STANDARD)
        depot.labels.restore([Label("default", "model")])
        depot.state.accepts_stores = False
        pool = make_pool(NUM_RECORDS * PAGE)
        self.queue = TierQueue(MemoryTier(pool, 1 << 20), pool, "memory", write_bytes=1 << 20, clock=lambda: self.now)
        self.tiering = put_tiers_below(depot, [self.queue], TieringSettings(Demotion.EVICT))
        spec = m.CacheSpec(1, SHARDED, "bytes")
        self.steps = restore(self.index, [spec], num_labels)
        self.num_steps = 0
        details = (m.GroupDetail((PAGE,), 8),)
        self.register = m.RegisterKVCache(m.PROTOCOL_VERSION, "new", 0, 2, "none", "none", "model", spec, details)
        self.context = self.ask(self.register).context

    def ask(self, request: frames.Request) -> Any:
        return self.depot.handle(1, Writer(7, 1), request)

    def finish(self, meanwhile: Callable[["Successor"], object] = lambda _: None) -> list[Entry]:
        unfinished: list[Entry] = []
        for entry in self.steps:
            self.num_steps += 1
            if entry is not None:
                unfinished.append(entry)
            meanwhile(self)
        self.depot.state.accepts_stores = True
        return unfinished

    def close(self) -> None:
        self.tiering.close()


def found(depot: Depot) -> list[int]:
    return [depot.index.visibility.match(depot.index.spaces[0], run.digests)[0] for run in (LONG, *SHORT)]


def evict(successor: Successor) -> None:
    node = successor.index.evictor.next_victim()
    assert node is None
    successor.index.evictor.make_room(1, 1)
    for node in range(len(successor.index.nodes.tree.keys)):
        successor.index.evictor.evict(node)


def report_corrupt(successor: Successor) -> None:
    entries = tuple((entry, successor.table.header(entry)) for entry in successor.table.entries[::5])
    assert successor.ask(m.ReportCorrupt(successor.context, entries)) == m.Done(2, 0)


def look_up(successor: Successor) -> None:
    for run in (LONG, *SHORT):
        successor.ask(m.Lookup(successor.context, "r", run.digests))
    successor.ask(m.EndRequest(successor.context, "r"))


def hint(successor: Successor) -> None:
    successor.ask(Hint(successor.context, "default", LONG.digests, session_ended=True))
    successor.depot.background.work()


def store_and_retrieve(successor: Successor) -> None:
    run = prompt(2, 99)
    store = m.PrepareStore(successor.context, "r", "", run.digests, 0, run.parent, (run.num_chunks,))
    assert successor.ask(store).ticket == 0
    retrieve = m.PrepareRetrieve(successor.context, "r", SHORT[0].digests, 0, (SHORT[0].num_chunks,))
    successor.ask(m.Release(successor.context, (successor.ask(retrieve).lease,)))


def come_and_go(successor: Successor) -> None:
    successor.ask(m.Unregister(successor.context))
    successor.context = successor.ask(successor.register).context
    successor.depot.end_process(Writer(1, 1))


def clear(successor: Successor) -> None:
    assert sum(clear_pool(successor.depot, None)) == 0


MEANWHILE: dict[str, Callable[[Successor], object]] = {
    "an eviction": evict,
    "a turn of the tiers": lambda successor: successor.tiering.turn(lambda: True),
    "a report of damaged bytes": report_corrupt,
    "lookups": look_up,
    "hints": hint,
    "a store and a retrieve": store_and_retrieve,
    "a worker comes and goes": come_and_go,
    "clearing": clear,
}


@needs("sessions")
@pytest.mark.promise(23)
@pytest.mark.parametrize("what", MEANWHILE)
def test_requests_at_any_step_of_reading_back_do_not_change_its_result(what: str, memory: bytearray) -> None:
    with closing(Successor(memory)) as undisturbed:
        assert undisturbed.finish() != []
        expected = found(undisturbed.depot)
    assert expected == [60, *([2] * 30)]
    assert undisturbed.num_steps > 30
    for disturbed in (None, *range(1, undisturbed.num_steps, 3)):
        with closing(Successor(memory)) as successor:

            def meanwhile(successor: Successor, disturbed: int | None = disturbed) -> None:
                if disturbed in (None, successor.num_steps):
                    MEANWHILE[what](successor)

            unfinished = successor.finish(meanwhile)
            assert found(successor.depot) == expected
            assert sum(successor.index.visibility.is_visible) == 120
            successor.index.check_integrity()
            successor.depot.quarantine.discard(unfinished)
            successor.depot.end_session(1)
            while successor.index.evictor.make_room(1, 1):
                pass
            check_empty(successor.index)


def fail_once(number: int, function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise RuntimeError("a mistake")
        return function(*arguments)

    return failing


def test_records_of_a_label_that_has_no_name_are_freed(memory: bytearray) -> None:
    successor = Successor(memory, num_labels=0)
    unfinished = successor.finish()
    assert found(successor.depot) == [0] * (1 + len(SHORT))
    assert successor.index.entries.num_sealed == 0
    assert sum(successor.table.state(entry) != FREE for entry in successor.table.entries) == len(unfinished) == 1
    successor.close()


@pytest.mark.promise(23)
@pytest.mark.parametrize(
    ("owner", "step", "number", "num_sealed"),
    [
        (ChunkIndex, "add_level", 0, 0),
        (ChunkIndex, "add_level", 50, 0),
        (Entries, "restore", 50, 0),
        (Shares, "added", 0, 0),
        (Visibility, "reveal", 0, 240),
    ],
)
def test_a_step_that_fails_leaves_an_index_that_serves(
    owner: type, step: str, number: int, num_sealed: int, memory: bytearray, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Successor(memory)) as successor:
        index, depot = successor.index, successor.depot
        extents = index.extents
        with monkeypatch.context() as patch:
            patch.setattr(owner, step, fail_once(number, getattr(owner, step)))
            unfinished = successor.finish()
        assert index.num_restore_errors == 1
        assert index.extents is extents, "the thread that allocates the pool goes on with it"
        assert not index.is_restoring
        records = {record.entry: record for record in index.table.records()}
        assert [record.entry for record in records.values() if record.state == WRITING] == unfinished != []
        assert index.extents.used_bytes == len(records) * PAGE
        assert sum(state.state == SEALED for state in records.values()) == index.entries.num_sealed
        assert index.entries.num_sealed == num_sealed
        assert sum(found(depot)) == 0
        run = prompt(2, 99)
        store = m.PrepareStore(successor.context, "r", "", run.digests, 0, run.parent, (run.num_chunks,))
        plan = successor.ask(store)
        taken = {offset for _, _, _, _, _, _, offset, _ in m.EXTENT.iter_unpack(plan.extents)}
        assert len(taken) == 2
        assert taken.isdisjoint(records[entry].offset for entry in unfinished)
        successor.ask(m.CommitStore(successor.context, plan.ticket))
        depot.quarantine.discard(unfinished)
        while index.evictor.make_room(1, 1):
            pass
        check_empty(index)


def make_server(folder: Path) -> DepotServer:
    (folder / "pool").mkdir(exist_ok=True)
    config = ServerConfig(directory=folder / "depot", pool_directory=folder / "pool", pool_size_bytes=1 << 20)
    files = open_pool(config.pool_path, 1 << 20, NUM_RECORDS, server="an earlier depot")
    files.take_place()
    files.close(remove=False)
    return DepotServer(config)


def test_a_server_whose_reading_back_fails_goes_on_without_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_arguments: object) -> Iterator[int | None]:
        yield None
        raise RuntimeError("a mistake")

    monkeypatch.setattr("kvdepot.server.restoring.restore", failing)
    with closing(make_server(tmp_path)) as server:
        assert server.restoring is not None
        server.restoring.go_on(lambda: False)
        assert (server.depot.state.is_restoring, server.depot.counters["chores_failed"]) == (False, 1)
        assert not server.depot.state.accepts_stores


@pytest.fixture
def next_server(tmp_path: Path) -> Iterator[DepotServer]:
    """The second of two servers. At the first, workers `a` and `b` of this process had prepared two chunks each."""
    with closing(make_server(tmp_path)) as server:
        assert server.restoring is not None
        server.restoring.go_on(lambda: False)
        for number, name in enumerate(("a", "b")):
            run = prompt(2, number)
            store = m.PrepareStore(register(server, name), "r", "", run.digests, 0, run.parent, (2,))
            plan = server.depot.handle(1, THIS_PROCESS, store)
            assert isinstance(plan, m.StorePlan)
            assert plan.ticket
    with closing(make_server(tmp_path)) as server:
        yield server


def register(server: DepotServer, name: str) -> int:
    spec = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes")
    details = (m.GroupDetail((PAGE,), 8),)
    request = m.RegisterKVCache(m.PROTOCOL_VERSION, name, 0, 1, "none", "none", "model", spec, details)
    reply = server.depot.handle(1, THIS_PROCESS, request)
    assert isinstance(reply, m.Registered)
    return reply.context


def test_a_worker_that_is_back_by_the_time_that_its_entries_are_looked_at_is_not_waited_for(
    next_server: DepotServer,
) -> None:
    assert next_server.restoring is not None
    while not next_server.depot.quarantine.held:
        next_server.restoring.go_on(lambda: True)
    assert len(next_server.depot.quarantine.held) == 1, "between the entries of one worker and those of the other"
    for name in ("a", "b"):
        register(next_server, name)
    while next_server.depot.state.is_restoring:
        next_server.restoring.go_on(lambda: True)
    assert next_server.depot.quarantine.held == []
    assert next_server.depot.index.extents.used_bytes == 0


@pytest.mark.parametrize("is_early", [True, False])
def test_a_worker_that_is_back_frees_nothing_that_another_one_of_its_process_may_be_writing(
    is_early: bool, next_server: DepotServer
) -> None:
    assert next_server.restoring is not None
    if is_early:
        register(next_server, "a")
    next_server.restoring.go_on(lambda: False)
    if not is_early:
        register(next_server, "a")
    (held,) = next_server.depot.quarantine.held
    assert len(held.entries) == 2
    assert next_server.depot.index.extents.used_bytes == 2 * PAGE
    register(next_server, "b")
    assert next_server.depot.quarantine.held == []
    assert next_server.depot.index.extents.used_bytes == 0
