"""`CudaTransferContext`: the transfers of a worker whose KV cache is in the memory of a CUDA device.

In mode `direct`, the worker's own process registers the depot's pool with its device and copies on two low-priority
streams, one for stores and one for retrieves. In mode `ipc`, it passes memory handles to the depot, and a process of
the depot, the mover, copies on its own streams. `kvdepot.client.transfers` communicates with the depot,
`kvdepot_cuda.move` with the mover, and `MoverRoute` decides between the two. `kvdepot_cuda.copy` copies in both
modes. If `ipc` turns out to be impossible, the worker registers again as `direct`, with the reason.

Order: a store reads its blocks after `ready` or, if none is given, after the work that the engine's stream has at the
time of the call. A retrieve always comes after that work, which may still read or clear the blocks. In mode `direct`,
the device does both waits, and no thread waits for the engine. In mode `ipc`, the thread of the transfer waits before
it sends any request, because events are not shared between processes. The option `stream` sets the engine's stream.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

import msgspec.structs

from kvdepot.backends import CopyBatch, Direction, KVCache
from kvdepot.client.session import Channel, Session
from kvdepot.client.transfer_protocol import STORE_BATCHES, CopyRoute
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.arrays import device_index_of, page_layout_of
from kvdepot.errors import BackendUnavailable, ConfigError, DepotUnavailable, ErrorCode, RemoteError
from kvdepot.layout import CacheLayout
from kvdepot.wire import messages as m
from kvdepot_cuda.copy import BATCH_RUNS, PIECE_BYTES, CopyEngine
from kvdepot_cuda.driver import Driver, DriverError, OpenDriver
from kvdepot_cuda.gather import CompileGather, compile_gather
from kvdepot_cuda.images import has_triton
from kvdepot_cuda.move import MoverUnavailable, await_mover, move
from kvdepot_cuda.mover import MOVER, offer_of
from kvdepot_cuda.nvidia import CudaDriver
from kvdepot_cuda.sums import CompileSums, OpenSums, compile_sums, open_sums

logger = logging.getLogger(__name__)

DIRECT: Final = "direct"
IPC: Final = "ipc"
CHECKSUM_THREADS: Final = min(4, len(os.sched_getaffinity(0)))  # one has 10 GB/s, a link 50
HANG_SECONDS: Final = 60.0  # the longest time of a copy: far above a long step of the engine, for which a copy waits
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class CudaOptions(TransferOptions):
    """Options of a `CudaTransferContext`.

    Raises:
        ConfigError: there is no such mode.
    """

    mode: str = DIRECT
    """The copying process. "direct": the worker itself. "ipc": a mover of the depot or, if no mover can open its
    memory, the worker itself. The log and `kvdepot status` report that in one line."""
    stream: Callable[[], int] | None = None
    """Returns the handle of the stream on which the engine writes and reads its cache; called at each submission. None:
    torch's current stream if the tensors are torch's, else transfers wait only for `ready`."""
    piece_bytes: int = PIECE_BYTES  # bytes of the pool that are registered per driver call
    batch_runs: int = BATCH_RUNS  # runs copied per driver call
    checksum_threads: int = CHECKSUM_THREADS
    gather_kernel: bool | None = None
    """Have a kernel copy many small runs at once where the worker copies. None: if Triton is installed. True: warn if
    there can be none. A mover has none: without MPS a GPU runs either the mover's kernels or the model's, while copies
    run beside both."""
    compile_gather: CompileGather = compile_gather  # compiles that kernel
    checksum_kernel: bool = False
    """Have kernels compute the checksums of a store where the worker copies. Off, because no device has run them."""
    compile_sums: CompileSums = compile_sums  # compiles those kernels
    open_driver: OpenDriver = CudaDriver  # opens the driver of the device with a number
    mover: str = MOVER  # entry point of the mover, in the depot's environment

    def __post_init__(self) -> None:
        if self.mode not in (DIRECT, IPC):
            raise ConfigError(f"mode {self.mode!r}: give {DIRECT!r} or {IPC!r}")


class CudaTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on a CUDA device and the depot.

    Raises:
        LayoutError: the tensors do not fit their description.
        BackendUnavailable: the device cannot be used; the text quotes the driver.
        ConfigError: an option is invalid.
    """

    def __init__(self, cache: KVCache, options: CudaOptions = CudaOptions()) -> None:  # frozen
        layout = cache.layout(lambda tensor: page_layout_of(tensor, "cuda"))
        ordinal = device_index_of(tensor for group in cache.groups for tensor in group.tensors)
        driver, self._engine = _open(ordinal, cache, layout, options)
        try:
            registration = cache.registration(layout, f"cuda:{ordinal}", DIRECT)
            if options.mode == IPC:
                registration = _offer(registration, driver, layout, options.mover)
        except BaseException:
            self._engine.close()
            raise
        self.copy_route: Final = MoverRoute(
            self._engine, registration, options.deadline_seconds, lambda changed: self.connection.register_as(changed)
        )
        super().__init__(registration, layout, self._engine, options, self.copy_route)
        self._engine.watch(self.device_hangs, HANG_SECONDS)

    @property
    def num_registered(self) -> int:
        """The number of ranges of the pool that are registered with the device. Copies elsewhere are pageable."""
        return self._engine.num_registered

    @property
    def uses_kernel(self) -> bool:
        """Whether this process has loaded the kernel that copies small pages. A mover has none."""
        return self._engine.uses_kernel

    @property
    def uses_sums(self) -> bool:
        """Whether this process has loaded the kernels that compute checksums. A mover has none."""
        return self._engine.uses_sums

    @property
    def is_warm(self) -> bool:
        """Whether the copying process has registered all it can, so that later copies will not be faster.

        A mover reports this with each copy.
        """
        return self._engine.is_warm if self.transfer_mode == DIRECT else self.copy_route.is_mover_warm

    @property
    def transfer_mode(self) -> str:
        """The mode in force: "direct" (the worker copies) or "ipc" (a mover does)."""
        return self.copy_route.transfer_mode

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot, and in mode `ipc` for its mover.

        Raises:
            DepotUnavailable: they were not ready within `timeout_seconds`; the text gives the reason.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            session = self.connection.wait_until_open(max(0.0, end - time.monotonic()))
            if self.copy_route.is_ready(session):
                return
            channel = self.connection.channel(session)
            try:
                self.copy_route.wait_for_mover(channel, max(0.0, end - time.monotonic()))
            except (DepotUnavailable, RemoteError) as error:  # the session may have ended meanwhile
                is_over = isinstance(error, RemoteError) and error.code not in (
                    ErrorCode.UNKNOWN_SESSION,
                    ErrorCode.UNKNOWN_CONTEXT,
                )
                if is_over or time.monotonic() >= end:
                    raise
            finally:
                channel.close()

    def close(self) -> None:
        """Finish the running transfers and leave the depot. Idempotent.

        Afterwards no other process has the device's memory open. Freeing it before that would be undefined behaviour.
        """
        super().close()
        if not self.connection.is_inherited:  # in a forked child, the movers are the parent's
            self.copy_route.end_movers()


