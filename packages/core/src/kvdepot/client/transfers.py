"""`WorkerTransfers`: the `TransferContext` of every backend, made of its copier.

Stores and retrieves each have their own thread, so that neither waits for the other.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvdepot.backends import BlockIds, Copier, Direction, ReadyEvent, TransferFuture
from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel, Session
from kvdepot.client.transfer_protocol import CopyRoute, TransferProtocol
from kvdepot.client.transfer_queue import Transfer, TransferJob, TransferQueue
from kvdepot.client.verify import Verifier
from kvdepot.config import DEADLINE_SECONDS
from kvdepot.errors import (
    DepotTimeout,
    DepotUnavailable,
    DeviceError,
    ErrorCode,
    KVDepotError,
    LayoutError,
    RemoteError,
)
from kvdepot.keys import KeyRun
from kvdepot.kvcache import MoveTokens
from kvdepot.layout import CacheLayout, GroupKind, check_block_ids
from kvdepot.pool.files import PoolMapping
from kvdepot.wire import messages as m

logger = logging.getLogger(__name__)

# Per request: large enough to hide a round trip, small enough to overlap. On an H200, 1.3 GB take 25 ms in these, and
# 27 ms in batches of 256 MiB (docs/devices.md).
BATCH_BYTES: Final = 64 << 20
_MOST_FAILURES: Final = 16  # different failures logged as errors: texts that contain addresses must not fill the log


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """Options of every context. Backends with further options extend this class."""

    url: str | None = None  # the depot's URL, None for the depot in the default directory
    deadline_seconds: float = DEADLINE_SECONDS  # limit of each request to the depot
    synchronous: bool = False  # transfer on the caller's thread, and return resolved futures
    batch_bytes: int = BATCH_BYTES  # bytes of a retrieved run per request; a store takes twice as many
    checksum_threads: int = 1  # the most threads that compute the checksums of a store that its copy did not compute
    register_when_asked: bool = False
    """True: register the pool with the device at the first copy or at `start_registering`, for engines that capture
    graphs before they serve. False: register it as soon as the depot is connected."""


class WorkerTransfers:
    """Transfers between the blocks of one worker and the depot.

    Args:
        registration: the worker's registration, from `KVCache.registration`.
        layout: the layout of the worker's blocks, from `KVCache.layout`.
        copier: moves the bytes. This object takes ownership of it.
        options: the context's options.
        copy_route: decides which process copies a batch; None: this process copies all.
    """

    move_tokens: MoveTokens | None = None  # set by backends that support it

    def __init__(
        self,
        registration: m.RegisterKVCache,
        layout: CacheLayout,
        copier: Copier,
        options: TransferOptions,
        copy_route: CopyRoute | None = None,
    ) -> None:
        self.spec: Final = registration.spec
        self.layout: Final = layout
        self.copier: Final = copier
        self._copy_route = copy_route or CopyRoute(copier)
        self._synchronous = options.synchronous
        self._verifier = Verifier(options.checksum_threads)
        self._protocol = TransferProtocol(layout, self._copy_route, self._verifier, options.batch_bytes)
        self._mapping: PoolMapping | None = None  # the mapping that was attached last
        self._closed = False
        self._failures: set[str] = set()  # failures that were logged
        self._device_is_lost = False
        self._queues = (TransferQueue(self._store, "store"), TransferQueue(self._retrieve, "retrieve"))
        self.connection: Final = Connection(
            options.url,
            f"{registration.instance} rank {registration.rank}",
            registration,
            maps_pool=True,
            deadline_seconds=options.deadline_seconds,
            barrier=self._protocol.barrier,
            on_open=self._on_open,
            reap_late_replies=self._reap_late_replies,
        )
        if not self._synchronous:
            for each in self._queues:
                each.start()

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot.

        Raises:
            DepotUnavailable: the depot was not usable within `timeout_seconds`; the text gives the reason.
        """
        self.connection.wait_until_open(timeout_seconds)

    def submit_store(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, ready: ReadyEvent | None = None
    ) -> TransferFuture[bool]:
        """See `TransferContext`."""
        return self._submit(Direction.STORE, request_id, key, block_ids, ready, 0)

    def submit_retrieve(
        self, request_id: str, key: KeyRun, block_ids: BlockIds, skip_tokens: int = 0
    ) -> TransferFuture[bool]:
        """See `TransferContext`."""
        for number, group in enumerate(self.layout.groups):
            if group.kind is not GroupKind.RECURRENT and skip_tokens % group.block_tokens:
                raise LayoutError(
                    f"{skip_tokens} tokens to skip are not whole blocks of {group.block_tokens} (group {number})"
                )
        if not 0 <= skip_tokens <= key.num_chunks * self.layout.chunk_tokens:
            raise LayoutError(f"{skip_tokens} tokens to skip of {key.num_chunks} chunks of {self.layout.chunk_tokens}")
        return self._submit(Direction.RETRIEVE, request_id, key, block_ids, None, skip_tokens)

    def start_registering(self) -> None:
        """See `TransferContext`."""
        self.copier.start_registering()

    def close(self) -> None:
        """See `TransferContext`."""
        # In a forked child, the session, the copies under way and the device are the parent's.
        if self._closed or self.connection.is_inherited:
            return
        self._closed = True
        for each in self._queues:
            each.stop()
        # The copy of a queue that is still busy may never return. The end of this process frees everything.
        if any(each.is_busy for each in self._queues):
            return
        session = self.connection.session
        if session is not None:
            # No copy is running any more, so the depot can free unfinished stores without waiting for this process to
            # die.
            channel = self.connection.channel(session)
            with contextlib.suppress(KVDepotError):
                channel.call(m.Unregister(session.context), self.connection.deadline_seconds)
            channel.close()
        self.connection.close()
        self._verifier.close()
        self.copier.close()

    # --- submitting -----------------------------------------------------------------------------------------------

    def _submit(
        self,
        direction: Direction,
        request_id: str,
        key: KeyRun,
        block_ids: BlockIds,
        ready: ReadyEvent | None,
        skip_tokens: int,
    ) -> Transfer:
        covered = self._covered(key, block_ids, may_skip=direction is Direction.RETRIEVE)
        transfer = Transfer()
        session = self.connection.session
        if self._closed or self._device_is_lost or (session is None and not self.connection.seek()):
            transfer.resolve(False)
            return transfer
        ready = self.copier.mark_ready(direction, ready)
        job = TransferJob(transfer, session, request_id, key, block_ids, covered, ready, skip_tokens)
        if self._synchronous:
            self._queues[direction].run(job)
        else:
            self._queues[direction].put(job)
        return transfer

    def _covered(self, key: KeyRun, block_ids: BlockIds, *, may_skip: bool) -> tuple[int, ...]:
        groups = self.layout.groups
        if len(block_ids) != len(groups):
            raise LayoutError(f"block ids for {len(block_ids)} layer groups, the cache has {len(groups)}")
        chunk_tokens, num_chunks = self.layout.chunk_tokens, key.num_chunks
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

    # --- one job --------------------------------------------------------------------------------------------------

    def _store(self, channel: Channel | None, job: TransferJob) -> Channel | None:
        return self._run_job(channel, job, self._protocol.store)

    def _retrieve(self, channel: Channel | None, job: TransferJob) -> Channel | None:
        return self._run_job(channel, job, self._protocol.retrieve)

    def _run_job(
        self, channel: Channel | None, job: TransferJob, work: Callable[[Connection, Channel, TransferJob], bool]
    ) -> Channel | None:
        """Execute one job and resolve its future. Return the channel for the next job."""
        started = time.perf_counter()
        ok, session = False, self.connection.session
        try:
            if session is None and job.session is None:
                session = self.connection.wait_while_coming(self.connection.deadline_seconds)
            if session is None or job.session not in (None, session) or self._device_is_lost:
                return channel
            if channel is None or channel.session is not session:
                if channel is not None:
                    channel.close()
                channel = self.connection.channel(session)
            self._copy_route.prepare(channel)
            ok = work(self.connection, channel, job)
        except DepotTimeout:
            if session is not None:
                self.connection.suspend(session)
            self.connection.reap_soon()
        except DepotUnavailable as error:
            logger.info("a transfer of %s is a miss: %s", job.request_id, error)
        except RemoteError as error:
            if error.code not in (ErrorCode.UNKNOWN_SESSION, ErrorCode.UNKNOWN_CONTEXT):
                logger.error("the depot refused a transfer of %s: %s", job.request_id, error)
        except DeviceError as error:
            self._device_failed(job, error)
        except KVDepotError as error:
            self._log_failure_once(str(error))
        except Exception:
            logger.exception("a transfer of %s failed, so it is a miss", job.request_id)
        finally:
            job.transfer.seconds = time.perf_counter() - started
            job.transfer.resolve(ok)
        return channel

    def _log_failure_once(self, text: str) -> None:
        """Log a failure of a device or a mover only once, as it will probably recur."""
        if text not in self._failures:
            level = logging.ERROR if len(self._failures) < _MOST_FAILURES else logging.DEBUG
            logger.log(level, "a transfer failed, so it is a miss (logged once per reason): %s", text)
            if level == logging.ERROR:
                self._failures.add(text)

    def _device_failed(self, job: TransferJob, error: DeviceError) -> None:
        """Log the error. If the device is lost, never use it again, and log that only once."""
        if not error.is_permanent:
            logger.error("a transfer of %s is a miss: %s", job.request_id, error)
        elif not self._device_is_lost:
            self._device_is_lost = True
            logger.error(
                "this process has lost the device: every transfer is a miss until the engine is restarted: %s", error
            )

    def device_hangs(self, direction: Direction, why: str) -> None:
        """Give up the device although a copy has not returned. All transfers behind that copy become misses.

        A hung store is resolved as not stored. The depot frees its extents when the driver returns or this process is
        dead. A hung retrieve is resolved only when the driver returns, because its blocks may be written until then.
        """
        self._device_is_lost = True
        logger.error(
            "this process has lost the device: every transfer is a miss until the engine is restarted: %s", why
        )
        for each in self._queues:
            each.lose()
        if direction is Direction.STORE:
            self._queues[direction].give_up()

    # --- called by the connection -----------------------------------------------------------------------------------

    def _reap_late_replies(self) -> bool:
        for each in self._queues:
            each.drain_soon()
        return not any(each.num_owed for each in self._queues)

    def _on_open(self, session: Session) -> None:
        for each in self._queues:
            each.drain_soon()
        self._copy_route.opened(session)
        self._verifier.warn_if_impossible(session)
        mapping = session.mapping
        if mapping is not None and mapping is not self._mapping and self._copy_route.copies_here(session):
            self._mapping = mapping
            thread = threading.Thread(
                target=mapping.populate, args=(lambda: self._closed,), name="kvdepot-populate", daemon=True
            )
            thread.start()
            self.copier.attach(mapping, self._protocol.barrier)
