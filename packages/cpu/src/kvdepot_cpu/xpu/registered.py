"""`RegisteredCopier`: blocks straight between an Intel GPU and the pool, which is registered with the device.

The fast path, where `vllm_xpu_kernels` offers it, above a `StagedCopier` that is always there. The staged one copies
until a thread has registered the pool, after each connection to a new depot, and for good once the device has refused
a piece or an operator has failed. A copy returns or raises only when the device is done.
"""

import contextlib
import logging
import mmap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdepot.backends import Copier, CopyBarrier, CopyBatch, Direction
from kvdepot.copying.runs import Addresses, BatchRuns, Runs, merge, split
from kvdepot.copying.staged.bridge import Bridge
from kvdepot.copying.staged.copy import StagedCopier
from kvdepot.layout import CacheLayout
from kvdepot.pool.files import PoolMemory
from kvdepot_cpu.xpu.kernels import ADDRESS_MASK, WAY_OUT, Kernels, NoKernels

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 1 << 30  # registered by one call; 4 GiB is said to be the most
CALL_BYTES: Final = 64 << 20  # of one batch, which takes as much pinned memory on its way to the device


class RegisteredCopier(Copier):
    """The `Copier` of an Intel GPU with `vllm_xpu_kernels`.

    Args:
        bridge: the device.
        kernels: its operators.
        layout: of the cache, without addresses.
        tensors: of each group, in the order of the layout's pages; kept alive.
        below: copies as long as this one cannot; owned by this object from now on.
        index: of the device.
        piece_bytes: how much of the pool is registered by one call; a multiple of `call_bytes`.
        call_bytes: how much one call copies.

    Raises:
        NoKernels: bytes copied by the operators do not arrive.
    """

    def __init__(
        self,
        bridge: Bridge,
        kernels: Kernels,
        layout: CacheLayout,
        tensors: Sequence[Sequence[Any]],
        below: StagedCopier,
        *,
        index: int = 0,
        piece_bytes: int = PIECE_BYTES,
        call_bytes: int = CALL_BYTES,
    ) -> None:
        self._bridge = bridge
        self._kernels = kernels
        self._keep_alive = tensors
        self._below = below
        self._index = index
        self._piece_bytes = piece_bytes
        self._call_bytes = call_bytes
        try:
            placed = [list(map(_address, group)) for group in tensors]
        except RuntimeError as error:
            raise NoKernels(f"the tensors do not say where they lie: {error}") from error
        self._runs = BatchRuns(_with_addresses(layout, placed))
        self._streams = (bridge.module.Stream(), bridge.module.Stream())  # by direction
        self._registration: _Registration | None = None
        self._registering: threading.Thread | None = None
        self._stop = threading.Event()
        self._is_closed = False
        self.is_left = False  # for good: the copier below does everything
        self._probe(tensors[0][0], placed[0][0])

    @property
    def is_registered(self) -> bool:
        """Whether the whole pool is registered now, so that copies go straight."""
        registration = self._registration
        return not self.is_left and registration is not None and registration.is_whole

    def store(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        if not self._has_moved(Direction.STORE, batch):
            self._below.store(batch)

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        if not self._has_moved(Direction.RETRIEVE, batch):
            self._below.retrieve(batch)

    def attach(self, mapping: PoolMemory, barrier: CopyBarrier) -> None:
        """See `Copier`. Register the new mapping and unregister the one before, on a thread."""
        if self._is_closed or self.is_left:
            return
        self._stop.set()
        stop, before = threading.Event(), self._registering

        def change() -> None:
            if before is not None:
                before.join()
            new = _Registration(self._kernels, mapping, self._piece_bytes)
            with barrier():
                old, self._registration = self._registration, new
            with self._bridge.module.device(self._index):
                if old is not None:
                    old.close()
                if not new.register(stop) and not stop.is_set():
                    self._leave(f"it refuses {new.refused_bytes >> 20} MiB of the pool")

        self._stop = stop
        self._registering = threading.Thread(target=change, name="kvdepot-register", daemon=True)
        self._registering.start()

    def close(self) -> None:
        """See `Copier`."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop.set()
        if self._registering is not None:
            self._registering.join()
        if self._registration is not None:
            with self._bridge.module.device(self._index):
                self._registration.close()
        self._keep_alive = ()
        self._below.close()

    # --- copies ---------------------------------------------------------------------------------------------------

    def _has_moved(self, direction: Direction, batch: CopyBatch) -> bool:
        """Move a batch. Return False if the copier below has to do it, or do it again."""
        registration = self._registration
        if not self.is_registered or registration is None or registration.mapping is not batch.mapping:
            return False
        runs = split(merge(self._runs.of(batch), self._runs.starts), self._call_bytes)
        try:
            for some in _calls(runs, self._call_bytes):
                pool = some.offsets + np.uint64(batch.mapping.address)
                sources, targets = (some.blocks, pool) if direction is Direction.STORE else (pool, some.blocks)
                self._issue(direction, sources, targets, some.sizes)
            self._wait(direction)
        except RuntimeError as error:
            with contextlib.suppress(RuntimeError):
                self._wait(direction)  # the caller may give blocks and extents away: nothing may be under way
            self._leave(str(error))
            return False
        return True

    def _issue(self, direction: Direction, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        with self._bridge.issuing(self._streams[direction]):
            self._kernels.copy(sources, targets, sizes)

    def _wait(self, direction: Direction) -> None:
        """Wait for the queued copies of a direction.

        Before the middle of August 2026 the operators queued on device 0 whatever device the memory was on.
        """
        self._streams[direction].synchronize()
        if self._index:
            self._bridge.module.synchronize(0)

    def _leave(self, reason: str) -> None:
        if not self.is_left:
            self.is_left = True
            logger.warning("the pool is not copied to and from the device directly any more, but staged: %s", reason)

    # --- probing --------------------------------------------------------------------------------------------------

    def _probe(self, tensor: Any, address: int) -> None:
        """Copy block 0 of `tensor` out of the device and other bytes into it; its own are restored."""
        first = tensor[:1]
        block = first.to("cpu")
        saved: npt.NDArray[np.uint8] = block.contiguous().view(self._bridge.torch.uint8).numpy().reshape(-1)
        memory: npt.NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, len(saved)), np.uint8)
        try:
            is_registered = self._kernels.register(memory.ctypes.data, len(memory))
        except RuntimeError as error:
            raise NoKernels(f"host memory cannot be registered ({error}): {WAY_OUT}") from error
        if not is_registered:
            raise NoKernels(f"the device refuses to register host memory, see torch's warning before this: {WAY_OUT}")
        host, device = (np.array([each], np.uint64) for each in (memory.ctypes.data, address))
        size = np.array([len(memory)], np.uint64)
        try:
            self._issue(Direction.STORE, device, host, size)
            self._wait(Direction.STORE)
            came_out = np.array_equal(memory, saved)
            memory[:] = ~saved
            self._issue(Direction.RETRIEVE, host, device, size)
            self._wait(Direction.RETRIEVE)
            arrived = first.to("cpu").contiguous().view(self._bridge.torch.uint8).numpy().reshape(-1)
            went_in = np.array_equal(arrived, ~saved)
        except RuntimeError as error:
            raise NoKernels(f"its operators fail here ({error}): {WAY_OUT}") from error
        finally:
            self._kernels.unregister(memory.ctypes.data)
            with self._bridge.torch.inference_mode():
                first.copy_(block)
        if not (came_out and went_in):
            raise NoKernels("bytes that its operators copy do not arrive; please report it with its version")


class _Registration:
    """One mapping of the pool in pieces, kept alive until `close`."""

    def __init__(self, kernels: Kernels, mapping: PoolMemory, piece_bytes: int) -> None:
        self.mapping = mapping
        self.is_whole = False
        self.refused_bytes = 0
        self._kernels = kernels
        self._piece_bytes = piece_bytes
        self._registered: list[int] = []

    def register(self, stop: threading.Event) -> bool:
        """Register all pieces, until `stop` is set or one is refused; return whether all are."""
        for start in range(0, self.mapping.size_bytes, self._piece_bytes):
            if stop.is_set():
                return False
            size = min(self._piece_bytes, self.mapping.size_bytes - start)
            try:
                is_registered = self._kernels.register(self.mapping.address + start, size)
            except RuntimeError as error:
                logger.warning("a piece of the pool cannot be registered with the device: %s", error)
                is_registered = False
            if not is_registered:
                self.refused_bytes = self.mapping.size_bytes - start
                return False
            self._registered.append(self.mapping.address + start)
        self.is_whole = True
        return True

    def close(self) -> None:
        """Unregister. Nothing may be copied here any more. Twice is harmless."""
        self.is_whole = False
        while self._registered:
            address = self._registered.pop()
            with contextlib.suppress(RuntimeError):
                if self._kernels.unregister(address):
                    continue
            logger.warning("a piece of the pool stays registered with the device")


def _address(tensor: Any) -> int:
    return int(tensor.data_ptr()) & ADDRESS_MASK


def _with_addresses(layout: CacheLayout, addresses: Sequence[Sequence[int]]) -> CacheLayout:
    groups = tuple(
        replace(group, pages=tuple(replace(page, address=at) for page, at in zip(group.pages, each, strict=True)))
        for group, each in zip(layout.groups, addresses, strict=True)
    )
    return replace(layout, groups=groups)


def _calls(runs: Runs, call_bytes: int) -> Iterator[Runs]:
    """Cut runs, none longer than `call_bytes`, into calls of at most that many bytes."""
    ends = np.cumsum(runs.sizes.astype(np.int64))
    start, before = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(ends, before + call_bytes, side="right"))
        yield runs.where(slice(start, stop))
        start, before = stop, int(ends[stop - 1])
