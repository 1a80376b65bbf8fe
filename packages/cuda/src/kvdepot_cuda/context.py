"""`CudaTransferContext`: a worker whose KV cache lies in the memory of a CUDA device.

In mode `direct` the worker's own process registers the depot's pool with its device and copies on two streams of low
priority, one for stores and one for retrieves. In mode `ipc` it hands the depot handles of its memory, and a process
of the depot, its mover, copies on streams of its own. The protocol with the depot is in `kvdepot.client.transfers` and,
for movers, `kvdepot.movers.client`; the copies of both are in `kvdepot_cuda.copy`. `auto` is `ipc` until that turns out
to be impossible, or slower (`probation`), and then `direct`: the worker registers again, with the reason.

Order: a store reads its blocks after `ready`, or, if none is given, after what the engine's stream has at the time of
the call. A retrieve always comes after what that stream has then, which may still read or clear the blocks. In mode
`direct` both waits are the device's own and no thread waits for the engine. In mode `ipc` the thread of the transfer
does, before it asks for anything: no event is shared between processes. Which stream that is says `stream`.
"""

import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec.structs

from kvdepot.backends import CacheGroup, ReadyEvent
from kvdepot.client.connection import Channel, Link
from kvdepot.client.transfers import BATCH_BYTES, CopyBatch, WorkerTransfers, detail_of, layer_group_of
from kvdepot.errors import BackendUnavailable, ConfigError, DepotUnavailable, ErrorCode, RemoteError
from kvdepot.layout import CacheLayout, GroupKind, default_chunk_tokens
from kvdepot.movers.client import MoverUnavailable, await_mover, move
from kvdepot.pool.files import PoolMapping
from kvdepot.wire import messages as m
from kvdepot_cuda import watchdog
from kvdepot_cuda.arrays import ordinal_of, page_layout_of
from kvdepot_cuda.copy import BATCH_RUNS, PIECE_BYTES, CopyEngine
from kvdepot_cuda.driver import Driver, DriverError, OpenDriver
from kvdepot_cuda.export import MOVER, offer_of
from kvdepot_cuda.gather import KERNEL_PROGRAMS, KERNEL_RUNS, CompileGather, KernelUse, compile_gather
from kvdepot_cuda.nvidia import CudaDriver
from kvdepot_cuda.probation import Probation

logger = logging.getLogger(__name__)

DIRECT: Final = "direct"
IPC: Final = "ipc"
AUTO: Final = "auto"
_T = TypeVar("_T")


class CudaTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on a CUDA device and the depot.

    Args as in `Backend.create_context`, and:
        mode: who copies: "direct", the worker itself; "ipc", a mover of the depot; "auto", a mover as long as that is
            possible and not slower, else the worker.
        stream: returns the handle of the stream on which the engine writes and reads its cache, asked at each
            submission; None for torch's current stream if the tensors are torch's, else nothing is waited for but
            `ready`.
        synchronous: transfer on the caller's thread.
        batch_bytes: how much of a run is asked for at once.
        piece_bytes: how much of the pool is registered by one call of the driver.
        batch_runs: how many runs one call of the driver copies.
        register_when_asked: register the pool when the first blocks are copied, or when `start_registering` is called,
            for engines that capture graphs before they serve; else as soon as the depot is there.
        kernel_run_bytes: runs of at most so many bytes are retrieved by a kernel; 0: none.
        kernel_runs: if a call has at least so many of them.
        kernel_programs: thread blocks of the kernel.
        kernel_in_mover: a mover uses the kernel, too. None: with MPS only, as else the GPU runs either the mover's
            kernels or the model's; copies run beside both.
        compile_gather: makes that kernel.
        open_driver: opens the driver of a device by its number.
        mover: the entry point of the mover, where the depot runs.

    Raises:
        LayoutError: the tensors are not what they are said to be.
        BackendUnavailable: a device that cannot be used, or whose memory cannot be shared as mode "ipc" needs; the
            text has the driver's word.
        ConfigError: an option that cannot work.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        instance: str,
        *,
        dtype: str,
        rank: int = 0,
        world_size: int = 1,
        model: str = "",
        format: str = "",  # noqa: A002  # the field's word
        chunk_tokens: int | None = None,
        url: str | None = None,
        deadline_seconds: float = 2.0,
        mode: str = DIRECT,
        stream: Callable[[], int] | None = None,
        synchronous: bool = False,
        batch_bytes: int = BATCH_BYTES,
        piece_bytes: int = PIECE_BYTES,
        batch_runs: int = BATCH_RUNS,
        register_when_asked: bool = False,
        kernel_run_bytes: int = 0,
        kernel_runs: int = KERNEL_RUNS,
        kernel_programs: int = KERNEL_PROGRAMS,
        kernel_in_mover: bool | None = None,
        compile_gather: CompileGather = compile_gather,
        open_driver: OpenDriver = CudaDriver,
        mover: str = MOVER,
    ) -> None:
        if mode not in (DIRECT, IPC, AUTO):
            raise ConfigError(f"mode {mode!r}: there are {DIRECT!r}, {IPC!r} and {AUTO!r}")
        kernel = KernelUse(kernel_run_bytes, kernel_runs, kernel_programs)
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(g.block_tokens for g in groups if g.kind is not GroupKind.RECURRENT)
        layer_groups = [layer_group_of(group, list(map(page_layout_of, group.tensors))) for group in groups]
        layout = CacheLayout(tuple(layer_groups), chunk_tokens, dtype, format)
        ordinal = ordinal_of(tensor for group in groups for tensor in group.tensors)
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, f"cuda:{ordinal}", DIRECT, model, m.spec_of(layout),
            tuple(detail_of(*each, dtype, each[0].tensors[0].shape) for each in zip(groups, layer_groups, strict=True)),
        )  # fmt: skip
        self._stream = stream or _stream_of_torch(groups[0].tensors[0], ordinal)
        self._mapping: PoolMapping | None = None
        self._mode = mode
        self._ready_link: Link | None = None  # whose mover can be asked
        self._patient_until = 0.0  # that it is waited for: not by every transfer of a queue anew
        self._moved_links: list[Link] = []  # those with movers: the last one, and earlier ones whose movers still live
        self._is_mover_settled = False
        self._falling_back = threading.Lock()
        try:
            driver = open_driver(ordinal)
        except DriverError as error:
            raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
        try:
            self._engine = CopyEngine(
                driver, layout, [list(group.tensors) for group in groups],
                piece_bytes=piece_bytes, batch_runs=batch_runs, kernel=kernel, compile_gather=compile_gather,
                register_when_asked=register_when_asked,
            )  # fmt: skip
        except BaseException as error:
            with suppress(DriverError):
                driver.close()
            if isinstance(error, DriverError):
                raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
            raise
        try:
            if kernel_in_mover is None:
                kernel_in_mover = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
            registration = self._offer(registration, driver, layout, mover, kernel if kernel_in_mover else KernelUse())
        except BaseException:
            self._engine.close()
            raise
        self._probation: Probation | None = None
        if mode == AUTO and registration.offer is not None:
            self._probation = Probation(self._engine, self._no_copy_running)
        self._registration = registration
        super().__init__(
            registration, layout, self._engine,
            url=url, deadline_seconds=deadline_seconds, synchronous=synchronous, batch_bytes=batch_bytes,
        )  # fmt: skip
        self._engine.watch(self.device_hangs, watchdog.HANG_SECONDS)

    def start_registering(self) -> None:
        """Register the pool from now on: the engine has captured its graphs. See `register_when_asked`."""
        self._engine.start_registering()

    @property
    def num_registered(self) -> int:
        """Ranges of the pool that the device knows, pieces or parts of them; copies elsewhere are pageable."""
        return self._engine.num_registered

    @property
    def uses_kernel(self) -> bool:
        """Whether a kernel is loaded here that retrieves small pages; a mover's is its own affair."""
        return self._engine.uses_kernel

    @property
    def is_settled(self) -> bool:
        """Whether later copies will be no faster: who copies has the pool registered, as far as the driver takes it.

        Of a mover that is known from its last copy.
        """
        return self._engine.is_settled if self.transfer_mode == DIRECT else self._is_mover_settled

    @property
    def transfer_mode(self) -> str:
        """Who copies now: "direct" or "ipc"."""
        return self._registration.transfer_mode

    def wait_until_connected(self, timeout_seconds: float) -> None:
        """Wait for the depot, and in mode `ipc` for its mover.

        Raises:
            DepotUnavailable: not there within `timeout_seconds`; the text says why.
            BackendUnavailable: mode "ipc" was asked for and is impossible.
        """
        end = time.monotonic() + timeout_seconds
        while True:
            link = self._connection.wait_until_open(max(0.0, end - time.monotonic()))
            if self.transfer_mode == DIRECT or self._ready_link is link:
                return
            channel = self._connection.channel(link)
            try:
                await_mover(channel, max(0.0, end - time.monotonic()), self._deadline_seconds)
                self._ready_link = link
            except MoverUnavailable as error:
                if self._mode == IPC:
                    raise BackendUnavailable(
                        f"mode {IPC!r}: {error}; mode={AUTO!r} lets the worker copy by itself"
                    ) from error
                self._fall_back(f"no mover: {error}")
            except (DepotUnavailable, RemoteError) as error:  # the session may have ended meanwhile
                is_over = isinstance(error, RemoteError) and error.code not in (
                    ErrorCode.UNKNOWN_SESSION, ErrorCode.UNKNOWN_CONTEXT
                )  # fmt: skip
                if is_over or time.monotonic() >= end:
                    raise
            finally:
                channel.close()

    def close(self) -> None:
        """Finish what is running and leave the depot. Twice is harmless.

        No other process has the device's memory open after that: freeing it before would be undefined.
        """
        super().close()
        for link in self._moved_links:
            link.end_movers()

    # --- who copies -----------------------------------------------------------------------------------------------

    def _offer(
        self, registration: m.RegisterKVCache, driver: Driver, layout: CacheLayout, mover: str, kernel: KernelUse
    ) -> m.RegisterKVCache:
        """Return the registration with what the mode needs."""
        if self._mode == DIRECT:
            return registration
        try:
            offer = offer_of(driver, layout, mover, kernel)
        except DriverError as error:
            if self._mode == IPC:
                raise BackendUnavailable(
                    f"mode {IPC!r}: the memory of {registration.device} cannot be shared: {error};"
                    f" mode={AUTO!r} lets the worker copy by itself"
                ) from error
            logger.warning("the worker copies by itself, as its memory cannot be shared: %s", error)
            return msgspec.structs.replace(registration, fallback=f"memory that cannot be shared: {error}"[:1024])
        return msgspec.structs.replace(registration, transfer_mode=IPC, offer=offer)

    def _fall_back(self, why: str) -> None:
        """Copy by ourselves from the next session on, which begins at once."""
        with self._falling_back:
            if self.transfer_mode == DIRECT:
                return
            registration = msgspec.structs.replace(
                self._registration, transfer_mode=DIRECT, offer=None, fallback=why[:1024]
            )
            # In this order: who sees the new mode leaves waits to our streams, and no mover may copy after that.
            self._connection.register_as(registration)
            self._registration = registration
        logger.warning("the worker copies by itself from now on: %s", why)

    def _is_moved(self, link: Link) -> bool:
        """Whether a mover copies in this session."""
        return isinstance(link.registration, m.RegisterKVCache) and link.registration.offer is not None

    def _before(self, channel: Channel) -> None:
        if not self._is_moved(channel.link) or self._ready_link is channel.link:
            return
        wait_seconds = max(0.0, self._patient_until - time.monotonic())
        self._with_mover(lambda: await_mover(channel, wait_seconds, self._deadline_seconds))
        self._ready_link = channel.link

    def _copy_batch(self, lane: int, channel: Channel, batch: CopyBatch) -> None:
        if not self._is_moved(channel.link):
            super()._copy_batch(lane, channel, batch)
            return
        probation = self._probation if lane == 1 else None
        if probation is None:
            self._move(lane, channel, batch)
            return
        probation.retrieve(batch, lambda: self._move(lane, channel, batch))
        if probation.is_over:
            self._probation = None
            if probation.why_slower:
                self._fall_back(probation.why_slower)

    def _move(self, lane: int, channel: Channel, batch: CopyBatch) -> bool:
        """See `kvdepot.movers.client.move`."""
        try:
            settled = self._with_mover(lambda: move(channel, lane, batch, self._deadline_seconds))
        except DepotUnavailable:
            self._ready_link = None
            self._is_mover_settled = False
            self._patient_until = time.monotonic() + self._deadline_seconds
            raise
        self._is_mover_settled = settled
        return settled

    def _with_mover(self, ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except MoverUnavailable as error:
            if self._mode == AUTO:
                self._fall_back(f"no mover: {error}")
            raise

    # --- order ----------------------------------------------------------------------------------------------------

    def _ready_of(self, lane: int, ready: ReadyEvent | None) -> ReadyEvent | None:
        if self._stream is None or (lane == 0 and ready is not None):
            return ready
        try:
            return self._engine.mark(self._stream())
        except DriverError as error:
            return _Unordered(error)

    def _wait_for(self, lane: int, ready: ReadyEvent) -> None:
        if self.transfer_mode == DIRECT:
            self._engine.wait_for(lane, ready)
        else:
            self._engine.wait_here(ready)

    def _on_open(self, link: Link) -> None:
        probation = self._probation
        if probation is not None and any(moved is not link for moved in self._moved_links):
            with self._no_copy_running():
                probation.end()
        earlier = [moved for moved in self._moved_links if moved is not link and moved.has_movers()]
        if self._is_moved(link):
            self._moved_links = [*earlier, link]
            self._patient_until = time.monotonic() + self._deadline_seconds
            self._populated = link.mapping  # only the headers are read here, and checksums made
            super()._on_open(link)
            return
        self._moved_links, self._ready_link = earlier, None  # a link keeps its pool mapped
        super()._on_open(link)
        if link.mapping is not None and link.mapping is not self._mapping:
            self._mapping = link.mapping
            self._engine.attach(link.mapping, self._no_copy_running)


class _Unordered:
    """The engine's stream could not be marked: the transfer fails when it comes to it, which is a miss."""

    def __init__(self, error: DriverError) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


def _stream_of_torch(tensor: Any, ordinal: int) -> Callable[[], int] | None:
    if type(tensor).__module__.partition(".")[0] != "torch":
        return None
    current_stream = importlib.import_module("torch").cuda.current_stream
    return lambda: int(current_stream(ordinal).cuda_stream)
