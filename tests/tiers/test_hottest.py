"""Lists of hot prefixes between depots that share a tier. Each depot has a pool of real memory and a fake clock."""

import mmap
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from kvdepot.index.index import ChunkIndex
from kvdepot.keys import KeyRun, Namespace, digest_at, hash_prefix
from kvdepot.lab.processes import wait_until
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import IndexTable, Writer
from kvdepot.server.depot import Depot
from kvdepot.server.hottest import LIST_BYTES, PERIOD_SECONDS, Hottest
from kvdepot.server.turns import PendingReply
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.queue import TierQueue
from kvdepot.tiers.url import TierUrl, open_tier
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from support.operate import operate, put_tiers_below

PAGE = 4096
POOL_BYTES = 8 << 20
SPEC = m.CacheSpec(1, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "bytes")


def prompt(name: str, num_chunks: int, tenant: str = "default", head: int = 0) -> KeyRun:
    """Return a prompt that shares its first `head` chunks with all others."""
    tokens = [*range(head), *random.Random(name).sample(range(1000, 100_000), num_chunks - head)]
    return hash_prefix(Namespace("model", tenant=tenant), 1, tokens)


class Node:
    """A depot over a shared folder, and its engine."""

    def __init__(self, folder: Path, wall_clock: Callable[[], float], pool_bytes: int) -> None:
        self.now = 100.0
        self.fd = os.memfd_create("pool")
        os.ftruncate(self.fd, pool_bytes)
        self.pool = TierPool(self.fd, memoryview(mmap.mmap(self.fd, pool_bytes)))
        self.index = ChunkIndex(ExtentAllocator(pool_bytes), IndexTable.in_memory(8192))
        self.depot = Depot(self.index, epoch=1, lease_seconds=10.0, clock=lambda: self.now)
        shared = open_tier(TierUrl.parse(f"file://{folder}"), self.pool)
        self.tiering = put_tiers_below(self.depot, [TierQueue(shared, self.pool, "shared")])
        Hottest(self.depot.state, self.depot.contexts, self.fd, wall_clock)
        self.context = 0

    def attach(self) -> None:
        details = (m.GroupDetail((PAGE,), 8),)
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, "engine", 0, 1, "none", "none", "model", SPEC, details)
        self.context = self.ask(request).context

    def ask(self, request: frames.Request) -> Any:
        return self.depot.handle(1, Writer(1, 1), request)

    def store(self, run: KeyRun) -> None:
        for start in range(0, run.num_chunks, m.MAXIMUM_STORE_ENTRIES):
            part = run.slice(start, min(start + m.MAXIMUM_STORE_ENTRIES, run.num_chunks))
            plan = self.ask(
                m.PrepareStore(
                    self.context, "r", run.tenant, part.digests, part.first_chunk, part.parent, (part.num_chunks,)
                )
            )
            for chunk, _, _, _, _, _, offset, size in m.EXTENT.iter_unpack(plan.extents):
                self.pool.view[offset : offset + size] = content(part, chunk)
            if plan.ticket:
                self.ask(m.CommitStore(self.context, plan.ticket))

    def use(self, run: KeyRun) -> None:
        reply = self.ask(m.Lookup(self.context, "r", run.digests, run.tenant, wait_seconds=10.0))
        if isinstance(reply, PendingReply):
            pending = reply
            self.turn_until(lambda: pending.reply is not None)
            reply = pending.reply
        assert isinstance(reply, m.LookupReply)
        self.ask(m.Release(self.context, (reply.lease,)))

    def store_and_use(self, *runs: KeyRun) -> None:
        """Attach the engine, and let it store prompts and use each once."""
        self.attach()
        for run in runs:
            self.store(run)
        self.settle()
        for run in runs:
            self.use(run)

    def take_lists(self, num_chunks: int) -> None:
        """Attach the engine, and wait until so many chunks of others' lists are promoted and nothing is under way."""
        self.attach()
        self.turn_until(lambda: self.num_promoted >= num_chunks)
        self.turn_until(self.is_idle)

    def holds(self, run: KeyRun) -> int:
        """Return how many chunks the pool has. Check their bytes."""
        found, _ = self.index.visibility.match(self.index.spaces[0], run.digests)
        for start in range(0, found, 100):
            part = run.slice(start, min(start + 100, found))
            request = m.PrepareRetrieve(self.context, "r", part.digests, start, (part.num_chunks,))
            plan = self.ask(request)
            assert plan.num_chunks == part.num_chunks
            for chunk, _, _, _, _, _, offset, size in m.EXTENT.iter_unpack(plan.extents):
                assert self.pool.view[offset : offset + size] == content(part, chunk)
            self.ask(m.Release(self.context, (plan.lease,)))
        return found

    def turn(self) -> None:
        self.now += 0.1
        self.depot.state.timers.expire(self.now)
        self.depot.background.work(lambda: True)
        self.tiering.turn()

    def turn_until(self, is_over: Callable[[], bool]) -> None:
        wait_until(lambda: (self.turn(), is_over())[1])

    def settle(self) -> None:
        """Wait until everything has arrived in the tier."""
        for _ in range(3):
            self.turn_until(
                lambda: not any(q.queued_write_bytes for q in self.tiering.queues) and not self.tiering.num_refreshing
            )
            self.now += 3.0

    @property
    def num_lists(self) -> int:
        return self.depot.counters["hottest_lists_written"]

    @property
    def num_promoted(self) -> int:
        return self.depot.counters["hottest_chunks_promoted"]

    def is_idle(self) -> bool:
        return not self.depot.background.num_waiting and not len(self.tiering.promotions)


