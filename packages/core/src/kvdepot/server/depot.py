"""Answers frames: passes each request to the part of the depot that serves it. Every request gets one reply.

`Depot` has no socket and no clock of its own. Requests come with their session, and the loop reports ended sessions and
dead processes. A handler that cannot serve a request changes nothing and raises `Refused`. `Requests` turns this, and
any other exception, into an error reply.
"""

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any, Final

from msgspec import Struct

from kvdepot.config import ServerConfig
from kvdepot.counting import depot_counter
from kvdepot.errors import ErrorCode, KeyFormatError
from kvdepot.index.index import ChunkIndex
from kvdepot.index.leases import LeaseTable
from kvdepot.layout import Part
from kvdepot.movers.protocol import Copy
from kvdepot.movers.table import MoveRefused
from kvdepot.pool.files import PoolFiles
from kvdepot.pool.table import Writer
from kvdepot.server.access import describe_peer
from kvdepot.server.connections import Connection, ConnectionTable
from kvdepot.server.contexts import Context, ContextTable
from kvdepot.server.feature import Feature, Features, Handler, MakeFeature, OperationHandler
from kvdepot.server.lookups import Lookups
from kvdepot.server.sessions import SessionTable
from kvdepot.server.sources import Source, TierSource
from kvdepot.server.state import DepotState, LabelTable, SaveNames, save_nothing
from kvdepot.server.stores import QuarantineTable, Stores
from kvdepot.server.turns import Awaited, PendingReply, Refused, Steps, Task, run
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.operation import Operation, OperatorRequest, Sender
from kvdepot.wire.status import SHORTEST_SECONDS, Histogram

logger = logging.getLogger(__name__)

_ENTRIES_CORRUPT: Final = depot_counter("entries_corrupt", "Entries removed because their checksum did not match")
_WHY_NO_SESSION: Final = "no open session: greet the depot with open_session first"


