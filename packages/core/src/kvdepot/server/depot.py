"""What a depot does with each message: index, leases, tickets and contexts, without a socket or a clock of its own.

The loop hands in requests with the session that they came from, and tells of sessions that ended and of processes that
died. Every request gets one reply; a request that cannot be served raises `Refused`, which becomes an error reply and
has changed nothing.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain, islice
from typing import Any, Final

import msgspec.structs

from kvdepot.errors import ErrorCode
from kvdepot.index.eviction import NO_NODE
from kvdepot.index.index import MOST_EVICTED, ChunkIndex, EntryPlace, Space, digest_of, pack_extent
from kvdepot.index.leases import LeaseTable
from kvdepot.index.pins import Pin, PinTable
from kvdepot.keys import DIGEST_BYTES
from kvdepot.layout import GroupKind
from kvdepot.movers.protocol import Copy
from kvdepot.movers.table import MoveRefused, MoverTable
from kvdepot.pool.table import MAXIMUM_ENTRY_BYTES, OWNER_BYTES, SEALED, Writer
from kvdepot.server.shadow import ShadowIndex
from kvdepot.tiers.tiering import ShardPlace, Tiering
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operations as o
from kvdepot.wire.histogram import Histogram

logger = logging.getLogger(__name__)

_OBSERVED_AT_ONCE: Final = 2048  # chunks, of which an eighth is sampled at most
_DONE_AT_ONCE: Final = 64  # steps of some microseconds
_MOST_LOOKED_AT: Final = 1024  # unfinished stores, in search of one that can end
_TICKET_LEASES: Final = 4  # times that a lease lives: so long a store may take
_RANKED_AT_ONCE: Final = 2  # steps of a hint that its request does itself: the end of the prefix is what leaves first
_PATIENT_SECONDS: Final = 60.0  # that an operator's request may wait for tiers

Fence = tuple[Writer, bytes]  # a process, and which worker in it

MAXIMUM_SPACES: Final = 4096  # different caches; kept as long as the pool
MAXIMUM_CONTEXTS: Final = 64  # of one session
MAXIMUM_EVENTS: Final = 20  # that operators see
MAXIMUM_ROWS: Final = 1024  # names with counters of their own
_OTHERS: Final = "(others)"
_DEFAULT_TENANT: Final = "default"
MAXIMUM_LABELS: Final = 65_536  # tenants and their models; names are kept as long as the pool


class Chore(Enum):
    """Kinds of what is done in steps between messages."""

    OPERATOR = "requests of operators"
    HINT = "long prefixes, whose end a request has ranked"
    ENDING = "prefixes whose time to live is over"
    UNPINNING = "pins whose time is over"
    SAMPLE = "a very long lookup, counted for the estimates"
    REPLAY = "events sent again"


_MOST_WAITING: Final = {Chore.OPERATOR: 64, Chore.HINT: 1024}  # one of any other kind


class Refused(Exception):
    """A request that is not served; nothing was changed."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(slots=True, eq=False)
class Deferred:
    """A reply that comes later: `reply` once it is here, which may be before the handler has returned."""

    reply: frames.Reply | None = None
    on_reply: Callable[[frames.Reply], None] | None = None

    def send(self, reply: frames.Reply) -> None:
        """Give the reply."""
        self.reply = reply
        if self.on_reply is not None:
            self.on_reply(reply)


@dataclass(frozen=True, slots=True)
class GroupOnWorker:
    """What the depot needs to know of one layer group of one worker."""

    shard: int
    chunk_size_bytes: int
    layout: int  # 64 bits of a digest of its page sizes: entries written under another one are not for it


@dataclass(slots=True)
class Context:
    """One registered cache, or one scheduler: everything about its owner, whatever the device."""

    number: int
    session: int
    writer: Writer
    instance: str
    model: str
    space: Space
    registration: m.RegisterKVCache | None = None  # None: a scheduler
    groups: tuple[GroupOnWorker, ...] = ()
    token_seconds: float = 0.0  # that computing a token takes, as a scheduler said last
    writing_bytes: int = 0  # of its stores that it has not ended
    status: o.ContextStatus | None = None  # as it was last

    @property
    def device(self) -> str:
        """The kind of device that its blocks lie on."""
        return self.registration.device.partition(":")[0] if self.registration else ""

    @property
    def owner(self) -> bytes:
        """Which worker of its process this is."""
        return digest_of((self.instance, self.registration.rank if self.registration else -1))[:OWNER_BYTES]

    @property
    def fence(self) -> Fence:
        """Who this is across sessions: a registration under the same name says that no old copy is running."""
        return self.writer, self.owner


class Workers:
    """The workers of one space. Those that have the same shard write the same there, or they are refused."""

    def __init__(self, space: Space) -> None:
        self.by_instance: dict[str, dict[int, Context]] = {}
        self.place_of: dict[tuple[int, int], ShardPlace] = {}  # by group and shard
        self._counts: Counter[tuple[int, int]] = Counter()
        self._num_places = sum(group.num_shards for group in space.spec.groups)
        self._places: list[ShardPlace] | None = None

    def add(self, context: Context) -> None:
        """A worker has registered."""
        self.by_instance.setdefault(context.instance, {})[context.number] = context
        for number, group in enumerate(context.groups):
            self._counts[number, group.shard] += 1
            if (number, group.shard) not in self.place_of:
                place = ShardPlace(number, group.shard, group.chunk_size_bytes, group.layout)
                self.place_of[number, group.shard] = place
                self._places = None

    def remove(self, context: Context) -> None:
        """A worker is gone."""
        mates = self.by_instance[context.instance]
        del mates[context.number]
        if not mates:
            del self.by_instance[context.instance]
        for number, group in enumerate(context.groups):
            self._counts[number, group.shard] -= 1
            if not self._counts[number, group.shard]:
                del self._counts[number, group.shard], self.place_of[number, group.shard]
                self._places = None

    def places(self) -> list[ShardPlace]:
        """Return where every shard goes; nothing while one has no worker."""
        if self._places is None:
            is_whole = len(self.place_of) == self._num_places
            self._places = [self.place_of[place] for place in sorted(self.place_of)] if is_whole else []
        return self._places

    def first_of(self, instance: str) -> Context:
        """Return a worker of this instance, of another if it has none."""
        mates = self.by_instance.get(instance) or next(iter(self.by_instance.values()))
        return next(iter(mates.values()))


@dataclass(slots=True)
class Ticket:
    """Entries that one context is writing."""

    number: int
    context: int
    request_id: str
    records: list[int]
    num_bytes: int
    began: float  # of the depot's clock
    extents: bytes = b""  # packed, if a mover writes them
    is_moving: bool = False  # the mover is writing them now
    is_aborted: bool = False  # and nobody wants them any more


@dataclass(slots=True)
class Quarantine:
    """Entries whose writer is gone for us but may still be writing."""

    fence: Fence
    records: list[int]
    num_bytes: int
    num_abandoned: int = 0  # of the records: they belong to no chunk any more


