"""Stores: a worker asks for extents, writes them or has its mover write them, and commits or aborts the ticket.

If the worker leaves the depot but may still be writing, its unfinished entries are held in quarantine.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode
from kvdepot.index.entries import NewRun, PartPlace, Wanted, pack_extents
from kvdepot.index.tree import NO_NODE
from kvdepot.pool.table import Entry, Writer
from kvdepot.server.contexts import Context, ContextTable, WorkerKey, check_run
from kvdepot.server.feature import Features
from kvdepot.server.sources import Source
from kvdepot.server.state import DepotState
from kvdepot.server.turns import CHORES_FAILED, Refused, Task
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

_ENTRIES_ABORTED: Final = depot_counter("entries_aborted", "Entries abandoned before commit")
_STORES: Final = depot_counter("stores", "Stores prepared")
_STORE_CHUNKS: Final = depot_counter("store_chunks", "Chunks in prepared stores")
_STORES_WITHOUT_COMMIT: Final = depot_counter(
    "stores_without_commit", "Stores declined because their worker already holds half of the pool in unfinished stores"
)
_STORES_WITHOUT_NAME: Final = depot_counter(
    "stores_without_name", "Stores declined because the name of their tenant or model found no room"
)
_STORE_ENTRIES_PRESENT: Final = depot_counter(
    "store_entries_present", "Entries of stores that were already in the pool"
)
_STORE_ENTRIES_DECLINED: Final = depot_counter("store_entries_declined", "Entries of stores declined for lack of space")
_ENTRIES_STORED: Final = depot_counter("entries_stored", "Entries committed")
_STORES_LATE: Final = depot_counter("stores_late", "Stores that were ended before their worker committed them")

_MOST_LOOKED_AT: Final = 1024  # unfinished stores examined to find one to end, as of leased chunks (`index.evictor`)
_TICKET_LEASES: Final = 4  # lifetimes of a lease that a store may take: after 20 minutes by default, its worker hangs


@dataclass(slots=True)
class Quarantine:
    """Entries of one worker of one process."""

    worker: WorkerKey
    entries: list[Entry]
    num_bytes: int
    num_abandoned: int = 0  # how many of the entries belong to no chunk any more


class QuarantineTable:
    """Holds entries until their worker registers again or its process is dead."""

    def __init__(self, state: DepotState) -> None:
        self.held: list[Quarantine] = []
        self._state = state

    @property
    def num_bytes(self) -> int:
        """Pool bytes held in quarantine."""
        return sum(each.num_bytes for each in self.held)

    def hold(self, worker: WorkerKey, entries: list[Entry], num_bytes: int) -> None:
        """Hold unfinished entries."""
        self.held.append(Quarantine(worker, entries, num_bytes))

    def end_worker(self, worker: WorkerKey) -> None:
        """Free the entries of a worker that has registered again."""
        self._free(lambda quarantine: quarantine.worker == worker)

    def end_process(self, writer: Writer) -> None:
        """Free the entries of a dead process."""
        self._free(lambda quarantine: quarantine.worker[0] == writer)

    def is_awaited(self, writer: Writer) -> bool:
        """Whether entries wait for the death of a process."""
        return any(quarantine.worker[0] == writer for quarantine in self.held)

    def _free(self, is_over: Callable[[Quarantine], bool]) -> None:
        entries = [entry for quarantine in self.held if is_over(quarantine) for entry in quarantine.entries]
        self.held[:] = [quarantine for quarantine in self.held if not is_over(quarantine)]
        self.discard(entries)

    def discard(self, entries: Sequence[Entry]) -> None:
        """Free unfinished entries without a writer: now, or in background steps if they are many."""
        self._state.background.add_urgent(self._discarding(entries), len(entries))

    def _discarding(self, entries: Sequence[Entry]) -> Task:
        index, counters = self._state.index, self._state.counters
        for entry in reversed(entries):  # mostly deepest first, so that no tombstones remain
            try:
                index.discard_entry(entry)
            except Exception:
                logger.exception("an unfinished entry could not be freed")
                counters[CHORES_FAILED] += 1
            counters[_ENTRIES_ABORTED] += 1
            yield

    def abandon_some(self) -> bool:
        """Detach some entries from their chunks, so that the chunks before can be evicted.

        Return False if none is left.
        """
        index = self._state.index
        for quarantine in self.held:
            if quarantine.num_abandoned < len(quarantine.entries):
                first = quarantine.num_abandoned
                quarantine.num_abandoned += m.MAXIMUM_STORE_ENTRIES
                for entry in quarantine.entries[first : quarantine.num_abandoned]:
                    if index.entries.node_of(entry) != NO_NODE:
                        index.abandon_entry(entry)
                return True
        return False


@dataclass(slots=True)
class Ticket:
    """Entries that one context is writing."""

    number: int
    context: int
    request_id: str
    entries: list[Entry]
    digests: bytes  # of the chunks, those without a new entry included
    chunk_bytes: int  # of a whole chunk, with the parts of other workers
    num_bytes: int
    began: float  # by the depot's clock
    extents: bytes = b""  # packed; empty if the worker writes them itself
    is_moving: bool = False  # whether the mover is writing them now
    is_aborted: bool = False  # whether to free them when the mover has ended


class Stores:
    """All stores under way.

    Args:
        state: the depot's state.
        contexts: the depot's contexts.
        quarantine: holds the entries of workers that left.
        sources: told of chunks that will not be stored; the list may grow.
        features: told of commits.
    """

    def __init__(
        self,
        state: DepotState,
        contexts: ContextTable,
        quarantine: QuarantineTable,
        sources: Sequence[Source],
        features: Features,
    ) -> None:
        self.ticket_seconds = _TICKET_LEASES * state.leases.lease_seconds
        self.tickets: dict[int, Ticket] = {}  # oldest first
        # Stores that the depot ended before their context did. The context may still be writing to their entries, which
        # belong to no chunk any more.
        self.late_tickets: dict[int, Ticket] = {}
        self._state = state
        self._index = state.index
        self._counters = state.counters
        self._contexts = contexts
        self._quarantine = quarantine
        self._sources = sources
        self._features = features

    @property
    def num_late_bytes(self) -> int:
        """Pool bytes that late stores may still write to."""
        return sum(ticket.num_bytes for ticket in self.late_tickets.values())

    def prepare(self, context: Context, request: m.PrepareStore) -> frames.Reply:
        """Reserve space for the entries that the pool lacks, as far as there is room."""
        num_chunks = check_run(context, request.digests, request.covered, m.MAXIMUM_STORE_ENTRIES)
        state, space, index, counters = self._state, context.space, self._index, self._counters
        counters[_STORES] += 1
        counters[_STORE_CHUNKS] += num_chunks
        writer: Writer | None = context.writer
        if context.has_mover:  # the mover writes in place of the worker, once it is ready
            writer = None if state.movers is None else state.movers.writer_of(context.number)
        if not state.accepts_stores or state.is_draining:
            return self._decline(context, request, "stores are declined: the depot restores, drains or stops")
        if writer is None:
            return self._decline(context, request, "its mover is not ready")
        if context.writing_bytes > index.extents.capacity_bytes // 2:
            counters[_STORES_WITHOUT_COMMIT] += 1
            return self._decline(context, request, "its worker holds half of the pool in unfinished stores")
        parent = NO_NODE
        if request.first_chunk:
            above = index.nodes.find(space, request.parent, request.first_chunk - 1)
            if above is None and space.full_mask:
                # No lookup could find these chunks without it.
                return self._decline(context, request, "the chunk before it was evicted")
            parent = NO_NODE if above is None else above
        weights = self._contexts.weights_of(context.instance)
        try:
            label = state.labels.number_of(request.tenant, context.model, weights)
        except Refused as error:
            counters[_STORES_WITHOUT_NAME] += 1
            return self._decline(context, request, str(error))
        run = NewRun(
            space, request.digests, request.first_chunk, parent, label, writer, context.owner, request.request_id
        )
        wanted, num_steps = _wanted_of(context.groups, request.covered, num_chunks), index.evictor.num_steps
        begun, num_present = index.reserve(run, wanted, self.end_one_above_quota)
        num_declined = len(wanted) - num_present - len(begun)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "store of %s: %d entries begun, %d already present, %d declined%s; %d chunks evicted for it",
                request.request_id,
                len(begun),
                num_present,
                num_declined,
                f": {index.why_cut}" if num_declined else "",
                index.evictor.num_steps - num_steps,
            )
        counters[_STORE_ENTRIES_PRESENT] += num_present
        if num_declined:
            counters[_STORE_ENTRIES_DECLINED] += num_declined
            self._cut(context, request.request_id, request.first_chunk + (begun[-1][0] + 1 if begun else 0))
        if not begun:
            return m.StorePlan(state.epoch, 0, b"", num_present, num_declined)
        entries = [extent[0] for _, _, extent in begun]
        num_bytes = sum([place.num_bytes for _, place, _ in begun])
        packed = pack_extents([(chunk, place.group, place.part, extent) for chunk, place, extent in begun])
        ticket = Ticket(
            next(state.numbers),
            context.number,
            request.request_id,
            entries,
            request.digests,
            self._contexts.chunk_bytes[space.number],
            num_bytes,
            state.clock(),
            packed if context.has_mover else b"",
        )
        self.tickets[ticket.number] = ticket
        context.writing_bytes += ticket.num_bytes
        return m.StorePlan(state.epoch, ticket.number, packed, num_present, num_declined)

    def _decline(self, context: Context, request: m.PrepareStore, why: str) -> m.StorePlan:
        num_declined = sum(request.covered)
        self._cut(context, request.request_id, request.first_chunk)
        logger.debug("store of %s: all %d entries declined: %s", request.request_id, num_declined, why)
        self._counters[_STORE_ENTRIES_DECLINED] += num_declined
        return m.StorePlan(self._state.epoch, 0, b"", 0, num_declined)

    def commit(self, context: Context, request: m.CommitStore) -> frames.Reply:
        """Seal the entries of a ticket, so that lookups find them."""
        state, now = self._state, self._state.clock()
        late = self.late_tickets.get(request.ticket)
        if late is not None and late.context == context.number:
            self._abort(late)
            why = f"after {self.ticket_seconds:g} s, or as a tenant within its quota needed the room before"
            return m.ErrorReply(state.epoch, ErrorCode.UNKNOWN_TICKET, f"ticket {late.number} ended: {why}")
        ticket = self._find(context, request.ticket)
        if ticket.is_moving:
            raise Refused(ErrorCode.UNKNOWN_TICKET, f"ticket {request.ticket} is still being written")
        if request.checksums and len(request.checksums) != m.CHECKSUM_BYTES * len(ticket.entries):
            raise Refused(
                ErrorCode.MALFORMED, f"checksums of {len(request.checksums)} bytes for {len(ticket.entries)} entries"
            )
        self._drop(ticket)
        nodes = self._index.seal(ticket.entries, int(now), request.checksums)
        self._counters[_ENTRIES_STORED] += len(ticket.entries)
        state.usage.store_seconds.add(now - ticket.began)
        state.usage.moved_bytes[context.device][0] += ticket.num_bytes
        if state.tiering is not None:
            is_first = (context.instance, ticket.request_id) in self._contexts.handing_over
            state.tiering.stored(ticket.entries, is_first=is_first)
        for stored in self._features.stored:
            stored(ticket, nodes)
        return m.Done(state.epoch, len(ticket.entries))

    def abort(self, context: Context, request: m.AbortStore) -> frames.Reply:
        """Free the entries of a ticket. The reply counts them."""
        ticket = self.tickets.get(request.ticket) or self.late_tickets.get(request.ticket)
        if ticket is None or ticket.context != context.number:
            return m.Done(self._state.epoch, 0)
        self._abort(ticket)
        return m.Done(self._state.epoch, len(ticket.entries))

    def begin_move(self, context: Context, number: int) -> tuple[bytes, Callable[[], None]]:
        """Note that the mover begins to write a ticket. Return its extents, and a function to call when the mover ends.

        Raises:
            Refused: the ticket is unknown, or is being written.
        """
        ticket = self._find(context, number)
        if ticket.is_moving:
            raise Refused(ErrorCode.MALFORMED, f"ticket {ticket.number} is being written")
        ticket.is_moving = True

        def on_end() -> None:
            ticket.is_moving = False
            if ticket.is_aborted and (ticket.number in self.tickets or ticket.number in self.late_tickets):
                self._abort(ticket)

        return ticket.extents, on_end

    def _find(self, context: Context, number: int) -> Ticket:
        ticket = self.tickets.get(number)
        if ticket is None or ticket.context != context.number or ticket.is_aborted:
            raise Refused(
                ErrorCode.UNKNOWN_TICKET, f"ticket {number} was not prepared here, or is committed or aborted"
            )
        return ticket

    def _abort(self, ticket: Ticket) -> None:
        """Free the entries of a ticket: now, or once its mover has ended the copy."""
        ticket.is_aborted = True
        self._cut_all(ticket)
        if not ticket.is_moving:
            self._drop(ticket)
            self._quarantine.discard(ticket.entries)

    def _cut_all(self, ticket: Ticket) -> None:
        context = self._contexts.by_number.get(ticket.context)
        if context is not None:
            self._cut(context, ticket.request_id, 0)

    def _cut(self, worker: Context, request_id: str, stop: int) -> None:
        for source in self._sources:
            source.cut(worker, request_id, stop)

    def _drop(self, ticket: Ticket) -> None:
        if self.tickets.pop(ticket.number, None) is None:
            del self.late_tickets[ticket.number]
        context = self._contexts.by_number.get(ticket.context)
        if context is not None:
            context.writing_bytes -= ticket.num_bytes

    def end_context(self, context: int, worker: WorkerKey | None) -> int:
        """End the tickets of a context. Return the number of their entries.

        Args:
            context: the context's number.
            worker: the worker that may still be writing, so that its entries are held in quarantine. None if none is.
        """
        every = chain(self.late_tickets.values(), self.tickets.values())
        tickets = [ticket for ticket in every if ticket.context == context]
        for ticket in tickets:
            self._drop(ticket)
        entries = [entry for ticket in tickets for entry in ticket.entries]
        if worker is None:
            self._quarantine.discard(entries)
        elif entries:
            self._quarantine.hold(worker, entries, sum(each.num_bytes for each in tickets))
        return len(entries)

    def has_late(self, now: float) -> bool:
        """Whether `end_late` has work."""
        ticket = next(iter(self.tickets.values()), None)
        return ticket is not None and ticket.began + self.ticket_seconds <= now

    def end_late(self, now: float) -> Task:
        """End stores that have taken too long."""
        while self.has_late(now):
            self._end_late(next(iter(self.tickets.values())))
            yield

    def _end_late(self, ticket: Ticket) -> None:
        """End a store before its context does. The context may still write to the extents."""
        del self.tickets[ticket.number]
        self.late_tickets[ticket.number] = ticket
        for entry in reversed(ticket.entries):
            self._index.abandon_entry(entry)
        self._counters[_STORES_LATE] += 1
        self._cut_all(ticket)

    def end_one_above_quota(self) -> bool:
        """End one store of a share above its quota, so that the chunks before it can be evicted.

        If there is none, abandon some entries in quarantine. Return False if there are none either.
        """
        index, quotas = self._index, self._index.quotas
        for ticket in islice(self.tickets.values(), _MOST_LOOKED_AT):
            node = index.entries.node_of(ticket.entries[0])
            if index.nodes.tree.parent[node] != NO_NODE and quotas.is_above(index.nodes.tree.share[node]):
                self._end_late(ticket)
                return True
        return self._quarantine.abandon_some()


def _wanted_of(groups: tuple[PartPlace, ...], covered: tuple[int, ...], num_chunks: int) -> list[Wanted]:
    """Return the entries of a run that a worker stores, chunk by chunk: the last `covered[g]` chunks of group `g`."""
    counts = tuple(zip(covered, groups))  # noqa: B905  # `check_run` compared them; the keyword costs as much as zip
    wanted: list[Wanted] = []
    for chunk in range(num_chunks):  # not a comprehension: for one chunk, its call takes longer than the loop
        for count, place in counts:
            if chunk + count >= num_chunks:
                wanted.append((chunk, place))
    return wanted
