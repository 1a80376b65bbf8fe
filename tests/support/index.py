"""A depot without sockets over a small pool, with workers that ask it and a clock that tests set."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvdepot.errors import ErrorCode
from kvdepot.features.routers.holdings import Holdings
from kvdepot.index.eviction import AUTO
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import restore
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.layout import GroupKind, Part
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import Entry, IndexTable, Writer, table_size_bytes
from kvdepot.server.depot import Depot
from kvdepot.server.feature import MakeFeature
from kvdepot.server.state import SaveNames, save_nothing
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.features import features

PAGE = 4096
LEASE_SECONDS = 10.0
FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
PLAIN = (m.GroupShape(FULL, 1),)
SHARDED = (m.GroupShape(FULL, 1, layers=2),)
ONLY_WINDOW = (m.GroupShape(WINDOW, 1, window_tokens=3),)
HYBRID = (m.GroupShape(FULL, 1), m.GroupShape(WINDOW, 1, window_tokens=3), m.GroupShape(STATE, 1))


class WatchfulAllocator(ExtentAllocator):
    """Fails when an extent is freed while a record still says that it is in use."""

    table: IndexTable

    def free(self, extents: Iterable[tuple[int, int]]) -> None:
        freed = list(extents)
        in_use = {record.offset for record in self.table.records()}
        assert not in_use & {offset for offset, _ in freed}, "the header must change first"
        super().free(freed)


@dataclass
class Worker:
    bench: "Bench"
    session: int
    writer: Writer
    context: int
    shard: int

    def ask(self, request: frames.Request) -> Any:
        reply = self.bench.depot.handle(self.session, self.writer, request)
        if isinstance(reply, PendingReply):
            self.bench.depot.background.work()
            assert reply.reply is not None
            return reply.reply
        return reply

    def prepare(self, run: KeyRun, *covered: int) -> m.StorePlan:
        covered = covered or (run.num_chunks,) * len(self.bench.spec.groups)
        return self.ask(
            m.PrepareStore(self.context, "r", run.tenant, run.digests, run.first_chunk, run.parent, covered)
        )

    def commit(self, plan: m.StorePlan) -> int:
        return self.ask(m.CommitStore(self.context, plan.ticket)).count

    def store(self, run: KeyRun, *covered: int) -> m.StorePlan:
        plan = self.prepare(run, *covered)
        if plan.ticket:
            self.commit(plan)
        return plan

    def lookup(self, run: KeyRun) -> m.LookupReply:
        return self.ask(m.Lookup(self.context, "r", run.digests))

    def retrieve(self, run: KeyRun, *covered: int) -> m.RetrievePlan:
        covered = covered or (run.num_chunks,) * len(self.bench.spec.groups)
        return self.ask(m.PrepareRetrieve(self.context, "r", run.digests, run.first_chunk, covered))

    def release(self, lease: int) -> int:
        return self.ask(m.Release(self.context, (lease,))).count

    def refusal(self, request: frames.Request) -> ErrorCode:
        with pytest.raises(Refused) as caught:
            self.ask(request)
        return caught.value.code


@dataclass
class Bench:
    """A depot with a small pool and a clock that tests set."""

    groups: tuple[m.GroupShape, ...] = PLAIN
    pages: int = 64
    num_records: int = 64
    policy: str = AUTO
    quotas: dict[str, int] = field(default_factory=dict[str, int])  # pages
    now: float = 0.0
    chunk_tokens: int = 1
    sessions: int = 0
    ready_pages: int | None = None  # None: all
    arena_pages: int | None = None  # None: as many as the pool
    holdings: Holdings | None = None
    save_names: SaveNames = save_nothing
    features: Sequence[MakeFeature] | None = None  # None: the standard ones
    memory: bytearray = field(init=False)
    unfinished: list[Entry] = field(default_factory=list[Entry])

    def __post_init__(self) -> None:
        self.spec = m.CacheSpec(self.chunk_tokens, self.groups, "bytes")
        self.memory = bytearray(table_size_bytes(self.num_records))
        ready = self.pages if self.ready_pages is None else self.ready_pages
        arena_pages = self.arena_pages or self.pages
        extents = WatchfulAllocator(self.pages * PAGE, ready * PAGE, arena_bytes=arena_pages * PAGE)
        extents.table = IndexTable(self.memory, self.num_records)
        quotas = QuotaTable(self.pages * PAGE, {name: pages * PAGE for name, pages in self.quotas.items()})
        self.index = ChunkIndex(extents, extents.table, self.policy, quotas)
        self.depot = Depot(
            self.index,
            epoch=1,
            lease_seconds=LEASE_SECONDS,
            clock=lambda: self.now,
            save_names=self.save_names,
            features=features(self.holdings) if self.features is None else self.features,
        )

    def worker(
        self,
        shard: int = 0,
        *,
        writer: Writer | None = None,
        page: int = PAGE,
        name: str = "",
        ranks: int = 1,
        stages: int = 1,
    ) -> Worker:
        self.sessions += 1
        writer = writer or Writer(1000 + self.sessions, 1)
        parts = [self.part(group, shard, ranks, stages) for group in self.groups]
        details = tuple(
            m.GroupDetail((page * part.num_heads,) * part.num_layers, 8, part=part.number) for part in parts
        )
        name = name or f"engine-{self.sessions}"
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, name, shard, 512, "none", "none", "model", self.spec, details)
        reply = self.depot.handle(self.sessions, writer, request)
        assert isinstance(reply, m.Registered)
        return Worker(self, self.sessions, writer, reply.context, shard)

    def part(self, group: m.GroupShape, shard: int, ranks: int, stages: int) -> Part:
        """Return row `shard` of an opaque group, else a rank's heads of its stage's layers."""
        if group.heads == 1:
            return Part(shard if group.layers > 1 else 0)
        (stage, rank), layers = divmod(shard, ranks), group.layers // stages
        return Part(stage * layers, layers, rank * group.heads // ranks, max(1, group.heads // ranks))

    def pass_time(self, seconds: float) -> None:
        """Let time pass and do the work that it makes due."""
        self.now += seconds
        self.depot.state.timers.expire(self.now)
        self.depot.expire()
        self.depot.background.work()

    def found(self, run: KeyRun) -> int:
        """Return how many chunks of a prompt are here, without counting as use."""
        return self.index.visibility.match(self.index.spaces[0], run.digests)[0]

    def successor(self, memory: bytearray | None = None, specs: list[m.CacheSpec] | None = None) -> ChunkIndex:
        """Return the index that a server restores when it starts on a copy of the table."""
        table = IndexTable(bytearray(self.memory if memory is None else memory), self.num_records)
        index = ChunkIndex(ExtentAllocator(self.pages * PAGE), table)
        restored = restore(index, [self.spec] if specs is None else specs)
        self.unfinished = [entry for entry in restored if entry is not None]
        return index

    def drain(self) -> None:
        for quarantine in [*self.depot.quarantine.held]:
            self.depot.end_process(quarantine.worker[0])
        sum(clear_pool(self.depot, None))
        assert (self.index.extents.used_bytes, self.index.entries.num_sealed, len(self.index.nodes)) == (0, 0, 0)
        assert (len(self.depot.leases), len(self.depot.stores.tickets), len(self.depot.quarantine.held)) == (0, 0, 0)
        assert self.index.extents.free_extents() == [(0, self.pages * PAGE)]


def bench_and_worker(*groups: Any, **options: Any) -> tuple[Bench, Worker]:
    """Return a bench and one worker of it."""
    bench = Bench(*groups, **options)
    return bench, bench.worker()


def prompt(num_chunks: int, name: int = 0, tenant: str = "default") -> KeyRun:
    return hash_prefix(Namespace("model", tenant=tenant), 1, [name * 100 + i for i in range(num_chunks)])
