# pyright: reportPrivateUsage=false
"""A node: one depot at a time over memory that outlives it, processes of engines, a tier, operators.

Every step is one event of a history, `(name, a, b, c)`, whose numbers choose among the possibilities at that moment. An
impossible event does nothing, so a history stays valid when events are removed.
"""

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from kvdepot.client.verify import count_valid_chunks
from kvdepot.config import Demotion
from kvdepot.errors import ErrorCode, IntegrityError
from kvdepot.index.index import ChunkIndex, digest_of
from kvdepot.index.quotas import QuotaTable
from kvdepot.keys import DIGEST_BYTES, KeyRun, Namespace, hash_prefix
from kvdepot.layout import GroupKind
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.names import Names
from kvdepot.pool.table import SEALED, TableReader, Writer
from kvdepot.server import commands
from kvdepot.server.depot import Depot
from kvdepot.server.replies import Deferred, Refused
from kvdepot.server.restoring import take_over
from kvdepot.tiers.jobs import Operation
from kvdepot.tiers.keys import label_of, place_of, tier_key
from kvdepot.tiers.tiering import Tiering, TieringSettings
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from simulation.memory import (
    NUM_RECORDS,
    PAGE,
    Claim,
    Crash,
    CrashingNames,
    CrashingTable,
    Fuse,
    Memory,
    Violation,
)
from simulation.tier import SimulatedQueue, Storage, make_queue
from support.integrity import check_empty

Event = tuple[str, int, int, int]