def content(run: KeyRun, chunk: int) -> bytes:
    return random.Random(digest_at(run.digests, chunk)).randbytes(PAGE)


class Fleet:
    """Nodes over one folder, with one wall clock."""

    def __init__(self, folder: Path) -> None:
        self.wall = 1_000_000.0 * PERIOD_SECONDS
        self.folder = folder
        self.nodes: list[Node] = []

    def node(self, pool_bytes: int = POOL_BYTES) -> Node:
        self.nodes.append(Node(self.folder, lambda: self.wall, pool_bytes))
        return self.nodes[-1]

    def write_list(self, node: Node) -> None:
        """Advance to a node's time in the next period, and wait for its list."""
        before = node.num_lists
        self.wall += 2 * PERIOD_SECONDS - 1
        node.turn_until(lambda: node.num_lists > before)
        node.settle()
        self.wall -= PERIOD_SECONDS - 1

    def names(self, run: KeyRun) -> bool:
        """Return whether any object names a chunk of a prompt."""
        objects = [path.read_bytes() for path in self.folder.rglob("*") if path.is_file()]
        return any(digest_at(run.digests, chunk) in data for chunk in range(run.num_chunks) for data in objects)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    for node in fleet.nodes:
        node.tiering.close()
        node.index.check_integrity()
        os.close(node.fd)


def test_a_new_depot_has_what_others_use_most_before_its_first_request(fleet: Fleet) -> None:
    old, new = fleet.node(), fleet.node()
    old.attach()
    hot = [prompt(f"hot {number}", 40, tenant="ab"[number % 2], head=8 * (number % 2)) for number in range(4)]
    cold = prompt("cold", 40)
    for run in [*hot, cold]:
        old.store(run)
    old.settle()
    for run in hot:
        old.use(run)
    fleet.write_list(old)
    assert old.index.extents.used_bytes == (5 * 40 - 8) * PAGE, "the list has left the pool"
    new.attach()
    new.turn_until(lambda: new.num_promoted >= 152)
    assert [new.holds(run) for run in hot] == [40] * 4
    assert new.holds(cold) == 0
    new.turn_until(new.is_idle)
    assert new.index.extents.used_bytes == 152 * PAGE, "no list stays in the pool"


