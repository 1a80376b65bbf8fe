"""Worker-driven transfers: the protocol with the depot, once for every device whose worker copies by itself.

A backend hands in a **copier** that knows the device; this module asks for extents, has them copied, checks
generations, commits, and resolves the futures. Stores and retrieves have one thread each, so that neither waits for the
other; each works through a run in batches.
"""

import contextlib
import importlib
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvdepot.backends import BlockIds, CacheGroup, ReadyEvent, TransferFuture
from kvdepot.client.connection import Channel, Connection, Link
from kvdepot.errors import (
    DepotTimeout,
    DepotUnavailable,
    DeviceError,
    ErrorCode,
    KVDepotError,
    LayoutError,
    RemoteError,
)
from kvdepot.keys import DIGEST_BYTES, KeyRun
from kvdepot.layout import CacheLayout, GroupKind, LayerGroup, PageLayout, check_block_ids
from kvdepot.pool.files import PoolMapping, PoolMemory
from kvdepot.pool.table import TableReader
from kvdepot.wire import frames
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

BATCH_BYTES: Final = 64 << 20  # of one prepare: long enough to hide a round trip, short enough to share the depot
_MOST_FAILURES: Final = 16  # different ones that are logged
_GIVE_BACK_SECONDS: Final = 0.1  # waited for a lease that nobody wants any more, before it is left to a later reply


@dataclass(frozen=True, slots=True)
class CopyBatch:
    """What a copier has to move.

    `extents` are packed `EXTENT` records. Chunk `c` of group `g` lies in the engine's blocks
    `block_ids[g][(c - first_covered[g]) * blocks_per_chunk:]`; the first `skip_blocks[g]` blocks of chunk 0 are left
    alone, and so are those named `NO_BLOCK` (retrieves only).
    """

    mapping: PoolMemory
    extents: bytes
    block_ids: BlockIds
    first_covered: tuple[int, ...]
    skip_blocks: tuple[int, ...]
    number: int = 0  # of the ticket or lease
    num_chunks: int = 0
    blocks_per_chunk: tuple[int, ...] = ()


def layer_group_of(group: CacheGroup, pages: Sequence[PageLayout]) -> LayerGroup:
    """Return a group with the places of its pages, as the backend found them."""
    return LayerGroup(group.kind, group.block_tokens, tuple(pages), group.window_tokens, group.shard, group.num_shards)


def detail_of(group: CacheGroup, layer_group: LayerGroup, dtype: str, shape: Sequence[int]) -> m.GroupDetail:
    """Return what a worker registers of a group; `shape` is that of one layer's tensor."""
    return m.GroupDetail(
        page_sizes_bytes=tuple(page.page_size_bytes for page in layer_group.pages),
        num_blocks=layer_group.num_blocks,
        shard=group.shard,
        physical_block_tokens=group.physical_block_tokens,
        compress_ratio=group.compress_ratio,
        num_layers=group.num_layers or len(group.tensors),
        hidden_dims=group.hidden_dims,
        dtype=dtype,
        is_mla=group.is_mla,
        shape=tuple(int(size) for size in shape)[:8],
        attention_backend=group.attention_backend,
    )


class Copier(Protocol):
    """Moves bytes between one worker's device memory and the mapped pool."""

    def store(self, batch: CopyBatch) -> None:
        """Copy blocks into extents; returns when the bytes are in the pool."""
        ...

    def retrieve(self, batch: CopyBatch) -> None:
        """Copy extents into blocks; returns when the extents are no longer read and the blocks hold the bytes."""
        ...

    def close(self) -> None:
        """Give up threads and buffers."""
        ...


class Transfer:
    """A `TransferFuture[bool]`."""

    __slots__ = ("_done", "_ok", "num_bytes", "num_chunks", "seconds")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._ok = False
        self.num_chunks = 0
        self.num_bytes = 0  # moved by this transfer
        self.seconds = 0.0  # spent on it, waiting in the queue left out

    def query(self) -> bool:
        """See `TransferFuture`."""
        return self._done.is_set()

    def result(self, timeout_seconds: float | None = None) -> bool:
        """See `TransferFuture`."""
        if not self._done.wait(timeout_seconds):
            raise TimeoutError(f"the transfer is not done after {timeout_seconds} s")
        return self._ok

    def resolve(self, ok: bool) -> None:
        """Say how it ended."""
        self._ok = ok
        self._done.set()


