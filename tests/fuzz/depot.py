"""The stateful target: bytes become requests and events of a depot without sockets. Its state must stay consistent."""

import itertools
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from kvdepot.features.blend.feature import BlendLookups
from kvdepot.features.blend.messages import (
    BLEND_RUN,
    SEGMENT,
    SEGMENT_NAME_BYTES,
    BlendLookup,
    BlendReply,
    NoteContents,
)
from kvdepot.features.flights import feature as flights
from kvdepot.features.flights.feature import FlightTable
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.weights.feature import Generations
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import restore
from kvdepot.index.tree import NO_NODE
from kvdepot.keys import Namespace, hash_prefix
from kvdepot.layout import GroupKind, Part, mask_of
from kvdepot.operate import operations as o
from kvdepot.operate.operations.cache import clear_pool
from kvdepot.operate.report import status_of
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import SEALED, WRITING, IndexTable, Writer, table_size_bytes
from kvdepot.server.depot import Depot
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from support.features import STANDARD
from support.integrity import check_empty, empty_by_eviction
from support.operate import operate

PAGE = 4096
NUM_RECORDS = 24
LEASE_SECONDS = 10.0
MOVE_SECONDS = float("inf")
FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
SPECS = (
    m.CacheSpec(1, (m.GroupShape(FULL, 1),), "plain"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1, layers=2),), "two shards"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1), m.GroupShape(WINDOW, 1, 3), m.GroupShape(STATE, 1)), "hybrid"),
    m.CacheSpec(1, (m.GroupShape(WINDOW, 1, 3, layers=2),), "only a window"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1, heads=4),), "heads"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1, heads=4), m.GroupShape(WINDOW, 1, 3, heads=4)), "heads and a window"),
)
PROMPTS = tuple(
    hash_prefix(Namespace("model", tenant=f"tenant-{n % 2}"), 1, [n // 2 * (i > 2) + i for i in range(8)])
    for n in range(4)
)
NUM_SESSIONS = 3


@dataclass
class Bytes:
    """Numbers from the input, and zeros after its end."""

    data: bytes
    place: int = 0

    @property
    def is_over(self) -> bool:
        return self.place >= len(self.data)

    def byte(self) -> int:
        self.place += 1
        return 0 if self.place > len(self.data) else self.data[self.place - 1]

    def below(self, limit: int) -> int:
        return self.byte() % limit

    def take(self, count: int) -> bytes:
        self.place += count
        return self.data[self.place - count : self.place]


def spec_of(setting: int) -> int:
    """Return the number of the spec with which a life begins."""
    return 4 + (setting >> 2 & 1) if setting & 16 else setting >> 2 & 3


@dataclass
class Life:
    """A depot, three processes with one session each, and the requests that an input encodes."""

    source: Bytes
    now: float = 0.0
    sessions: list[int] = field(default_factory=lambda: list(range(1, NUM_SESSIONS + 1)))
    writers: list[Writer] = field(default_factory=lambda: [Writer(100 + n, 1) for n in range(NUM_SESSIONS)])
    next_number: int = NUM_SESSIONS + 1
    waiting: list[tuple[float, PendingReply]] = field(
        default_factory=list[tuple[float, PendingReply]]
    )  # deadlines and replies

    def __post_init__(self) -> None:
        setting = self.source.byte()
        self.policy = ("auto", "arc")[setting & 1]
        self.quotas = {"tenant-0": 4 * PAGE} if setting & 2 else {}
        self.spec = spec_of(setting)
        self.pages = 5 + self.source.below(32)
        self.memory = bytearray(table_size_bytes(NUM_RECORDS))
        self.start()
        for who in range(NUM_SESSIONS):
            self.join(who)

    def start(self) -> None:
        """Make an empty depot on the table."""
        size = self.pages * PAGE
        index = ChunkIndex(
            ExtentAllocator(size), IndexTable(self.memory, NUM_RECORDS), self.policy, QuotaTable(size, self.quotas)
        )
        self.depot = Depot(index, epoch=1, lease_seconds=LEASE_SECONDS, clock=lambda: self.now, features=STANDARD)
        self.depot.stores.ticket_seconds = LEASE_SECONDS  # inputs are too short for longer

    def steps(self) -> list[Callable[[], None]]:
        return [
            self.register_worker,
            self.register_scheduler,
            self.unregister,
            self.lookup,
            self.release,
            self.end_request,
            self.prepare,
            self.commit,
            self.abort,
            self.retrieve,
            self.report,
            self.clear,
            self.time_passes,
            self.connection_closes,
            self.process_dies,
            self.restart,
            self.frame,
            self.drain,
            self.note,
            self.blend,
            self.hint,
            self.session,
        ]

    def run(self) -> None:
        """Run the input. Every eighth step, check that the depot is consistent; at the end, that nothing is left."""
        steps = self.steps()
        for number in itertools.count(1):
            if self.source.is_over:
                break
            steps[self.source.below(len(steps))]()
            if number % 8 == 0:
                self.check()
        self.check()
        self.finish()

    def ask(self, request: frames.Request, who: int) -> frames.Reply | None:
        """Send a request. Check that a refused one changes nothing."""
        before = self.state()
        try:
            reply = self.depot.handle(self.sessions[who], self.writers[who], request)
        except Refused as error:
            assert str(error)
            assert self.state() == before, "a refused request changed something"
            return None
        if isinstance(reply, PendingReply):
            self.depot.background.work()
            if reply.reply is None:
                assert isinstance(request, m.Move) or (isinstance(request, m.Lookup) and request.joins)
                seconds = request.wait_seconds if isinstance(request, m.Lookup) else MOVE_SECONDS
                self.waiting.append((self.now + seconds, reply))
                return None
            reply = reply.reply
        assert frames.decode_reply(bytes(frames.encode_frame(0, reply))) == reply
        return reply

    def state(self) -> tuple[Any, ...]:
        depot = self.depot
        return (
            bytes(self.memory),
            dict(depot.stores.tickets),
            dict(depot.stores.late_tickets),
            dict(depot.contexts.by_number),
            list(depot.quarantine.held),
            list(depot.labels.names),
            list(depot.leases),
            len(depot.index.spaces),
            list(depot.index.nodes.tree.holds),
            len(depot.features.of(FlightTable)),
            len(depot.features.of(BlendLookups).contents),
        )

    # --- choices of the input -------------------------------------------------------------------------------------

    def who(self) -> int:
        return self.source.below(NUM_SESSIONS)

    def context(self, who: int) -> int:
        """Return mostly a context of the session, sometimes another one's or an unknown number."""
        choice = self.source.byte()
        own = [c.number for c in self.depot.contexts.by_number.values() if c.session == self.sessions[who]]
        return own[choice % len(own)] if own and choice < 0xF0 else choice & 0xF

    def covered(self, context: int, num_chunks: int) -> tuple[int, ...]:
        known = self.depot.contexts.by_number.get(context)
        count = len(known.space.spec.groups) if known else 1
        choices = [self.source.byte() for _ in range(count)]
        return tuple(num_chunks if choice < 0xA0 else choice % (num_chunks + 2) for choice in choices)

    def request_id(self) -> str:
        return "abc"[self.source.below(3)]

    def run_of_chunks(self) -> tuple[bytes, int, bytes, str]:
        """Return digests, first chunk, parent and tenant, mostly of a real prompt, else of a forged one."""
        prompt, choice = PROMPTS[self.source.below(4)], self.source.byte()
        start, length = (choice & 7), (choice >> 3) % 8 + 1
        run = prompt.slice(start, min(8, start + length))
        if choice & 0xC0 == 0xC0:  # forged: the same digests at another depth, cut, or twice
            kind = self.source.byte()
            digests = run.digests[: len(run.digests) - kind % 3] if kind & 4 else run.digests * (1 + kind % 2)
            first_chunk = kind >> 3 if kind < 0xF0 else (1 << 31) - 1
            return digests, first_chunk, run.parent, run.tenant
        return run.digests, run.first_chunk, run.parent, run.tenant

    # --- requests -------------------------------------------------------------------------------------------------

    def join(self, who: int) -> None:
        """Register a worker as its engine would: two workers have shard 0, one has shard 1.

        If heads are cut, the first process is an engine of one rank, and the others are the ranks of another one.
        """
        if SPECS[self.spec].groups[0].heads > 1:
            self.register_part(who, *((1, 0), (2, 0), (2, 1))[who])
        else:
            self.register(who, self.spec | (who & 1) << 2)

    def register_worker(self) -> None:
        who, choice = self.who(), self.source.byte()
        if SPECS[self.spec].groups[0].heads > 1 and choice & 3:
            ranks = (1, 2, 4, 8)[choice >> 2 & 3]
            self.register_part(who, ranks, (choice >> 4) % ranks, is_odd=choice >= 0xF0)
        else:
            self.register(who, choice)

    def register_part(self, who: int, ranks: int, rank: int, *, is_odd: bool = False) -> None:
        """Register a rank of an engine. Of eight ranks, two share each head. With `is_odd`, pages have another size."""
        parts = [Part(0, 1, rank * group.heads // ranks, max(1, group.heads // ranks)) for group in self.groups]
        size = PAGE // 4 + is_odd
        details = tuple(m.GroupDetail((size * part.num_heads,), 8, part=part.number) for part in parts)
        name, spec = f"engine of {ranks}", SPECS[self.spec]
        request = m.RegisterKVCache(m.PROTOCOL_VERSION, name, rank, ranks, "none", "none", "model", spec, details)
        self.ask(self.completed(request, rank << 5), who)

    @property
    def groups(self) -> tuple[m.GroupShape, ...]:
        return SPECS[self.spec].groups

    def register(self, who: int, choice: int) -> None:
        spec, shard = SPECS[choice & 3], choice >> 2 & 1
        page = PAGE * (1 + (choice >> 3 & 1)) + (choice >> 4 & 1)
        version, world_size = (m.PROTOCOL_VERSION, 2) if choice < 0xF0 else (choice & 3, 1)
        details = tuple(m.GroupDetail((page,), 8, part=shard % group.layers << 16) for group in spec.groups)
        name = f"engine-{choice >> 5 & 1}"
        request = m.RegisterKVCache(version, name, shard, world_size, "none", "none", "model", spec, details)
        self.ask(self.completed(request, choice), who)

    def completed(self, request: m.RegisterKVCache, choice: int) -> m.RegisterKVCache:
        del choice
        return request

    def register_scheduler(self) -> None:
        choice = self.source.below(4)
        spec = SPECS[max(self.spec, choice)] if self.spec > 3 else SPECS[choice]
        who, weights = self.who(), f"lineage {choice}"
        if choice == 3:
            self.ask(m.ChangeWeights(self.context(who), f"lineage {self.now % 5:.0f}"), who)
        request = m.RegisterScheduler(m.PROTOCOL_VERSION, f"engine-{choice & 1}", "model", spec, weights=weights)
        self.ask(request, who)

    def unregister(self) -> None:
        who = self.who()
        self.ask(m.Unregister(self.context(who)), who)

    def lookup(self) -> None:
        who = self.who()
        context, request_id = self.context(who), self.request_id()
        digests, _, _, tenant = self.run_of_chunks()
        choice = self.source.byte()
        request = m.Lookup(
            context,
            request_id,
            digests,
            tenant,
            (0.0, 1.5, 4.0, 60.0)[choice & 3],
            (0.0, 0.01)[choice >> 2 & 1],
            announces=bool(choice & 8),
            joins=bool(choice & 16),
            ahead_tokens=choice >> 5 << 2,
            awaits=choice >> 6,
            hands_over=choice >= 0xF0,
        )
        reply = self.ask(request, who)
        assert reply is None or (isinstance(reply, m.LookupReply) and bool(reply.num_chunks) == bool(reply.lease))

    def segments(self) -> bytes:
        """Return some segments, in ascending or any order."""
        packed, place = b"", 0
        for _ in range(self.source.below(6)):
            name, length = self.source.byte(), self.source.byte()
            packed += SEGMENT.pack(bytes([name & 15]) * SEGMENT_NAME_BYTES, place, length & 7)
            place = place + (length & 7) if length < 0xE0 else length
        return packed if not packed or packed[0] < 15 else packed[:-1]

    def note(self) -> None:
        who = self.who()
        context, (digests, *_) = self.context(who), self.run_of_chunks()
        self.ask(NoteContents(context, digests, self.segments()), who)

    def hint(self) -> None:
        who = self.who()
        context, (digests, *_), flags = self.context(who), self.run_of_chunks(), self.source.byte()
        request = Hint(
            context,
            f"tenant-{flags & 1}",
            digests,
            session_ended=bool(flags & 2),
            session=f"agent-{flags >> 2 & 1}" if flags & 8 else "",
            retain_seconds=float(flags >> 4),
        )
        self.ask(request, who)

    def session(self) -> None:
        """Let an operator name a session, known or unknown."""
        flags = self.source.byte()
        session, tenant = f"agent-{flags & 1}", f"tenant-{flags >> 1 & 1}"
        with suppress(Refused):
            match flags >> 2 & 3:
                case 0:
                    operate(self.depot, session_operations.RetainSession(session, float(flags >> 4), tenant))
                case 1:
                    operate(self.depot, session_operations.PrefetchSession(session, tenant, float(flags >> 4)))
                case 2:
                    operate(self.depot, session_operations.DemoteSession(session, tenant))
                case _:
                    operate(self.depot, session_operations.ForgetSession(session, tenant, bool(flags & 16)))
        self.depot.background.work()

    def blend(self) -> None:
        who = self.who()
        request = BlendLookup(self.context(who), self.request_id(), self.segments(), self.source.below(4))
        reply = self.ask(request, who)
        if isinstance(reply, BlendReply):
            end, found = 0, len(reply.digests) // 32
            for position, length, source, first, count, start in BLEND_RUN.iter_unpack(reply.runs):
                assert position >= end
                end = position + length
                assert first <= source < source + length <= first + count
                assert start + count <= found

    def release(self) -> None:
        who = self.who()
        context = self.context(who)
        leases = [lease.number for lease in self.depot.leases] or [0]
        self.ask(m.Release(context, tuple(leases[self.source.byte() % len(leases)] for _ in range(2))), who)

    def end_request(self) -> None:
        who = self.who()
        self.ask(m.EndRequest(self.context(who), self.request_id()), who)

    def prepare(self) -> None:
        who = self.who()
        context = self.context(who)
        digests, first_chunk, parent, tenant = self.run_of_chunks()
        covered = self.covered(context, len(digests) // 32)
        message = m.PrepareStore(context, self.request_id(), tenant, digests, first_chunk, parent, covered)
        reply = self.ask(message, who)
        if isinstance(reply, m.StorePlan):
            extents = list(m.EXTENT.iter_unpack(reply.extents))
            assert bool(extents) == bool(reply.ticket)
            assert len(extents) + reply.num_present + reply.num_declined == sum(covered)
            for _, _, _, entry, _, header, offset, num_bytes in extents:
                assert self.depot.index.table.header(entry) == header - SEALED + WRITING
                assert self.depot.index.table.extent(entry) == (offset, num_bytes)

    def ticket(self) -> int:
        tickets, choice = [*self.depot.stores.tickets, *self.depot.stores.late_tickets], self.source.byte()
        return tickets[choice % len(tickets)] if tickets else choice

    def commit(self) -> None:
        who = self.who()
        context, ticket, length = self.context(who), self.ticket(), self.source.byte()
        known = self.depot.stores.tickets.get(ticket)
        checksums = b"" if length < 0xA0 else bytes(16 * (len(known.entries) if known else 1) + length % 2)
        self.ask(m.CommitStore(context, ticket, checksums), who)

    def abort(self) -> None:
        who = self.who()
        self.ask(m.AbortStore(self.context(who), self.ticket()), who)

    def retrieve(self) -> None:
        who = self.who()
        context = self.context(who)
        digests, first_chunk, _, _ = self.run_of_chunks()
        covered = self.covered(context, len(digests) // 32)
        reply = self.ask(m.PrepareRetrieve(context, self.request_id(), digests, first_chunk, covered), who)
        if isinstance(reply, m.RetrievePlan):
            places = {place.group: place for place in self.depot.contexts.by_number[context].groups}
            cells = Counter[tuple[int, int]]()
            for chunk, group, heads, number, layers, header, offset, num_bytes in m.EXTENT.iter_unpack(reply.extents):
                record, mine = self.depot.index.table.record(number), places[group]
                part = Part.of(layers << 16 | heads)
                assert record is not None
                assert record.state == SEALED
                assert (record.key, record.group) == (digests[32 * chunk : 32 * chunk + 32], group)
                assert (record.part, record.check) == (part.number, mine.check)
                assert (record.offset, record.num_bytes) == (offset, num_bytes)
                assert num_bytes * mine.num_cells == mine.num_bytes * part.num_cells, "the size of its own part"
                assert self.depot.index.table.header(number) == header
                num_heads = self.depot.index.spaces[record.space].heads[int(group)]
                shared = mask_of(part.number, num_heads) & mask_of(mine.part, num_heads)
                assert shared & ~cells[chunk, group], "it brings nothing new"
                cells[chunk, group] |= shared
            for (_, group), found in cells.items():
                assert found.bit_count() == places[group].num_cells, "a head is missing"

    def report(self) -> None:
        who = self.who()
        context, number, choice = self.context(who), self.source.below(NUM_RECORDS + 2), self.source.byte()
        table = self.depot.index.table
        header = table.header(table.entries[number]) if number < NUM_RECORDS and choice < 0xC0 else choice
        self.ask(m.ReportCorrupt(context, ((number, header), (number, header))), who)

    def frame(self) -> None:
        """Decode the next bytes as a frame, like the loop."""
        who = self.who()
        frame = bytes(8) + self.source.take(self.source.byte())
        try:
            request = frames.decode_request(frame)
        except frames.FrameError:
            return
        if not isinstance(request, m.Hello | o.Status | o.Clear):
            self.ask(request, who)

    # --- events ---------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        sum(clear_pool(self.depot, (None, "tenant-0", "nobody")[self.source.below(3)]))

    def time_passes(self) -> None:
        self.now += self.source.below(12)
        self.depot.state.timers.expire(self.now)
        self.depot.expire()
        self.depot.background.work()

    def connection_closes(self) -> None:
        """Close a connection. The same process connects again."""
        who = self.who()
        self.depot.end_session(self.sessions[who])
        self.sessions[who] = self.next_number
        self.next_number += 1
        self.join(who)

    def process_dies(self) -> None:
        """Kill a process. Another one takes its place."""
        who = self.who()
        self.depot.end_session(self.sessions[who])
        self.depot.end_process(self.writers[who])
        self.sessions[who], self.writers[who] = self.next_number, Writer(100 + self.next_number, 1)
        self.next_number += 1
        self.join(who)

    def drain(self) -> None:
        self.depot.state.accepts_stores = not self.depot.state.accepts_stores

    def restart(self) -> None:
        """Kill the server. The next one reads the table, and unfinished work waits as in its loop."""
        specs = [space.spec for space in self.depot.index.spaces]
        labels = self.depot.labels.names
        sealed = {r.key: r for r in self.depot.index.table.records() if r.state == SEALED}
        visible = [
            {key for key, node in space.nodes.items() if self.depot.index.visibility.is_reachable(node)}
            for space in self.depot.index.spaces
        ]
        # The next server has a copy: handlers of the killed one end when the garbage collector finds them, and would
        # then free records that the next one holds.
        self.memory = bytearray(self.memory)
        self.start()
        self.waiting.clear()  # their connections broke
        self.depot.labels.restore(labels)
        index = self.depot.index
        for entry in [entry for entry in restore(index, specs, len(labels)) if entry is not None]:
            self.depot.quarantine.hold((index.table.writer_of(entry), index.table.owner_of(entry)), [entry], 0)
        assert len({r.key for r in index.table.records() if r.state == SEALED}) <= len(sealed)
        for space, before in zip(index.spaces, visible, strict=True):
            assert {key for key, node in space.nodes.items() if index.visibility.is_reachable(node)} == before
        self.sessions = [self.next_number + n for n in range(NUM_SESSIONS)]
        self.next_number += NUM_SESSIONS
        for who in range(NUM_SESSIONS):
            self.join(who)

    # --- invariants -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        depot, index = self.depot, self.depot.index
        index.check_integrity()
        depot.features.of(FlightTable).check_integrity()
        depot.leases.check_integrity()
        depot.features.of(Agents).prefixes.check_integrity()
        depot.features.of(Generations).check_integrity()
        for until, deferred in self.waiting:
            assert deferred.reply is not None or self.now < until, "a lookup waits for too long"
        late = [n for t in depot.stores.late_tickets.values() for n in t.entries]
        assert all(index.entries.node_of(number) == NO_NODE for number in late)
        writing = [n for t in depot.stores.tickets.values() for n in t.entries]
        assert all(index.entries.node_of(number) != NO_NODE for number in writing)
        writing += late + [n for q in depot.quarantine.held for n in q.entries]
        assert sorted(writing) == [r.entry for r in index.table.records() if r.state == WRITING]
        for context in depot.contexts.by_number.values():
            tickets = [*depot.stores.tickets.values(), *depot.stores.late_tickets.values()]
            own = sum(ticket.num_bytes for ticket in tickets if ticket.context == context.number)
            assert context.writing_bytes == own
        holds = Counter(index.entries.node_of(number) for number in writing)
        del holds[NO_NODE]
        for lease in depot.leases:
            assert lease.context in depot.contexts.by_number
            assert lease.expiry_seconds > self.now - LEASE_SECONDS
            holds.update(lease.nodes)
        for pin in depot.features.of(Agents).pins:
            holds.update(pin.nodes)
        tree = index.nodes.tree
        assert all(tree.holds[node] == holds[node] for node in range(len(tree.keys)))
        assert all(ticket.context in depot.contexts.by_number for ticket in depot.stores.tickets.values())
        status_of(depot)

    def finish(self) -> None:
        for who in range(NUM_SESSIONS):
            self.depot.end_session(self.sessions[who])
        self.depot.background.work()  # ending flights answer their lookups in steps
        assert all(deferred.reply for until, deferred in self.waiting if until < MOVE_SECONDS), "never answered"
        assert not len(self.depot.features.of(FlightTable))
        for quarantine in list(self.depot.quarantine.held):
            self.depot.end_process(quarantine.worker[0])
        depot = self.depot
        assert not (len(depot.leases) or depot.stores.tickets or depot.stores.late_tickets or depot.quarantine.held)
        for _ in depot.features.of(Agents).pins.expire(float("inf")):
            pass
        if len(self.source.data) % 2:
            sum(clear_pool(self.depot, None))
            check_empty(self.depot.index)
        else:
            empty_by_eviction(self.depot.index)


def live(data: bytes) -> None:
    """Run the first 400 bytes of an input: longer inputs find nothing more."""
    with patch.object(flights, "LEAST_TOKENS", 2):  # chunks have one token here
        Life(Bytes(data[:400])).run()