def test_lists_of_several_depots_are_taken_and_the_most_used_prefixes_first(fleet: Fleet) -> None:
    """A quarter of the pool holds 512 chunks: two prompts of 200, and half of a third one."""
    first, second, new = fleet.node(), fleet.node(), fleet.node()
    runs = [prompt(f"{number}", 200) for number in range(4)]
    for node, mine in ((first, runs[:1]), (second, runs[1:])):
        node.attach()
        for run in mine:
            node.store(run)
        node.settle()
    for number, run in enumerate(runs[1:]):
        for _ in range(3 - number):
            second.use(run)
    first.use(runs[0])
    fleet.write_list(first)
    fleet.write_list(second)
    new.take_lists(512)
    assert new.holds(runs[1]) == new.holds(runs[2]) == 200
    assert new.holds(runs[3]) == 112
    assert new.holds(runs[0]) == 0
    assert new.index.extents.used_bytes == POOL_BYTES // 4


@pytest.mark.parametrize("is_back", [True, False], ids=["in the pool", "evicted"])
def test_a_prefix_that_a_tier_is_often_asked_for_comes_before_one_that_was_used_once(
    is_back: bool, fleet: Fleet
) -> None:
    """The old depot's pool holds one prompt at a time, a quarter of the new one's one prompt and a half."""
    old, new = fleet.node(pool_bytes=450 * PAGE), fleet.node()
    hot, cold = prompt("hot", 350), [prompt(f"cold {number}", 350) for number in range(3)]
    old.attach()
    for run in (hot, *cold):
        old.store(run)
        old.settle()
    for run in cold:
        old.use(run)
        old.use(hot)
    if not is_back:
        old.use(cold[2])
    assert (old.holds(hot) == 350) == is_back
    fleet.write_list(old)
    new.take_lists(512)
    assert new.holds(hot) == 350
    assert sum(map(new.holds, cold)) == 512 - 350


def test_a_depot_that_is_full_enough_promotes_nothing(fleet: Fleet) -> None:
    old, new = fleet.node(), fleet.node()
    old.store_and_use(prompt("hot", 40))
    fleet.write_list(old)
    new.attach()
    new.store(prompt("mine", 512))
    new.settle()
    new.turn_until(new.is_idle)
    assert new.num_promoted == 0
    assert new.holds(prompt("hot", 40)) == 0


def test_a_prompt_that_left_the_pool_is_listed_as_far_as_it_is_there(fleet: Fleet) -> None:
    old, new, run = fleet.node(), fleet.node(), prompt("hot", 40)
    old.store_and_use(run)
    old.use(run.slice(0, 30))
    for chunk in range(39, 29, -1):
        assert old.index.evictor.evict(old.index.spaces[0].nodes[digest_at(run.digests, chunk)])
    old.store(prompt("another", 20))
    fleet.write_list(old)
    new.take_lists(30)
    assert new.holds(run) == 30


@pytest.mark.parametrize("request_", [o.Clear("a"), o.Clear(model="model"), o.Clear()], ids=["tenant", "model", "all"])
def test_no_list_names_what_was_cleared(request_: o.Clear, fleet: Fleet) -> None:
    """The pool holds one of the prompts, so the depot remembers the first one as one that tiers were asked for."""
    node, cleared = fleet.node(pool_bytes=450 * PAGE), prompt("cleared", 350, tenant="a")
    node.attach()
    for run in (cleared, prompt("other", 350, tenant="b")):
        node.store(run)
        node.settle()
    node.use(cleared)
    node.use(prompt("other", 350, tenant="b"))
    fleet.write_list(node)
    assert fleet.names(cleared)
    reply = operate(node.depot, request_)
    assert isinstance(reply, PendingReply)
    node.turn_until(lambda: reply.reply is not None)
    assert not fleet.names(cleared)
    kept = prompt("kept", 20, tenant="b")
    node.store(kept)
    node.use(kept)
    fleet.write_list(node)
    assert fleet.names(kept)
    assert not fleet.names(cleared)