class Depot:
    """Owns the parts of a depot, and passes each message to the part that serves it.

    Args:
        index: the chunks in the pool.
        epoch: identifies this run of the server.
        lease_seconds: the lifetime of a lease.
        clock: returns monotonic seconds.
        verify: the checksums that workers check.
        save_names: keeps names for the next server.
        config: the server's settings, for features; None in tests.
        files: the pool's files, for features; None for a pool in memory.
        features: each makes a feature of this depot, or None if the settings do not ask for it.
    """

    def __init__(
        self,
        index: ChunkIndex,
        *,
        epoch: int,
        lease_seconds: float,
        clock: Callable[[], float],
        verify: m.Verify = m.Verify.OFF,
        save_names: SaveNames = save_nothing,
        config: ServerConfig | None = None,
        files: PoolFiles | None = None,
        features: Iterable[MakeFeature] = (),
    ) -> None:
        self.index = index
        self.config = config
        self.files = files
        self.leases = LeaseTable(index, lease_seconds)
        self.labels = LabelTable(index, save_names)
        self.state = DepotState(index, epoch, clock, verify, self.leases, self.labels)
        self.counters = self.state.counters
        self.background = self.state.background
        self.contexts = ContextTable(self.state)
        self.quarantine = QuarantineTable(self.state)
        self.features = Features(self.counters)
        self.tiers = TierSource(self.state, self.contexts)
        self.sources: list[Source] = [self.tiers]
        self.stores = Stores(self.state, self.contexts, self.quarantine, self.sources, self.features)
        lookups = Lookups(self.state, self.contexts, self.sources, self.features)
        self._is_expiring = False
        self._handlers: dict[type[m.ContextRequest], Handler] = {
            m.Lookup: lookups.lookup,
            m.Release: lookups.release,
            m.EndRequest: lookups.end_request,
            m.PrepareRetrieve: lookups.prepare_retrieve,
            m.PrepareStore: self.stores.prepare,
            m.CommitStore: self.stores.commit,
            m.AbortStore: self.stores.abort,
            m.ChangeWeights: self.contexts.change_weights,
            m.Move: self._move,
            m.ReportCorrupt: self._report_corrupt,
            m.Unregister: self._unregister,
        }
        self.operations: dict[type[OperatorRequest], OperationHandler] = {}
        with ExitStack() as undo:
            undo.callback(self.close)
            for make in features:
                self._add(make(self))
            undo.pop_all()

    def _add(self, feature: Feature | None) -> None:
        if feature is not None:
            self.features.add(feature)
            self._handlers.update(feature.handlers())
            self.operations.update(feature.operations())
            self.sources.extend(feature.sources)
            self.sources.sort(key=lambda source: source.rank)

    def close(self) -> None:
        """Close the features."""
        for close in self.features.close:
            close()

    def operate(self, server: Any, request: OperatorRequest, sender: Sender) -> frames.Reply | PendingReply:
        """Answer an operation, now or later.

        Args:
            server: this depot's server.
            request: any operation.
            sender: describes the sender for the log.

        Raises:
            Refused: nothing was changed; the text gives the reason.
        """
        if request.needs_entries and self.state.is_restoring:
            raise Refused(ErrorCode.DRAINING, "the entries of an earlier server are being read: ask again")
        handler = self.operations.get(type(request))
        try:
            handled: frames.Reply | Steps = request.answer(server, sender) if handler is None else handler(request)
        except NotImplementedError:
            raise self._unknown(request) from None
        return handled if isinstance(handled, Struct) else run(handled, self.state.fail)

    def _unknown(self, request: frames.Request) -> Refused:
        text = f"this depot runs without the feature that answers {frames.operation_of(type(request))}"
        return Refused(ErrorCode.UNKNOWN_OPERATION, text)

    def note(self, text: str) -> None:
        """Tell operators of a change, in the status and in the log."""
        self.state.note(text)
        logger.info("%s", text)

    def handle(self, session: int, writer: Writer, request: frames.Request) -> frames.Reply | PendingReply:
        """Serve one request of an open session. The reply may come later, for example from the tiers.

        Args:
            session: the number of the session.
            writer: the client's process.
            request: any request that needs a session.

        Raises:
            Refused: nothing was changed; the text gives the reason.
        """
        if isinstance(request, m.ContextRequest):
            context = self.contexts.by_number.get(request.context)
            if context is None or context.session != session:
                text = f"context {request.context} is not registered by this session: register again"
                raise Refused(ErrorCode.UNKNOWN_CONTEXT, text)
            handler = self._handlers.get(type(request))
            if handler is None:
                raise self._unknown(request)
            try:
                handled = handler(context, request)
            except KeyFormatError as error:
                raise Refused(ErrorCode.BAD_KEY, str(error)) from error
            return handled if isinstance(handled, Struct) else run(handled, self.state.fail)
        if isinstance(request, m.RegisterKVCache):
            return self._register_worker(session, writer, request)
        assert isinstance(request, m.RegisterScheduler)
        context = self._attached(self.contexts.add_scheduler(session, writer, request))
        return m.Registered(self.state.epoch, context.number, wants_tokens=context.wants_tokens)

    def _attached(self, context: Context) -> Context:
        for attached in self.features.attached:
            attached(context)
        return context

    def _register_worker(self, session: int, writer: Writer, request: m.RegisterKVCache) -> m.Registered:
        state = self.state
        context = self._attached(self.contexts.add_worker(session, writer, request))
        self.quarantine.end_worker(context.worker_key)
        if state.movers is None or request.offer is None:
            return m.Registered(state.epoch, context.number, state.verify)
        state.movers.start(context.number, session, request)
        return m.Registered(state.epoch, context.number, state.verify, state.movers.move_seconds)

    def _unregister(self, context: Context, request: m.Unregister) -> m.Done:
        mover = self._remove(context)
        self.stores.end_context(context.number, None if mover is None else (mover, context.owner))
        return m.Done(self.state.epoch, 1)

    def _remove(self, context: Context) -> Writer | None:
        """Remove a context, but not its stores. Return its mover, which may still be writing these."""
        mover = self.contexts.remove(context)
        for detached in self.features.detached:
            detached(context)
        return mover

    def _move(self, context: Context, request: m.Move) -> Steps:
        """Make a worker's mover copy the extents of a ticket or a lease."""
        epoch, movers = self.state.epoch, self.state.movers
        if movers is None or not context.has_mover:
            return m.Moved(epoch, m.MoveOutcome.UNAVAILABLE, "this worker offered no memory")
        copy: Copy | None = None
        end_ticket: Callable[[], None] | None = None
        if request.number:
            num_groups = len(context.groups)
            if {len(request.block_ids), len(request.first_covered), len(request.skip_blocks)} != {num_groups}:
                raise Refused(ErrorCode.BAD_LAYOUT, f"blocks of {len(request.block_ids)} of {num_groups} layer groups")
            if request.is_store:
                extents, end_ticket = self.stores.begin_move(context, request.number)
            else:
                lease = self.leases.find(context.number, request.number)
                if lease is None or not lease.extents:
                    raise Refused(ErrorCode.UNKNOWN_TICKET, f"lease {request.number} was not granted to a retrieve")
                extents = lease.extents
            copy = Copy(0, request.is_store, extents, request.block_ids, request.first_covered, request.skip_blocks)
        moved = Awaited[m.MoveOutcome, str]()
        try:
            movers.move(context.number, copy, request.wait_seconds, moved.set)
            outcome, why = yield from moved.wait()
        except MoveRefused as error:
            raise Refused(ErrorCode.MALFORMED, str(error)) from error
        finally:
            if end_ticket is not None:
                end_ticket()
        return m.Moved(epoch, outcome, why, movers.is_warm(context.number))

    def _report_corrupt(self, context: Context, request: m.ReportCorrupt) -> m.Done:
        removed = 0
        for number, header in request.entries:
            removed += self.remove_corrupt(number, header, context.space.number)
        return m.Done(self.state.epoch, removed)

    def remove_corrupt(self, number: int, header: int, space: int | None = None) -> bool:
        """Remove a sealed entry whose checksum did not match. Return False if the record was reused meanwhile.

        While an earlier server's table is being read, nothing is removed. The next reader reports the entry again.
        """
        if self.index.is_restoring:
            return False
        record = self.index.table.sealed_record(number, header)
        if record is None or space not in (None, record.space):
            return False
        tenant = self.labels.names[record.label][0]
        logger.error(
            "checksum mismatch in chunk %s (group %d, %s, tenant %s): entry removed",
            record.key.hex(),
            record.group,
            Part.of(record.part),
            tenant,
        )
        self.index.remove_entry(record.entry)
        self.state.note(f"an entry of tenant {tenant} lost its bytes and was removed")
        self.counters[_ENTRIES_CORRUPT] += 1
        return True

    def end_session(self, session: int) -> None:
        """End the contexts of a session: leases now, unfinished entries as soon as their writer is known to be gone."""
        # A worker that renews its session may register before the loop sees its earlier session end.
        renewed = {each.worker_key for each in self.contexts.by_number.values() if each.session > session}
        for context in self.contexts.of_session(session):
            mover = self._remove(context)
            # Identifies the process that may still be writing.
            worker = (mover or context.writer, context.owner)
            if worker in renewed:
                worker = None
            count = self.stores.end_context(context.number, worker)
            self.state.note(
                f"{context.instance} left"
                + (", its unfinished stores wait for its process" if count and worker else "")
            )
            logger.info(
                "%s (context %d) left%s",
                context.instance,
                context.number,
                f", {count} unfinished entries wait for process {worker[0].pid}" if count and worker else "",
            )

    def end_process(self, writer: Writer) -> None:
        """Free the unfinished entries of a dead process."""
        self.quarantine.end_process(writer)

    def end_mover(self, context: int, writer: Writer) -> None:
        """Free the unfinished entries of a dead mover."""
        self.stores.end_context(context, None)
        self.end_process(writer)

    def expire(self) -> None:
        """End expired leases and tickets, and let features end theirs."""
        now = self.state.clock()
        self.index.nodes.now = int(now)
        if not self._is_expiring and (self.leases.has_expired(now) or self.stores.has_late(now)):
            self._is_expiring = True
            self.background.urgent.add(self._expiring(now))
        for swept in self.features.swept:
            swept(now)

    def _expiring(self, now: float) -> Task:
        try:
            yield from self.leases.expire(now)
            yield from self.stores.end_late(now)
        finally:
            self._is_expiring = False


