"""`CopyEngine`: copies between one worker's device memory and the pool, on its own two streams.

There are several copy strategies, chosen per run by the kind of memory it is in: batches, if the pool is registered
with the device and the driver supports batches; single copies in stream order, if the driver does not; single pageable
copies, where the pool is not registered (yet). If a batch fails, the engine uses single copies at once and from then
on. If enabled, a kernel copies many small runs by one launch instead, in the stream of their direction. A kernel that
cannot be loaded or launched is not used again. Each such fallback logs one warning.

No result is reported or raised before the stream is synchronised. Otherwise a copy of a failed transfer could still be
running when its extents and blocks belong to others.
"""

import collections
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Final, TypeVar

from kvdepot.backends import Copier, CopyBarrier, CopyBatch, Direction, ReadyEvent, UnrecordedEvent
from kvdepot.copying.runs import Addresses, BatchRuns, Runs, merge, split
from kvdepot.errors import ConfigError
from kvdepot.layout import CacheLayout
from kvdepot.pool.files import PoolMemory
from kvdepot_cuda.driver import MAXIMUM_REGISTERED_BYTES, CopyKind, Driver, DriverError
from kvdepot_cuda.gather import CompileGather, Gather, runs_for_kernel
from kvdepot_cuda.images import KernelUnavailable
from kvdepot_cuda.registration import PoolRegistration, unit_bytes_of
from kvdepot_cuda.sums import DeviceSums, OpenSums
from kvdepot_cuda.watchdog import Watchdog

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 256 << 20  # registered in 0.08 s, for which the driver's lock blocks others (docs/devices.md)
BATCH_RUNS: Final = 4096  # per driver call
_KINDS: Final = (CopyKind.TO_HOST, CopyKind.TO_DEVICE)  # by direction
_PAGE_BYTES: Final = 4096  # of the host: drivers register whole pages
_T = TypeVar("_T")


