"""A node: one depot at a time over memory that outlives it, processes of engines, a tier, operators.

Every step is one event of a history, `(name, a, b, c)`, whose numbers choose among the possibilities at that moment. An
impossible event does nothing, so a history stays valid when events are removed.
"""

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain, product
from typing import Any, Final

import msgspec

from kvdepot.client.verify import count_valid_chunks
from kvdepot.errors import ErrorCode, IntegrityError
from kvdepot.features.blend.messages import BLEND_RUN, BlendLookup, NoteContents
from kvdepot.features.flights.feature import FlightTable
from kvdepot.features.sessions import operations as session_operations
from kvdepot.features.sessions.feature import Agents
from kvdepot.features.sessions.messages import Hint
from kvdepot.features.sessions.prefixes import PrefixFile
from kvdepot.index.index import ChunkIndex
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import restore
from kvdepot.index.tree import digest_of
from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot.layout import Part, mask_of
from kvdepot.operate import operations as o
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.names import NamesFile
from kvdepot.pool.table import (
    FREE,
    HEADER_PAGE_BYTES,
    RECORD_BYTES,
    SEALED,
    WRITING,
    Entry,
    IndexTable,
    TableReader,
    Writer,
)
from kvdepot.server.depot import Depot
from kvdepot.server.restoring import take_over
from kvdepot.server.turns import PendingReply, Refused
from kvdepot.tiers.jobs import JobKind
from kvdepot.tiers.keys import name_hash, place_of, tier_key
from kvdepot.tiers.tiering import TieringSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from simulation.memory import (
    NUM_RECORDS,
    PAGE,
    Claim,
    Crash,
    CrashingTable,
    Fuse,
    Memory,
    Violation,
    num_pages,
    pages_in,
    tags_of,
)
from simulation.node import Event, Node
from simulation.setup import (
    ABOVE,
    FULL,
    LETTER_TOKENS,
    NAMES,
    NUM_CHUNKS,
    PROMPTS,
    STATE,
    TEXTS,
    WINDOW,
    Setup,
    part_of,
    segments_of,
)
from simulation.tier import SimulatedQueue, Storage, make_queue
from support.features import features
from support.integrity import check_empty
from support.operate import operate, put_tiers_below
from support.records import write_record

LEASE_SECONDS: Final = 10.0
PROCESS_OF_WORKER: Final = (0, 0, 1, 2, 2)  # some workers share a process


def _cells(part: Part) -> set[tuple[int, int]]:
    layers = range(part.first_layer, part.first_layer + part.num_layers)
    return set(product(layers, range(part.first_head, part.first_head + part.num_heads)))


@dataclass(eq=False)
class Store:
    """A worker's running store, on the server of `epoch`."""

    epoch: int
    ticket: int
    claims: list[Claim]

    @property
    def is_copied(self) -> bool:
        return all(claim.is_written for claim in self.claims)


@dataclass(eq=False)
class Retrieve:
    """A worker's running retrieve."""

    plan: m.RetrievePlan
    digests: bytes
    parts: tuple[Part, ...]
    read: list[list[Any]] = field(default_factory=list[list[Any]])  # the pages read, by extent


@dataclass(eq=False)
class Process:
    """A process of an engine. It is stopped and killed as a whole."""

    writer: Writer
    is_alive: bool = True
    is_stopped: bool = False


@dataclass(eq=False)
class Lease:
    """A lease on the first chunks of a prompt, or on the extents of a retrieve."""

    number: int
    run: KeyRun
    num_chunks: int


@dataclass(eq=False)
class Worker:
    """A worker with its own connection. It also acts as its engine's scheduler."""

    name: str  # the engine's name
    process: Process
    rank: int
    epoch: int = 0  # epoch of the server to which it believes it is connected
    session: int = 0
    context: int = 0
    parts: tuple[Part, ...] = ()
    stores: list[Store] = field(default_factory=list[Store])
    retrieves: list[Retrieve] = field(default_factory=list[Retrieve])
    leases: list[Lease] = field(default_factory=list[Lease])


class Server:
    """One life of the depot."""

    def __init__(self, world: "World", pid: int) -> None:
        setup, memory = world.setup, world.memory
        self.fuse = Fuse()
        self.writer = Writer(pid, 1)
        size = setup.num_pages * PAGE
        table = CrashingTable(memory.table, self.fuse)
        extents = ExtentAllocator(size, memory.ready_pages * PAGE)
        self.index = ChunkIndex(extents, table, setup.policy, QuotaTable(size, setup.quotas))
        prefixes = PrefixFile(memory.sessions)
        self.names = memory.open_names(self.fuse)
        self.depot = Depot(
            self.index,
            epoch=pid,
            lease_seconds=LEASE_SECONDS,
            clock=world.clock,
            save_names=self.names.add,
            features=features(prefixes=prefixes),
        )
        self.queue: SimulatedQueue | None = None
        if setup.demotion is not None:
            self.queue = make_queue(world.storage, f"the server {pid}", world.clock)
            tiering = put_tiers_below(self.depot, [self.queue], TieringSettings(setup.demotion))
            tiering.promotion_context.own_writer = self.writer
        found = self.names.found
        self.watched: set[Writer] = set()
        restored = restore(self.index, found.spaces, len(found.labels))
        self.restoring = chain(prefixes.restore(), take_over(self.depot, restored, world.await_death))
        self.is_restoring = True
        self.depot.state.is_restoring, self.depot.state.accepts_stores = True, False
        self.depot.labels.restore(found.labels)


