"""The protocol of one store or retrieve with the depot.

A store asks for extents, fills them and commits them. A retrieve takes a lease, copies the extents, checks that they
have not changed, and releases the lease. Both process the run in batches, and request the next batch before they copy
one. A `CopyRoute` decides which process copies.
"""

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Final

from kvdepot.backends import Copier, CopyBatch, Direction
from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel, Session
from kvdepot.client.transfer_queue import TransferJob
from kvdepot.client.verify import Verifier
from kvdepot.errors import DepotTimeout, DepotUnavailable, KVDepotError, LayoutError
from kvdepot.keys import KeyRun
from kvdepot.layout import CacheLayout, GroupKind, Part
from kvdepot.wire import frames
from kvdepot.wire import messages as m

# Nobody waits for a store, and one thread of the depot serves all workers of the node. Twice as large batches take 0.94
# of its time for a request of an 8B model in chunks of 64, 0.67 in chunks of 256 (`benchmarks/depot/node.py --models`).
STORE_BATCHES: Final = 2
_LATE_GRANT_SECONDS: Final = 0.1  # wait for an unwanted ticket or lease; after that, `on_reply` gives it back


class CopyRoute:
    """Copies every batch with the copier of this process.

    A backend that also supports copies by a mover of the depot overrides these methods.
    """

    def __init__(self, copier: Copier) -> None:
        self.copier: Final = copier

    def copies_here(self, session: Session) -> bool:
        """Return whether this process copies in this session. If so, the pool must be mapped and attached."""
        del session
        return True

    def opened(self, session: Session) -> None:
        """Note a session that became usable: new, or no longer suspended. Called before `attach`."""

    def prepare(self, channel: Channel) -> None:
        """Prepare for a transfer, before it sends requests to the depot. An exception makes it a miss."""

    def store(self, channel: Channel, batch: CopyBatch) -> bytes | None:
        """Copy a batch of a store: see `Copier.store`."""
        del channel
        return self.copier.store(batch)

    def begin_retrieve(self, channel: Channel, batch: CopyBatch) -> Callable[[], bytes | None] | None:
        """Begin to copy a batch of a retrieve: see `Copier.begin_retrieve`."""
        del channel
        return self.copier.begin_retrieve(batch)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Consecutive chunks of a run that one request covers."""

    start: int  # first chunk, within the run
    key: KeyRun
    covered: tuple[int, ...]  # per group, the number of chunks at the end of the batch to copy


class _Retrieval:
    """One batch of a retrieve, from its plan to the release of its lease. Used by one thread."""

    def __init__(self, batch: _Batch, plan: m.RetrievePlan) -> None:
        self.batch: Final = batch
        self.plan: Final = plan
        self.lease: Final = contextlib.ExitStack()  # closing it releases the lease
        self.copying = contextlib.ExitStack()  # closing it waits for the copy and releases the pool
        self.is_copying = False
        self.checksums: bytes | None = None  # of the plan's extents, if the copy has computed them
        self.num_bytes = 0  # of this worker's blocks

    def end_copy(self, wait: Callable[[], bytes | None]) -> None:
        """Wait for the copy and keep its checksums."""
        self.checksums = wait()

    def close(self) -> None:
        """Wait for the copy and release the lease. Idempotent."""
        with self.lease:
            self.copying.close()


class TransferProtocol:
    """Executes the stores and retrieves of one worker.

    Args:
        layout: the layout of the worker's cache.
        copy_route: copies the batches.
        verifier: checks the copied batches.
        batch_bytes: the bytes per batch of a retrieve; those of a store have `STORE_BATCHES` times as many.
    """

    def __init__(self, layout: CacheLayout, copy_route: CopyRoute, verifier: Verifier, batch_bytes: int) -> None:
        self._layout = layout
        self._copy_route = copy_route
        self._verifier = verifier
        self._batch_chunks = tuple(
            max(1, min(most // len(layout.groups), size // sum(layout.chunk_sizes_bytes)))
            for most, size in (
                (m.MAXIMUM_STORE_ENTRIES, batch_bytes * STORE_BATCHES),
                (m.MAXIMUM_RETRIEVE_ENTRIES, batch_bytes),
            )
        )
        # Bytes of an entry by (group, heads, layers) of its part, as in an extent. Begins with the worker's own parts;
        # `_learn` adds others.
        self._entry_sizes = {
            (number, group.part.number & 0xFFFF, group.part.number >> 16): size
            for number, (group, size) in enumerate(zip(layout.groups, layout.chunk_sizes_bytes, strict=True))
        }
        self._own = frozenset(self._entry_sizes)
        self._blocks_per_chunk = tuple(group.blocks_per_chunk(layout.chunk_tokens) for group in layout.groups)
        self._copy_locks = (threading.RLock(), threading.RLock())  # by direction; held once per copy under way

    @contextlib.contextmanager
    def barrier(self) -> Generator[None]:
        """See `CopyBarrier`."""
        with self._copy_locks[0], self._copy_locks[1]:
            yield

    def store(self, connection: Connection, channel: Channel, job: TransferJob) -> bool:
        """Store a run. Return whether the depot stored all of it."""
        if job.ready is not None:
            self._copy_route.copier.wait_for(Direction.STORE, job.ready)
        commits: collections.deque[tuple[int, int]] = collections.deque()  # not confirmed: sequence, first chunk
        complete, first = True, job.first_covered
        job.transfer.num_chunks = first

        def abandon_commits() -> None:
            for sequence, start in commits:
                job.transfer.num_chunks = min(job.transfer.num_chunks, start)
                channel.abandon(sequence)

        with contextlib.ExitStack() as undo:
            undo.callback(abandon_commits)
            for batch, sequence in self._ask_ahead(Direction.STORE, connection, channel, job, first, undo):
                plan = self._wait(connection, channel, sequence, _abort)
                if not isinstance(plan, m.StorePlan):
                    raise DepotUnavailable(f"it answered a store with {type(plan).__name__}")
                if plan.ticket:
                    with contextlib.ExitStack() as undo_ticket:
                        undo_ticket.callback(_abort, channel, plan)
                        copies = self._copies(channel, job, batch, plan)
                        num_bytes = self._check(copies, batch, is_store=True)
                        with self._copy_locks[Direction.STORE]:
                            # Compared under the lock, which `barrier` takes before a mapping ends.
                            if connection.session is not channel.session:
                                return False
                            checksums = self._copy_route.store(channel, copies)
                        undo_ticket.pop_all()
                    job.transfer.num_bytes += num_bytes
                    if checksums is None:
                        checksums = self._verifier.checksums(channel.session, plan.extents)
                    commit = m.CommitStore(channel.session.context, plan.ticket, checksums)
                    commits.append((channel.submit(commit), batch.start))
                if plan.num_declined:
                    complete = False
                    break
                job.transfer.num_chunks = batch.start + batch.key.num_chunks
            while commits:
                sequence, start = commits.popleft()
                try:
                    channel.wait(sequence, connection.deadline_seconds)
                except KVDepotError:
                    job.transfer.num_chunks = min(job.transfer.num_chunks, start)
                    raise
        return complete

    def retrieve(self, connection: Connection, channel: Channel, job: TransferJob) -> bool:
        """Retrieve a run. Return whether all of it arrived.

        The copy of a batch begins before the wait for the previous copy, so that the device does not idle between them.
        """
        if job.ready is not None:
            self._copy_route.copier.wait_for(Direction.RETRIEVE, job.ready)
        first = max(job.skip_tokens // self._layout.chunk_tokens, job.first_covered)
        job.transfer.num_chunks = first
        with contextlib.ExitStack() as undo:
            begun: collections.deque[_Retrieval] = collections.deque()
            for batch, sequence in self._ask_ahead(Direction.RETRIEVE, connection, channel, job, first, undo):
                plan = self._wait(connection, channel, sequence, _release)
                if not isinstance(plan, m.RetrievePlan):
                    raise DepotUnavailable(f"it answered a retrieve with {type(plan).__name__}")
                current = _Retrieval(batch, plan)
                undo.callback(current.close)
                if plan.lease:
                    current.lease.callback(_release, channel, plan)
                    if not self._begin(connection, channel, job, current):
                        return False
                begun.append(current)
                while len(begun) > 1 or (begun and not begun[0].is_copying):
                    if not self._end(channel, job, begun.popleft()):
                        return False
                if plan.num_chunks < batch.key.num_chunks:
                    break
            return all(self._end(channel, job, retrieval) for retrieval in begun)

    def _begin(self, connection: Connection, channel: Channel, job: TransferJob, retrieval: "_Retrieval") -> bool:
        """Begin to copy a batch. Return False if its session is no longer the current one."""
        copies = self._copies(channel, job, retrieval.batch, retrieval.plan)
        retrieval.num_bytes = self._check(copies, retrieval.batch, is_store=False)
        with contextlib.ExitStack() as undo:
            undo.enter_context(self._copy_locks[Direction.RETRIEVE])
            # Compared under the lock, as for stores.
            if connection.session is not channel.session:
                return False
            wait = self._copy_route.begin_retrieve(channel, copies)
            if wait is not None:
                undo.callback(retrieval.end_copy, wait)
                retrieval.copying = undo.pop_all()
                retrieval.is_copying = True
        return True

    def _end(self, channel: Channel, job: TransferJob, retrieval: "_Retrieval") -> bool:
        """Wait for a batch, check it and release its lease. Return whether all of it arrived."""
        plan, num_chunks = retrieval.plan, retrieval.batch.key.num_chunks
        with retrieval.lease:  # until the comparison, as the depot may reuse the extents afterwards
            retrieval.copying.close()
            if plan.lease:
                job.transfer.num_bytes += retrieval.num_bytes
                digests = retrieval.batch.key.digests
                valid = self._verifier.valid_chunks(channel, plan, digests, retrieval.checksums)
            else:
                valid = num_chunks if plan.num_chunks >= num_chunks else 0
        job.transfer.num_chunks = retrieval.batch.start + valid
        return valid >= num_chunks

    def _ask_ahead(
        self,
        direction: Direction,
        connection: Connection,
        channel: Channel,
        job: TransferJob,
        first: int,
        undo: contextlib.ExitStack,
    ) -> Iterator[tuple[_Batch, int]]:
        """Yield each batch of a transfer with the sequence number of its request. Request one batch ahead.

        Closing `undo` gives back the grants of requests that are still under way.
        """
        batches = self._batches(direction, job, first)
        pending: list[int] = []
        give_back = _abort if direction is Direction.STORE else _release

        def ask() -> tuple[_Batch, int] | None:
            batch = next(batches, None)
            if batch is None:
                return None
            pending.append(channel.submit(_request(direction, channel.session.context, job, batch)))
            return batch, pending[-1]

        def give_back_pending() -> None:
            for sequence in pending:
                try:
                    give_back(channel, channel.wait(sequence, _LATE_GRANT_SECONDS))
                except KVDepotError:
                    channel.abandon(sequence, lambda reply: give_back(channel, reply))
                    connection.reap_soon()

        undo.callback(give_back_pending)
        current = ask()
        while current is not None:
            following = ask()
            pending.remove(current[1])
            yield current
            current = following

    def _wait(
        self, connection: Connection, channel: Channel, sequence: int, undo: Callable[[Channel, frames.Reply], None]
    ) -> frames.Reply:
        """Return the reply to a request. If it arrives after the deadline, `undo` gets it."""
        began = time.monotonic()
        try:
            reply = channel.wait(sequence, connection.deadline_seconds)
            connection.note_wait(channel.session, time.monotonic() - began)
            return reply
        except DepotTimeout:
            channel.abandon(sequence, lambda reply: undo(channel, reply))
            raise

    def _batches(self, direction: Direction, job: TransferJob, first: int) -> Iterator[_Batch]:
        total = job.key.num_chunks
        for start in range(first, total, self._batch_chunks[direction]):
            stop = min(start + self._batch_chunks[direction], total)
            covered = tuple(max(0, stop - max(start, total - count)) for count in job.covered)
            yield _Batch(start, job.key.slice(start, stop), covered)

    def _copies(
        self, channel: Channel, job: TransferJob, batch: _Batch, plan: m.StorePlan | m.RetrievePlan
    ) -> CopyBatch:
        """Return the copies for a plan, with only the blocks of this batch: a copier may convert all that it gets."""
        mapping = channel.session.mapping
        assert mapping is not None
        num_chunks = batch.key.num_chunks
        chunk_tokens = self._layout.chunk_tokens
        skip_tokens = max(0, job.skip_tokens - batch.start * chunk_tokens)
        skip_blocks = tuple(
            max(0, skip_tokens // group.block_tokens - (chunk_tokens // group.block_tokens - kept))
            if group.kind is not GroupKind.RECURRENT
            else 0
            for group, kept in zip(self._layout.groups, self._blocks_per_chunk, strict=True)
        )
        after = job.key.num_chunks - batch.start - num_chunks  # chunks of the run behind this batch
        block_ids = tuple(
            ids[(covered - after - here) * per_chunk : (covered - after) * per_chunk]
            for ids, covered, here, per_chunk in zip(
                job.block_ids, job.covered, batch.covered, self._blocks_per_chunk, strict=True
            )
        )
        return CopyBatch(
            mapping,
            plan.extents,
            block_ids,
            tuple(num_chunks - here for here in batch.covered),
            skip_blocks,
            plan.ticket if isinstance(plan, m.StorePlan) else plan.lease,
            self._verifier.needs_all_checksums(channel.session, is_store=isinstance(plan, m.StorePlan)),
        )

    def _check(self, copies: CopyBatch, batch: _Batch, *, is_store: bool) -> int:
        """Return how many of this worker's bytes a plan covers. Several extents may hold one chunk of a group.

        Refuse a plan that names anything but whole entries of this batch, or another worker's parts for a store.
        """
        sizes, own_sizes, num_chunks = self._entry_sizes, self._layout.chunk_sizes_bytes, batch.key.num_chunks
        first_covered, pool_bytes = copies.first_covered, copies.mapping.size_bytes
        total, last = 0, (-1, -1)
        group: int
        for chunk, group, heads, _, layers, _, offset, num_bytes in m.EXTENT.iter_unpack(copies.extents):
            place = group, heads, layers
            if (
                (place not in sizes and not self._learn(place))
                or (is_store and place not in self._own)
                or num_bytes != sizes[place]
                or not first_covered[group] <= chunk < num_chunks
                or offset + num_bytes > pool_bytes
            ):
                raise LayoutError(f"the depot named {num_bytes} bytes at {offset} for chunk {chunk} of group {group}")
            if (chunk, group) != last:
                total += own_sizes[group]
                last = chunk, group
        return total

    def _learn(self, place: tuple[int, int, int]) -> bool:
        """Note the size of entries of another part. Return False if this worker cannot read them."""
        number, heads, layers = place
        if number >= len(self._layout.groups):
            return False
        part = Part.of(layers << 16 | heads)
        size = self._layout.groups[number].readable_bytes(part, self._layout.chunk_tokens)
        if size:
            self._entry_sizes[place] = size
        return size > 0


def _request(direction: Direction, context: int, job: TransferJob, batch: _Batch) -> m.PrepareStore | m.PrepareRetrieve:
    key = batch.key
    if direction is Direction.RETRIEVE:
        return m.PrepareRetrieve(context, job.request_id, key.digests, key.first_chunk, batch.covered)
    return m.PrepareStore(context, job.request_id, key.tenant, key.digests, key.first_chunk, key.parent, batch.covered)


def _abort(channel: Channel, reply: frames.Reply) -> None:
    if isinstance(reply, m.StorePlan) and reply.ticket:
        with contextlib.suppress(DepotUnavailable):
            channel.post(m.AbortStore(channel.session.context, reply.ticket))


def _release(channel: Channel, reply: frames.Reply) -> None:
    if isinstance(reply, m.RetrievePlan) and reply.lease:
        with contextlib.suppress(DepotUnavailable):
            channel.post(m.Release(channel.session.context, (reply.lease,)))