def _open(ordinal: int, cache: KVCache, layout: CacheLayout, options: CudaOptions) -> tuple[Driver, CopyEngine]:
    try:
        driver = options.open_driver(ordinal)
    except DriverError as error:
        raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
    try:
        return driver, CopyEngine(
            driver,
            layout,
            cache,
            stream=options.stream or _stream_of_torch(cache.groups[0].tensors[0], ordinal),
            piece_bytes=options.piece_bytes,
            batch_runs=options.batch_runs,
            compile_gather=_compiler_of(options),
            open_sums=_opener_of(options, layout),
            register_when_asked=options.register_when_asked,
        )
    except BaseException as error:
        with suppress(DriverError):
            driver.close()
        if isinstance(error, DriverError):
            raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
        raise


def _compiler_of(options: CudaOptions) -> CompileGather | None:
    """Return the compiler of the kernel, None if the worker uses none."""
    is_wanted = options.gather_kernel
    if is_wanted is None:
        is_wanted = has_triton()
        if not is_wanted:
            logger.info("DMA copies small pages, as the kernel for them needs Triton, which is not installed")
    return options.compile_gather if is_wanted else None


def _opener_of(options: CudaOptions, layout: CacheLayout) -> OpenSums | None:
    """Return a function that opens the kernels of the checksums, None if the worker uses none."""
    if not options.checksum_kernel:
        return None
    max_bytes = max(STORE_BATCHES * options.batch_bytes, sum(layout.chunk_sizes_bytes))  # at least one chunk
    return partial(open_sums, compile_sums=options.compile_sums, max_bytes=max_bytes)


def _offer(registration: m.RegisterKVCache, driver: Driver, layout: CacheLayout, mover: str) -> m.RegisterKVCache:
    """Return the registration with an offer of this memory for a mover, or with the reason against it."""
    try:
        offer = offer_of(driver, layout, mover)
    except DriverError as error:
        logger.warning("the worker copies by itself, because its memory cannot be shared: %s", error)
        return msgspec.structs.replace(registration, fallback=f"memory that cannot be shared: {error}"[:1024])
    return msgspec.structs.replace(registration, transfer_mode=IPC, offer=offer)


def _stream_of_torch(tensor: Any, ordinal: int) -> Callable[[], int] | None:
    if type(tensor).__module__.partition(".")[0] != "torch":
        return None
    current_stream = importlib.import_module("torch").cuda.current_stream
    return lambda: int(current_stream(ordinal).cuda_stream)