@pytest.mark.slow
def test_a_list_that_is_begun_before_a_clear_is_not_written_after_it(fleet: Fleet) -> None:
    """The pool holds two of the prompts, so each use of one promotes it. To count these uses takes more steps."""
    node = fleet.node(pool_bytes=100 * PAGE)
    cleared = [prompt(f"cleared {number}", 40, tenant="a") for number in range(50)]
    node.attach()
    for run in cleared:
        node.store(run)
        node.settle()
    for run in cleared:
        node.use(run)
    fleet.wall += 2 * PERIOD_SECONDS - 1
    node.turn_until(lambda: node.depot.background.num_waiting > 0)
    reply = operate(node.depot, o.Clear("a"))
    assert isinstance(reply, PendingReply)
    (queue,) = node.tiering.queues
    while reply.reply is None:
        wait_until(lambda: (node.tiering.turn(), not queue.num_calls)[1])
        node.depot.background.work(lambda: True)
    assert node.depot.background.num_waiting, "the list is still being made"
    node.turn_until(node.is_idle)
    node.settle()
    assert not any(map(fleet.names, cleared))


def test_nothing_is_listed_without_a_use(fleet: Fleet) -> None:
    node = fleet.node()
    node.attach()
    node.store(prompt("stored", 20))
    node.settle()
    for _ in range(4):
        fleet.wall += PERIOD_SECONDS
        for _ in range(20):
            node.turn()
    assert node.num_lists == 0


def test_a_depot_with_a_read_only_tier_writes_no_list_and_takes_those_of_others(fleet: Fleet) -> None:
    old, new = fleet.node(), fleet.node()
    (queue,) = new.tiering.queues
    queue.write_bytes = 0
    hot, mine = prompt("hot", 40), prompt("mine", 20)
    old.store_and_use(hot)
    fleet.write_list(old)
    new.take_lists(40)
    assert new.holds(hot) == 40
    new.store(mine)
    new.use(mine)
    used_bytes = new.index.extents.used_bytes
    for _ in range(4):
        fleet.wall += PERIOD_SECONDS
        for _ in range(20):
            new.turn()
    assert (new.num_lists, new.index.extents.used_bytes) == (0, used_bytes)


@pytest.mark.parametrize(
    "listing",
    [
        (["label"], b"", b"", b""),
        ([("a", "model", "")], b"\0\0", b"\0\0\0\0", b"k" * 32),
        ([("a", "model", "")], b"\1\0", b"\xff\xff\xff\xff", b"k" * 32),
        ([("a", "model", "")], b"\0\0", b"\xff\xff\xff\xff", b"k" * 64),
        ([("a" * 2000, "model", "")], b"\0\0", b"\xff\xff\xff\xff", b"k" * 32),
        "nonsense",
        ([], b"", b"", b"", msgspec.Raw(b"\x91" * 3000 + b"\xc0")),
    ],
    ids=["labels", "its own parent", "unknown label", "too few parents", "a long name", "no list", "a nested field"],
)
def test_a_list_that_contradicts_itself_is_passed_over(
    listing: object, fleet: Fleet, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, run = fleet.node(), fleet.node(), prompt("hot", 40)
    old.store_and_use(run)
    with monkeypatch.context() as patched:
        patched.setattr(Hottest, "pack", Mock(return_value=msgspec.msgpack.encode(listing)))
        fleet.write_list(old)
    new.attach()
    new.turn_until(lambda: "ignoring a list" in caplog.text)
    new.turn_until(new.is_idle)
    assert new.num_promoted == 0
    assert new.depot.counters["requests_failed"] == new.depot.counters["chores_failed"] == 0


def test_long_names_leave_room_for_fewer_chunks(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot.server.hottest.LIST_BYTES", 2000)
    old, new = fleet.node(), fleet.node()
    runs = [prompt(f"{number}", 10, tenant=f"{number}" * 250) for number in range(6)]
    old.store_and_use(*runs)
    fleet.write_list(old)
    new.take_lists(1)
    assert 0 < sum(new.holds(run) for run in runs) < 60
    assert LIST_BYTES > 2000


def test_lists_of_the_last_periods_are_taken_and_no_older_ones(fleet: Fleet) -> None:
    nodes, new = [fleet.node() for _ in range(4)], fleet.node()
    runs = [prompt(f"{number}", 10) for number in range(4)]
    for node, run in zip(nodes, runs, strict=True):
        node.store_and_use(run)
        fleet.write_list(node)
    new.take_lists(30)
    assert [new.holds(run) for run in runs] == [0, 10, 10, 10]
