"""`CudaTransferContext`: a worker whose KV cache lies in the memory of a CUDA device, and that copies by itself.

This is the mode `direct`: the worker's own process registers the depot's pool with its device and copies on two streams
of low priority, one for stores and one for retrieves. The protocol with the depot is in `kvdepot.client.transfers`, the
copies are in `kvdepot_cuda.copy`.

Order: a store reads its blocks after `ready`, or, if none is given, after what the engine's stream has at the time of
the call. A retrieve always comes after what that stream has then, which may still read or clear the blocks. Both waits
are the device's own; no thread waits for the engine. Which stream that is says `stream`.
"""

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from kvdepot import messages as m
from kvdepot.client.connection import Link
from kvdepot.client.transfers import BATCH_BYTES, WorkerTransfers, detail_of, layer_group_of
from kvdepot.errors import BackendUnavailable, ConfigError
from kvdepot.layout import CacheLayout, GroupKind, default_chunk_tokens
from kvdepot.pool import PoolMapping
from kvdepot.protocols import CacheGroup, ReadyEvent
from kvdepot_cuda.arrays import ordinal_of, page_layout_of
from kvdepot_cuda.copy import BATCH_RUNS, PIECE_BYTES, CopyEngine
from kvdepot_cuda.driver import DriverError, OpenDriver
from kvdepot_cuda.gather import KERNEL_PROGRAMS, KERNEL_RUNS, CompileGather, KernelUse, compile_gather
from kvdepot_cuda.nvidia import CudaDriver

DIRECT: Final = "direct"
_NOT_BUILT: Final = {
    "ipc": "copies by a process of the depot are not built yet",
    "auto": "there is only one mode yet",
}


class CudaTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on a CUDA device and the depot.

    Args as in `Backend.create_context`, and:
        mode: only "direct" is built.
        stream: returns the handle of the stream on which the engine writes and reads its cache, asked at each
            submission; None for torch's current stream if the tensors are torch's, else nothing is waited for but
            `ready`.
        synchronous: transfer on the caller's thread.
        batch_bytes: how much of a run is asked for at once.
        piece_bytes: how much of the pool is registered by one call of the driver.
        batch_runs: how many runs one call of the driver copies.
        kernel_run_bytes: runs of at most so many bytes are retrieved by a kernel; 0: none.
        kernel_runs: if a call has at least so many of them.
        kernel_programs: thread blocks of the kernel.
        compile_gather: makes that kernel.
        open_driver: opens the driver of a device by its number.

    Raises:
        LayoutError: the tensors are not what they are said to be.
        BackendUnavailable: a mode that is not built, or a device that cannot be used; the text has the driver's word.
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
        kernel_run_bytes: int = 0,
        kernel_runs: int = KERNEL_RUNS,
        kernel_programs: int = KERNEL_PROGRAMS,
        compile_gather: CompileGather = compile_gather,
        open_driver: OpenDriver = CudaDriver,
    ) -> None:
        _check_mode(mode)
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
        try:
            driver = open_driver(ordinal)
        except DriverError as error:
            raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
        try:
            self._engine = CopyEngine(
                driver, layout, [list(group.tensors) for group in groups],
                piece_bytes=piece_bytes, batch_runs=batch_runs, kernel=kernel, compile_gather=compile_gather,
            )  # fmt: skip
        except BaseException as error:
            with suppress(DriverError):
                driver.close()
            if isinstance(error, DriverError):
                raise BackendUnavailable(f"device cuda:{ordinal} cannot be used: {error}") from error
            raise
        super().__init__(
            registration, layout, self._engine,
            url=url, deadline_seconds=deadline_seconds, synchronous=synchronous, batch_bytes=batch_bytes,
        )  # fmt: skip

    @property
    def num_registered(self) -> int:
        """Pieces of the pool that the device knows; copies elsewhere are pageable."""
        return self._engine.num_registered

    @property
    def uses_kernel(self) -> bool:
        """Whether a kernel is loaded that retrieves small pages."""
        return self._engine.uses_kernel

    def _ready_of(self, lane: int, ready: ReadyEvent | None) -> ReadyEvent | None:
        if self._stream is None or (lane == 0 and ready is not None):
            return ready
        try:
            return self._engine.mark(self._stream())
        except DriverError as error:
            return _Unordered(error)

    def _wait_for(self, lane: int, ready: ReadyEvent) -> None:
        self._engine.wait_for(lane, ready)

    def _on_open(self, link: Link) -> None:
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


def _check_mode(mode: str) -> None:
    if mode in _NOT_BUILT:
        raise BackendUnavailable(f"mode {mode!r}: {_NOT_BUILT[mode]}; use mode={DIRECT!r}, in which the worker copies")
    if mode != DIRECT:
        raise ConfigError(f"mode {mode!r}: there is {DIRECT!r}")


def _stream_of_torch(tensor: Any, ordinal: int) -> Callable[[], int] | None:
    if type(tensor).__module__.partition(".")[0] != "torch":
        return None
    current_stream = importlib.import_module("torch").cuda.current_stream
    return lambda: int(current_stream(ordinal).cuda_stream)