class MoverRoute(CopyRoute):
    """Copies batches by a mover of the depot, as long as the registration offers the worker's memory to one.

    Args:
        copier: the worker's own copier.
        registration: has an offer if a mover is to copy.
        deadline_seconds: the limit of each request to the depot.
        register_as: see `Connection`.
    """

    def __init__(
        self,
        copier: CopyEngine,
        registration: m.RegisterKVCache,
        deadline_seconds: float,
        register_as: Callable[[m.RegisterKVCache], None],
    ) -> None:
        super().__init__(copier)
        self._own_copier = copier
        self._registration = registration
        self._deadline_seconds = deadline_seconds
        self._register_as = register_as
        self._ready_session: Session | None = None  # the session whose mover accepts requests
        # The time until which transfers wait for the mover; queued transfers do not wait anew.
        self._patient_until = 0.0
        # The last session with a mover, and earlier ones whose movers are still alive.
        self._moved_sessions: list[Session] = []
        self._falling_back = threading.Lock()
        self.is_mover_warm = False
        copier.waits_on_host = self.transfer_mode == IPC

    @property
    def transfer_mode(self) -> str:
        """The mode in force: "direct" (the worker copies) or "ipc" (a mover does)."""
        return self._registration.transfer_mode

    def is_ready(self, session: Session) -> bool:
        """Return whether transfers over a session need not wait for a mover."""
        return self.transfer_mode == DIRECT or self._ready_session is session

    def wait_for_mover(self, channel: Channel, timeout_seconds: float) -> None:
        """Wait for the mover of a session, or fall back if there will be none.

        Raises:
            DepotUnavailable: the depot or its mover is not ready within `timeout_seconds`.
            RemoteError: the depot refused the request.
        """
        try:
            await_mover(channel, timeout_seconds, self._deadline_seconds)
            self._ready_session = channel.session
        except MoverUnavailable as error:
            self.fall_back(f"no mover: {error}")

    def fall_back(self, why: str) -> None:
        """Begin a new session, in which the worker copies by itself."""
        with self._falling_back:
            if self.transfer_mode == DIRECT:
                return
            registration = msgspec.structs.replace(
                self._registration, transfer_mode=DIRECT, offer=None, fallback=why[:1024]
            )
            # In this order: once only this process's streams wait, no mover may copy.
            self._register_as(registration)
            self._registration = registration
            self._own_copier.waits_on_host = False
        logger.warning("the worker copies by itself from now on: %s", why)

    def end_movers(self) -> None:
        """End the movers of all sessions, so that no other process has the device's memory open."""
        for session in self._moved_sessions:
            session.end_movers()

    def copies_here(self, session: Session) -> bool:
        """See `CopyRoute`."""
        return not (isinstance(session.registration, m.RegisterKVCache) and session.registration.offer is not None)

    def opened(self, session: Session) -> None:
        """See `CopyRoute`."""
        earlier = [moved for moved in self._moved_sessions if moved is not session and moved.has_movers()]
        if self.copies_here(session):
            # Drop earlier sessions, as each keeps its pool mapped.
            self._moved_sessions, self._ready_session = earlier, None
        else:
            self._moved_sessions = [*earlier, session]
            self._patient_until = time.monotonic() + self._deadline_seconds

    def prepare(self, channel: Channel) -> None:
        """See `CopyRoute`."""
        if self.copies_here(channel.session) or self._ready_session is channel.session:
            return
        wait_seconds = max(0.0, self._patient_until - time.monotonic())
        self._with_mover(lambda: await_mover(channel, wait_seconds, self._deadline_seconds))
        self._ready_session = channel.session

    def store(self, channel: Channel, batch: CopyBatch) -> bytes | None:
        """See `CopyRoute`."""
        if self.copies_here(channel.session):
            return super().store(channel, batch)
        self._move(Direction.STORE, channel, batch)
        return None

    def begin_retrieve(self, channel: Channel, batch: CopyBatch) -> Callable[[], bytes | None] | None:
        """See `CopyRoute`. A mover does one retrieve at a time, so this returns when its copy has ended."""
        if self.copies_here(channel.session):
            return super().begin_retrieve(channel, batch)
        self._move(Direction.RETRIEVE, channel, batch)
        return None

    def _move(self, direction: Direction, channel: Channel, batch: CopyBatch) -> None:
        """See `kvdepot_cuda.move.move`."""
        try:
            self.is_mover_warm = self._with_mover(lambda: move(channel, direction, batch, self._deadline_seconds))
        except DepotUnavailable:
            self._ready_session = None
            self.is_mover_warm = False
            self._patient_until = time.monotonic() + self._deadline_seconds
            raise

    def _with_mover(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except MoverUnavailable as error:
            self.fall_back(f"no mover: {error}")
            raise