class World(Node):
    """The node. `do` makes one event happen.

    Args:
        setup: the constants of the history.
        say: receives each event in words.
    """

    def __init__(self, setup: Setup, say: Callable[[str], object] | None = None) -> None:
        super().__init__(say)
        self.setup = setup
        self.now = 50.0
        self.memory = Memory(setup.num_pages, setup.ready_pages)
        self.storage = Storage(self.memory)
        if setup.has_history:
            self._fill_tier()
        self.num_crashes = self.num_reads = 0
        self._next = 100  # pids, sessions, epochs
        self.server: Server | None = None
        self.lingering: list[tuple[Writer, Any, list[Claim]]] = []  # calls of dead servers that are still in the kernel
        self.dead: list[Writer] = []  # processes whose end was not yet reported to the server
        self.remembered: set[bytes] = set()  # all last prefixes that sessions ever had
        self.suspect: set[bytes] = set()  # chunks with an entry that a client reported as corrupt
        self.waiting: list[PendingReply] = []  # lookups that the current server has not answered
        processes = [Process(Writer(self._number(), 1)) for _ in set(PROCESS_OF_WORKER)]
        self.workers = [self._new_worker(n, processes[PROCESS_OF_WORKER[n]]) for n in range(len(setup.ranks))]

    def _fill_tier(self) -> None:
        spec, model = digest_of(self.setup.spec), name_hash("model")
        for run in PROMPTS:
            for chunk in range(NUM_CHUNKS):
                key = run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                for group, shape in enumerate(self.setup.spec.groups):
                    cell_bytes = self.setup.entry_bytes[group]
                    check = int.from_bytes(digest_of((1, 1, (cell_bytes,)))[:4], "little")
                    workers = range(len(self.setup.ranks))
                    for part in dict.fromkeys(part_of(shape, worker, self.setup.ranks) for worker in workers):
                        num_bytes = cell_bytes * part.num_cells
                        place = place_of(spec, group, part.number, check, num_bytes)
                        tags = tags_of((key, group, part.number), num_pages(num_bytes))
                        self.storage.entries[tier_key(name_hash(run.tenant), model, place, key)] = tags

    def clock(self) -> float:
        return self.now

    def close(self) -> None:
        """Close everything that has a descriptor."""
        self.memory.close()
        if self.server is not None:
            self.server.names.close()

    def do(self, event: Event) -> bool:
        """Make an event happen. Return False if it is impossible now.

        Raises:
            Violation: an invariant was violated.
        """
        try:
            return super().do(event)
        except Crash:
            told = f"{event[0]}; in the middle of it the server is killed, at its write {self._fuse_writes()}"
            self._bury_server()
            if self._say is not None:
                self._say(told)
            return True
        except Violation:
            if self._say is not None:
                self._say(f"{event[0]} ...")
            raise

    def _fuse_writes(self) -> int:
        return 0 if self.server is None else self.server.fuse.num_writes

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _new_worker(self, number: int, process: Process) -> Worker:
        if max(group.heads for group in self.setup.spec.groups) > 1:
            return Worker(f"engine of {self.setup.ranks[number][0]}", process, number)
        return Worker(f"engine-{PROCESS_OF_WORKER[number]}", process, number % 2)

    # --- the server -----------------------------------------------------------------------------------------------

    def on_start(self, a: int, b: int, c: int) -> str | None:
        if self.server is not None:
            return None
        is_fresh = not a % 16
        if is_fresh:
            self._forget_files()
        self.server = Server(self, self._number())
        self.suspect.clear()
        for worker in self.workers:
            worker.session = 0  # the kernel closed every connection
        self.waiting.clear()
        return f"a server starts (process {self.server.writer.pid}){' with new files' if is_fresh else ''}"

    def _forget_files(self) -> None:
        """Give the next server new files. Processes that mapped the old files write to those."""
        self.memory.close()
        self.memory.__init__(self.setup.num_pages, self.memory.ready_pages)
        self.lingering.clear()
        for worker in self.workers:
            worker.stores, worker.retrieves = [], []

    def on_restore(self, a: int, b: int, c: int) -> str | None:
        server = self.server
        if server is None or not server.is_restoring:
            return None
        for _ in range(1 + a % 8 * 4):
            if next(server.restoring, "over") == "over":
                return self._restored(server)
        return "the server reads back some records"

    def _restored(self, server: Server) -> str:
        server.is_restoring = False
        server.depot.state.is_restoring, server.depot.state.accepts_stores = False, True
        if server.index.num_restore_errors:
            raise Violation("reading back failed")
        self.check()
        return f"the server has read back {server.index.entries.num_sealed} entries"

    def on_kill_server(self, a: int, b: int, c: int) -> str | None:
        """Kill the server now, or at one of its next writes."""
        server = self.server
        if server is None:
            return None
        if a % 4:
            server.fuse.left, server.fuse.torn = b % 12, c
            return f"the server will be killed after {b % 12} more writes"
        self._bury_server()
        return "the server is killed"

    def _bury_server(self) -> None:
        server = self.server
        assert server is not None
        self.num_crashes += 1
        self.server = None
        server.names.close()
        self.dead.clear()
        if server.queue is None:
            return
        threads = server.queue.threads
        for waiting in threads.waiting.values():
            for call in waiting:
                threads.let_go(call)
        for call in threads.begun:
            claims = threads.claims.get(id(call), [])
            if claims and len(self.lingering) < 2 and self.num_crashes % 2:
                self.lingering.append((server.writer, call, claims))
            else:
                threads.let_go(call)

    def on_linger(self, a: int, b: int, c: int) -> str | None:
        """End a hung read of a killed server. The end of the last one ends the server's process."""
        if not self.lingering:
            return None
        writer, call, claims = self.lingering.pop(a % len(self.lingering))
        for key, extent, claim in zip(
            call.job.keys[call.first : call.last], call.job.extents[call.first : call.last], claims, strict=True
        ):
            self.storage.fill(key, *extent)
            self.memory.end(claim)
        if all(other != writer for other, _, _ in self.lingering):
            self._note_death(writer)
        return f"a read of the dead server {writer.pid} ends in the kernel"

    def await_death(self, writer: Writer) -> bool:
        """Stand in for the session table: watch a process, and return whether it is alive."""
        assert self.server is not None
        is_alive = any(worker.process.writer == writer and worker.process.is_alive for worker in self.workers) or any(
            other == writer for other, _, _ in self.lingering
        )
        if is_alive:
            self.server.watched.add(writer)
        return is_alive

    def _note_death(self, writer: Writer) -> None:
        if self.server is not None and writer in self.server.watched:
            self.dead.append(writer)

    def on_turn(self, a: int, b: int, c: int) -> str | None:
        """Run a turn of the loop without a message."""
        server = self.server
        if server is None:
            return None
        self.now += (0.0, 0.1, 1.0, 3.0, 11.0)[a % 5]
        depot = server.depot
        depot.expire()
        depot.state.timers.expire(self.now)
        depot.background.work(lambda: bool(b % 2))
        if depot.state.tiering is not None:
            depot.state.tiering.turn(lambda: bool(b % 3))
        self._look(server)
        return f"the loop turns at {self.now:.1f} s"

    def on_grow(self, a: int, b: int, c: int) -> str | None:
        """Give more of the pool memory, even while the server reads back."""
        server, memory = self.server, self.memory
        if server is None or memory.ready_pages == memory.num_pages:
            return None
        memory.ready_pages = min(memory.num_pages, memory.ready_pages + 1 + a % 4)
        server.index.extents.grow(memory.ready_pages * PAGE)
        return f"{memory.ready_pages} of {memory.num_pages} pages have memory"

    def on_damage(self, a: int, b: int, c: int) -> str | None:
        """Damage files between two servers: cut off the end of the names, change a byte, or duplicate an entry.

        No writer may lose its extent, so records of unfinished entries stay.
        """
        if self.server is not None:
            return None
        memory, table = self.memory, IndexTable(self.memory.table, NUM_RECORDS)
        number = a % NUM_RECORDS
        if c % 4 == 3:
            memory.sessions[1024 + (a * 256 + b) % (len(memory.sessions) - 1024)] ^= 1 + c // 4
            return "a byte of the sessions is another"
        if c % 3 == 0:
            size = os.fstat(memory.names_fd).st_size
            os.ftruncate(memory.names_fd, max(len(NamesFile.MAGIC), size - 1 - b))
            return f"the names lose up to {1 + b} bytes"
        if c % 3 == 1:
            if table.state(table.entries[number]) == WRITING:
                return None
            memory.table[HEADER_PAGE_BYTES + number * RECORD_BYTES + b % RECORD_BYTES] ^= 1 + c // 3
            return f"byte {b % RECORD_BYTES} of record {number} is another"
        return self._copy_entry(table, table.entries[number], b)

    def _copy_entry(self, table: IndexTable, entry: Entry, b: int) -> str | None:
        """Give an entry a second record and extent, which a correct server never does."""
        memory, found = self.memory, table.record(entry)
        target = next((each for each in table.entries if table.state(each) == FREE), None)
        if found is None or found.state != SEALED or target is None:
            return None
        taken = {page for each in table.records() for page in pages_in(each.offset, each.num_bytes)} | set(
            memory.claims
        )
        size = num_pages(found.num_bytes)
        starts = [
            start for start in range(memory.ready_pages - size + 1) if taken.isdisjoint(range(start, start + size))
        ]
        if not starts:
            return None
        start = starts[b % len(starts)]
        memory.pages[start : start + size] = memory.pages_of(found.offset, found.num_bytes)
        write_record(
            table,
            target,
            space=found.space,
            group=found.group,
            part=found.part,
            offset=start * PAGE,
            num_bytes=found.num_bytes,
            key=found.key,
            parent=found.parent,
            depth=found.depth,
            check=found.check,
            label=found.label,
            writer=found.writer,
            owner=found.owner,
        )
        table.seal([target], found.last_use)
        return f"record {target} is a copy of record {entry}, with pages of its own"

    def _look(self, server: Server) -> None:
        counters = server.depot.counters
        if counters["chores_failed"]:
            raise Violation("work between messages failed")

    # --- processes ------------------------------------------------------------------------------------------------

    def _able(self, a: int) -> Worker | None:
        """Return a process that can act."""
        worker = self.workers[a % len(self.workers)]
        return worker if worker.process.is_alive and not worker.process.is_stopped else None

    def _connected(self, a: int) -> Worker | None:
        worker = self._able(a)
        is_there = worker is not None and self.server is not None and worker.session
        return worker if is_there else None

    def _ask(self, worker: Worker, request: frames.Request) -> Any:
        """Send a request. Return the reply, or None if it was refused or comes later."""
        server = self.server
        assert server is not None
        try:
            reply = server.depot.handle(worker.session, worker.process.writer, request)
        except Refused as error:
            if error.code not in (ErrorCode.UNKNOWN_TICKET, ErrorCode.UNKNOWN_CONTEXT):
                raise Violation(f"{type(request).__name__} is refused: {error}") from error
            return None
        except Exception as error:
            raise Violation(f"{type(request).__name__} failed: {error!r}") from error
        self._look(server)
        return reply

    def on_connect(self, a: int, b: int, c: int) -> str | None:
        """Open a session and register, once no copy is running."""
        worker = self._able(a)
        if worker is None or self.server is None or worker.session:
            return None
        self._end_jobs(worker)
        self._register(worker)
        return f"{worker.name} (process {worker.process.writer.pid}) connects"

    def _register(self, worker: Worker) -> None:
        assert self.server is not None
        worker.session, worker.epoch, worker.leases = self._number(), self.server.writer.pid, []
        spec = self.setup.spec
        worker.parts = tuple(part_of(group, worker.rank, self.setup.ranks) for group in spec.groups)
        details = tuple(
            m.GroupDetail((self.setup.entry_bytes[number] * part.num_heads,) * part.num_layers, 8, part=part.number)
            for number, part in enumerate(worker.parts)
        )
        reply = self._ask(
            worker,
            m.RegisterKVCache(
                m.PROTOCOL_VERSION, worker.name, worker.rank, len(self.workers), "none", "none", "model", spec, details
            ),
        )
        worker.context = reply.context

    def _end_jobs(self, worker: Worker) -> None:
        for store in worker.stores:
            for claim in store.claims:
                self.memory.end(claim)
        worker.stores, worker.retrieves = [], []

    def on_unregister(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None or not worker.context:
            return None
        self._end_jobs(worker)
        self._ask(worker, m.Unregister(worker.context))
        self._register(worker)
        return f"{worker.name} unregisters and registers again"

    def on_disconnect(self, a: int, b: int, c: int) -> str | None:
        """Close the connection. The process lives and may continue copying."""
        worker = self.workers[a % len(self.workers)]
        if not worker.process.is_alive or self.server is None or not worker.session:
            return None
        self._end_session(worker)
        return f"the connection of {worker.name} closes"

    def _end_session(self, worker: Worker) -> None:
        assert self.server is not None
        self.server.depot.end_session(worker.session)
        worker.session = 0
        if any(quarantine.worker[0] == worker.process.writer for quarantine in self.server.depot.quarantine.held):
            self.server.watched.add(worker.process.writer)

    def on_kill(self, a: int, b: int, c: int) -> str | None:
        """Kill a process. Another one with the same name takes its place."""
        process, successor = self.workers[a % len(self.workers)].process, Process(Writer(self._number(), 1))
        process.is_alive = False
        for number, worker in enumerate(self.workers):
            if worker.process is process:
                self._end_jobs(worker)
                self.workers[number] = self._new_worker(number, successor)
                if self.server is not None and worker.session:
                    self._end_session(worker)
        self._note_death(process.writer)
        return f"process {process.writer.pid} is killed"

    def on_bury(self, a: int, b: int, c: int) -> str | None:
        """Report a death to the server."""
        if self.server is None or not self.dead:
            return None
        writer = self.dead.pop(a % len(self.dead))
        self.server.depot.end_process(writer)
        return f"the server sees that process {writer.pid} is dead"

    def on_stop(self, a: int, b: int, c: int) -> str | None:
        process = self.workers[a % len(self.workers)].process
        process.is_stopped = not (process.is_stopped or c % 4)
        return f"process {process.writer.pid} is {'stopped' if process.is_stopped else 'continued'}"

    # --- stores ---------------------------------------------------------------------------------------------------

    def _run(self, b: int, c: int) -> KeyRun:
        start = c % NUM_CHUNKS if c & 0x30 == 0x30 else 0
        return PROMPTS[b % self.setup.num_prompts].slice(start, min(NUM_CHUNKS, start + 1 + c // 4 % NUM_CHUNKS))

    def _needed(self, run: KeyRun, full: bool) -> tuple[int, ...]:
        """Return how many of a run's last chunks each group covers."""
        window = {FULL: run.num_chunks, WINDOW: run.num_chunks if full else 2, STATE: 1}
        return tuple(min(run.num_chunks, window[group.kind]) for group in self.setup.spec.groups)

    def on_prepare(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None or len(worker.stores) >= 2:
            return None
        run = self._run(b, c)
        plan = self._ask(
            worker,
            m.PrepareStore(
                worker.context,
                "r",
                run.tenant,
                run.digests,
                run.first_chunk,
                run.parent,
                self._needed(run, bool(b & 16)),
            ),
        )
        assert self.server is not None
        self._check_leases(self.server)
        if plan is None or not plan.ticket:
            return f"{worker.name} asks to store {self._name(run)}: declined, or all of it is there"
        holder = f"{worker.name} (process {worker.process.writer.pid})"
        claims = [
            self.memory.claim(holder, self._place(run.digests, chunk, group, layers << 16 | heads), offset, size)
            for chunk, group, heads, _, layers, _, offset, size in m.EXTENT.iter_unpack(plan.extents)
        ]
        worker.stores.append(Store(worker.epoch, plan.ticket, claims))
        pages = ", ".join(
            f"{NAMES[claim.place[0]]} in pages {claim.first_page} to {claim.first_page + claim.num_pages - 1}"
            for claim in claims
        )
        return f"{worker.name} is given room for {pages}"

    def _name(self, run: KeyRun) -> str:
        first, last = run.digests[:DIGEST_BYTES], run.digests[-DIGEST_BYTES:]
        return NAMES[first] if first == last else f"{NAMES[first]} to {NAMES[last]}"

    @staticmethod
    def _place(digests: bytes, chunk: int, group: int, part: int) -> tuple[bytes, int, int]:
        return digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES], group, part

    def on_copy(self, a: int, b: int, c: int) -> str | None:
        worker = self._able(a)
        stores = [] if worker is None else [store for store in worker.stores if not store.is_copied]
        if worker is None or not stores:
            return None
        store = stores[b % len(stores)]
        for _ in range(1 + c % 8):
            claim = next((claim for claim in store.claims if not claim.is_written), None)
            if claim is not None:
                self.memory.write(claim, 1 + c // 4 % 2)
        return f"{worker.name} copies" + (" the last of it" if store.is_copied else " some pages")

    def on_end_store(self, a: int, b: int, c: int) -> str | None:
        """Commit a finished copy, or abort a failed one."""
        worker = self._able(a)
        if worker is None or not worker.stores:
            return None
        store = worker.stores[b % len(worker.stores)]
        if not store.is_copied and c % 16:
            return None
        worker.stores.remove(store)
        for claim in store.claims:
            self.memory.end(claim)
        if self.server is None or not worker.session or store.epoch != self.server.writer.pid:
            return f"{worker.name} is done with a store of a server that is gone"
        if not store.is_copied:
            self._ask(worker, m.AbortStore(worker.context, store.ticket))
            return f"{worker.name} aborts a store"
        reply = self._ask(worker, m.CommitStore(worker.context, store.ticket))
        return f"{worker.name} commits a store" + ("" if reply is not None else ", which is refused")

    # --- lookups and retrieves ------------------------------------------------------------------------------------

    def on_lookup(self, a: int, b: int, c: int) -> str | None:
        """Look a prompt up. Some lookups announce it, join an announcement, or await another node's chunks."""
        worker = self._connected(a)
        if worker is None:
            return None
        run = PROMPTS[b % self.setup.num_prompts].slice(0, 1 + c % NUM_CHUNKS)
        request = m.Lookup(
            worker.context,
            "ab"[c // 4 % 2],
            run.digests,
            run.tenant,
            1.0,
            token_seconds=(0.0, 1e-4, 1e-2)[a // 4 % 3],
            announces=bool(c & 32),
            joins=bool(c & 16),
            awaits=run.num_chunks * (c >= 192),
            hands_over=bool(b & 128),
        )
        session, server = worker.session, self.server

        def on_reply(reply: Any) -> None:
            if isinstance(reply, m.LookupReply) and reply.num_chunks:
                assert server is not None
                self._check_found(server.index, run, reply.num_chunks)
                if worker.session == session:
                    worker.leases.append(Lease(reply.lease, run, reply.num_chunks))

        reply = self._ask(worker, request)
        if isinstance(reply, PendingReply):
            reply.on_reply = on_reply
            self.waiting.append(reply)
            return f"{worker.name} looks {self._name(run)} up, which waits for a tier or another engine"
        on_reply(reply)
        return f"{worker.name} looks {self._name(run)} up and finds {0 if reply is None else reply.num_chunks}"

    def _check_found(self, index: ChunkIndex, run: KeyRun, found: int, first: int = 0) -> None:
        space = index.space(self.setup.spec)
        for number, (group, chunks) in enumerate(zip(space.spec.groups, space.chunks_needed, strict=True)):
            for chunk in range(max(0, found - chunks) if chunks else first, found):
                key = run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                node = index.nodes.find(space, key, chunk)
                missing = space.cells[number]
                for entry in [] if node is None else index.entries.sealed(node):
                    place = index.table.place_of(entry)
                    if place[0] == number:
                        missing &= ~mask_of(place[1], group.heads)
                        self.memory.check_content((key, *place), *index.table.extent(entry), "what is found")
                if missing:
                    raise Violation(f"chunk {NAMES[key]} is found and is not there")

    def on_release(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None or not worker.leases:
            return None
        lease = worker.leases.pop(b % len(worker.leases))
        self._ask(worker, m.Release(worker.context, (lease.number,)))
        return f"{worker.name} releases a lease"

    def on_end_request(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None:
            return None
        self._ask(worker, m.EndRequest(worker.context, "abr"[b % 3]))
        return f"{worker.name} ends a request"

    def on_retrieve(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None or len(worker.retrieves) >= 2:
            return None
        run = self._run(b, c)
        plan = self._ask(
            worker, m.PrepareRetrieve(worker.context, "r", run.digests, run.first_chunk, self._needed(run, full=False))
        )
        if plan is None or not plan.num_chunks or not plan.lease:
            return f"{worker.name} asks to retrieve {self._name(run)}: a miss"
        for _, group, heads, _, layers, _, _, size in m.EXTENT.iter_unpack(plan.extents):
            if size != self.setup.entry_bytes[group] * Part.of(layers << 16 | heads).num_cells:
                raise Violation(f"{worker.name} is told of {size} bytes, which are not the entry's")
        is_checked = self.is_full_attention and not run.first_chunk
        worker.leases.append(Lease(plan.lease, run, plan.num_chunks if is_checked else 0))
        if c >= 240 and plan.extents:
            plan = self._mixed_up(plan, run, b)
        worker.retrieves.append(Retrieve(plan, run.digests, worker.parts))
        return f"{worker.name} begins to retrieve {plan.num_chunks} chunks from {self._name(run)}"

    def _mixed_up(self, plan: m.RetrievePlan, run: KeyRun, b: int) -> m.RetrievePlan:
        """Return the plan of a server with a wrong index, in which an extent belongs to another chunk."""
        assert self.server is not None
        table, extents = self.server.index.table, list(m.EXTENT.iter_unpack(plan.extents))
        place = b % len(extents)
        chunk, group, heads, _, layers, *_, num_bytes = extents[place]
        for other in table.records():
            if other.state == SEALED and other.num_bytes == num_bytes and other.key not in run.digests:
                header = table.header(other.entry)
                extents[place] = chunk, group, heads, other.entry, layers, header, other.offset, num_bytes
        return msgspec.structs.replace(plan, extents=b"".join(m.EXTENT.pack(*extent) for extent in extents))

    def on_read(self, a: int, b: int, c: int) -> str | None:
        """Read the next extents. After the last one, compare as the client does."""
        worker = self._able(a)
        if worker is None or not worker.retrieves:
            return None
        retrieve = worker.retrieves[b % len(worker.retrieves)]
        extents: list[tuple[int, ...]] = list(m.EXTENT.iter_unpack(retrieve.plan.extents))
        for *_, offset, size in extents[len(retrieve.read) : len(retrieve.read) + 1 + c % 3]:
            retrieve.read.append(self.memory.pages_of(offset, size))
        if len(retrieve.read) < len(extents):
            return f"{worker.name} reads some pages"
        worker.retrieves.remove(retrieve)
        valid = count_valid_chunks(retrieve.plan, retrieve.digests, TableReader(self.memory.table))
        missing: dict[tuple[int, int], set[tuple[int, int]]] = {
            (chunk, group): _cells(retrieve.parts[group]) for chunk, group, *_ in extents
        }
        for extent, pages in zip(extents, retrieve.read, strict=True):
            chunk, group, heads, layers = extent[0], extent[1], extent[2], extent[4]
            place = self._place(retrieve.digests, chunk, group, layers << 16 | heads)
            if chunk < valid and pages != tags_of(place, len(pages)):
                raise Violation(f"{worker.name} retrieved other bytes than those of {NAMES[place[0]]}")
            missing[chunk, group] -= _cells(Part.of(place[2]))
        if any(left for (chunk, _), left in missing.items() if chunk < valid):
            raise Violation(f"{worker.name} retrieved chunks without some of its layers or heads")
        self.num_reads += valid
        return f"{worker.name} has retrieved {valid} chunks"

    # --- blends ---------------------------------------------------------------------------------------------------

    @property
    def is_full_attention(self) -> bool:
        return all(group.kind is FULL for group in self.setup.spec.groups)

    def on_note(self, a: int, b: int, c: int) -> str | None:
        """Note the segments of a prompt's chunks."""
        worker = self._connected(a)
        if worker is None or not self.is_full_attention:
            return None
        number = b % self.setup.num_prompts
        run = PROMPTS[number]
        self._ask(worker, NoteContents(worker.context, run.digests, segments_of(TEXTS[number], run.tenant)))
        return f"{worker.name} says what {self._name(run)} hold"

    def on_blend(self, a: int, b: int, c: int) -> str | None:
        """Look for a text at any position. The chunks found must have this text."""
        worker = self._connected(a)
        if worker is None or not self.is_full_attention:
            return None
        assert self.server is not None
        number, tenant = b % self.setup.num_prompts, PROMPTS[b % self.setup.num_prompts].tenant
        cut = c // 2 % len(TEXTS[number]) if c % 2 else 0
        text = TEXTS[number][cut:] + TEXTS[number][:cut]
        reply = self._ask(worker, BlendLookup(worker.context, "ab"[a // 4 % 2], segments_of(text, tenant)))
        for position, length, source, first, count, start in BLEND_RUN.iter_unpack(reply.runs):
            digests = reply.digests[start * DIGEST_BYTES : (start + count) * DIGEST_BYTES]
            of = next((n for n, run in enumerate(PROMPTS) if digests == run.slice(first, first + count).digests), None)
            if of is None or letters(TEXTS[of], source, length) != letters(text, position, length):
                raise Violation(f"a blend takes chunks with another text than {letters(text, position, length)}")
            self._check_found(
                self.server.index, PROMPTS[of], first + count, first
            )  # the chunks before it may be missing
        if reply.lease:
            worker.leases.append(Lease(reply.lease, PROMPTS[number], 0))
        return f"{worker.name} looks for the text {text} and finds {len(reply.runs) // BLEND_RUN.size} runs"

    # --- lies -----------------------------------------------------------------------------------------------------

    def on_lie(self, a: int, b: int, c: int) -> str | None:
        """Let a client name leases, tickets, contexts and entries of others. Nothing may change."""
        worker = self._connected(a)
        if worker is None:
            return None
        assert self.server is not None
        depot, context = self.server.depot, worker.context
        leases = [lease.number for lease in depot.leases if lease.context != context]
        every = [*depot.stores.tickets.values(), *depot.stores.late_tickets.values()]
        tickets = [ticket.number for ticket in every if ticket.context != context] or [0]
        ticket, table = tickets[b % len(tickets)], self.server.index.table
        entry = table.entries[b % NUM_RECORDS]
        request = (
            m.Release(context, tuple(leases)),
            m.CommitStore(context, ticket),
            m.AbortStore(context, ticket),
            m.ReportCorrupt(context, ((entry, table.header(entry) ^ 0x100),)),
            m.EndRequest(context + 1 + b % 8, "a"),
        )[c % 5]
        before = self._state()
        self._ask(worker, request)
        if self._state() != before:
            raise Violation(f"{worker.name} changed by {request} what is not its own")
        return f"{worker.name} sends {request}"

    def _state(self) -> tuple[object, ...]:
        assert self.server is not None
        depot = self.server.depot
        numbers = [lease.number for lease in depot.leases]
        return bytes(self.memory.table), numbers, list(depot.stores.tickets), list(depot.stores.late_tickets)

    def on_hint(self, a: int, b: int, c: int) -> str | None:
        worker = self._connected(a)
        if worker is None or self.server is None:
            return None
        run = PROMPTS[b % self.setup.num_prompts].slice(0, 1 + c % NUM_CHUNKS)
        session = f"agent-{a % 2}" if c & 128 else ""
        hint = Hint(
            worker.context,
            run.tenant,
            run.digests,
            bool(c & 16),
            session,
            5.0 if c & 4 else 0.0,
        )
        self._ask(worker, hint)
        if session and not self.server.is_restoring:
            self.remembered.add(run.digests)
        return f"{worker.name} says how long {self._name(run)} is worth keeping{session and f', as {session}'}"

    # --- the tier -------------------------------------------------------------------------------------------------

    def on_tier_begin(self, a: int, b: int, c: int) -> str | None:
        server = self.server
        if server is None or server.queue is None or len(server.queue.threads.begun) >= 6:
            return None
        call = server.queue.threads.begin()
        return None if call is None else f"a {call.operation.name.lower()} of the tier begins"

    def on_tier_end(self, a: int, b: int, c: int) -> str | None:
        server = self.server
        if server is None or server.queue is None or not server.queue.threads.begun:
            return None
        begun = server.queue.threads.begun
        quick = [number for number, call in enumerate(begun) if call.operation is not JobKind.READ]
        waits = self.setup.is_slow and b % 16 > 0
        if waits and not quick:
            return None
        call = server.queue.threads.finish(quick[a % len(quick)] if waits else a % len(begun))
        return f"a {call.operation.name.lower()} of the tier {'fails' if call.outcomes is None else 'ends'}"

    def on_tier_fails(self, a: int, b: int, c: int) -> str | None:
        if self.setup.demotion is None:
            return None
        self.storage.is_failing = not (self.storage.is_failing or c % 4)
        return f"the tier {'fails' if self.storage.is_failing else 'works'} from now on"

    # --- operators ------------------------------------------------------------------------------------------------

    def on_operate(self, a: int, b: int, c: int) -> str | None:
        server = self.server
        if server is None or server.is_restoring:
            return None
        depot, tenant = server.depot, (None, "tenant-0", "tenant-1")[b % 3]
        session, owner = f"agent-{b // 2 % 2}", f"tenant-{b % 2}"
        try:
            match a % 7:
                case 0:
                    operate(depot, o.Clear(tenant))
                    return f"an operator clears {tenant or 'everything'}"
                case 1:
                    num_bytes = b // 3 % 4 * PAGE
                    operate(depot, o.SetQuota("tenant-1", num_bytes))
                    return f"an operator sets the quota of tenant-1 to {num_bytes} bytes"
                case 2:
                    operate(depot, o.Warm(tenant=PROMPTS[b % 4].tenant, digests=PROMPTS[b % 4].digests))
                    return f"an operator warms {self._name(PROMPTS[b % 4])}"
                case 3:
                    operate(depot, session_operations.RetainSession(session, c % 3 * 5.0, owner))
                    return f"{session} of {owner} is retained for {c % 3 * 5} s"
                case 4:
                    operate(depot, session_operations.PrefetchSession(session, owner, c % 3 * 5.0))
                    return f"{session} of {owner} is prefetched"
                case 5:
                    if c % 2:
                        operate(depot, session_operations.DemoteSession(session, owner))
                        return f"{session} of {owner} is demoted"
                    operate(depot, session_operations.ForgetSession(session, owner, at_once=bool(c & 2)))
                    return f"{session} of {owner} is forgotten"
                case _:
                    operate(depot, o.Drain(not b % 4))
                    return f"an operator {'begins' if not b % 4 else 'ends'} draining"
        except Refused:
            return None

    def on_report(self, a: int, b: int, c: int) -> str | None:
        """Let a client report an entry's bytes as damaged."""
        worker = self._connected(a)
        if worker is None or self.server is None:
            return None
        table = self.server.index.table
        copied = [each.entry for each in table.records() if self.memory.copied[each.offset // PAGE]]
        entry = copied[b % len(copied)] if copied and c % 2 else table.entries[b % NUM_RECORDS]
        header = table.header(entry)
        if not table.is_sealed(entry):
            return None
        self.suspect.add(table.key_of(entry))
        reply = self._ask(worker, m.ReportCorrupt(worker.context, ((entry, header),)))
        return f"{worker.name} reports record {entry} as damaged: {reply.count} removed"

    # --- invariants -----------------------------------------------------------------------------------------------

    def on_check(self, a: int, b: int, c: int) -> str | None:
        self.check()
        return "everything adds up"

    def check(self) -> None:
        """Fail unless the server's state is consistent."""
        server = self.server
        if server is None or server.is_restoring:
            return
        try:
            server.index.check_integrity()
            server.depot.features.of(FlightTable).check_integrity()
            server.depot.features.of(Agents).prefixes.check_integrity()
        except IntegrityError as error:
            raise Violation(f"the depot's tables do not add up: {error}") from error
        index = server.index
        for extent in index.extents.free_extents():
            if any(self.memory.copied[page] for page in pages_in(*extent)):
                raise Violation(f"pages {extent[0] // PAGE} on are free while a tier copies some of them")
        for space in index.spaces if self.is_full_attention else ():
            for key, node in space.nodes.items():
                if key in ABOVE and index.nodes.key_of(index.nodes.tree.parent[node]) != ABOVE[key]:
                    raise Violation(f"chunk {NAMES[key]} follows another chunk than in its prompt")
        self._check_leases(server)
        for session in ("agent-0", "agent-1"):
            for tenant in ("tenant-0", "tenant-1"):
                prefix = server.depot.features.of(Agents).prefixes.find(tenant, session)
                if prefix and not any(each.startswith(prefix) for each in self.remembered):
                    raise Violation(f"{session} of {tenant} leads to a prefix that nobody named")

    def _check_leases(self, server: Server) -> None:
        """Fail unless all leased chunks are there. With quotas, leases yield to tenants within their quota."""
        if server.index.quotas.num_shares > 1:
            return
        for worker in self.workers:
            for lease in worker.leases if worker.session else ():
                digests = lease.run.digests
                keys = {digests[chunk * DIGEST_BYTES :][:DIGEST_BYTES] for chunk in range(lease.num_chunks)}
                if server.depot.leases.find(worker.context, lease.number) is not None and not keys & self.suspect:
                    self._check_found(server.index, lease.run, lease.num_chunks)

    def finish(self) -> None:
        """Let all processes leave and die. Fail if anything is left."""
        for worker in self.workers:
            worker.process.is_stopped = False
        self.storage.is_failing = False
        while self.lingering:
            self.do(("linger", 0, 0, 0))
        self.do(("start", 0, 0, 0))
        server = self.server
        if server is None:
            raise Violation("no server starts")
        server.fuse.left = None
        while self.do(("restore", 7, 0, 0)):
            pass
        while self.do(("grow", 3, 0, 0)):
            pass
        for _ in range(20):
            self.do(("turn", 2, 0, 0))
        if not all(deferred.reply for deferred in self.waiting):
            raise Violation("a lookup is never answered")
        for number in range(len(self.workers)):
            self.do(("kill", number, 0, 0))
        while self.do(("bury", 0, 0, 0)):
            pass
        for _ in range(40):
            self.do(("turn", 4, 0, 0))
            while self.do(("tier_begin", 0, 0, 0)) or self.do(("tier_end", 0, 0, 0)):
                pass
        depot = server.depot
        for _ in depot.features.of(Agents).pins.expire(float("inf")):
            pass
        operate(depot, o.Clear())
        for _ in range(10):
            self.do(("turn", 4, 0, 0))
            while self.do(("tier_begin", 0, 0, 0)) or self.do(("tier_end", 0, 0, 0)):
                pass
        held = (depot.leases, depot.stores.tickets, depot.quarantine.held, depot.contexts.by_number, self.memory.claims)
        if any(map(len, held)):
            raise Violation(f"left over: {[len(each) for each in held]} leases, tickets, quarantines, contexts, claims")
        try:
            check_empty(server.index)
        except (AssertionError, IntegrityError) as error:
            raise Violation(f"something is left over in the index: {_failed(error)}") from error


def letters(text: str, first_token: int, num_tokens: int) -> str:
    """Return the letters that stand for some tokens of a text."""
    return text[first_token // LETTER_TOKENS : (first_token + num_tokens) // LETTER_TOKENS]


def _failed(error: Exception) -> str:
    """Return the assertion's source, as an assertion without a message has no text."""
    frames = traceback.extract_tb(error.__traceback__)
    return str(error) or str(frames[-1].line)
