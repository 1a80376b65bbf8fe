"""`XpuTransferContext`: a worker whose KV cache lies in the memory of an Intel GPU.

No memory handle of such a device can be opened in another process, so the worker copies, on the best of three paths
that is found to work when the context is made. The protocol with the depot is in `kvdepot.client.transfers`.

Order: a store reads its blocks after `ready`, or, if none is given, after what the submitting thread's stream has at
the time of the call; a retrieve always comes after that, as the engine may still read or clear the blocks. The thread
that copies waits for it on the host: the streams and queues of the copies have no order with the engine's.
"""

import enum
import importlib
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Final

from kvdepot.backends import CacheGroup, ReadyEvent
from kvdepot.client.connection import Link
from kvdepot.client.transfers import BATCH_BYTES, WorkerTransfers, detail_of, layer_group_of
from kvdepot.copying.staged.arrays import page_layout_of, tensors_of
from kvdepot.copying.staged.bridge import Bridge
from kvdepot.copying.staged.copy import StagedCopier
from kvdepot.errors import BackendUnavailable, ConfigError, LayoutError
from kvdepot.layout import CacheLayout, GroupKind, default_chunk_tokens
from kvdepot.pool.files import PoolMapping
from kvdepot.wire import messages as m
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


class XpuTransferContext(WorkerTransfers):
    """Moves blocks between an engine's KV cache on an Intel GPU and the depot.

    Construct it where the cache is registered: after it is allocated, on the thread and stream that compute, before the
    first request. Block 0 of each tensor is written and restored.

    Args as in `Backend.create_context`; `groups` may have a `(keys, values)` tuple for each layer, and:
        path: "registered", "staged" or "synchronous" for that one or none; None for the best that works.
        synchronous: transfer on the caller's thread.
        batch_bytes: how much of a run is asked for at once.
        staging_bytes: of one staging slot, at most; four are on the host, and two buffers of that size on the device.
        max_blocks: how many blocks are staged at once, at most.
        device_type: what torch calls the device; for tests on a pretend one.

    Raises:
        LayoutError: the tensors are not what they are said to be, or cannot be seen as bytes.
        BackendUnavailable: the path that was asked for does not work; the text says why.
        ConfigError: no such path.
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
        path: str | None = None,
        synchronous: bool = False,
        batch_bytes: int = BATCH_BYTES,
        staging_bytes: int = STAGING_BYTES,
        max_blocks: int = MAX_BLOCKS,
        device_type: str = "xpu",
    ) -> None:
        wanted = _path(path)
        if chunk_tokens is None:
            chunk_tokens = default_chunk_tokens(g.block_tokens for g in groups if g.kind is not GroupKind.RECURRENT)
        tensors = [tensors_of(group) for group in groups]
        layout = CacheLayout(
            tuple(
                layer_group_of(group, [page_layout_of(tensor, device_type) for tensor in each])
                for group, each in zip(groups, tensors, strict=True)
            ),
            chunk_tokens, dtype, format,
        )  # fmt: skip
        index = _index_of(tensor for each in tensors for tensor in each)
        self._bridge: Final = _load_bridge(device_type, pins=wanted is not Path.SYNCHRONOUS)
        self._device: Final = self._bridge.torch.device(device_type, index)
        self._mapping: PoolMapping | None = None
        self._registered: RegisteredCopier | None = None
        with self._bridge.module.device(index):
            self._staged = StagedCopier(
                self._bridge, layout, tensors, max_blocks=max_blocks, staging_bytes=staging_bytes, follows=False,
                needs_pinned=True,
            )  # fmt: skip
            try:
                self._choose(wanted, layout, tensors, index)
            except BaseException:
                self._staged.close()
                raise
        registration = m.RegisterKVCache(
            m.PROTOCOL_VERSION, instance, rank, world_size, f"{device_type}:{index}", str(self.path), model,
            m.spec_of(layout),
            tuple(
                detail_of(group, layer_group, dtype, each[0].shape)
                for group, layer_group, each in zip(groups, layout.groups, tensors, strict=True)
            ),
        )  # fmt: skip
        super().__init__(
            registration, layout, self._registered or self._staged, url=url, deadline_seconds=deadline_seconds,
            synchronous=synchronous, batch_bytes=batch_bytes,
        )  # fmt: skip

    @property
    def path(self) -> Path:
        """How bytes move; while the pool is being registered, and once an operator has failed, they are staged."""
        if self._registered is not None and not self._registered.is_left:
            return Path.REGISTERED
        return Path.STAGED if self._staged.is_pinned else Path.SYNCHRONOUS

    @property
    def is_registered(self) -> bool:
        """Whether the whole pool is registered with the device now, so that blocks go straight."""
        return self._registered is not None and self._registered.is_registered

    def _choose(self, wanted: Path | None, layout: CacheLayout, tensors: Sequence[Sequence[Any]], index: int) -> None:
        reason = ""
        if wanted in (None, Path.REGISTERED):
            try:
                kernels = Kernels(self._bridge.torch)
                self._registered = RegisteredCopier(self._bridge, kernels, layout, tensors, self._staged, index=index)
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

    # --- order ----------------------------------------------------------------------------------------------------

    def _ready_of(self, lane: int, ready: ReadyEvent | None) -> ReadyEvent | None:
        if lane == 0 and ready is not None:
            return ready
        try:
            event = self._bridge.module.Event()
            event.record(self._bridge.module.current_stream(self._device))
        except RuntimeError as error:
            return _Unordered(error)
        return event

    def _on_open(self, link: Link) -> None:
        super()._on_open(link)
        if self._registered is not None and link.mapping is not None and link.mapping is not self._mapping:
            self._mapping = link.mapping
            self._registered.attach(link.mapping, self._no_copy_running)


class _Unordered:
    """The engine's stream could not be marked: the transfer fails when it comes to it, which is a miss."""

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