class Requests:
    """Answers frames of the control socket, and measures the latencies.

    Args:
        depot: answers the requests of engines.
        sessions: the open sessions.
        operate: answers an operation, given a function that describes its sender for the log.
    """

    def __init__(
        self,
        depot: Depot,
        sessions: SessionTable,
        operate: Callable[[OperatorRequest, Sender], frames.Reply | PendingReply],
    ) -> None:
        self.latencies: dict[type, Histogram] = {
            kind: Histogram(SHORTEST_SECONDS) for kind in (*frames.request_types(), m.ErrorReply)
        }
        self._depot = depot
        self._sessions = sessions
        self._operate = operate

    def serve(self, connections: ConnectionTable, connection: Connection, frame: memoryview) -> None:
        """Decode a frame of the control socket, pass it to its handler, and send the reply, now or later."""
        began, sequence = time.monotonic(), frames.sequence_of(frame)
        kind: type = m.ErrorReply
        try:
            request = frames.decode_request(frame)
            session = self._sessions.by_token.get(connection.owner or b"")
            if isinstance(request, Operation):
                reply = self._operate(request, lambda: describe_peer(connection.socket))
            elif session is None:
                raise Refused(ErrorCode.UNKNOWN_SESSION, _WHY_NO_SESSION)
            else:
                reply = self._depot.handle(session.number, session.writer, request)
            kind = type(request)
            if isinstance(reply, PendingReply):
                pending, num_bytes = reply, len(frame)
                connections.hold(connection, num_bytes)

                def send(late: frames.Reply) -> None:
                    answer = frames.encode_frame(sequence, late)  # if this raises, the error reply comes here, too
                    pending.on_reply = None  # one request, one reply
                    connections.release(connection, num_bytes)
                    connections.send(connection, answer)
                    self.latencies[kind].add(time.monotonic() - began)

                pending.on_reply = send
                return
            answer = frames.encode_frame(sequence, reply)  # raises, for example, if the pool's path is not UTF-8
        except Exception as error:
            answer = frames.encode_frame(sequence, self._depot.state.fail(error))
        connections.send(connection, answer)
        self.latencies[kind].add(time.monotonic() - began)