class Depot:
    """The state of a depot, and its answer to each message."""

    def __init__(
        self,
        index: ChunkIndex,
        *,
        epoch: int,
        lease_seconds: float,
        clock: Callable[[], float],
        verify: m.Verify = m.Verify.OFF,
    ) -> None:
        self.index = index
        self.verify = verify
        self.epoch = epoch
        self.leases = LeaseTable(index, lease_seconds)
        self.counters: Counter[str] = Counter()
        self.contexts: dict[int, Context] = {}
        self._num_contexts: Counter[int] = Counter()  # by session
        self._workers: dict[int, Workers] = {}  # by space
        self.ticket_seconds = _TICKET_LEASES * lease_seconds
        self.tickets: dict[int, Ticket] = {}  # the oldest first
        # Stores that are over before their context has ended them: it may still be writing, to what belongs to no
        # chunk any more.
        self.late_tickets: dict[int, Ticket] = {}
        self.shadow = ShadowIndex(index.extents.capacity_bytes)
        self.store_seconds = Histogram(0.0001)  # from plan to commit
        self.moved_bytes: dict[str, list[int]] = {}  # stored and retrieved, by device
        self.tenant_tokens: dict[str, list[int]] = {}  # asked for, found in the pool, found in tiers
        self._chunk_bytes: dict[int, int] = {}  # of all shards and groups, by space
        self.events: deque[tuple[float, str]] = deque(maxlen=MAXIMUM_EVENTS)
        self.quarantines: list[Quarantine] = []
        self.pins = PinTable(index)
        self.saved_seconds = 0.0  # of computing, by what was retrieved
        self.labels: list[tuple[str, str]] = []  # tenant and model, by number
        self.tiering: Tiering | None = None
        self.movers: MoverTable | None = None
        self._soon: deque[Iterator[int]] = deque()  # what must not wait for what takes long
        self.index.end_store = self._end_store
        # What takes long: of each kind one after the other, and one step of each kind after the other.
        self._chores: dict[Chore, deque[Iterator[int]]] = {}
        self._is_expiring = False  # leases and stores whose time is over are among what must not wait
        self.accepts_stores = True  # not while an earlier table is being read back, nor while draining
        self.is_draining = False  # an operator asked for it
        self.on_names_changed: Callable[[], None] = lambda: None
        self._clock = clock
        self._num_saved_spaces = self._num_saved_labels = 0
        self._label_numbers: dict[str, int] = {}  # no tuples: `server.watch`
        self._next_number = 1
        self._token_seconds: dict[str, float] = {}  # by instance, as its scheduler says
        self._handlers: dict[type, Callable[[int, Writer, Any], frames.Reply | Deferred]] = {
            m.RegisterKVCache: self._register_kv_cache,
            m.RegisterScheduler: self._register_scheduler,
            m.Unregister: self._unregister,
            m.Lookup: self._lookup,
            m.Release: self._release,
            m.EndRequest: self._end_request,
            m.Hint: self._hint,
            m.PrepareStore: self._prepare_store,
            m.CommitStore: self._commit_store,
            m.AbortStore: self._abort_store,
            m.PrepareRetrieve: self._prepare_retrieve,
            m.Move: self._move,
            m.ReportCorrupt: self._report_corrupt,
        }

    def handle(self, session: int, writer: Writer, request: frames.Request) -> frames.Reply | Deferred:
        """Serve one request of an open session, now or, where tiers are asked, later.

        Args:
            session: the number of the session.
            writer: the process at its other end.
            request: any request that needs a session.

        Raises:
            Refused: with the reason; nothing was changed.
        """
        return self._handlers[type(request)](session, writer, request)

    # --- contexts -------------------------------------------------------------------------------------------------

    def _register_kv_cache(self, session: int, writer: Writer, request: m.RegisterKVCache) -> frames.Reply:
        self._check_version(request.protocol_version)
        self._check_room(session)
        spec = request.spec
        self._check_spec(spec)
        if len(request.details) != len(spec.groups):
            raise Refused(ErrorCode.BAD_LAYOUT, f"{len(request.details)} details for {len(spec.groups)} layer groups")
        groups: list[GroupOnWorker] = []
        for number, (shape, detail) in enumerate(zip(spec.groups, request.details, strict=True)):
            if detail.shard >= shape.num_shards:
                raise Refused(ErrorCode.BAD_LAYOUT, f"group {number}: shard {detail.shard} of {shape.num_shards}")
            blocks = 1 if shape.kind is GroupKind.RECURRENT else spec.chunk_tokens // shape.block_tokens
            if blocks * sum(detail.page_sizes_bytes) > MAXIMUM_ENTRY_BYTES:
                raise Refused(
                    ErrorCode.BAD_LAYOUT, f"group {number}: a chunk has {blocks * sum(detail.page_sizes_bytes)} bytes"
                )
            layout = int.from_bytes(digest_of((blocks, detail.page_sizes_bytes))[:8], "little")
            groups.append(GroupOnWorker(detail.shard, blocks * sum(detail.page_sizes_bytes), layout))
        if request.rank >= request.world_size:
            raise Refused(ErrorCode.BAD_LAYOUT, f"rank {request.rank} of {request.world_size}")
        self._check_offer(request)
        space = self._space(spec)
        self._check_peers(space, groups, request)
        self._chunk_bytes[space.number] = sum(
            group.chunk_size_bytes * shape.num_shards for group, shape in zip(groups, spec.groups, strict=True)
        )
        context = Context(
            self._number(), session, writer, request.instance, request.model, space, request, tuple(groups)
        )
        fence = context.fence
        self._lift_quarantine(lambda quarantine: quarantine.fence == fence)
        self.contexts[context.number] = context
        self._num_contexts[session] += 1
        context.status = _registered_status(context)
        self._workers.setdefault(space.number, Workers(space)).add(context)
        logger.info(
            "registered %s rank %d of %d on %s (%s, model %s) as context %d",
            request.instance, request.rank, request.world_size, request.device, request.transfer_mode, request.model,
            context.number,
        )  # fmt: skip
        self.note(f"{request.instance} rank {request.rank} of {request.world_size} on {request.device} registered")
        if request.fallback:
            self.counters["workers_fallen_back"] += 1
        if self.movers is None or request.offer is None:
            return m.Registered(self.epoch, context.number, self.verify)
        self.movers.start(context.number, session, request)
        return m.Registered(self.epoch, context.number, self.verify, self.movers.move_seconds)

    def note(self, event: str) -> None:
        """Keep what happened for operators to see."""
        self.events.append((self._clock(), event))

    def _register_scheduler(self, session: int, writer: Writer, request: m.RegisterScheduler) -> frames.Reply:
        self._check_version(request.protocol_version)
        self._check_room(session)
        self._check_spec(request.spec)
        space = self._space(request.spec)
        context = Context(self._number(), session, writer, request.instance, request.model, space)
        self.contexts[context.number] = context
        self._num_contexts[session] += 1
        context.status = _registered_status(context)
        logger.info(
            "registered scheduler of %s (model %s) as context %d", request.instance, request.model, context.number
        )
        return m.Registered(self.epoch, context.number)

    def _unregister(self, session: int, writer: Writer, request: m.Unregister) -> frames.Reply:
        context = self._context(session, request.context)
        mover = self._forget(context)
        records, num_bytes = self._take_tickets(context.number)
        if mover is None:
            self.discard_records(records)
        elif records:
            self.quarantine((mover, context.owner), records, num_bytes)
        return m.Done(self.epoch, 1)

    def _forget(self, context: Context) -> Writer | None:
        """End a context, its leases and its mover; return the mover if it is not dead yet."""
        del self.contexts[context.number]
        self._num_contexts[context.session] -= 1
        if not self._num_contexts[context.session]:
            del self._num_contexts[context.session]
        if context.registration is None:
            self._token_seconds.pop(context.instance, None)
        else:
            self._workers[context.space.number].remove(context)
        self._do_soon(self.leases.end_context(context.number), self.leases.count_of(context.number))
        return None if self.movers is None else self.movers.end(context.number)

    def _take_tickets(self, context: int) -> tuple[list[int], int]:
        """End the tickets of a context; return their records and what these have of the pool."""
        every = chain(self.late_tickets.values(), self.tickets.values())
        tickets = [ticket for ticket in every if ticket.context == context]
        for ticket in tickets:
            self._drop_ticket(ticket)
        return [record for ticket in tickets for record in ticket.records], sum(each.num_bytes for each in tickets)

    def _check_room(self, session: int) -> None:
        if self._num_contexts[session] >= MAXIMUM_CONTEXTS:
            raise Refused(ErrorCode.OUT_OF_RANGE, f"a session has {MAXIMUM_CONTEXTS} contexts at most: unregister one")

    def _check_version(self, version: int) -> None:
        reason = m.check_protocol_version(version)
        if reason:
            logger.warning("%s", reason)
            raise Refused(ErrorCode.VERSION_MISMATCH, reason)

    def _check_spec(self, spec: m.CacheSpec) -> None:
        for number, group in enumerate(spec.groups):
            if group.kind is not GroupKind.RECURRENT and spec.chunk_tokens % group.block_tokens:
                raise Refused(
                    ErrorCode.BAD_LAYOUT,
                    f"group {number}: chunks of {spec.chunk_tokens} tokens are not whole blocks of"
                    f" {group.block_tokens}",
                )
            if (group.kind is GroupKind.SLIDING_WINDOW) != (group.window_tokens > 0):
                raise Refused(
                    ErrorCode.BAD_LAYOUT, f"group {number}: {group.kind} with a window of {group.window_tokens}"
                )

    def _check_offer(self, request: m.RegisterKVCache) -> None:
        """What an offer says fits the rest; whether it is true, its mover finds out."""
        offer = request.offer
        if offer is None:
            return
        if [len(pages) for pages in offer.pages] != [len(detail.page_sizes_bytes) for detail in request.details]:
            raise Refused(ErrorCode.BAD_LAYOUT, "an offer whose pages are not those of the layer groups")
        if len(set(offer.allocations)) != len(offer.allocations):
            raise Refused(ErrorCode.BAD_LAYOUT, "an offer that names an allocation twice")
        for pages, detail in zip(offer.pages, request.details, strict=True):
            for page, size in zip(pages, detail.page_sizes_bytes, strict=True):
                if page.allocation >= len(offer.allocations) or page.stride_bytes < size:
                    raise Refused(
                        ErrorCode.BAD_LAYOUT,
                        f"an offer with pages of {size} bytes, {page.stride_bytes} apart, in allocation"
                        f" {page.allocation} of {len(offer.allocations)}",
                    )

    def _check_peers(self, space: Space, groups: list[GroupOnWorker], request: m.RegisterKVCache) -> None:
        """Two workers that are told the same spec must write the same bytes for the same shard."""
        workers = self._workers.get(space.number)
        if workers is None:
            return
        for number, mine in enumerate(groups):
            theirs = workers.place_of.get((number, mine.shard))
            if theirs is None or theirs.layout == mine.layout:
                continue
            others = (each for mates in workers.by_instance.values() for each in mates.values())
            other = next(each for each in others if each.groups[number].shard == mine.shard)
            raise Refused(
                ErrorCode.BAD_LAYOUT,
                f"group {number}, shard {mine.shard}: {mine.chunk_size_bytes} bytes a chunk, but"
                f" {other.instance} registered {theirs.num_bytes} with other pages under the same spec:"
                " tell the two apart by CacheSpec.format",
            )

    def _space(self, spec: m.CacheSpec) -> Space:
        if len(self.index.spaces) >= MAXIMUM_SPACES and all(space.spec != spec for space in self.index.spaces):
            raise Refused(ErrorCode.BAD_LAYOUT, f"more than {MAXIMUM_SPACES} different caches: start the depot --fresh")
        space = self.index.space(spec)
        if space.number >= self._num_saved_spaces:
            self._save_names()
        return space

    def _save_names(self) -> None:
        """A name is in the file before any record refers to it: if that fails, who needs it next tries again."""
        self.on_names_changed()
        self._num_saved_spaces, self._num_saved_labels = len(self.index.spaces), len(self.labels)

    def _context(self, session: int, number: int) -> Context:
        context = self.contexts.get(number)
        if context is None or context.session != session:
            raise Refused(
                ErrorCode.UNKNOWN_CONTEXT, f"context {number} is not registered by this session: register again"
            )
        return context

    def _worker(
        self, session: int, number: int, covered: tuple[int, ...], num_chunks: int, most_entries: int
    ) -> Context:
        context = self._context(session, number)
        if context.registration is None:
            raise Refused(
                ErrorCode.UNKNOWN_CONTEXT, f"context {number} is a scheduler: only a worker has blocks to move"
            )
        if len(covered) != len(context.groups) or any(count > num_chunks for count in covered):
            raise Refused(
                ErrorCode.BAD_LAYOUT, f"{covered} of {num_chunks} chunks for {len(context.groups)} layer groups"
            )
        if sum(covered) > max(most_entries, len(covered)):
            raise Refused(
                ErrorCode.OUT_OF_RANGE,
                f"{sum(covered)} entries at once: ask for at most {most_entries}, in several requests",
            )
        return context

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    # --- schedulers -----------------------------------------------------------------------------------------------

    def _lookup(self, session: int, writer: Writer, request: m.Lookup) -> frames.Reply | Deferred:
        context = self._context(session, request.context)
        num_chunks = _count_digests(request.digests)
        found, nodes = self.index.longest_prefix(context.space, request.digests)
        if request.token_seconds != context.token_seconds:
            context.token_seconds = self._token_seconds[context.instance] = request.token_seconds
        self.counters["lookups"] += 1
        self.counters["lookup_chunks"] += num_chunks
        self.counters["lookup_chunks_pool_hit"] += found
        space = context.space
        chunk_bytes = self._chunk_bytes.get(space.number)
        if chunk_bytes is not None:
            self._observe(request.digests, chunk_bytes)
        tenant = request.tenant or _DEFAULT_TENANT
        tokens = self.tenant_tokens.get(tenant) or _row(self.tenant_tokens, tenant, 3)
        tokens[0] += num_chunks * space.spec.chunk_tokens
        tokens[1] += found * space.spec.chunk_tokens
        if self.tiering is None or found == num_chunks or not self.accepts_stores:
            return self._found(context, request, found, nodes)
        places, model = self._places(space, context.instance)
        try:
            label = self._label(request.tenant, model) if places else None
        except (Refused, OSError):
            label = None  # a tenant too many, or no room for its name: what the pool has is answer enough
            self.counters["lookups_without_name"] += 1
        if label is None:
            return self._found(context, request, found, nodes)
        deferred = Deferred()
        began = self._clock()

        def answer() -> None:
            if self.contexts.get(context.number) is not context:
                gone = f"context {context.number} ended while its lookup waited for tiers: register again"
                deferred.send(m.ErrorReply(self.epoch, ErrorCode.UNKNOWN_CONTEXT, gone))
                return
            here, nodes = self.index.longest_prefix(context.space, request.digests)
            tokens[2] += max(0, here - found) * context.space.spec.chunk_tokens
            deferred.send(self._found(context, request, here, nodes, self._clock() - began))

        is_asking = self.tiering.promote(
            space, request.digests, places, label, found=found, pins=nodes,
            wait_seconds=min(request.wait_seconds, self.tiering.settings.promotion_seconds), on_answer=answer,
            token_seconds=request.token_seconds,
        )  # fmt: skip
        if not is_asking:
            return self._found(context, request, found, nodes)
        return deferred.reply or deferred

    def _observe(self, digests: bytes, chunk_bytes: int) -> None:
        """Have the shadow index count a lookup, the end of a long prompt first; not if another long one is counted."""
        if len(digests) <= _OBSERVED_AT_ONCE * DIGEST_BYTES:
            self.shadow.looked_up(digests, chunk_bytes)
            return

        def steps() -> Iterator[int]:
            step = _OBSERVED_AT_ONCE * DIGEST_BYTES
            for start in range((len(digests) - 1) // step * step, -1, -step):
                self.shadow.looked_up(digests[start : start + step], chunk_bytes)
                yield 0

        if not self.do_later(steps(), Chore.SAMPLE):
            self.counters["lookups_not_sampled"] += 1

    def _found(
        self, context: Context, request: m.Lookup, found: int, nodes: tuple[int, ...], waited_seconds: float = 0.0
    ) -> m.LookupReply:
        self.counters["lookup_chunks_hit"] += found
        if not found:
            return m.LookupReply(self.epoch, 0, 0, 0.0, waited_seconds)
        lease = self.leases.grant(context.number, request.request_id, nodes, self._clock())
        self._used(nodes[-1])
        if self.tiering is not None:
            self.tiering.used(nodes[-1])
        return m.LookupReply(self.epoch, found, lease, self.leases.lease_seconds, waited_seconds)

    def _used(self, node: int) -> None:
        rest = self.index.used(node)
        if rest is not None and not self.do_later(rest, Chore.HINT):
            self.counters["hints_cut"] += 1

    def _places(self, space: Space, instance: str = "") -> tuple[list[ShardPlace], str]:
        """Return where every shard of the caches of a space goes, as their workers registered it, and their model.

        The model is that of a worker of `instance`, if there is one. Nothing while a shard has no worker.
        """
        workers = self._workers.get(space.number)
        places = [] if workers is None else workers.places()
        return (places, workers.first_of(instance).model) if workers is not None and places else ([], "")

    def _release(self, session: int, writer: Writer, request: m.Release) -> frames.Reply:
        context = self._context(session, request.context)
        return m.Done(self.epoch, sum(self.leases.release(context.number, lease) for lease in request.leases))

    def _end_request(self, session: int, writer: Writer, request: m.EndRequest) -> frames.Reply:
        context = self._context(session, request.context)
        count = self.leases.count_of_request(context.number, request.request_id)
        self._do_soon(self.leases.end_request(context.number, request.request_id), count)
        return m.Done(self.epoch, count)

    def _hint(self, session: int, writer: Writer, request: m.Hint) -> frames.Reply | Deferred:
        context = self._context(session, request.context)
        _count_digests(request.digests)
        found, nodes = self.index.longest_prefix(context.space, request.digests)
        self.counters["hints"] += 1
        if not found:
            return m.Done(self.epoch, 0)
        tenant = request.tenant  # a chore must not keep the request's digests

        def is_own(label: int) -> bool:
            return self.labels[label][0] == tenant

        if request.session_ended:
            return self._ranked(self.index.end_session(nodes[-1], is_own))
        ranking = self.index.set_priority(nodes[-1], is_own, request.priority)
        if request.ttl_seconds:
            self.index.end_session_at(nodes[-1], is_own, self._clock() + request.ttl_seconds)
        return self._ranked(ranking)

    def _ranked(self, steps: Iterator[int]) -> frames.Reply | Deferred:
        """Rank the end of a prefix now and the rest of a long one between messages; the reply counts chunks.

        When very many wait, the rest is left as it is.
        """
        count = 0
        for _ in range(_RANKED_AT_ONCE):
            more = next(steps, None)
            if more is None:
                return m.Done(self.epoch, count)
            count += more
        deferred = Deferred()

        def chore() -> Iterator[int]:
            nonlocal count
            for each in steps:
                count += each
                yield 0
            deferred.send(m.Done(self.epoch, count))

        if self.do_later(self._answering(deferred, chore()), Chore.HINT):
            return deferred
        self.counters["hints_cut"] += 1
        return m.Done(self.epoch, count)

    # --- workers --------------------------------------------------------------------------------------------------

    def _prepare_store(self, session: int, writer: Writer, request: m.PrepareStore) -> frames.Reply:
        num_chunks = _count_digests(request.digests)
        context = self._worker(session, request.context, request.covered, num_chunks, m.MAXIMUM_STORE_ENTRIES)
        space, index = context.space, self.index
        self.counters["stores"] += 1
        self.counters["store_chunks"] += num_chunks
        is_moved = context.registration is not None and context.registration.offer is not None
        writes = self._mover_of(context) if is_moved else context.writer
        if not self.accepts_stores or self.is_draining or writes is None:
            return self._declined(0, sum(request.covered))
        if context.writing_bytes > index.extents.capacity_bytes // 2:
            self.counters["stores_without_commit"] += 1
            return self._declined(0, sum(request.covered))
        parent = NO_NODE
        if request.first_chunk:
            above = index.node(space, request.parent, request.first_chunk - 1)
            if above is None and space.full_mask:
                # What is before it has left: nothing could ever find these chunks.
                return self._declined(0, sum(request.covered))
            parent = NO_NODE if above is None else above
        label = self._label(request.tenant, context.model)
        records: list[int] = []
        extents: list[bytes] = []
        num_present = num_declined = num_bytes = 0
        full, most_steps = False, index.num_room_steps + MOST_EVICTED
        for chunk in range(num_chunks):
            key = request.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            depth = request.first_chunk + chunk
            node = index.node(space, key, depth)
            for number, group in enumerate(context.groups):
                if num_chunks - chunk > request.covered[number]:
                    continue
                if node is not None and index.has_entry(node, number, group.shard):
                    num_present += 1
                    continue
                if node is None and key in space.nodes:
                    full = True  # the same digest at another depth: only a forged chain comes here
                place = EntryPlace(
                    space, key, parent, depth, number, group.shard, group.chunk_size_bytes, group.layout, label,
                    writes, context.owner,
                )  # fmt: skip
                record = None if full else index.begin_entry(place, most_steps - index.num_room_steps)
                if record is None:
                    full = True
                    num_declined += 1
                    continue
                records.append(record)
                num_bytes += group.chunk_size_bytes
                sealed_header = index.table.header(record) + 1
                extent = record, sealed_header, *index.table.extent(record)
                extents.append(pack_extent(chunk, number, extent))
                node = index.node(space, key, depth)
            if node is None and space.full_mask:
                num_declined += sum(min(count, num_chunks - chunk - 1) for count in request.covered)
                break
            parent = NO_NODE if node is None else node
        self.counters["store_entries_present"] += num_present
        self.counters["store_entries_declined"] += num_declined
        if not records:
            return m.StorePlan(self.epoch, 0, b"", num_present, num_declined)
        self.shadow.stored(request.digests, self._chunk_bytes[space.number])
        packed = b"".join(extents)
        ticket = Ticket(
            self._number(), context.number, request.request_id, records, num_bytes, self._clock(),
            packed if is_moved else b"",
        )  # fmt: skip
        self.tickets[ticket.number] = ticket
        context.writing_bytes += num_bytes
        return m.StorePlan(self.epoch, ticket.number, packed, num_present, num_declined)

    def _declined(self, num_present: int, num_declined: int) -> m.StorePlan:
        self.counters["store_entries_declined"] += num_declined
        return m.StorePlan(self.epoch, 0, b"", num_present, num_declined)

    def _commit_store(self, session: int, writer: Writer, request: m.CommitStore) -> frames.Reply:
        context = self._context(session, request.context)
        late = self.late_tickets.get(request.ticket)
        if late is not None and late.context == context.number:
            self._abort(late)
            why = f"after {self.ticket_seconds:g} s, or as a tenant within its quota needed the room before"
            return m.ErrorReply(self.epoch, ErrorCode.UNKNOWN_TICKET, f"ticket {late.number} ended: {why}")
        ticket = self._ticket(context, request.ticket)
        if ticket.is_moving:
            raise Refused(ErrorCode.UNKNOWN_TICKET, f"ticket {request.ticket} is still being written")
        if request.checksums and len(request.checksums) != m.CHECKSUM_BYTES * len(ticket.records):
            raise Refused(
                ErrorCode.MALFORMED, f"checksums of {len(request.checksums)} bytes for {len(ticket.records)} entries"
            )
        self._drop_ticket(ticket)
        self.index.seal_entries(ticket.records, int(self._clock()), request.checksums)
        self.counters["entries_stored"] += len(ticket.records)
        self.store_seconds.add(self._clock() - ticket.began)
        _row(self.moved_bytes, context.device, 2)[0] += ticket.num_bytes
        if self.tiering is not None:
            self.tiering.stored(ticket.records)
        return m.Done(self.epoch, len(ticket.records))

    def _ticket(self, context: Context, number: int) -> Ticket:
        ticket = self.tickets.get(number)
        if ticket is None or ticket.context != context.number or ticket.is_aborted:
            raise Refused(
                ErrorCode.UNKNOWN_TICKET, f"ticket {number} was not prepared here, or is committed or aborted"
            )
        return ticket

    def _abort_store(self, session: int, writer: Writer, request: m.AbortStore) -> frames.Reply:
        context = self._context(session, request.context)
        ticket = self.tickets.get(request.ticket) or self.late_tickets.get(request.ticket)
        if ticket is None or ticket.context != context.number:
            return m.Done(self.epoch, 0)
        self._abort(ticket)
        return m.Done(self.epoch, len(ticket.records))

    def _abort(self, ticket: Ticket) -> None:
        """Take back what its context writes no more: now, or once its mover has ended the copy."""
        ticket.is_aborted = True
        if not ticket.is_moving:
            self._drop_ticket(ticket)
            self.discard_records(ticket.records)

    def _drop_ticket(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.number, None) is None:
            del self.late_tickets[ticket.number]
        context = self.contexts.get(ticket.context)
        if context is not None:
            context.writing_bytes -= ticket.num_bytes

    def _end_late(self, ticket: Ticket) -> None:
        """End a store that its context has not ended; to its extents it may still write."""
        del self.tickets[ticket.number]
        self.late_tickets[ticket.number] = ticket
        for record in reversed(ticket.records):
            self.index.abandon_entry(record)
        self.counters["stores_late"] += 1

    def _ending_late(self, now: float) -> Iterator[int]:
        while self._has_late(now):
            self._end_late(next(iter(self.tickets.values())))
            yield 1

    def _has_late(self, now: float) -> bool:
        ticket = next(iter(self.tickets.values()), None)
        return ticket is not None and ticket.began + self.ticket_seconds <= now

    def _end_store(self) -> bool:
        """Let no unfinished store of a share above its quota keep what is before it; False if none does.

        One store, or some entries in quarantine, at a time.
        """
        index, quotas = self.index, self.index.quotas
        for ticket in islice(self.tickets.values(), _MOST_LOOKED_AT):
            node = index.node_of(ticket.records[0])
            if index.parent_of(node) != NO_NODE and quotas.is_above(index.share_of(node)):
                self._end_late(ticket)
                return True
        for quarantine in self.quarantines:
            if quarantine.num_abandoned < len(quarantine.records):
                first = quarantine.num_abandoned
                quarantine.num_abandoned += m.MAXIMUM_STORE_ENTRIES
                for record in quarantine.records[first : quarantine.num_abandoned]:
                    if index.node_of(record) != NO_NODE:
                        index.abandon_entry(record)
                return True
        return False

    def discard_records(self, records: Sequence[int]) -> None:
        """Take back unfinished entries that nobody writes any more: at once, or soon if they are many."""

        def steps() -> Iterator[int]:
            for record in reversed(records):  # mostly deepest first: then no holes remain
                try:
                    self.index.discard_entry(record)
                except Exception:
                    logger.exception("an unfinished entry could not be taken back")
                    self.counters["chores_failed"] += 1
                self.counters["entries_aborted"] += 1
                yield 1

        self._do_soon(steps(), len(records))

    def _prepare_retrieve(self, session: int, writer: Writer, request: m.PrepareRetrieve) -> frames.Reply:
        num_chunks = _count_digests(request.digests)
        context = self._worker(session, request.context, request.covered, num_chunks, m.MAXIMUM_RETRIEVE_ENTRIES)
        index = self.index
        self.counters["retrieves"] += 1
        extents: list[bytes] = []
        nodes: list[int] = []
        found = num_bytes = 0
        for chunk in range(num_chunks):
            key = request.digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]
            node = index.visible(context.space, key, request.first_chunk + chunk)
            needed = [g for g in range(len(context.groups)) if num_chunks - chunk <= request.covered[g]]
            if node is None:
                if needed or context.space.full_mask:
                    break
                continue
            here: list[bytes] = []
            for number in needed:
                group = context.groups[number]
                extent = index.extent_of(node, number, group.shard, group.layout)
                if extent is not None:
                    here.append(pack_extent(chunk, number, extent))
                    num_bytes += extent[3]
            if len(here) < len(needed):
                break
            extents += here
            nodes.append(node)
            found = chunk + 1
        self.counters["retrieve_chunks"] += num_chunks
        self.counters["retrieve_chunks_hit"] += found
        _row(self.moved_bytes, context.device, 2)[1] += num_bytes
        if not nodes:
            return m.RetrievePlan(self.epoch, 0, found, b"")
        if context.registration is not None and not context.registration.rank:
            tokens = found * context.space.spec.chunk_tokens
            self.saved_seconds += tokens * self._token_seconds.get(context.instance, 0.0)
        pins = (nodes[-1],) if context.space.full_mask else tuple(nodes)
        packed = b"".join(extents)
        is_moved = context.registration is not None and context.registration.offer is not None
        lease = self.leases.grant(context.number, request.request_id, pins, self._clock(), packed if is_moved else b"")
        self._used(nodes[-1])
        return m.RetrievePlan(self.epoch, lease, found, packed)

    # --- movers ---------------------------------------------------------------------------------------------------

    def _mover_of(self, context: Context) -> Writer | None:
        return None if self.movers is None else self.movers.writer_of(context.number)

    def _move(self, session: int, writer: Writer, request: m.Move) -> frames.Reply | Deferred:
        context = self._context(session, request.context)
        movers = self.movers
        if movers is None or context.registration is None or context.registration.offer is None:
            return m.Moved(self.epoch, m.MoveOutcome.UNAVAILABLE, "this worker offered no memory")
        ticket: Ticket | None = None
        copy: Copy | None = None
        if request.number:
            num_groups = len(context.groups)
            if {len(request.block_ids), len(request.first_covered), len(request.skip_blocks)} != {num_groups}:
                raise Refused(ErrorCode.BAD_LAYOUT, f"blocks of {len(request.block_ids)} of {num_groups} layer groups")
            if request.is_store:
                ticket = self._ticket(context, request.number)
                extents = ticket.extents
            else:
                lease = self.leases.find(context.number, request.number)
                if lease is None or not lease.extents:
                    raise Refused(ErrorCode.UNKNOWN_TICKET, f"lease {request.number} was not granted to a retrieve")
                extents = lease.extents
            copy = Copy(0, request.is_store, extents, request.block_ids, request.first_covered, request.skip_blocks)
        deferred = Deferred()

        def on_end(outcome: m.MoveOutcome, why: str) -> None:
            if ticket is not None:
                ticket.is_moving = False
                if ticket.is_aborted and (ticket.number in self.tickets or ticket.number in self.late_tickets):
                    self._abort(ticket)
            deferred.send(m.Moved(self.epoch, outcome, why, movers.is_settled(context.number)))

        if ticket is not None:
            if ticket.is_moving:
                raise Refused(ErrorCode.MALFORMED, f"ticket {ticket.number} is being written")
            ticket.is_moving = True
        try:
            movers.move(context.number, copy, request.wait_seconds, on_end)
        except MoveRefused as error:
            if ticket is not None:
                ticket.is_moving = False
            raise Refused(ErrorCode.MALFORMED, str(error)) from error
        return deferred.reply or deferred

    def end_mover(self, context: int, writer: Writer) -> None:
        """A mover is dead: nothing of what it was to write is being written, and nothing of it will be."""
        self.discard_records(self._take_tickets(context)[0])
        self.end_process(writer)

    def _report_corrupt(self, session: int, writer: Writer, request: m.ReportCorrupt) -> frames.Reply:
        context = self._context(session, request.context)
        removed = 0
        for number, header in request.entries:
            if number < self.index.table.num_records and header & 0xFF == SEALED:
                removed += self.remove_corrupt(number, header, context.space.number)
        return m.Done(self.epoch, removed)

    def remove_corrupt(self, number: int, header: int, space: int | None = None) -> bool:
        """Remove a sealed entry whose bytes lack their checksum; False if it is another one by now.

        Nothing is removed while an earlier server's table is being read back: whoever finds the bytes reports again.
        """
        if self.index.is_restoring:
            return False
        record = self.index.table.record(number) if self.index.table.header(number) == header else None
        if record is None or space not in (None, record.space):
            return False
        logger.error(
            "the bytes of chunk %s (group %d, shard %d, tenant %s) do not have their checksum: removed",
            record.key.hex(), record.group, record.shard, self.labels[record.label][0],
        )  # fmt: skip
        self.index.remove_entry(number)
        self.note(f"an entry of tenant {self.labels[record.label][0]} lost its bytes and was removed")
        self.counters["entries_corrupt"] += 1
        return True

    # --- ends -----------------------------------------------------------------------------------------------------

    def end_session(self, session: int) -> None:
        """A connection closed: its leases end now, its unfinished entries wait until nobody can be writing them."""
        for context in [context for context in self.contexts.values() if context.session == session]:
            records, num_bytes = self._take_tickets(context.number)
            mover = self._forget(context)
            fence = context.fence if mover is None else (mover, context.owner)  # who may be writing
            if records:
                self.quarantine(fence, records, num_bytes)
            self.note(f"{context.instance} left" + (", its unfinished stores wait for its process" if records else ""))
            logger.info(
                "%s (context %d) left%s", context.instance, context.number,
                f", {len(records)} unfinished entries wait for process {fence[0].pid}" if records else "",
            )  # fmt: skip

    def end_process(self, writer: Writer) -> None:
        """A process is dead: nothing writes for it any more."""
        self._lift_quarantine(lambda quarantine: quarantine.fence[0] == writer)

    def quarantine(self, fence: Fence, records: list[int], num_bytes: int) -> None:
        """Hold unfinished entries until their worker is back or its process dead."""
        self.quarantines.append(Quarantine(fence, records, num_bytes))

    def _lift_quarantine(self, over: Callable[[Quarantine], bool]) -> None:
        records = [record for quarantine in self.quarantines if over(quarantine) for record in quarantine.records]
        self.quarantines = [quarantine for quarantine in self.quarantines if not over(quarantine)]
        self.discard_records(records)

    def expire(self) -> None:
        """End what has lived too long."""
        now = self._clock()
        self.index.now = int(now)
        if not self._is_expiring and (self.leases.has_expired(now) or self._has_late(now)):
            self._is_expiring = True
            self._soon.append(self._expiring(now))
        if self.index.has_ended(now):
            self.do_later(self.index.expire(now), Chore.ENDING)
        if self.pins.has_expired(now):
            self.do_later(self.pins.expire(now), Chore.UNPINNING)

    def _expiring(self, now: float) -> Iterator[int]:
        try:
            yield from self.leases.expire(now)
            yield from self._ending_late(now)
        finally:
            self._is_expiring = False

    # --- operators ------------------------------------------------------------------------------------------------

    def clear(self, tenant: str | None, model: str | None = None) -> int:
        """Remove the entries of a tenant or a model (None: all) that nobody uses; return how many."""
        return sum(self._clear(tenant, model))

    def _clear(self, tenant: str | None, model: str | None) -> Iterator[int]:
        def is_wanted(label: int, _space: Space) -> bool:
            names = self.labels[label]
            return tenant in (None, names[0]) and model in (None, names[1])

        return self.index.clear(is_wanted)

    @property
    def has_work(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._soon or self._chores)

    def work(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Go on with what is done in steps until `is_over`: by one of what must not wait and one chore's at least.

        What fails is left, and counted.
        """
        is_first = True
        while self._soon or self._chores:
            must_not_wait = bool(self._soon)
            if must_not_wait:
                self._step(self._soon)
            if self._chores and (is_first or not must_not_wait):
                kind, chores = next(iter(self._chores.items()))
                self._step(chores)
                del self._chores[kind]
                if chores:
                    self._chores[kind] = chores  # behind the other kinds
            is_first = False
            if is_over():
                break

    def _step(self, chores: deque[Iterator[int]]) -> None:
        try:
            is_done = next(chores[0], None) is None
        except Exception:
            logger.exception("what was to be done between messages failed")
            self.counters["chores_failed"] += 1
            is_done = True
        if is_done:
            chores.popleft()

    def clear_everywhere(self, tenant: str | None, model: str | None) -> Deferred:
        """Like `clear`, step by step in `work`, and then in the tiers; the reply comes when they are done.

        It is an error if a tier could not be cleared; the others and the pool are.

        Raises:
            Refused: very many requests of operators wait.
        """
        deferred = Deferred()
        removed = 0

        def on_done(in_tiers: int, problems: list[str]) -> None:
            if not problems:
                deferred.send(m.Done(self.epoch, removed + in_tiers))
                return
            text = (
                f"{removed + in_tiers} entries were removed, but not in every tier: {'; '.join(problems)}."
                " What is still there is served again: clear again once 'kvdepot status' says that the tier is used"
            )
            logger.error("%s", text)
            deferred.send(m.ErrorReply(self.epoch, ErrorCode.TIER_UNAVAILABLE, text))

        def chore() -> Iterator[int]:
            nonlocal removed
            if self.tiering is not None:
                yield from self.tiering.stop(tenant, model)
            for count in self._clear(tenant, model):
                removed += count
                yield count
            if self.tiering is None:
                on_done(0, [])
            else:
                self.tiering.clear(tenant, model, on_done)

        return self._for_operator(chore(), deferred)

    def later(self, work: Iterator[frames.Reply | None]) -> Deferred:
        """Do in steps what an operator asks for; the reply is what the last of them yields.

        Raises:
            Refused: very many such requests wait.
        """
        deferred = Deferred()
        return self._for_operator(self._replying(work, deferred), deferred)

    def _replying(self, work: Iterator[frames.Reply | None], deferred: Deferred) -> Iterator[int]:
        for reply in work:
            if reply is not None:
                deferred.send(reply)
            yield 0

    def _for_operator(self, chore: Iterator[int], deferred: Deferred) -> Deferred:
        if len(self._chores.get(Chore.OPERATOR, ())) >= _MOST_WAITING[Chore.OPERATOR]:
            raise Refused(
                ErrorCode.DRAINING, f"{_MOST_WAITING[Chore.OPERATOR]} requests of operators wait already: ask again"
            )
        self._go_on_for_operator(chore, deferred)
        return deferred

    def _go_on_for_operator(self, chore: Iterator[int], deferred: Deferred) -> None:
        """Do in steps the next part of a request that was taken, however many wait."""
        self._chores.setdefault(Chore.OPERATOR, deque()).append(self._answering(deferred, chore))

    def _answering(self, deferred: Deferred, chore: Iterator[int]) -> Iterator[int]:
        """Do a chore; if it fails, that is the reply."""
        try:
            yield from chore
        except Refused as error:
            deferred.send(m.ErrorReply(self.epoch, error.code, str(error)))
        except Exception as error:
            if deferred.reply is None:
                deferred.send(m.ErrorReply(self.epoch, ErrorCode.INTERNAL, f"{type(error).__name__}: {error}"))
            raise

    def do_later(self, chore: Iterator[int], kind: Chore) -> bool:
        """Do in steps, between messages, what takes long; False if as many of its kind wait as may."""
        waiting = self._chores.setdefault(kind, deque())
        if len(waiting) >= _MOST_WAITING.get(kind, 1):
            return False
        waiting.append(chore)
        return True

    def _do_soon(self, steps: Iterator[int], count: int) -> None:
        """Do what takes some microseconds a step: at once if it is not much."""
        if count <= _DONE_AT_ONCE:
            for _ in steps:
                pass
        else:
            self._soon.append(steps)

    def warm(self, request: o.Warm) -> Deferred:
        """Bring a prefix up from the tiers, as far as they have it, and pin it if asked to.

        The reply counts the chunks that are in the pool then, of the space that has the most. Tiers are asked where
        engines are registered, for every model that they named.

        Raises:
            Refused: the digests are none, or very many requests of operators wait.
        """
        num_chunks = _count_digests(request.digests)
        deferred = Deferred()
        num_left = 1  # answers of tiers, and the end of the questions

        def on_answer() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                self._go_on_for_operator(self._replying(self._warmed(request), deferred), deferred)

        def steps() -> Iterator[None]:
            nonlocal num_left
            for space in list(self.index.spaces):
                yield
                for model in self._models(space):
                    found, nodes = self.index.longest_prefix(space, request.digests)
                    places, _ = self._places(space)
                    if self.tiering is None or not places or found == num_chunks:
                        break
                    num_left += 1
                    if not self.tiering.promote(
                        space, request.digests, places, self._label(request.tenant, model), found=found, pins=nodes,
                        wait_seconds=_PATIENT_SECONDS, on_answer=on_answer,
                    ):  # fmt: skip
                        num_left -= 1
                    yield
            on_answer()

        return self._for_operator(self._replying(steps(), deferred), deferred)

    def _models(self, space: Space) -> list[str]:
        """Return the models whose workers share a space: their entries have names of their own in tiers."""
        workers = self._workers.get(space.number)
        mates = workers.by_instance.values() if workers else ()
        return list(dict.fromkeys(worker.model for each in mates for worker in each.values()))

    def _warmed(self, request: o.Warm) -> Iterator[frames.Reply | None]:
        most, best = 0, None
        for space in list(self.index.spaces):
            yield None
            found, _ = self.index.longest_prefix(space, request.digests)
            if found > most:
                most, best = found, space
        if best is not None:
            most, nodes = self.index.longest_prefix(best, request.digests)  # some of it may have left since
            if most and request.pin_seconds:
                self.pins.add(Pin(request.tenant, nodes), self._clock() + request.pin_seconds)
        yield m.Done(self.epoch, most)

    def restore_labels(self, labels: list[tuple[str, str]]) -> None:
        """Number tenants and models as an earlier server did; the names of the spaces that are here are saved, too."""
        for tenant, model in labels:
            self._label(tenant, model)
        self._num_saved_spaces = len(self.index.spaces)

    def _label(self, tenant: str, model: str) -> int:
        name = f"{len(tenant)} {tenant}{model}"
        number = self._label_numbers.get(name)
        if number is None:
            if len(self.labels) >= MAXIMUM_LABELS:
                raise Refused(
                    ErrorCode.MALFORMED, f"more than {MAXIMUM_LABELS} tenants and models: {tenant!r} is one too many"
                )
            number = self._label_numbers[name] = len(self.labels)
            self.labels.append((tenant, model))
            self.index.quotas.add_label(number, tenant)
        if number >= self._num_saved_labels:
            self._save_names()
        return number

    def _tenant_status(self) -> dict[str, dict[str, int]]:
        quotas = self.index.quotas
        tenants = {name: {"used_bytes": used} for name, used in quotas.first_tenants(MAXIMUM_ROWS)}
        for name, (quota, used) in quotas.usage().items():
            if used or name in tenants:
                tenants[name] = {"used_bytes": used, "quota_bytes": quota}
        rest = sum(quotas.used_bytes) - sum([usage["used_bytes"] for usage in tenants.values()])
        if rest:
            tenants[_OTHERS] = {"used_bytes": rest}
        for name, (asked, in_pool, in_tiers) in self.tenant_tokens.items():
            usage = tenants.setdefault(name, {"used_bytes": 0})
            usage["lookup_tokens"], usage["pool_hit_tokens"], usage["tier_hit_tokens"] = asked, in_pool, in_tiers
        return tenants

    def status_fields(self) -> dict[str, Any]:
        """Return the fields of `DepotStatus` that the depot itself knows."""
        index = self.index
        return {
            "num_entries": index.num_entries,
            "num_chunks": index.num_chunks,
            "max_entries": index.table.num_records,
            "pool_size_bytes": index.extents.capacity_bytes,
            "pool_ready_bytes": index.extents.ready_bytes,
            "pool_used_bytes": index.extents.used_bytes,
            "quarantined_bytes": sum(each.num_bytes for each in [*self.quarantines, *self.late_tickets.values()]),
            "num_leases": len(self.leases),
            "num_pins": len(self.pins),
            "draining": self.is_draining,
            "num_tickets": len(self.tickets),
            "prefill_seconds_saved": self.saved_seconds,
            "contexts": self._contexts_status(),
            "tenants": self._tenant_status(),
            "tiers": self.tiering.status() if self.tiering else [],
            "counters": {
                **self.counters,
                **(self.tiering.counters if self.tiering else {}),
                **(self.movers.counters if self.movers else {}),
                "chunks_evicted": index.num_evicted,
                "chunks_evicted_leased": index.num_leased_evicted,
                "store_entries_over_share": index.num_over_share,
                "policy_errors": index.num_policy_errors,
                "leases_expired": self.leases.num_expired,
            },
            "devices": {
                name: {"stored_bytes": stored, "retrieved_bytes": retrieved}
                for name, (stored, retrieved) in self.moved_bytes.items()
            },
            "eviction_ages": index.eviction_ages.status(),
            "estimates": self.shadow.estimates(),
            "estimated_chunks": self.shadow.num_chunks,
            "estimate_rate": self.shadow.rate,
            "pool_regions": list(index.extents.region_bytes),
            "events": [(self._clock() - at, text) for at, text in self.events],
        }

    def _contexts_status(self) -> list[o.ContextStatus]:
        tickets = Counter(ticket.context for ticket in self.tickets.values())
        return [self._context_status(context, tickets.get(context.number, 0)) for context in self.contexts.values()]

    def _context_status(self, context: Context, num_tickets: int) -> o.ContextStatus:
        """Return the status that was made last, if it is the same: there may be a thousand."""
        state, pid, why = ("", 0, "") if self.movers is None else self.movers.status(context.number)
        num_leases = self.leases.count_of(context.number)
        last = context.status or _registered_status(context)
        if (last.num_leases, last.num_tickets, last.mover, last.mover_pid, last.why_no_mover) != (
            num_leases, num_tickets, state, pid, why,
        ):  # fmt: skip
            last = msgspec.structs.replace(
                last, num_leases=num_leases, num_tickets=num_tickets, mover=state, mover_pid=pid, why_no_mover=why
            )
        context.status = last
        return last


def _registered_status(context: Context) -> o.ContextStatus:
    """Return what does not change."""
    spec, registration = context.space.spec, context.registration
    common = o.ContextStatus(
        context=context.number, role="scheduler", instance=context.instance, model=context.model,
        pid=context.writer.pid, chunk_tokens=spec.chunk_tokens, dtype=spec.dtype, format=spec.format,
        num_leases=0, num_tickets=0, groups=[],
    )  # fmt: skip
    if registration is None:
        return msgspec.structs.replace(common, groups=[_group_status(shape, None) for shape in spec.groups])
    groups = [_group_status(shape, detail) for shape, detail in zip(spec.groups, registration.details, strict=True)]
    return msgspec.structs.replace(
        common, role="worker", fallback=registration.fallback, rank=registration.rank,
        world_size=registration.world_size, device=registration.device, transfer_mode=registration.transfer_mode,
        groups=groups, bytes_per_token=sum(group.bytes_per_token for group in groups),
    )  # fmt: skip


def _group_status(shape: m.GroupShape, detail: m.GroupDetail | None) -> o.GroupStatus:
    common = o.GroupStatus(
        kind=shape.kind, block_tokens=shape.block_tokens, window_tokens=shape.window_tokens, num_shards=shape.num_shards
    )
    if detail is None:
        return common
    block_size_bytes = sum(detail.page_sizes_bytes)
    recurrent = shape.kind is GroupKind.RECURRENT
    return msgspec.structs.replace(
        common, shard=detail.shard, num_layers=detail.num_layers or len(detail.page_sizes_bytes),
        num_blocks=detail.num_blocks, physical_block_tokens=detail.physical_block_tokens or shape.block_tokens,
        compress_ratio=detail.compress_ratio, hidden_dims=detail.hidden_dims, dtype=detail.dtype, is_mla=detail.is_mla,
        shape=detail.shape, attention_backend=detail.attention_backend, block_size_bytes=block_size_bytes,
        bytes_per_token=0.0 if recurrent else block_size_bytes / shape.block_tokens,
    )  # fmt: skip


def _row(rows: dict[str, list[int]], name: str, num_columns: int) -> list[int]:
    """Return the counters under a name that a client chose; when there are many names, those of all further ones."""
    row = rows.get(name)
    if row is None:
        row = rows.setdefault(name if len(rows) < MAXIMUM_ROWS else _OTHERS, [0] * num_columns)
    return row


def _count_digests(digests: bytes) -> int:
    count, rest = divmod(len(digests), DIGEST_BYTES)
    if rest:
        raise Refused(ErrorCode.BAD_KEY, f"{len(digests)} bytes of digests: each chunk has {DIGEST_BYTES}")
    return count
