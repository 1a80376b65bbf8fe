"""The whole cache, compared with a plain dict: after any events, right entries or a miss, and no leaks."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvdepot.errors import ErrorCode
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.index.eviction import POLICIES
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import restore
from kvdepot.index.tree import NO_NODE
from kvdepot.keys import KeyRun, Namespace, hash_prefix
from kvdepot.layout import GroupKind, Part
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.table import SEALED, WRITING, Entry, IndexTable, Writer, table_size_bytes
from kvdepot.server.depot import Depot
from kvdepot.server.turns import Refused
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import OperatorRequest
from support.features import NAMES, STANDARD
from support.operate import operate

PAGE = 4096
NUM_RECORDS = 48
LEASE_SECONDS = 10.0
TICKET_SECONDS = 8.0
FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT

SPECS = {
    "plain": (m.GroupShape(FULL, 1),),
    "two ranks": (m.GroupShape(FULL, 1, layers=2),),
    "heads": (m.GroupShape(FULL, 1, heads=4), m.GroupShape(FULL, 1)),
    "layers and heads": (m.GroupShape(FULL, 1, layers=2, heads=2),),
    "heads and a window": (m.GroupShape(FULL, 1, heads=4), m.GroupShape(WINDOW, 1, window_tokens=3, heads=4)),
    "hybrid": (m.GroupShape(FULL, 1), m.GroupShape(WINDOW, 1, window_tokens=3), m.GroupShape(STATE, 1)),
    "only a window": (m.GroupShape(WINDOW, 1, window_tokens=3),),
}
# Ranks of an engine, and the number of one of them. Two layers with heads make two stages if there are enough ranks.
SIZES = ((1, 0), (2, 0), (2, 1), (4, 0), (4, 1), (4, 2), (4, 3))
WINDOWS = {FULL: 10**6, WINDOW: 2, STATE: 1}
PROMPTS = [
    hash_prefix(Namespace("model", tenant=f"tenant-{n % 2}"), 1, [n // 2 * (i > 2) + i for i in range(8)])
    for n in range(4)
]


EntryKey = tuple[bytes, int, int]  # digest, group, number of the part


@dataclass
class Orphan:
    """The entries that a worker was writing when its connection closed."""

    writer: Writer
    entries: list[EntryKey]
    late: list[EntryKey]


@dataclass
class Worker:
    session: int
    writer: Writer
    context: int
    place: tuple[int, int]  # number of ranks of its engine, and its own rank
    parts: tuple[int, ...]
    tickets: dict[int, list[EntryKey]] = field(default_factory=dict[int, list[EntryKey]])
    late: dict[int, list[EntryKey]] = field(default_factory=dict[int, list[EntryKey]])
    leases: dict[int, tuple[str, float]] = field(default_factory=dict[int, tuple[str, float]])


@cache
def cells_of(number: int) -> frozenset[tuple[int, int]]:
    part = Part.of(number)
    layers = range(part.first_layer, part.first_layer + part.num_layers)
    return frozenset(itertools.product(layers, range(part.first_head, part.first_head + part.num_heads)))


def part_of(group: m.GroupShape, size: int, rank: int) -> Part:
    if group.heads == 1:
        return Part(rank if group.layers > 1 else 0)
    held = max(1, group.layers // size)
    size = size * held // group.layers  # ranks of a stage
    stage, rank = divmod(rank, size)
    return Part(stage * held, held, rank * group.heads // size, max(1, group.heads // size))


class DepotMachine(RuleBasedStateMachine):
    """Entries are named (digest, group, part)."""

    @initialize(
        name=st.sampled_from(sorted(SPECS)),
        policy=st.sampled_from(sorted(POLICIES)),
        pages=st.one_of(st.integers(6, 12), st.integers(4, 40)),
        quota=st.sampled_from([0, 0, 2, 4]),
    )
    def start(self, name: str, policy: str, pages: int, quota: int) -> None:
        self.groups = SPECS[name]
        self.spec = m.CacheSpec(1, self.groups, name)
        self.memory = bytearray(table_size_bytes(NUM_RECORDS))
        quotas = QuotaTable(pages * PAGE, {"tenant-0": quota * PAGE} if quota else {})
        self.index = ChunkIndex(ExtentAllocator(pages * PAGE), IndexTable(self.memory, NUM_RECORDS), policy, quotas)
        self.last_read = b""
        self.now = 0.0
        self.depot = Depot(self.index, epoch=1, lease_seconds=LEASE_SECONDS, clock=lambda: self.now, features=STANDARD)
        self.depot.stores.ticket_seconds = TICKET_SECONDS
        self.sealed: set[EntryKey] = set()
        self.writing: set[EntryKey] = set()
        self.orphans: list[Orphan] = []
        self.evictions = 0
        self.workers: list[Worker] = []
        self.agents: dict[str, bytes] = {}  # last prefix of each tenant's session
        self.sessions = 0
        for place in SIZES if max(group.heads for group in self.groups) > 1 else ((2, 0), (2, 1)):
            self.join(place)

    def join(self, place: tuple[int, int]) -> None:
        self.sessions += 1
        writer, (size, rank) = Writer(1000 + self.sessions, 1), place
        parts = [part_of(group, size, rank) for group in self.groups]
        details = tuple(
            m.GroupDetail((PAGE * (2 if g else 1) * part.num_heads,) * part.num_layers, 8, part=part.number)
            for g, part in enumerate(parts)
        )
        request = m.RegisterKVCache(
            m.PROTOCOL_VERSION, f"engine-{self.sessions}", rank, size, "none", "none", "model", self.spec, details
        )
        reply = self.depot.handle(self.sessions, writer, request)
        assert isinstance(reply, m.Registered)
        numbers = tuple(part.number for part in parts)
        self.workers.append(Worker(self.sessions, writer, reply.context, place, numbers))

    def ask(self, worker: Worker, request: frames.Request) -> Any:
        return self.depot.handle(worker.session, worker.writer, request)

    def worker(self, number: int) -> Worker:
        return self.workers[number % len(self.workers)]

    # --- the model's state ----------------------------------------------------------------------------------------

    def digest(self, run: KeyRun, chunk: int) -> bytes:
        return run.digests[chunk * 32 : chunk * 32 + 32]

    def cells(self, entries: set[EntryKey], digest: bytes, group: int) -> frozenset[tuple[int, int]]:
        """Return the layers and heads of a chunk and group that `entries` have."""
        parts = [part for key, number, part in entries if (key, number) == (digest, group)]
        return frozenset[tuple[int, int]]().union(*map(cells_of, parts))

    def whole(self, run: KeyRun, chunk: int, group: int) -> bool:
        shape = self.groups[group]
        plane = Part(0, shape.layers, 0, shape.heads)
        return self.cells(self.sealed, self.digest(run, chunk), group) == cells_of(plane.number)

    def usable(self, run: KeyRun, length: int) -> bool:
        """Return whether a prefix of `length` chunks has everything that the tokens after it need."""
        return all(
            self.whole(run, chunk, number)
            for number, group in enumerate(self.groups)
            for chunk in range(max(0, length - WINDOWS[group.kind]), length)
        )

    def longest(self, run: KeyRun) -> int:
        return next(length for length in range(run.num_chunks, -1, -1) if self.usable(run, length))

    def in_table(self, state: int) -> set[EntryKey]:
        return {(r.key, r.group, r.part) for r in self.index.table.records() if r.state == state}

    def learn_late(self) -> None:
        """Learn from the depot which stores ended before their workers ended them. These own no chunk any more."""
        for worker in self.workers:
            for ticket in [ticket for ticket in worker.tickets if ticket in self.depot.stores.late_tickets]:
                worker.late[ticket] = worker.tickets.pop(ticket)
                self.writing -= set(worker.late[ticket])
        for orphan in self.orphans:
            held = [e for q in self.depot.quarantine.held if q.worker[0] == orphan.writer for e in q.entries]
            late = {self.key_of(entry) for entry in held if self.index.entries.node_of(entry) == NO_NODE}
            self.writing -= late & set(orphan.entries)
            orphan.late += [entry for entry in orphan.entries if entry in late]
            orphan.entries = [entry for entry in orphan.entries if entry not in late]

    def key_of(self, entry: Entry) -> EntryKey:
        return (self.index.table.key_of(entry), *self.index.table.place_of(entry))

    @property
    def late(self) -> Counter[EntryKey]:
        of_workers = [entry for worker in self.workers for entries in worker.late.values() for entry in entries]
        return Counter([*of_workers, *(entry for orphan in self.orphans for entry in orphan.late)])

    def learn_evictions(self) -> None:
        """Learn from the index which entries left. The invariants check that nothing else changed."""
        if self.index.evictor.num_evicted != self.evictions:
            self.evictions = self.index.evictor.num_evicted
            self.sealed &= self.in_table(SEALED)

    # --- actions of workers ---------------------------------------------------------------------------------------

    @precondition(lambda _: "sessions" in NAMES)
    @rule(
        who=st.integers(0, 9),
        prompt=st.sampled_from(PROMPTS),
        length=st.integers(1, 8),
        session_ended=st.booleans(),
        session=st.sampled_from(["", "agent"]),
        retain_seconds=st.sampled_from([0.0, 5.0]),
    )
    def hint(self, who: int, prompt: KeyRun, length: int, **hints: Any) -> None:
        worker, run = self.worker(who), prompt.slice(0, length)
        self.ask(worker, Hint(worker.context, run.tenant, run.digests, **hints))
        if hints["session"]:
            self.agents[run.tenant] = b"" if hints["session_ended"] else run.digests

    @precondition(lambda _: "sessions" in NAMES)
    @rule(
        tenant=st.sampled_from(["tenant-0", "tenant-1"]),
        operation=st.sampled_from(["retain", "forget first", "forget at once"]),
        seconds=st.sampled_from([0.0, 5.0]),
    )
    def name_a_session(self, tenant: str, operation: str, seconds: float) -> None:
        """Retained chunks stay within quotas, and an operation on an unknown session changes nothing."""
        request: OperatorRequest = session_operations.ForgetSession("agent", tenant, operation == "forget at once")
        if operation == "retain":
            request = session_operations.RetainSession("agent", seconds, tenant)
        try:
            pending = operate(self.depot, request)
        except Refused as error:
            assert error.code is ErrorCode.OUT_OF_RANGE
            assert not self.agents.get(tenant)
            return
        assert self.agents[tenant]
        self.depot.background.work()
        assert isinstance(pending.reply, m.Done)
        if operation != "retain":
            self.agents[tenant] = b""
            self.sealed &= self.in_table(SEALED)

    @precondition(lambda _: "sessions" in NAMES)
    @invariant()
    def sessions_are_known_by_their_last_prefix(self) -> None:
        for tenant in ("tenant-0", "tenant-1"):
            assert self.depot.features.of(Agents).prefixes.find(tenant, "agent") == self.agents.get(tenant, b"")
        for share, quota_bytes in enumerate(self.index.quotas.quota_bytes):
            assert self.depot.features.of(Agents).pins.bytes_of(share) <= quota_bytes / 2

    @rule(
        who=st.integers(0, 9),
        prompt=st.sampled_from(PROMPTS),
        start=st.integers(0, 6),
        length=st.integers(1, 8),
        data=st.data(),
    )
    def prepare(self, who: int, prompt: KeyRun, start: int, length: int, data: st.DataObject) -> None:
        worker, run = self.worker(who), prompt.slice(start, min(8, start + length))
        covered = tuple(
            run.num_chunks if group.kind is FULL else data.draw(st.integers(0, run.num_chunks)) for group in self.groups
        )
        self.begin(worker, run, covered)

    @rule(who=st.integers(0, 9), prompt=st.sampled_from(PROMPTS), length=st.integers(1, 8), ends=st.booleans())
    def store_and_lease(self, who: int, prompt: KeyRun, length: int, ends: bool) -> None:
        run = prompt.slice(0, length)
        for number in (who, who + 1):
            worker = self.worker(number)
            if ticket := self.begin(worker, run, (length,) * len(self.groups)):
                self.commit(number, sorted(worker.tickets).index(ticket))
        self.lookup(who, prompt, length, "a")
        if not ends and length < 8:
            self.begin(self.worker(who), prompt.slice(length, length + 1), (1,) * len(self.groups))

    @rule(who=st.integers(0, 9), ends=st.booleans())
    def one_tenant_takes_what_it_can(self, who: int, ends: bool) -> None:
        for prompt in PROMPTS[1::2]:
            self.store_and_lease(who, prompt, 7, ends)

    def begin(self, worker: Worker, run: KeyRun, covered: tuple[int, ...]) -> int:
        plan = self.ask(
            worker, m.PrepareStore(worker.context, "r", run.tenant, run.digests, run.first_chunk, run.parent, covered)
        )
        assert isinstance(plan, m.StorePlan)
        self.learn_evictions()
        self.learn_late()
        entries: list[EntryKey] = [
            (self.digest(run, chunk), group, worker.parts[group])
            for chunk, group, _, _, _, _, _, _ in m.EXTENT.iter_unpack(plan.extents)
        ]
        for digest, group, part in entries:
            missing = cells_of(part) - self.cells(self.sealed | self.writing, digest, group)
            assert missing, "nobody else has or writes all of an entry"
        assert len(entries) + plan.num_present + plan.num_declined == sum(covered)
        self.writing.update(entries)
        if plan.ticket:
            worker.tickets[plan.ticket] = entries
        return plan.ticket

    @rule(who=st.integers(0, 9), which=st.integers(0, 9))
    def commit(self, who: int, which: int) -> None:
        worker = self.worker(who)
        if worker.tickets:
            ticket = sorted(worker.tickets)[which % len(worker.tickets)]
            entries = worker.tickets.pop(ticket)
            assert self.ask(worker, m.CommitStore(worker.context, ticket)).count == len(entries)
            self.writing -= set(entries)
            self.sealed |= set(entries)
            self.refused(worker, m.CommitStore(worker.context, ticket), ErrorCode.UNKNOWN_TICKET)

    @rule(who=st.integers(0, 9), which=st.integers(0, 9))
    def abort(self, who: int, which: int) -> None:
        worker = self.worker(who)
        if worker.tickets:
            ticket = sorted(worker.tickets)[which % len(worker.tickets)]
            entries = worker.tickets.pop(ticket)
            assert self.ask(worker, m.AbortStore(worker.context, ticket)).count == len(entries)
            assert self.ask(worker, m.AbortStore(worker.context, ticket)).count == 0
            self.writing -= set(entries)

    @rule(who=st.integers(0, 9), which=st.integers(0, 9), commits=st.booleans())
    def end_late(self, who: int, which: int, commits: bool) -> None:
        worker = self.worker(who)
        if worker.late:
            ticket = sorted(worker.late)[which % len(worker.late)]
            entries = worker.late.pop(ticket)
            if commits:
                assert self.ask(worker, m.CommitStore(worker.context, ticket)).code is ErrorCode.UNKNOWN_TICKET
                self.refused(worker, m.CommitStore(worker.context, ticket), ErrorCode.UNKNOWN_TICKET)
            else:
                assert self.ask(worker, m.AbortStore(worker.context, ticket)).count == len(entries)

    @rule(
        who=st.integers(0, 9), prompt=st.sampled_from(PROMPTS), length=st.integers(0, 8), request=st.sampled_from("ab")
    )
    def lookup(self, who: int, prompt: KeyRun, length: int, request: str) -> None:
        worker, run = self.worker(who), prompt.slice(0, length)
        reply = self.ask(worker, m.Lookup(worker.context, request, run.digests))
        assert reply.num_chunks == self.longest(run)
        if reply.num_chunks:
            worker.leases[reply.lease] = (request, self.now + LEASE_SECONDS)

    @rule(who=st.integers(0, 9), prompt=st.sampled_from(PROMPTS), start=st.integers(0, 7), length=st.integers(1, 8))
    def retrieve(self, who: int, prompt: KeyRun, start: int, length: int) -> None:
        worker, run = self.worker(who), prompt.slice(start, min(8, start + length))
        covered = tuple(min(run.num_chunks, WINDOWS[group.kind]) for group in self.groups)
        plan = self.ask(worker, m.PrepareRetrieve(worker.context, "r", run.digests, run.first_chunk, covered))
        found: dict[tuple[int, int], list[int]] = {}
        for chunk, group, heads, entry, layers, header, offset, num_bytes in m.EXTENT.iter_unpack(plan.extents):
            part = layers << 16 | heads
            assert (self.digest(run, chunk), group, part) in self.sealed
            assert self.index.table.place_of(entry) == (group, part)
            assert self.index.table.header(entry) == header
            assert self.index.table.extent(entry) == (offset, num_bytes)
            assert num_bytes == PAGE * (2 if group else 1) * len(cells_of(part))
            found.setdefault((chunk, group), []).append(part)
        for (chunk, group), parts in found.items():
            own, digest = worker.parts[group], self.digest(run, chunk)
            assert parts == [own] or (digest, group, own) not in self.sealed
            missing = cells_of(own)
            for part in parts:
                assert missing & cells_of(part), "an entry of no use"
                missing -= cells_of(part)
            assert not missing, "a cell is missing"
        for group, count in enumerate(covered):
            wanted = {chunk for chunk in range(plan.num_chunks) if run.num_chunks - chunk <= count}
            assert wanted <= {chunk for chunk, number in found if number == group}
        if plan.lease:
            worker.leases[plan.lease] = ("r", self.now + LEASE_SECONDS)

    @rule(who=st.integers(0, 9), which=st.integers(0, 9))
    def release(self, who: int, which: int) -> None:
        worker = self.worker(who)
        if worker.leases:
            lease = sorted(worker.leases)[which % len(worker.leases)]
            del worker.leases[lease]
            assert self.ask(worker, m.Release(worker.context, (lease, lease))).count == 1

    @rule(who=st.integers(0, 9), request=st.sampled_from("abr"))
    def end_request(self, who: int, request: str) -> None:
        worker = self.worker(who)
        ended = [lease for lease, (owner, _) in worker.leases.items() if owner == request]
        assert self.ask(worker, m.EndRequest(worker.context, request)).count == len(ended)
        for lease in ended:
            del worker.leases[lease]

    @rule(seconds=st.floats(0, 6))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.depot.expire()
        self.depot.background.work()
        self.learn_late()
        assert all(ticket.began + TICKET_SECONDS > self.now for ticket in self.depot.stores.tickets.values())
        for worker in self.workers:
            worker.leases = {n: (r, expiry) for n, (r, expiry) in worker.leases.items() if expiry > self.now}

    @rule(tenant=st.sampled_from([None, "tenant-0", "nobody"]))
    def clear(self, tenant: str | None) -> None:
        sum(clear_pool(self.depot, tenant))
        if tenant == "nobody":
            assert self.in_table(SEALED) == self.sealed
        self.sealed &= self.in_table(SEALED)

    # --- ends of workers ------------------------------------------------------------------------------------------

    @rule(who=st.integers(0, 9))
    def connection_closes(self, who: int) -> None:
        worker = self.worker(who)
        self.workers.remove(worker)
        self.depot.end_session(worker.session)
        open_and_late = [
            [entry for each in entries for entry in each] for entries in (worker.tickets.values(), worker.late.values())
        ]
        self.orphans.append(Orphan(worker.writer, *open_and_late))
        self.refused(worker, m.Lookup(worker.context, "r", b""), ErrorCode.UNKNOWN_CONTEXT)
        self.join(worker.place)

    @rule(which=st.integers(0, 9))
    def process_dies(self, which: int) -> None:
        if self.orphans:
            orphan = self.orphans.pop(which % len(self.orphans))
            self.depot.end_process(orphan.writer)
            self.writing -= set(orphan.entries)

    @rule(who=st.integers(0, 9))
    def unregisters(self, who: int) -> None:
        worker = self.worker(who)
        self.workers.remove(worker)
        self.ask(worker, m.Unregister(worker.context))
        self.writing -= {entry for entries in worker.tickets.values() for entry in entries}
        self.join(worker.place)

    @rule(which=st.integers(0, 99))
    def an_entry_is_corrupt(self, which: int) -> None:
        sealed = [record.entry for record in self.index.table.records() if record.state == SEALED]
        if sealed:
            entry = sealed[which % len(sealed)]
            key = self.key_of(entry)
            assert self.depot.remove_corrupt(entry, self.index.table.header(entry))
            self.sealed.remove(key)

    def refused(self, worker: Worker, request: frames.Request, code: ErrorCode) -> None:
        try:
            self.ask(worker, request)
        except Refused as error:
            assert error.code is code
        else:
            raise AssertionError("not refused")

    # --- invariants -----------------------------------------------------------------------------------------------

    @invariant()
    def the_table_holds_exactly_what_was_stored(self) -> None:
        assert self.in_table(SEALED) == self.sealed
        assert self.in_table(WRITING) == self.writing | set(self.late)
        assert self.index.quotas.writing_bytes[0] <= max(
            sum(self.index.quotas.quota_bytes) // 16, self.index.quotas.quota_bytes[0]
        )
        assert self.index.entries.num_sealed == len(self.sealed)

    @invariant()
    def space_adds_up_and_never_overlaps(self) -> None:
        spans = sorted((r.offset, r.offset + extent_size(r.num_bytes), r.num_bytes) for r in self.index.table.records())
        assert all(a_end <= b for (_, a_end, _), (b, _, _) in itertools.pairwise(spans))
        used = sum(end - start for start, end, _ in spans)
        assert used == self.index.extents.used_bytes == sum(self.index.quotas.tenant_bytes)

    @invariant()
    def leases_are_what_their_owners_have_and_pin(self) -> None:
        assert len(self.depot.leases) == sum(len(worker.leases) for worker in self.workers)

    @invariant()
    def a_successor_finds_what_is_sealed(self) -> None:
        """A server that reads the table at this moment finds every prefix that can be found now."""
        table = bytes(self.memory)
        if table == self.last_read:
            return  # lookups, hints and sessions change nothing here
        self.last_read = table
        again = ChunkIndex(
            ExtentAllocator(self.index.extents.capacity_bytes), IndexTable(bytearray(self.memory), NUM_RECORDS)
        )
        unfinished = [entry for entry in restore(again, [self.spec]) if entry is not None]
        space = again.spaces[0]
        for prompt in PROMPTS:
            found, _ = again.visibility.match(space, prompt.digests)
            assert found == self.longest(prompt)
        assert sorted(unfinished) == [record.entry for record in self.index.table.records() if record.state == WRITING]
        for entry in unfinished:
            again.discard_entry(entry)
        num_entries = again.entries.num_sealed
        assert sum(again.evictor.clear(lambda _tenant, _space: True)) == num_entries
        assert (again.extents.used_bytes, again.entries.num_sealed, len(again.nodes)) == (0, 0, 0)

    def teardown(self) -> None:
        """Check that everything is released."""
        if not hasattr(self, "depot"):
            return
        for worker in self.workers:
            self.depot.end_session(worker.session)
            self.depot.end_process(worker.writer)
        for orphan in self.orphans:
            self.depot.end_process(orphan.writer)
        if "sessions" in NAMES:
            for _ in self.depot.features.of(Agents).pins.expire(float("inf")):
                pass
        sum(clear_pool(self.depot, None))
        assert (self.index.extents.used_bytes, self.index.entries.num_sealed, len(self.index.nodes)) == (0, 0, 0)
        assert (len(self.depot.leases), len(self.depot.stores.tickets), len(self.depot.quarantine.held)) == (0, 0, 0)
        assert set(self.index.quotas.tenant_bytes) <= {0}


DepotMachine.TestCase.settings = settings(max_examples=2 * settings().max_examples)  # every redesign relies on it
TestDepot = DepotMachine.TestCase