@dataclass(frozen=True, slots=True)
class _Job:
    transfer: Transfer
    link: Link
    request_id: str
    key: KeyRun
    block_ids: BlockIds
    covered: tuple[int, ...]
    ready: ReadyEvent | None = None
    skip_tokens: int = 0


class WorkerTransfers:
    """The `TransferContext` of every worker-driven backend.

    Args:
        registration: what this worker is.
        layout: where its blocks are.
        copier: moves the bytes; owned by this object from now on.
        url: the depot, None for the one in the default directory.
        deadline_seconds: of each request to the depot.
        synchronous: transfer on the caller's thread and return resolved futures.
        batch_bytes: how much of a run is asked for at once.
    """

    def __init__(
        self,
        registration: m.RegisterKVCache,
        layout: CacheLayout,
        copier: Copier,
        *,
        url: str | None = None,
        deadline_seconds: float = 2.0,
        synchronous: bool = False,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self.spec: Final = registration.spec
        self._layout = layout
        self._copier = copier
        self._deadline_seconds = deadline_seconds
        self._batch_chunks = tuple(
            max(1, min(most // len(layout.groups), batch_bytes // sum(layout.chunk_sizes_bytes)))
            for most in (m.MAXIMUM_STORE_ENTRIES, m.MAXIMUM_RETRIEVE_ENTRIES)
        )
        self._blocks_per_chunk = tuple(group.blocks_per_chunk(layout.chunk_tokens) for group in layout.groups)
        self._closed = False
        self._failures: set[str] = set()  # that were logged
        self._device_is_lost = False
        self.hangs = False  # the device is lost as a copy does not return
        self._checksum = _xxh3_128()
        self._copy_locks = (threading.Lock(), threading.Lock())  # store, retrieve: held while the pool is touched
        self._populated: PoolMapping | None = None
        self._synchronous = synchronous
        self._lanes = (_Lane(self, self._store, "store"), _Lane(self, self._retrieve, "retrieve"))
        self._connection = Connection(
            url, f"{registration.instance} rank {registration.rank}", registration,
            maps_pool=True, deadline_seconds=deadline_seconds, fence=self._no_copy_running, on_open=self._on_open,
            on_tidy=self._tidy,
        )  # fmt: skip
        if not synchronous:
            for lane in self._lanes:
                lane.start()

    @property
    def is_connected(self) -> bool:
        """Whether a depot is there now."""
        return self._connection.link is not None

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: none within `timeout_seconds`; the text says why.
        """
        self._connection.wait_until_open(timeout_seconds)

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """See `TransferContext`."""
        return self._submit(0, request_id, key, block_ids, ready, 0)

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """See `TransferContext`."""
        for number, group in enumerate(self._layout.groups):
            if group.kind is not GroupKind.RECURRENT and skip_tokens % group.block_tokens:
                raise LayoutError(
                    f"{skip_tokens} tokens to skip are not whole blocks of {group.block_tokens} (group {number})"
                )
        if not 0 <= skip_tokens <= key.num_chunks * self._layout.chunk_tokens:
            raise LayoutError(f"{skip_tokens} tokens to skip of {key.num_chunks} chunks of {self._layout.chunk_tokens}")
        return self._submit(1, request_id, key, block_ids, None, skip_tokens)

    def close(self) -> None:
        """See `TransferContext`."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes:
            lane.stop()
        if any(lane.is_busy for lane in self._lanes):  # for ever: the end of this process gives everything back
            return
        link = self._connection.link
        if link is not None:
            # Nothing is being copied any more: what was prepared can be freed without waiting for our death.
            channel = self._connection.channel(link)
            with contextlib.suppress(KVDepotError):
                channel.call(m.Unregister(link.context), self._deadline_seconds)
            channel.close()
        self._connection.close()
        self._copier.close()

    # --- submitting -----------------------------------------------------------------------------------------------

    def _submit(
        self,
        lane: int,
        request_id: str,
        key: KeyRun,
        block_ids: BlockIds,
        ready: ReadyEvent | None,
        skip_tokens: int,
    ) -> Transfer:
        covered = self._covered(key, block_ids, may_skip=lane == 1)
        transfer = Transfer()
        link = self._connection.link
        if link is None or self._closed or self._device_is_lost:
            transfer.resolve(False)
            return transfer
        job = _Job(transfer, link, request_id, key, block_ids, covered, self._ready_of(lane, ready), skip_tokens)
        if self._synchronous:
            self._lanes[lane].run(job)
        else:
            self._lanes[lane].put(job)
        return transfer

    def _ready_of(self, lane: int, ready: ReadyEvent | None) -> ReadyEvent | None:
        """Return what a transfer has to wait for; called by who submits it, in lane 0 for stores, 1 for retrieves.

        Devices whose work is ordered by streams record here where the engine's stream is.
        """
        del lane
        return ready

    def _wait_for(self, lane: int, ready: ReadyEvent) -> None:
        """Have what the lane does from now on come after `ready`; called by who does the transfer."""
        del lane
        ready.synchronize()

    def _covered(self, key: KeyRun, block_ids: BlockIds, *, may_skip: bool) -> tuple[int, ...]:
        groups = self._layout.groups
        if len(block_ids) != len(groups):
            raise LayoutError(f"block ids for {len(block_ids)} layer groups, the cache has {len(groups)}")
        chunk_tokens, num_chunks = self._layout.chunk_tokens, key.num_chunks
        covered = tuple(
            check_block_ids(group, ids, chunk_tokens, num_chunks, may_skip=may_skip)
            for group, ids in zip(groups, block_ids, strict=True)
        )
        for number, group in enumerate(groups):
            if group.kind is GroupKind.FULL_ATTENTION and covered[number] != num_chunks:
                raise LayoutError(
                    f"group {number} is full attention: blocks for {covered[number]} of {num_chunks} chunks"
                )
        return covered

    @contextlib.contextmanager
    def _no_copy_running(self) -> Generator[None]:
        with self._copy_locks[0], self._copy_locks[1]:
            yield

    # --- store ----------------------------------------------------------------------------------------------------

    def _store(self, channel: Channel, job: _Job) -> bool:
        if job.ready is not None:
            self._wait_for(0, job.ready)
        commits: list[tuple[int, int]] = []
        complete = True
        for start, run, covered in self._batches(0, job, 0):
            request = m.PrepareStore(
                channel.link.context, job.request_id, run.tenant, run.digests, run.first_chunk, run.parent, covered
            )
            plan = self._ask(channel, request, _abort)
            if not isinstance(plan, m.StorePlan):
                raise DepotUnavailable(f"it answered a store with {type(plan).__name__}")
            if plan.ticket:
                try:
                    copied = self._copy(0, channel, job, start, run, plan.ticket, plan.extents)
                except BaseException:
                    _abort(channel, plan)
                    raise
                if not copied:
                    _abort(channel, plan)
                    return False
                checksums = self._checksums(channel.link, plan.extents)
                commits.append((channel.submit(m.CommitStore(channel.link.context, plan.ticket, checksums)), start))
            if plan.num_declined:
                complete = False
                break
            job.transfer.num_chunks = start + run.num_chunks
        for sequence, start in commits:
            try:
                channel.wait(sequence, self._deadline_seconds)
            except KVDepotError:
                job.transfer.num_chunks = min(job.transfer.num_chunks, start)
                raise
        return complete

    # --- retrieve -------------------------------------------------------------------------------------------------

    def _retrieve(self, channel: Channel, job: _Job) -> bool:
        if job.ready is not None:
            self._wait_for(1, job.ready)
        transfer = job.transfer
        first = job.skip_tokens // self._layout.chunk_tokens
        transfer.num_chunks = first
        with contextlib.ExitStack() as asked_ahead:
            for (start, run, _), sequence in self._ask_ahead(channel, job, first, asked_ahead):
                plan = self._wait(channel, sequence, _release)
                if not isinstance(plan, m.RetrievePlan):
                    raise DepotUnavailable(f"it answered a retrieve with {type(plan).__name__}")
                if plan.num_chunks and plan.lease:
                    try:
                        if not self._copy(1, channel, job, start, run, plan.lease, plan.extents):
                            return False
                        valid = self._valid_chunks(channel, plan, run.digests)
                    finally:
                        _release(channel, plan)
                    transfer.num_chunks = start + valid
                    if valid < run.num_chunks:
                        return False
                elif plan.num_chunks < run.num_chunks:
                    return False
                else:
                    transfer.num_chunks = start + run.num_chunks
        return True

    def _ask_ahead(
        self, channel: Channel, job: _Job, first: int, undo: contextlib.ExitStack
    ) -> Iterator[tuple[tuple[int, KeyRun, tuple[int, ...]], int]]:
        """Yield the batches of a retrieve with the number of their request; the next one is always under way.

        What is still under way when `undo` closes is given back.
        """
        batches = self._batches(1, job, first)
        pending: list[int] = []

        def ask() -> tuple[tuple[int, KeyRun, tuple[int, ...]], int] | None:
            batch = next(batches, None)
            if batch is None:
                return None
            _, run, covered = batch
            request = m.PrepareRetrieve(channel.link.context, job.request_id, run.digests, run.first_chunk, covered)
            pending.append(channel.submit(request))
            return batch, pending[-1]

        def give_back() -> None:
            for sequence in pending:
                try:
                    _release(channel, channel.wait(sequence, _GIVE_BACK_SECONDS))
                except KVDepotError:
                    channel.abandon(sequence, lambda reply: _release(channel, reply))
                    self._connection.tidy_soon()

        undo.callback(give_back)
        current = ask()
        while current is not None:
            following = ask()
            pending.remove(current[1])
            yield current
            current = following

    def _valid_chunks(self, channel: Channel, plan: m.RetrievePlan, digests: bytes) -> int:
        """Return how many leading chunks are right, as far as that shows after the copy."""
        assert channel.link.mapping is not None
        valid = count_valid_chunks(plan, digests, channel.link.mapping.table)
        if valid < plan.num_chunks:
            logger.warning("chunk %d of a retrieve was evicted under it: a miss", valid)
        return min(valid, self._intact_chunks(channel, plan))

    def _intact_chunks(self, channel: Channel, plan: m.RetrievePlan) -> int:
        """Return how many leading chunks have their checksum, as far as they are to be compared; report the others."""
        link = channel.link
        if link.verify is m.Verify.OFF or self._checksum is None:
            return plan.num_chunks
        assert link.mapping is not None
        table, pool = link.mapping.table, memoryview(link.mapping.pool)
        wrong: list[tuple[int, int]] = []
        intact = plan.num_chunks
        sample = random.randrange(m.VERIFY_ONE_IN)
        for chunk, _, _, record, _, header, offset, num_bytes in m.EXTENT.iter_unpack(plan.extents):
            if link.verify is m.Verify.SAMPLE and chunk % m.VERIFY_ONE_IN != sample:
                continue
            expected = table.checksum_of(record)
            if not any(expected) or self._checksum(pool[offset : offset + num_bytes]) == expected:
                continue
            if table.is_same(record, header):
                wrong.append((record, header))
            intact = min(intact, chunk)
        if wrong:
            logger.error("%d entries of the pool do not have their checksum: misses, and reported", len(wrong))
            with contextlib.suppress(DepotUnavailable):
                channel.post(m.ReportCorrupt(link.context, tuple(wrong)))
        return intact

    def _checksums(self, link: Link, extents: bytes) -> bytes:
        """Return the packed checksums of what has just been copied into extents, nothing if none are wanted."""
        if link.verify is m.Verify.OFF or self._checksum is None:
            return b""
        assert link.mapping is not None
        pool = memoryview(link.mapping.pool)
        places = ((offset, offset + size) for *_, offset, size in m.EXTENT.iter_unpack(extents))
        return b"".join(self._checksum(pool[start:stop]) for start, stop in places)

    # --- both -----------------------------------------------------------------------------------------------------

    def _ask(
        self, channel: Channel, request: frames.Request, undo: Callable[[Channel, frames.Reply], None]
    ) -> frames.Reply:
        """Call the depot; what it grants after the deadline is given back when its answer comes."""
        return self._wait(channel, channel.submit(request), undo)

    def _wait(self, channel: Channel, sequence: int, undo: Callable[[Channel, frames.Reply], None]) -> frames.Reply:
        began = time.monotonic()
        try:
            reply = channel.wait(sequence, self._deadline_seconds)
            self._connection.note_wait(channel.link, time.monotonic() - began)
            return reply
        except DepotTimeout:
            channel.abandon(sequence, lambda reply: undo(channel, reply))
            raise

    def _batches(self, lane: int, job: _Job, first: int) -> Iterator[tuple[int, KeyRun, tuple[int, ...]]]:
        """Cut a run into batches: first chunk, key, and the chunks that each group covers at its end."""
        total = job.key.num_chunks
        for start in range(first, total, self._batch_chunks[lane]):
            stop = min(start + self._batch_chunks[lane], total)
            covered = tuple(max(0, stop - max(start, total - count)) for count in job.covered)
            yield start, job.key.slice(start, stop), covered

    def _copy(
        self, lane: int, channel: Channel, job: _Job, start: int, run: KeyRun, number: int, extents: bytes
    ) -> bool:
        """Have a batch copied; False if the link was lost before it began."""
        mapping = channel.link.mapping
        assert mapping is not None
        total = job.key.num_chunks
        skip = tuple(
            max(0, job.skip_tokens - start * self._layout.chunk_tokens) // group.block_tokens
            if group.kind is not GroupKind.RECURRENT else 0
            for group in self._layout.groups
        )  # fmt: skip
        first_covered = tuple(total - count - start for count in job.covered)
        batch = CopyBatch(
            mapping, extents, job.block_ids, first_covered, skip, number, run.num_chunks, self._blocks_per_chunk
        )
        self._check_plan(batch, run.num_chunks)
        with self._copy_locks[lane]:
            if self._connection.link is not channel.link:
                return False
            self._copy_batch(lane, channel, batch)
        job.transfer.num_bytes += sum(record[7] for record in m.EXTENT.iter_unpack(extents))
        return True

    def _before(self, channel: Channel) -> None:
        """Called by who does a transfer, before it asks for anything; an exception is a miss."""
        del channel

    def _copy_batch(self, lane: int, channel: Channel, batch: CopyBatch) -> None:
        """Have the bytes moved; returns when they are, and raises when nothing moves any more."""
        del channel
        (self._copier.store if lane == 0 else self._copier.retrieve)(batch)

    def _check_plan(self, batch: CopyBatch, num_chunks: int) -> None:
        """Refuse to touch anything that the plan may not name."""
        sizes = self._layout.chunk_sizes_bytes
        for chunk, group, _, _, _, _, offset, num_bytes in m.EXTENT.iter_unpack(batch.extents):
            if (
                group >= len(sizes)
                or num_bytes != sizes[group]
                or not batch.first_covered[group] <= chunk < num_chunks
                or offset + num_bytes > batch.mapping.size_bytes
            ):
                raise LayoutError(f"the depot named {num_bytes} bytes at {offset} for chunk {chunk} of group {group}")

    def run_job(self, channel: Channel | None, job: _Job, work: "_Work") -> Channel | None:
        """Do one job and resolve its future; return the channel to use for the next."""
        started = time.perf_counter()
        ok = False
        try:
            link = self._connection.link
            if link is None or link is not job.link or self._device_is_lost:
                return channel
            if channel is None or channel.link is not link:
                if channel is not None:
                    channel.close()
                channel = self._connection.channel(link)
            self._before(channel)
            ok = work(channel, job)
        except DepotTimeout:
            self._connection.suspend(job.link)
            self._connection.tidy_soon()
        except DepotUnavailable as error:
            logger.info("a transfer of %s is a miss: %s", job.request_id, error)
        except RemoteError as error:
            if error.code not in (ErrorCode.UNKNOWN_SESSION, ErrorCode.UNKNOWN_CONTEXT):
                logger.error("a transfer of %s was refused: %s", job.request_id, error)
        except DeviceError as error:
            self._device_failed(job, error)
        except KVDepotError as error:
            self._note_failure(str(error))
        except Exception:
            logger.exception("a transfer of %s failed: it is a miss", job.request_id)
        finally:
            job.transfer.seconds = time.perf_counter() - started
            job.transfer.resolve(ok)
        return channel

    def _note_failure(self, text: str) -> None:
        """Log what a device or a mover cannot do: once, as it will probably not be able to the next time either."""
        if text not in self._failures:
            level = logging.ERROR if len(self._failures) < _MOST_FAILURES else logging.DEBUG
            logger.log(level, "a transfer failed, which is a miss (said once): %s", text)
            if level == logging.ERROR:
                self._failures.add(text)

    def _device_failed(self, job: _Job, error: DeviceError) -> None:
        """Say so in one line; a device that is lost is not asked again, and not spoken of again."""
        if not error.is_permanent:
            logger.error("a transfer of %s is a miss: %s", job.request_id, error)
        elif not self._device_is_lost:
            self._device_is_lost = True
            logger.error(
                "the device is lost for this process, every transfer is a miss until the engine is restarted: %s", error
            )

    def device_hangs(self, lane: int, why: str) -> None:
        """Give the device up although a copy in `lane` has not returned. Whatever waits behind that copy is a miss.

        The store that hangs ends as not stored; the depot frees its extents when the driver returns or this process is
        dead. The retrieve that hangs ends when the driver returns: until then its blocks may still be written.
        """
        self._device_is_lost = self.hangs = True
        logger.error("the device is lost for this process, transfers are misses until the engine is restarted: %s", why)
        if lane == 0:
            self._lanes[0].give_up()
        for each in self._lanes:
            each.drop()

    def _tidy(self) -> bool:
        for lane in self._lanes:
            lane.nudge()
        return not any(lane.num_owed for lane in self._lanes)

    def _on_open(self, link: Link) -> None:
        """The link is new, or usable again."""
        if link.verify is not m.Verify.OFF and self._checksum is None:
            logger.error("the depot wants checksums and xxhash is not installed: pip install xxhash; none are made")
        mapping = link.mapping
        if mapping is not None and mapping is not self._populated:
            self._populated = mapping
            thread = threading.Thread(
                target=mapping.populate, args=(lambda: self._closed,), name="kvdepot-populate", daemon=True
            )
            thread.start()


def _xxh3_128() -> Callable[[memoryview], bytes] | None:
    try:
        xxhash = importlib.import_module("xxhash")
    except ImportError:
        return None
    return xxhash.xxh3_128_digest


class _Work(Protocol):
    def __call__(self, channel: Channel, job: _Job, /) -> bool: ...


def _abort(channel: Channel, reply: frames.Reply) -> None:
    if isinstance(reply, m.StorePlan) and reply.ticket:
        with contextlib.suppress(DepotUnavailable):
            channel.post(m.AbortStore(channel.link.context, reply.ticket))


def _release(channel: Channel, reply: frames.Reply) -> None:
    if isinstance(reply, m.RetrievePlan) and reply.lease:
        with contextlib.suppress(DepotUnavailable):
            channel.post(m.Release(channel.link.context, (reply.lease,)))


class _Lane:
    """One direction: a queue and a thread, or the caller's thread. In the queue None is a nudge."""

    def __init__(self, transfers: WorkerTransfers, work: _Work, name: str) -> None:
        self._transfers = transfers
        self._work = work
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._channel: Channel | None = None
        self._lock = threading.Lock()
        self._stopping = False
        self._current: _Job | None = None
        self._thread = threading.Thread(target=self._loop, name=f"kvdepot-{name}", daemon=True)

    @property
    def is_busy(self) -> bool:
        return self._current is not None

    @property
    def num_owed(self) -> int:
        channel = self._channel
        return 0 if channel is None else channel.num_owed

    def start(self) -> None:
        self._thread.start()

    def put(self, job: _Job) -> None:
        self._jobs.put(job)
        if self._transfers.hangs:
            self.drop()

    def drop(self) -> None:
        """Make misses of the jobs in the queue."""
        with contextlib.suppress(queue.Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job.transfer.resolve(False)

    def give_up(self) -> None:
        """End the job that hangs, before its copy returns."""
        if self._current is not None:
            self._current.transfer.resolve(False)

    def nudge(self) -> None:
        """Take in what the depot says to requests that were given up."""
        if self._thread.is_alive():
            self._jobs.put(None)
        elif self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def run(self, job: _Job) -> None:
        with self._lock:
            self._current = job
            try:
                self._channel = self._transfers.run_job(self._channel, job, self._work)
            finally:
                self._current = None

    def stop(self) -> None:
        """Finish what was put in; then close. A job that hangs is left alone."""
        self._stopping = True
        self._jobs.put(None)
        while self._thread.ident is not None and self._thread.is_alive():
            self._thread.join(0.1)
            if self._transfers.hangs and self.is_busy:
                return
            if self._transfers.hangs:
                self._jobs.put(None)  # the first one may have been dropped
        if self._channel is not None:
            self._channel.close()

    def _loop(self) -> None:
        while True:
            job = self._jobs.get()
            if job is not None:
                self.run(job)
            elif self._stopping and self._jobs.empty():
                return
            else:
                self._drain()

    def _drain(self) -> None:
        if self._channel is not None:
            with contextlib.suppress(DepotUnavailable):
                self._channel.drain()


def count_valid_chunks(plan: m.RetrievePlan, digests: bytes, table: TableReader) -> int:
    """Return how many leading chunks of a plan were still in their places after the copy: the seqlock's second look.

    The key of each record is compared as well: a depot whose index is wrong gives a miss instead of other bytes.
    """
    for chunk, _, _, record, _, header, _, _ in m.EXTENT.iter_unpack(plan.extents):
        if not table.holds(record, header, digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES]):
            return chunk
    return plan.num_chunks