LEASE_SECONDS: Final = 10.0
NUM_PROCESSES: Final = 4
FULL, WINDOW, STATE = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW, GroupKind.RECURRENT
SPECS: Final = (
    m.CacheSpec(1, (m.GroupShape(FULL, 1),), "plain"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1, num_shards=2),), "two shards"),
    m.CacheSpec(1, (m.GroupShape(FULL, 1), m.GroupShape(WINDOW, 1, 3), m.GroupShape(STATE, 1)), "hybrid"),
    m.CacheSpec(1, (m.GroupShape(WINDOW, 1, 3, num_shards=2),), "only a window"),
)
NUM_CHUNKS: Final = 4
PROMPTS: Final = tuple(
    hash_prefix(Namespace("model", tenant=f"tenant-{n % 2}"), 1, [n // 2 * (i > 1) + i for i in range(NUM_CHUNKS)])
    for n in range(4)
)
NAMES: Final = {
    PROMPTS[n].digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES]: f"{'abcd'[n]}{i}"
    for n in (3, 2, 1, 0)
    for i in range(NUM_CHUNKS)
}


def entry_bytes(group: int) -> int:
    """Return the size of an entry: one page in the group of windows, else two."""
    return PAGE if group == 1 else 2 * PAGE


DEMOTIONS: Final = (None, Demotion.STORE, Demotion.STORE, Demotion.REUSE, Demotion.EVICT)


@dataclass
class Setup:
    """The constants of a history."""

    spec: m.CacheSpec
    num_pages: int
    policy: str
    demotion: Demotion | None
    quotas: dict[str, int]
    has_history: bool  # the tier has every chunk from the start
    is_slow: bool  # reads of the tier hang

    @classmethod
    def of_seed(cls, seed: int) -> "Setup":
        rng = random.Random(f"setup {seed}")
        quotas = {"tenant-0": 3 * PAGE} if rng.random() < 0.3 else {}
        spec, num_pages, policy = rng.choice(SPECS), rng.randint(5, 20), rng.choice(["lru", "arc", "auto"])
        demotion = rng.choice(DEMOTIONS)
        is_slow = demotion is not None and rng.random() < 0.4
        return cls(spec, num_pages, policy, demotion, quotas, is_slow or rng.random() < 0.5, is_slow)


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
    shards: tuple[int, ...]
    read: list[list[Any]] = field(default_factory=list[list[Any]])  # the pages read, by extent


@dataclass(eq=False)
class Process:
    """An engine's process with one worker, which also acts as the scheduler."""

    name: str
    writer: Writer
    rank: int
    is_alive: bool = True
    is_stopped: bool = False
    epoch: int = 0  # of the server to which it believes it is connected
    session: int = 0
    context: int = 0
    shards: tuple[int, ...] = ()
    stores: list[Store] = field(default_factory=list[Store])
    retrieves: list[Retrieve] = field(default_factory=list[Retrieve])
    leases: list[int] = field(default_factory=list[int])


class Server:
    """One life of the depot."""

    def __init__(self, world: "World", pid: int) -> None:
        setup, memory = world.setup, world.memory
        self.fuse = Fuse()
        self.writer = Writer(pid, 1)
        size = setup.num_pages * PAGE
        table = CrashingTable(memory.table, self.fuse)
        self.index = ChunkIndex(ExtentAllocator(size), table, setup.policy, QuotaTable(size, setup.quotas))
        self.depot = Depot(self.index, epoch=pid, lease_seconds=LEASE_SECONDS, clock=world.clock)
        self.names = CrashingNames(memory.names, self.fuse)
        self.queue: SimulatedQueue | None = None
        if setup.demotion is not None:
            self.queue = make_queue(world.storage, f"the server {pid}", world.clock)
            self.depot.state.tiering = Tiering(
                self.index, [self.queue], TieringSettings(setup.demotion), names_of=self.depot.labels.names.__getitem__,
                on_corrupt=self.depot.remove_corrupt, clock=world.clock,
            )  # fmt: skip
            self.depot.state.tiering.promotion_context.own_writer = self.writer
        found = self.names.found
        self.watched: set[Writer] = set()
        self.restoring = iter(
            take_over(self.depot, self.index.restore(found.spaces, len(found.labels)), world.await_death)
        )
        self.is_restoring = True
        self.depot.state.accepts_stores = False
        self.depot.labels.restore(found.labels)
        self.depot.labels.save = self._save_names

    def _save_names(self) -> None:
        spaces = [space.spec for space in self.index.spaces[self.names.num_spaces :]]
        self.names.add(Names(spaces, self.depot.labels.names[self.names.num_labels :]))


class World:
    """The node. `do` makes one event happen.

    Args:
        setup: the constants of the history.
        say: receives each event in words.
    """

    def __init__(self, setup: Setup, say: Callable[[str], object] | None = None) -> None:
        self.setup = setup
        self.now = 50.0
        self.memory = Memory(setup.num_pages)
        self.storage = Storage(self.memory)
        if setup.has_history:
            self._fill_tier()
        self.num_crashes = self.num_reads = 0
        self._say = say
        self._next = 100  # pids, sessions, epochs
        self.server: Server | None = None
        self.lingering: list[tuple[Writer, Any, list[Claim]]] = []  # calls of dead servers that are still in the kernel
        self.dead: list[Writer] = []  # processes whose end was not yet reported to the server
        self.processes = [self._new_process(number) for number in range(NUM_PROCESSES)]
        self._events: dict[str, Callable[[int, int, int], str | None]] = {
            name.removeprefix("on_"): getattr(self, name) for name in dir(self) if name.startswith("on_")
        }

    def _fill_tier(self) -> None:
        spec, model = digest_of(self.setup.spec), label_of("model")
        for run in PROMPTS:
            for chunk in range(NUM_CHUNKS):
                key = run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                for group, shape in enumerate(self.setup.spec.groups):
                    layout = int.from_bytes(digest_of((1, (entry_bytes(group),)))[:8], "little")
                    for shard in range(shape.num_shards):
                        place = place_of(spec, group, shard, layout, entry_bytes(group))
                        self.storage.entries[tier_key(label_of(run.tenant), model, place, key)] = [
                            (key, group, shard, number) for number in range(entry_bytes(group) // PAGE)
                        ]

    def clock(self) -> float:
        return self.now

    def do(self, event: Event) -> bool:
        """Make an event happen. Return False if it is impossible now.

        Raises:
            Violation: an invariant was violated.
        """
        name, a, b, c = event
        told: str | None = None
        try:
            told = self._events[name](a, b, c)
        except Crash:
            told = f"{name}; in the middle of it the server is killed, at its write {self._fuse_writes()}"
            self._bury_server()
        except Violation:
            if self._say is not None:
                self._say(f"{name} ...")
            raise
        if told is not None and self._say is not None:
            self._say(told)
        return told is not None

    def _fuse_writes(self) -> int:
        return 0 if self.server is None else self.server.fuse.num_writes

    def _number(self) -> int:
        self._next += 1
        return self._next

    def _new_process(self, number: int) -> Process:
        return Process(f"engine-{number}", Writer(self._number(), 1), number % 2)

    # --- the server -----------------------------------------------------------------------------------------------

    def on_start(self, a: int, b: int, c: int) -> str | None:
        if self.server is not None:
            return None
        is_fresh = not a % 16
        if is_fresh:
            self._forget_files()
        self.server = Server(self, self._number())
        for process in self.processes:
            process.session = 0  # the kernel closed every connection
        return f"a server starts (process {self.server.writer.pid}){' with new files' if is_fresh else ''}"

    def _forget_files(self) -> None:
        """Give the next server new files. Processes that mapped the old files write to those."""
        self.memory.claims.clear()
        self.memory.__init__(self.setup.num_pages)
        self.lingering.clear()
        for process in self.processes:
            process.stores, process.retrieves = [], []

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
        server.depot.state.accepts_stores = True
        if server.index.num_restore_errors:
            raise Violation("reading back failed")
        self.check()
        return f"the server has read back {server.index.num_entries} entries"

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
        """End a hung read of a killed server; the last one ends the server's process."""
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
        """Replace the session table: watch a process that may be alive."""
        assert self.server is not None
        is_alive = any(process.writer == writer and process.is_alive for process in self.processes) or any(
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
        depot.background.work(lambda: bool(b % 2))
        if depot.state.tiering is not None:
            depot.state.tiering.turn(lambda: bool(b % 3))
        self._look(server)
        return f"the loop turns at {self.now:.1f} s"

    def _look(self, server: Server) -> None:
        counters = server.depot.counters
        if counters["chores_failed"]:
            raise Violation("work between messages failed")

    # --- processes ------------------------------------------------------------------------------------------------

    def _able(self, a: int) -> Process | None:
        """Return a process that can act."""
        process = self.processes[a % NUM_PROCESSES]
        return process if process.is_alive and not process.is_stopped else None

    def _connected(self, a: int) -> Process | None:
        process = self._able(a)
        is_there = process is not None and self.server is not None and process.session
        return process if is_there else None

    def _ask(self, process: Process, request: frames.Request) -> Any:
        """Send a request and return the reply, or None if it was refused or comes later."""
        server = self.server
        assert server is not None
        try:
            reply = server.depot.handle(process.session, process.writer, request)
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
        process = self._able(a)
        if process is None or self.server is None or process.session:
            return None
        self._end_jobs(process)
        self._register(process)
        return f"{process.name} (process {process.writer.pid}) connects"

    def _register(self, process: Process) -> None:
        assert self.server is not None
        process.session, process.epoch, process.leases = self._number(), self.server.writer.pid, []
        spec = self.setup.spec
        process.shards = tuple(process.rank if group.num_shards > 1 else 0 for group in spec.groups)
        details = tuple(
            m.GroupDetail((entry_bytes(number),), 8, shard=shard) for number, shard in enumerate(process.shards)
        )
        reply = self._ask(
            process,
            m.RegisterKVCache(
                m.PROTOCOL_VERSION, process.name, process.rank, 2, "none", "none", "model", spec, details
            ),
        )
        process.context = reply.context

    def _end_jobs(self, process: Process) -> None:
        for store in process.stores:
            for claim in store.claims:
                self.memory.end(claim)
        process.stores, process.retrieves = [], []

    def on_unregister(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None or not process.context:
            return None
        self._end_jobs(process)
        self._ask(process, m.Unregister(process.context))
        self._register(process)
        return f"{process.name} unregisters and registers again"

    def on_disconnect(self, a: int, b: int, c: int) -> str | None:
        """Close the connection; the process lives and may continue copying."""
        process = self.processes[a % NUM_PROCESSES]
        if not process.is_alive or self.server is None or not process.session:
            return None
        self._end_session(process)
        return f"the connection of {process.name} closes"

    def _end_session(self, process: Process) -> None:
        assert self.server is not None
        self.server.depot.end_session(process.session)
        process.session = 0
        if any(quarantine.fence[0] == process.writer for quarantine in self.server.depot.quarantine.held):
            self.server.watched.add(process.writer)

    def on_kill(self, a: int, b: int, c: int) -> str | None:
        """Kill a process; another of the same name takes its place."""
        number = a % NUM_PROCESSES
        process = self.processes[number]
        self._end_jobs(process)
        process.is_alive = False
        self.processes[number] = self._new_process(number)
        if self.server is not None:
            if process.session:
                self._end_session(process)
            self._note_death(process.writer)
        return f"{process.name} (process {process.writer.pid}) is killed"

    def on_bury(self, a: int, b: int, c: int) -> str | None:
        """Report a death to the server."""
        if self.server is None or not self.dead:
            return None
        writer = self.dead.pop(a % len(self.dead))
        self.server.depot.end_process(writer)
        return f"the server sees that process {writer.pid} is dead"

    def on_stop(self, a: int, b: int, c: int) -> str | None:
        process = self.processes[a % NUM_PROCESSES]
        process.is_stopped = not (process.is_stopped or c % 4)
        return f"{process.name} is {'stopped' if process.is_stopped else 'continued'}"

    # --- stores ---------------------------------------------------------------------------------------------------

    def _run(self, b: int, c: int) -> KeyRun:
        start = c % NUM_CHUNKS if c & 0x30 == 0x30 else 0
        return PROMPTS[b % len(PROMPTS)].slice(start, min(NUM_CHUNKS, start + 1 + c // 4 % NUM_CHUNKS))

    def _needed(self, run: KeyRun, full: bool) -> tuple[int, ...]:
        """Return how many of a run's last chunks each group covers."""
        window = {FULL: run.num_chunks, WINDOW: run.num_chunks if full else 2, STATE: 1}
        return tuple(min(run.num_chunks, window[group.kind]) for group in self.setup.spec.groups)

    def on_prepare(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None or len(process.stores) >= 2:
            return None
        run = self._run(b, c)
        plan = self._ask(
            process,
            m.PrepareStore(
                process.context, "r", run.tenant, run.digests, run.first_chunk, run.parent,
                self._needed(run, bool(b & 16)),
            ),
        )  # fmt: skip
        if plan is None or not plan.ticket:
            return f"{process.name} asks to store {self._name(run)}: declined, or all of it is there"
        holder = f"{process.name} (process {process.writer.pid})"
        claims = [
            self.memory.claim(holder, self._place(run.digests, chunk, group, process.shards), offset, size)
            for chunk, group, _, _, _, _, offset, size in m.EXTENT.iter_unpack(plan.extents)
        ]  # fmt: skip
        process.stores.append(Store(process.epoch, plan.ticket, claims))
        pages = ", ".join(
            f"{NAMES[claim.place[0]]} in pages {claim.first_page} to {claim.first_page + claim.num_pages - 1}"
            for claim in claims
        )
        return f"{process.name} is given room for {pages}"

    def _name(self, run: KeyRun) -> str:
        first, last = run.digests[:DIGEST_BYTES], run.digests[-DIGEST_BYTES:]
        return NAMES[first] if first == last else f"{NAMES[first]} to {NAMES[last]}"

    @staticmethod
    def _place(digests: bytes, chunk: int, group: int, shards: Sequence[int]) -> tuple[bytes, int, int]:
        return digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES], group, shards[group]

    def on_copy(self, a: int, b: int, c: int) -> str | None:
        process = self._able(a)
        stores = [] if process is None else [store for store in process.stores if not store.is_copied]
        if process is None or not stores:
            return None
        store = stores[b % len(stores)]
        for _ in range(1 + c % 8):
            claim = next((claim for claim in store.claims if not claim.is_written), None)
            if claim is not None:
                self.memory.write(claim, 1 + c // 4 % 2)
        return f"{process.name} copies" + (" the last of it" if store.is_copied else " some pages")

    def on_end_store(self, a: int, b: int, c: int) -> str | None:
        """Commit a finished copy; abort a failed one."""
        process = self._able(a)
        if process is None or not process.stores:
            return None
        store = process.stores[b % len(process.stores)]
        if not store.is_copied and c % 16:
            return None
        process.stores.remove(store)
        for claim in store.claims:
            self.memory.end(claim)
        if self.server is None or not process.session or store.epoch != self.server.writer.pid:
            return f"{process.name} is done with a store of a server that is gone"
        if not store.is_copied:
            self._ask(process, m.AbortStore(process.context, store.ticket))
            return f"{process.name} aborts a store"
        reply = self._ask(process, m.CommitStore(process.context, store.ticket))
        return f"{process.name} commits a store" + ("" if reply is not None else ", which is refused")

    # --- lookups and retrieves ------------------------------------------------------------------------------------

    def on_lookup(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None:
            return None
        run = PROMPTS[b % len(PROMPTS)].slice(0, 1 + c % NUM_CHUNKS)
        request = m.Lookup(process.context, "ab"[c // 4 % 2], run.digests, run.tenant, 1.0)
        session, server = process.session, self.server

        def on_reply(reply: Any) -> None:
            if isinstance(reply, m.LookupReply) and reply.num_chunks:
                assert server is not None
                self._check_found(server.index, run, reply.num_chunks)
                if process.session == session:
                    process.leases.append(reply.lease)

        reply = self._ask(process, request)
        if isinstance(reply, Deferred):
            reply.on_reply = on_reply
            return f"{process.name} looks {self._name(run)} up, which waits for the tier"
        on_reply(reply)
        return f"{process.name} looks {self._name(run)} up and finds {0 if reply is None else reply.num_chunks}"

    def _check_found(self, index: ChunkIndex, run: KeyRun, found: int) -> None:
        space = index.space(self.setup.spec)
        for number, (group, chunks) in enumerate(zip(space.spec.groups, space.chunks_needed, strict=True)):
            for chunk in range(max(0, found - chunks) if chunks else 0, found):
                key = run.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
                node = index.node(space, key, chunk)
                for shard in range(group.num_shards):
                    record = None if node is None else index.entry(node, number, shard)
                    if record is None or index.table.header(record) & 0xFF != SEALED:
                        raise Violation(f"chunk {NAMES[key]} is found and is not there")
                    self.memory.check_content((key, number, shard), *index.table.extent(record), "what is found")

    def on_release(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None or not process.leases:
            return None
        lease = process.leases.pop(b % len(process.leases))
        self._ask(process, m.Release(process.context, (lease,)))
        return f"{process.name} releases a lease"

    def on_end_request(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None:
            return None
        self._ask(process, m.EndRequest(process.context, "abr"[b % 3]))
        return f"{process.name} ends a request"

    def on_retrieve(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None or len(process.retrieves) >= 2:
            return None
        run = self._run(b, c)
        plan = self._ask(
            process,
            m.PrepareRetrieve(process.context, "r", run.digests, run.first_chunk, self._needed(run, full=False)),
        )
        if plan is None or not plan.num_chunks or not plan.lease:
            return f"{process.name} asks to retrieve {self._name(run)}: a miss"
        process.leases.append(plan.lease)
        process.retrieves.append(Retrieve(plan, run.digests, process.shards))
        return f"{process.name} begins to retrieve {plan.num_chunks} chunks from {self._name(run)}"

    def on_read(self, a: int, b: int, c: int) -> str | None:
        """Read the next extents; after the last one, compare as the client does."""
        process = self._able(a)
        if process is None or not process.retrieves:
            return None
        retrieve = process.retrieves[b % len(process.retrieves)]
        extents = list(m.EXTENT.iter_unpack(retrieve.plan.extents))
        for *_, offset, size in extents[len(retrieve.read) : len(retrieve.read) + 1 + c % 3]:
            retrieve.read.append(self.memory.pages[offset // PAGE : (offset + size) // PAGE])
        if len(retrieve.read) < len(extents):
            return f"{process.name} reads some pages"
        process.retrieves.remove(retrieve)
        valid = count_valid_chunks(retrieve.plan, retrieve.digests, TableReader(self.memory.table))
        for (chunk, group, *_), pages in zip(extents, retrieve.read, strict=True):
            place = self._place(retrieve.digests, chunk, group, retrieve.shards)
            if chunk < valid and any(page != (*place, number) for number, page in enumerate(pages)):
                raise Violation(f"{process.name} retrieved other bytes than those of {NAMES[place[0]]}")
        self.num_reads += valid
        return f"{process.name} has retrieved {valid} chunks"

    def on_hint(self, a: int, b: int, c: int) -> str | None:
        process = self._connected(a)
        if process is None:
            return None
        run = PROMPTS[b % len(PROMPTS)].slice(0, 1 + c % NUM_CHUNKS)
        hint = m.Hint(process.context, run.tenant, run.digests, bool(c & 16), c >> 5 & 3, 5.0 if c & 8 else 0.0)
        self._ask(process, hint)
        return f"{process.name} says how long {self._name(run)} is worth keeping"

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
        quick = [number for number, call in enumerate(begun) if call.operation is not Operation.READ]
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
        try:
            match a % 5:
                case 0:
                    commands.clear(depot, tenant, None)
                    return f"an operator clears {tenant or 'everything'}"
                case 1:
                    num_bytes = b // 3 % 4 * PAGE
                    commands.set_quota(depot, "tenant-1", num_bytes)
                    return f"an operator sets the quota of tenant-1 to {num_bytes} bytes"
                case 2:
                    commands.warm(depot, o.Warm(PROMPTS[b % 4].tenant, PROMPTS[b % 4].digests, 5.0))
                    return f"an operator warms and pins {self._name(PROMPTS[b % 4])}"
                case 3:
                    commands.unpin(depot, tenant)
                    return "an operator ends pins"
                case _:
                    commands.drain(depot, not b % 4)
                    return f"an operator {'begins' if not b % 4 else 'ends'} draining"
        except Refused:
            return None

    def on_report(self, a: int, b: int, c: int) -> str | None:
        """Let a client report an entry's bytes as damaged."""
        process = self._connected(a)
        if process is None or self.server is None:
            return None
        number = b % NUM_RECORDS
        header = self.server.index.table.header(number)
        if header & 0xFF != SEALED:
            return None
        reply = self._ask(process, m.ReportCorrupt(process.context, ((number, header),)))
        return f"{process.name} reports record {number} as damaged: {reply.count} removed"

    # --- what always holds ----------------------------------------------------------------------------------------

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
        except IntegrityError as error:
            raise Violation(f"the index does not add up: {error}") from error

    def finish(self) -> None:
        """Let everybody leave and die; fail unless nothing is left."""
        for process in self.processes:
            process.is_stopped = False
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
        for number in range(NUM_PROCESSES):
            self.do(("kill", number, 0, 0))
        while self.do(("bury", 0, 0, 0)):
            pass
        for _ in range(40):
            self.do(("turn", 4, 0, 0))
            while self.do(("tier_begin", 0, 0, 0)) or self.do(("tier_end", 0, 0, 0)):
                pass
        depot = server.depot
        for _ in depot.pins.end(None):
            pass
        commands.clear(depot, None, None)
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


def _failed(error: Exception) -> str:
    """Return the assertion, as one without a message says nothing of itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return str(error) or str(frames[-1].line)
