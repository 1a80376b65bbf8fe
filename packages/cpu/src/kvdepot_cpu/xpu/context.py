"""`XpuTransferContext`: a worker whose KV cache lies in the memory of an Intel GPU.

No memory handle of such a device can be opened in another process, so the worker copies, on the best of three paths
that is found to work when the context is made. `kvdepot.client.transfers` speaks
with the depot.

Order: a store reads its blocks after `ready`, or, if none is given, after what the submitting thread's stream has at
the time of the call; a retrieve always comes after that, as the engine may still read or clear the blocks. The thread
that copies waits for it on the host: the streams and queues of the copies have no order with the engine's.
"""

import enum
import importlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvdepot.backends import Copier, CopyBarrier, CopyBatch, Direction, KVCache, ReadyEvent
from kvdepot.client.transfers import TransferOptions, WorkerTransfers
from kvdepot.copying.staged.arrays import flattened, page_layout_of
from kvdepot.copying.staged.bridge import Bridge
from kvdepot.copying.staged.copy import StagedCopier
from kvdepot.errors import BackendUnavailable, ConfigError, LayoutError
from kvdepot.layout import CacheLayout
from kvdepot.pool.files import PoolMemory
from kvdepot_cpu.xpu.kernels import Kernels, NoKernels
from kvdepot_cpu.xpu.registered import RegisteredCopier

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 32 << 20
MAX_BLOCKS: Final = 256  # moved at once


class Path(enum.StrEnum):
    """How bytes move, from fast to slow."""

    REGISTERED = "registered"  # straight, by operators of vllm_xpu_kernels
    STAGED = "staged"  # gathered on the device, through pinned memory of the host, beside the caller
    SYNCHRONOUS = "synchronous"  # the same through pageable memory, each copy waited for


@dataclass(frozen=True, kw_only=True)
class XpuOptions(TransferOptions):
    """Options of an `XpuTransferContext`."""

    path: str | None = None  # "registered", "staged" or "synchronous": that one or none; None: the best that works
    staging_bytes: int = STAGING_BYTES  # limit of one staging slot: four on the host, two such buffers on the device
    max_blocks: int = MAX_BLOCKS  # staged at once, at most
    device_type: str = "xpu"  # torch's name of the device; another one for tests on a pretend device


class XpuCopier(Copier):
    """The `Copier` of an Intel GPU: on the best path that works, in order with the engine's stream.

    Args:
        cache: with its tensors one by one.
        layout: of the cache, without addresses.
        options: of the context.

    Raises:
        LayoutError: the tensors cannot be viewed as bytes, or are on several devices.
        BackendUnavailable: the path that the options name does not work; the text gives the reason.
        ConfigError: no such path.
    """

    def __init__(self, cache: KVCache, layout: CacheLayout, options: XpuOptions) -> None:
        wanted = _path(options.path)
        tensors = [group.tensors for group in cache.groups]
        self.index: Final = _index_of(tensor for each in tensors for tensor in each)
        self._bridge = _load_bridge(options.device_type, pins=wanted is not Path.SYNCHRONOUS)
        self._device = self._bridge.torch.device(options.device_type, self.index)
        self.registered: RegisteredCopier | None = None
        with self._bridge.module.device(self.index):
            self._staged = StagedCopier(
                self._bridge, layout, tensors, max_blocks=options.max_blocks, staging_bytes=options.staging_bytes,
                follows=False, needs_pinned=True,
            )  # fmt: skip
            try:
                self._choose(wanted, layout, tensors)
            except BaseException:
                self._staged.close()
                raise
        self._copier: Copier = self.registered or self._staged

    @property
    def path(self) -> Path:
        """How bytes move. While the pool is being registered, and once an operator has failed, they are staged."""
        if self.registered is not None and not self.registered.is_left:
            return Path.REGISTERED
        return Path.STAGED if self._staged.is_pinned else Path.SYNCHRONOUS

    def store(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        self._copier.store(batch)

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        self._copier.retrieve(batch)

    def mark_ready(self, direction: Direction, ready: ReadyEvent | None) -> ReadyEvent | None:
        """See `Copier`. Mark the engine's stream, except for a store with `ready`."""
        if direction is Direction.STORE and ready is not None:
            return ready
        try:
            event = self._bridge.module.Event()
            event.record(self._bridge.module.current_stream(self._device))
        except RuntimeError as error:
            return _Unordered(error)
        return event

    def attach(self, mapping: PoolMemory, barrier: CopyBarrier) -> None:
        """See `Copier`."""
        self._copier.attach(mapping, barrier)

    def close(self) -> None:
        """See `Copier`."""
        self._copier.close()

    def _choose(self, wanted: Path | None, layout: CacheLayout, tensors: Sequence[Sequence[Any]]) -> None:
        reason = ""
        if wanted in (None, Path.REGISTERED):
            try:
                kernels = Kernels(self._bridge.torch)
                self.registered = RegisteredCopier(
                    self._bridge, kernels, layout, tensors, self._staged, index=self.index
                )
            except NoKernels as error:
                reason = f"the pool cannot be registered with the device: {error}"
        if wanted is not None and self.path is not wanted:
            raise BackendUnavailable(
                f"path {wanted}: {reason or 'staging memory cannot be pinned'}; leave path out to take what works"
            )
        if self.path is Path.SYNCHRONOUS and wanted is None:
            logger.warning("staging memory for the XPU could not be pinned, each copy is waited for; and %s", reason)
        elif reason:
            logger.info("blocks are staged in pinned memory: %s", reason)


class XpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an Intel GPU and the depot.

    Construct it where the cache is registered: after it is allocated, on the thread and stream that compute, before the
    first request. Block 0 of each tensor is written and restored. The groups of the cache may have a `(keys, values)`
    tuple for each layer.

    Raises:
        LayoutError: the tensors do not fit their description, or cannot be viewed as bytes.
        BackendUnavailable: the path that the options name does not work; the text gives the reason.
        ConfigError: no such path.
    """

    def __init__(self, cache: KVCache, options: XpuOptions = XpuOptions()) -> None:  # frozen
        cache = flattened(cache)
        layout = cache.layout(lambda tensor: page_layout_of(tensor, options.device_type))
        self._paths = XpuCopier(cache, layout, options)
        registration = cache.registration(layout, f"{options.device_type}:{self._paths.index}", str(self.path))
        super().__init__(registration, layout, self._paths, options)

    @property
    def path(self) -> Path:
        """See `XpuCopier`."""
        return self._paths.path

    @property
    def is_registered(self) -> bool:
        """Whether the whole pool is registered with the device now, so that blocks go straight."""
        return self._paths.registered is not None and self._paths.registered.is_registered


class _Unordered:
    """Stands for a stream that could not be marked: the transfer fails when it waits for it, which is a miss."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def synchronize(self) -> None:
        raise self._error


def _path(name: str | None) -> Path | None:
    try:
        return None if name is None else Path(name)
    except ValueError as error:
        raise ConfigError(f"path {name!r}: there are {', '.join(Path)}") from error


def _index_of(tensors: Iterable[Any]) -> int:
    found = {int(tensor.device.index or 0) for tensor in tensors}
    if len(found) != 1:
        raise LayoutError(f"tensors on devices {sorted(found)}: a worker has one")
    return found.pop()


def _load_bridge(device_type: str, *, pins: bool) -> Bridge:
    torch: Any = importlib.import_module("torch")
    return Bridge(torch, device_type, getattr(torch, device_type), pins=pins)