class CopyEngine(Copier):
    """The `Copier` of a device.

    Args:
        driver: the device's driver. This object takes ownership of it.
        layout: the layout of the blocks.
        keep_alive: the owner of the blocks' memory.
        stream: returns the inference engine's stream. Transfers come after the work on it. None: only after `ready`.
        piece_bytes: the bytes of the pool that are registered per call.
        batch_runs: the runs per driver call.
        runs: computes the runs of a batch; None for those of `layout`, unchecked.
        compile_gather: compiles the kernel for small runs. Called once, on a thread of its own. None for no kernel.
        open_sums: opens the kernels that compute the checksums of stores, on the same thread. None for no such kernels.
        register_when_asked: register the pool after the first copy or `start_registering`, not at `attach`. Engines
            capture CUDA graphs before that, and captures were reported to fail or hang beside a registration.

    Raises:
        ConfigError: a size is invalid.
        DriverError: the streams cannot be created.
    """

    def __init__(
        self,
        driver: Driver,
        layout: CacheLayout,
        keep_alive: object,
        *,
        stream: Callable[[], int] | None = None,
        piece_bytes: int = PIECE_BYTES,
        batch_runs: int = BATCH_RUNS,
        runs: BatchRuns | None = None,
        compile_gather: CompileGather | None = None,
        open_sums: OpenSums | None = None,
        register_when_asked: bool = False,
    ) -> None:
        if piece_bytes % _PAGE_BYTES or not 0 < piece_bytes <= MAXIMUM_REGISTERED_BYTES:
            raise ConfigError(f"piece_bytes={piece_bytes}: a multiple of {_PAGE_BYTES}, at most 64 GiB")
        if batch_runs < 1:
            raise ConfigError(f"batch_runs={batch_runs}: at least 1")
        self.waits_on_host = False  # True if a mover copies, as its streams cannot wait for an event of this process
        self._driver = driver
        self._stream = stream
        self.keep_alive = keep_alive
        self._runs = runs or BatchRuns(layout)
        self._piece_bytes = piece_bytes
        self._unit_bytes = unit_bytes_of(piece_bytes)
        self._batch_runs = batch_runs
        self._takes_batches = driver.has_batch_copy
        self._compile_gather = compile_gather
        self._gathers: list[Gather] = []  # by direction
        self.uses_kernel = False  # whether the kernel is loaded and in use
        self._open_sums = open_sums
        self._sums: DeviceSums | None = None
        self.uses_sums = False  # whether the kernels of the checksums are loaded and in use
        self._loading: threading.Thread | None = None  # of the kernels
        self._registration: PoolRegistration | None = None  # of the mapping that copies use
        self._latest: PoolRegistration | None = None  # the same, or the one that will replace it
        self._registering: threading.Thread | None = None
        self._attaching = threading.RLock()
        self._may_register = not register_when_asked
        self._put_off: Callable[[], None] | None = None  # a deferred `attach`
        self._watchdog: Watchdog | None = None
        self._is_closed = False
        self._events: list[int] = []
        self._idle_events: collections.deque[int] = collections.deque()
        self._streams: list[int] = []  # by direction
        with driver.activated():
            for _ in Direction:
                self._streams.append(driver.create_stream())

    @property
    def num_registered(self) -> int:
        """The number of registered ranges of the pool: pieces, or parts of pieces that the driver refused."""
        return 0 if self._registration is None else self._registration.num_registered

    @property
    def is_warm(self) -> bool:
        """Whether the wanted pieces of the pool are registered and the kernel is loaded, as far as that is possible."""
        is_loading = self._loading is not None and self._loading.is_alive()
        found = self._registration
        return found is not None and found is self._latest and found.is_idle and not is_loading

    def watch(self, on_hang: Callable[[Direction, str], None], seconds: float) -> None:
        """From now on, fail and report a copy that does not return within `seconds`: see `Watchdog`."""
        self._watchdog = Watchdog(on_hang, seconds)

    # --- order ----------------------------------------------------------------------------------------------------

    def _mark(self, stream: int) -> "Mark":
        """Return a mark that stands for all the work that a stream has now."""
        try:
            event = self._idle_events.pop()
        except IndexError:
            event = self._driver.create_event()
            self._events.append(event)
        mark = Mark(event, self._idle_events)
        self._driver.record_event(event, stream)
        return mark

    def mark_ready(self, direction: Direction, ready: ReadyEvent | None) -> ReadyEvent | None:
        """See `Copier`. Mark the inference engine's stream, except for a store with `ready`."""
        if self._stream is None or (direction is Direction.STORE and ready is not None):
            return ready
        try:
            with self._driver.activated():
                return self._mark(self._stream())
        except DriverError as error:
            return UnrecordedEvent(error)

    def wait_for(self, direction: Direction, ready: ReadyEvent) -> None:
        """See `Copier`. Wait on the device if `ready` has a handle and this process copies, else in this thread."""
        if self.waits_on_host:
            self._wait_here(ready)
            return
        event = _event_of(ready)
        if not event:
            ready.synchronize()
            return
        with self._driver.activated():
            self._driver.wait_for_event(self._streams[direction], event)

    def _wait_here(self, ready: ReadyEvent) -> None:
        """Wait in this thread for `ready`.

        If it has a handle, wait by the driver, which lets graph captures continue.
        """
        event = _event_of(ready)
        if not event:
            ready.synchronize()
            return
        with self._driver.activated():
            self._driver.synchronize_event(event)

    # --- the pool -------------------------------------------------------------------------------------------------

    def attach(self, mapping: PoolMemory, barrier: CopyBarrier) -> None:
        """See `Copier`. Register the new mapping and unregister the previous one, on a thread.

        The first call also begins to load the kernel, on another thread, as its compiler may take seconds.
        """
        with self._attaching:
            if self._may_register:
                self._attach(mapping, barrier)
            else:
                self._put_off = lambda: self._attach(mapping, barrier)

    def start_registering(self) -> None:
        """Register attached mappings, and later ones, without waiting for a copy. Idempotent."""
        with self._attaching:
            self._may_register = True
            put_off, self._put_off = self._put_off, None
            if put_off is not None:
                put_off()

    def _attach(self, mapping: PoolMemory, barrier: CopyBarrier) -> None:
        if self._is_closed:
            return
        compile_gather, self._compile_gather = self._compile_gather, None
        open_sums, self._open_sums = self._open_sums, None
        if compile_gather is not None or open_sums is not None:
            loading = threading.Thread(
                target=self._load_kernels, args=(compile_gather, open_sums), name="kvdepot-kernel", daemon=True
            )
            loading.start()
            self._loading = loading
        if self._latest is not None:
            self._latest.stop()
        before, new = self._registering, PoolRegistration(self._driver, mapping, self._piece_bytes)
        self._latest = new

        def change() -> None:
            if before is not None:
                before.join()
            with barrier():
                old, self._registration = self._registration, new
            if old is not None:
                old.close()
            new.register()

        self._registering = threading.Thread(target=change, name="kvdepot-register", daemon=True)
        self._registering.start()

    # --- copies ---------------------------------------------------------------------------------------------------

    def store(self, batch: CopyBatch) -> bytes | None:
        """See `Copier`."""
        return self._move(Direction.STORE, batch)

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        self._move(Direction.RETRIEVE, batch)

    def begin_retrieve(self, batch: CopyBatch) -> Callable[[], None]:
        """See `Copier`. Each retrieve has its own event, so that the next one can be queued behind it."""

        def begin() -> Mark:
            runs = self._runs_of(batch)
            try:
                with self._driver.activated():
                    self._copy(Direction.RETRIEVE, batch, runs)
                    return self._mark(self._streams[Direction.RETRIEVE])
            except BaseException:
                self._synchronize(Direction.RETRIEVE)
                raise

        def wait() -> None:
            try:
                self._wait_here(mark)
            except DriverError:
                self._synchronize(Direction.RETRIEVE)  # no copy may be running afterwards
                raise

        mark = self._watched(Direction.RETRIEVE, begin)
        return lambda: self._watched(Direction.RETRIEVE, wait)

    def close(self) -> None:
        """See `Copier`. While a copy hangs in the driver, nothing is released; the end of the process does that."""
        if self._is_closed or (self._watchdog is not None and self._watchdog.has_hung_copy):
            return
        with self._attaching:
            self._is_closed = True
        if self._watchdog is not None:
            self._watchdog.close()
        if self._latest is not None:
            self._latest.stop()
        for thread in (self._registering, self._loading):  # a process that exits while one compiles may crash
            if thread is not None:
                thread.join()
        if self._registration is not None:
            self._registration.close()
        for kernel in (*self._gathers, self._sums):
            with contextlib.suppress(DriverError), self._driver.activated():
                if kernel is not None:
                    kernel.close()
        with contextlib.suppress(DriverError), self._driver.activated():  # nothing can be freed on a failed device
            for event in self._events:
                self._driver.destroy_event(event)
            for stream in self._streams:
                self._driver.destroy_stream(stream)
        with contextlib.suppress(DriverError):
            self._driver.close()

    def _move(self, direction: Direction, batch: CopyBatch) -> bytes | None:
        def move() -> bytes | None:
            runs = self._runs_of(batch)
            # Every call of the driver hands the interpreter's lock over, so one activation serves the whole batch.
            with self._driver.activated():
                try:
                    checksums = self._begin_sums(batch, runs) if direction is Direction.STORE else None
                    self._copy(direction, batch, runs)
                finally:
                    self._driver.synchronize_stream(self._streams[direction])
            return None if checksums is None else checksums()

        return self._watched(direction, move)

    def _watched(self, direction: Direction, work: Callable[[], _T]) -> _T:
        """Do work that calls the driver. Fail if the watchdog gave it up meanwhile."""
        if self._watchdog is None:
            return work()
        self._watchdog.begin(direction)
        try:
            result = work()
        finally:
            is_late = self._watchdog.end(direction)
        if is_late:  # the blocks of a store may belong to others by now
            self._synchronize(direction)
            raise DriverError(f"a {direction.name.lower()}", "returned after it was given up", is_permanent=True)
        return result

    def _synchronize(self, direction: Direction) -> None:
        with self._driver.activated():
            self._driver.synchronize_stream(self._streams[direction])

    def _runs_of(self, batch: CopyBatch) -> Runs:
        """Return the runs of a batch, none across the end of a piece. Begin a registration that waits for a copy."""
        if not self._may_register:
            self.start_registering()
        return split(merge(self._runs.of(batch), self._runs.starts), self._unit_bytes)

    def _copy(self, direction: Direction, batch: CopyBatch, runs: Runs) -> None:
        registration = self._registration
        if registration is None or registration.mapping is not batch.mapping:
            self._copy_singly(direction, batch, runs)
            return
        is_registered = registration.covers(runs.offsets)
        is_all = bool(is_registered.all())
        reachable = runs if is_all else runs.where(is_registered)
        if self.uses_kernel:
            reachable = self._launch_for(direction, registration, reachable)
        self._copy_in_batches(direction, batch, reachable)
        if not is_all:
            others = runs.where(~is_registered)
            registration.want(others)
            self._copy_singly(direction, batch, others)

    # --- kernels --------------------------------------------------------------------------------------------------

    def _load_kernels(self, compile_gather: CompileGather | None, open_sums: OpenSums | None) -> None:
        """Compile and load the kernels. Until then, DMA copies everything, and stores compute no checksums."""
        if compile_gather is not None:
            try:
                image = compile_gather(self._driver.capability)
                with self._driver.activated():
                    for _ in Direction:
                        self._gathers.append(Gather(self._driver, image, self._batch_runs))
                self.uses_kernel = True
            except (DriverError, KernelUnavailable, OSError) as error:
                logger.warning("DMA copies small pages, as the kernel for them cannot be loaded: %s", error)
        if open_sums is not None:
            try:
                self._sums = open_sums(self._driver)
                self.uses_sums = True
            except (DriverError, KernelUnavailable, OSError) as error:
                logger.warning("threads compute checksums, as the kernels for them cannot be loaded: %s", error)

    def _begin_sums(self, batch: CopyBatch, runs: Runs) -> Callable[[], bytes] | None:
        """Queue the computation of a store's checksums, in front of its copies. Return None if threads compute them."""
        if self._sums is None or not self.uses_sums or not batch.with_checksums:
            return None
        try:
            return self._sums.begin(batch, runs, self._streams[Direction.STORE])
        except DriverError as error:
            if error.is_permanent:
                raise
            self.uses_sums = False
            logger.warning("threads compute checksums from now on, as the kernels for them failed: %s", error)
            return None

    def _launch_for(self, direction: Direction, registration: PoolRegistration, runs: Runs) -> Runs:
        """Make the kernel copy the suitable runs. Return the others."""
        pool = registration.device_addresses(runs.offsets)
        chosen = runs_for_kernel(pool, runs.blocks, runs.sizes)
        if not chosen.any():
            return runs
        small = runs.where(chosen)
        sources, targets = _ends(direction, small.blocks, pool[chosen])
        try:
            self._gathers[direction].copy(sources, targets, small.sizes, self._streams[direction])
        except DriverError as error:
            if error.is_permanent:
                raise
            # The other direction may fail at the same time. Nothing is closed yet, as a launch may still be running.
            was_used, self.uses_kernel = self.uses_kernel, False
            if was_used:
                logger.warning("DMA copies small pages from now on, as the kernel for them failed: %s", error)
            return runs
        return runs.where(~chosen)

    # --- DMA ------------------------------------------------------------------------------------------------------

    def _copy_in_batches(self, direction: Direction, batch: CopyBatch, runs: Runs) -> None:
        for start in range(0, len(runs), self._batch_runs):
            some = runs.where(slice(start, start + self._batch_runs))
            if self._takes_batches:
                sources, targets = _ends(direction, some.blocks, some.offsets + batch.mapping.address)
                try:
                    self._driver.copy_batch(sources, targets, some.sizes, _KINDS[direction], self._streams[direction])
                    continue
                except DriverError as error:
                    if error.is_permanent:
                        raise
                    self._takes_batches = False
                    logger.warning("from now on, copies run one by one and slower, because a batch failed: %s", error)
            self._copy_singly(direction, batch, some)

    def _copy_singly(self, direction: Direction, batch: CopyBatch, runs: Runs) -> None:
        kind, stream, address = _KINDS[direction], self._streams[direction], batch.mapping.address
        columns = zip(runs.blocks.tolist(), runs.offsets.tolist(), runs.sizes.tolist(), strict=True)
        for block, offset, size in columns:
            source, target = (block, address + offset) if direction is Direction.STORE else (address + offset, block)
            self._driver.copy(source, target, size, kind, stream)


def _ends(direction: Direction, blocks: Addresses, pool: Addresses) -> tuple[Addresses, Addresses]:
    """Return the sources and the targets of copies."""
    return (blocks, pool) if direction is Direction.STORE else (pool, blocks)


def _event_of(ready: ReadyEvent) -> int:
    """Return the driver's handle of an event, 0 if it has none or is not recorded."""
    return int(getattr(ready, "cuda_event", 0) or 0)  # torch's name of the handle


class Mark:
    """A `ReadyEvent` that a `CopyEngine` recorded on the engine's stream. Only that `CopyEngine` waits for it."""

    __slots__ = ("_idle_events", "cuda_event")

    def __init__(self, event: int, idle_events: collections.deque[int]) -> None:
        self.cuda_event = event
        self._idle_events = idle_events

    def __del__(self) -> None:
        self._idle_events.append(self.cuda_event)  # no driver function, as any thread may collect the mark

    def synchronize(self) -> None:
        """Do not call this: `CopyEngine.wait_for` does."""
        raise NotImplementedError("a mark is waited for by its engine")
