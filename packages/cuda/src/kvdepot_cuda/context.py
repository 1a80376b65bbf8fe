"""`CudaTransferContext`: the transfers of a worker whose KV cache is in the memory of a CUDA device.

In mode `direct`, the worker's own process registers the depot's pool with its device and copies on two low-priority
streams, one for stores and one for retrieves. In mode `ipc`, it passes memory handles to the depot, and a process of
the depot, the mover, copies on its own streams. `kvdepot.client.transfers` communicates with the depot,
`kvdepot.movers.client` with the mover. `kvdepot_cuda.copy` copies in both modes. If `ipc` turns out to be impossible,
the worker registers again as `direct`, with the reason.

`kvdepot_cuda.copy_route` describes the order relative to the engine's stream.
"""

import importlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import msgspec.structs

from kvdepot.backends import KVCache
from kvdepot.client.transfers import WorkerTransfers
from kvdepot.copying.arrays import device_index_of, page_layout_of
from kvdepot.errors import BackendUnavailable, DepotUnavailable, ErrorCode, RemoteError
from kvdepot.layout import CacheLayout
from kvdepot.wire import messages as m
from kvdepot_cuda import watchdog
from kvdepot_cuda.copy import CopyEngine
from kvdepot_cuda.copy_route import DIRECT, IPC, CudaOptions, MoverRoute
from kvdepot_cuda.driver import Driver, DriverError
from kvdepot_cuda.export import offer_of
from kvdepot_cuda.gather import CompileGather, has_triton

logger = logging.getLogger(__name__)


class CudaTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on a CUDA device and the depot.

    Raises:
        LayoutError: the tensors do not fit their description.
        BackendUnavailable: the device cannot be used; the text quotes the driver.
        ConfigError: an option is invalid.
    """

    def __init__(self, cache: KVCache, options: CudaOptions = CudaOptions()) -> None:  # noqa: B008  # frozen
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
        self._engine.watch(self.device_hangs, watchdog.HANG_SECONDS)

    @property
    def num_registered(self) -> int:
        """The number of ranges of the pool that are registered with the device. Copies elsewhere are pageable."""
        return self._engine.num_registered

    @property
    def uses_kernel(self) -> bool:
        """Whether this process has loaded the kernel that copies small pages. A mover has none."""
        return self._engine.uses_kernel

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
