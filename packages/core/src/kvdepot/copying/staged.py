"""Copies blocks between a device's memory and the pool: gathers and scatters on the device, stages in host memory.

A move of a store copies the block ids to the device, gathers every page into one buffer (`index_select`), copies the
buffer to a staging slot and records an event. After the event, the host copies the slot to the extents. A move of a
retrieve does the same backwards, with `index_copy_`. Each direction has two slots, so that the host copies one while
the device fills the other. The device touches only the staging slots, never the pool.

A transfer runs after the work that is on the engine's stream at submission: the submitting thread records an event
there, and the copying thread waits for it on the host.

If the device compiles each new shape (a Gaudi, for seconds), all its work has one of the shapes that `warm_up` has run.
Launching and waiting are separate: `Bridge.launch` starts deferred work and waits for nothing (a Gaudi's mark_step);
waiting for an event may launch nothing. So every hand-over is: work, launch, event, wait.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kvdepot.backends import Copier, CopyBatch, Direction, ReadyEvent, UnrecordedEvent
from kvdepot.copying.arrays import byte_view
from kvdepot.copying.moves import Bytes, Ids, StagedGroup, StagedMove, moves
from kvdepot.errors import LayoutError
from kvdepot.layout import CacheLayout

logger = logging.getLogger(__name__)

STAGING_BYTES: Final = 64 << 20  # limit of each of the four slots, unless one block is larger
_NUM_SLOTS: Final = 2  # one is filled while the device copies the other; a third would only wait


@dataclass(frozen=True, slots=True)
class Bridge:
    """torch, its module for the device, and the peculiarities of the device."""

    torch: Any
    device_type: str  # as in `torch.device`
    module: Any  # torch.hpu, torch.xpu: Stream, Event, stream, current_stream
    launch: Callable[[], object] = lambda: None  # starts work that the device's library has deferred; does not wait
    compiles_shapes: bool = False  # an operation on a new shape costs seconds
    index: int | None = None  # of the device; None: the current one

    def current_stream(self) -> Any:
        """Return the calling thread's stream of the device."""
        return self.module.current_stream() if self.index is None else self.module.current_stream(self.index)

    @contextlib.contextmanager
    def issuing(self, stream: Any) -> Generator[None]:
        """Issue work to `stream`, in inference mode: a cache made in that mode cannot be written outside it."""
        with self.torch.inference_mode(), self.module.stream(stream):
            yield

    def host_buffer(self, num_bytes: int) -> tuple[Any, bool]:
        """Return int8 memory of the host, and whether it is pinned.

        Some versions for some devices cannot pin memory, and some only claim to have pinned it. So ask, then check.
        """
        with contextlib.suppress(RuntimeError, TypeError):
            buffer = self.torch.empty(num_bytes, dtype=self.torch.int8, pin_memory=True)
            if buffer.is_pinned():
                return buffer, True
        return self.torch.empty(num_bytes, dtype=self.torch.int8), False


@dataclass(frozen=True, slots=True)
class _Slot:
    """One staging buffer with the ids of its blocks. The device owns it from the issue of the work to the event."""

    bytes_on_host: Bytes
    ids_on_host: Ids
    event: Any


@dataclass(frozen=True, slots=True)
class _Views:
    """The buffers of one direction in one shape."""

    ids: Any  # (num_blocks,) int64 on the device
    gathered: Any  # (num_blocks * block_size_bytes,) int8 on the device
    pages: tuple[Any, ...]  # of `gathered`: (num_blocks, page_size_bytes) each
    staged: tuple[Any, ...]  # by slot: like `gathered`, on the host
    staged_ids: tuple[Any, ...]


class _Buffers:
    """The stream, the device buffer and the two staging slots of one direction."""

    def __init__(self, bridge: Bridge, shapes: Sequence[StagedGroup]) -> None:
        torch = bridge.torch
        num_bytes = max(shape.largest * shape.block_size_bytes for shape in shapes)
        num_ids = max(shape.largest for shape in shapes)
        self.stream = bridge.module.Stream()
        self._shapes = shapes
        self._ids: Any = torch.zeros(num_ids, dtype=torch.int64, device=bridge.device_type)
        self._gathered: Any = torch.zeros(num_bytes, dtype=torch.int8, device=bridge.device_type)
        bridge.launch()
        buffers = [bridge.host_buffer(num_bytes) for _ in range(_NUM_SLOTS)]
        self._staged = [buffer for buffer, _ in buffers]
        self._staged_ids = [bridge.host_buffer(num_ids * 8)[0].view(torch.int64) for _ in range(_NUM_SLOTS)]
        self.is_pinned = all(pinned for _, pinned in buffers)
        self.slots: tuple[_Slot, ...] = tuple(
            _Slot(buffer.numpy().view(np.uint8), ids_on_host.numpy(), bridge.module.Event())
            for buffer, ids_on_host in zip(self._staged, self._staged_ids, strict=True)
        )
        self.views: dict[tuple[int, int], _Views] = {  # kept: on a Gaudi a view is part of a graph
            (number, bucket): self._make_views(number, bucket)
            for number, shape in enumerate(shapes)
            for bucket in shape.buckets
        }

    def views_of(self, move: StagedMove) -> _Views:
        """Return the buffers in the shape of a move."""
        if not self._shapes[move.group].buckets:
            return self._make_views(move.group, move.bucket)
        return self.views[move.group, move.bucket]

    def _make_views(self, group: int, num_blocks: int) -> _Views:
        pages: list[Any] = []
        start = 0
        for size in self._shapes[group].page_sizes_bytes:
            pages.append(self._gathered[start : start + num_blocks * size].view(num_blocks, size))
            start += num_blocks * size
        return _Views(
            self._ids[:num_blocks],
            self._gathered[:start],
            tuple(pages),
            tuple(each[:start] for each in self._staged),
            tuple(each[:num_blocks] for each in self._staged_ids),
        )

    def close(self) -> None:
        """Release the buffers."""
        self.views.clear()
        self.slots = ()
        self._ids = self._gathered = None
        self._staged, self._staged_ids = [], []


class StagedCopier(Copier):
    """The `Copier` of a device.

    Construct it on the engine's stream, before the engine computes. The constructor compiles every shape if needed, and
    checks that bytes written through the byte views arrive in the engine's tensors. Then it restores block 0 of each
    tensor.

    Args:
        bridge: the device.
        layout: where the blocks are.
        tensors: of each group, in the order of the layout's pages; kept alive.
        max_blocks: the most blocks of one move.
        staging_bytes: limit of each of the four staging slots and of each of the two buffers on the device.

    Raises:
        LayoutError: the tensors cannot be seen as bytes.
    """

    def __init__(
        self,
        bridge: Bridge,
        layout: CacheLayout,
        tensors: Sequence[Sequence[Any]],
        *,
        max_blocks: int,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._bridge = bridge
        self._shapes = [
            StagedGroup.of(group, layout.chunk_tokens, staging_bytes, max_blocks, in_buckets=bridge.compiles_shapes)
            for group in layout.groups
        ]
        self._pages = [[byte_view(tensor, bridge.torch.int8) for tensor in group] for group in tensors]
        compute = bridge.current_stream()  # the stream of the engine's work
        self._issuing = threading.Lock()  # lazy mode accumulates work of all threads: issue one move at a time
        self._stores, self._retrieves = (_Buffers(bridge, self._shapes) for _ in range(2))
        bridge.launch()
        self.is_pinned: Final = self._stores.is_pinned and self._retrieves.is_pinned
        if not self.is_pinned:  # copies between the device and pageable memory may not be asynchronous
            logger.warning("staging memory for %s could not be pinned: each copy is waited for", bridge.device_type)
        for direction in (self._stores, self._retrieves):
            direction.stream.wait_stream(compute)  # the work that made the cache and the buffers
        for number, group in enumerate(tensors):
            self._check(number, group)
        self.warm_up()

    def store(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        self._run(batch, self._stores, self._store_in_turns)

    def retrieve(self, batch: CopyBatch) -> None:
        """See `Copier`."""
        self._run(batch, self._retrieves, self._retrieve_in_turns)

    def mark_ready(self, direction: Direction, ready: ReadyEvent | None) -> ReadyEvent | None:
        """See `Copier`. Mark the engine's stream, except for a store with `ready`."""
        self._bridge.launch()  # only launched work can be waited for
        if direction is Direction.STORE and ready is not None:
            return ready
        try:
            event = self._bridge.module.Event()
            event.record(self._bridge.current_stream())
        except RuntimeError as error:
            return UnrecordedEvent(error)
        return event

    def close(self) -> None:
        """See `Copier`."""
        self._pages = []
        self._stores.close()
        self._retrieves.close()

    def warm_up(self) -> None:
        """Run every bucket once in both directions: read block 0 of every tensor, and write the same bytes back."""
        for number, shape in enumerate(self._shapes):
            for bucket in shape.buckets:
                move = StagedMove(number, bucket, np.zeros(bucket, np.int64), ())
                self._write_rows(move, self._read_rows(move))

    # --- a batch --------------------------------------------------------------------------------------------------

    def _run(self, batch: CopyBatch, direction: _Buffers, work: Callable[[CopyBatch, _Buffers, Bytes], None]) -> None:
        pool: Bytes = np.frombuffer(batch.mapping.pool, np.uint8)
        try:
            work(batch, direction, pool)
        except BaseException:
            # The caller may reuse the blocks and extents afterwards: wait for the work that was issued.
            with contextlib.suppress(RuntimeError), self._issue(direction):
                self._bridge.launch()
                direction.stream.synchronize()
            raise

    def _store_in_turns(self, batch: CopyBatch, direction: _Buffers, pool: Bytes) -> None:
        before: tuple[StagedMove, _Slot] | None = None
        for number, move in enumerate(moves(batch, self._shapes)):
            slot = self._gather(direction, move, number % _NUM_SLOTS)
            if before is not None:
                self._unload(*before, pool)
            before = move, slot
        if before is not None:
            self._unload(*before, pool)

    def _unload(self, move: StagedMove, slot: _Slot, pool: Bytes) -> None:
        slot.event.synchronize()
        move.to_pool(self._shapes[move.group], slot.bytes_on_host, pool)

    def _retrieve_in_turns(self, batch: CopyBatch, direction: _Buffers, pool: Bytes) -> None:
        used = 0
        for number, move in enumerate(moves(batch, self._shapes)):
            slot = direction.slots[number % _NUM_SLOTS]
            if number >= _NUM_SLOTS:
                slot.event.synchronize()  # the device may still read it
            shape = self._shapes[move.group]
            move.from_pool(shape, slot.bytes_on_host, pool)
            move.pad(shape, slot.bytes_on_host)
            self._scatter(direction, move, number % _NUM_SLOTS)
            used = min(number + 1, _NUM_SLOTS)
        for slot in direction.slots[:used]:
            slot.event.synchronize()

    # --- the device -----------------------------------------------------------------------------------------------

    def _gather(self, direction: _Buffers, move: StagedMove, number: int) -> _Slot:
        """Issue the copy of blocks to a slot."""
        views, slot = self._prepare(direction, move, number)
        index_select = self._bridge.torch.index_select
        with self._issue(direction):
            views.ids.copy_(views.staged_ids[number], non_blocking=self.is_pinned)
            for page, rows in zip(self._pages[move.group], views.pages, strict=True):
                index_select(page, 0, views.ids, out=rows)
            self._bridge.launch()  # so that the copy stays out of the compiled graph
            views.staged[number].copy_(views.gathered, non_blocking=self.is_pinned)
            self._bridge.launch()
            slot.event.record(direction.stream)
        return slot

    def _scatter(self, direction: _Buffers, move: StagedMove, number: int) -> _Slot:
        """Issue the copy of a slot to blocks."""
        views, slot = self._prepare(direction, move, number)
        with self._issue(direction):
            views.ids.copy_(views.staged_ids[number], non_blocking=self.is_pinned)
            views.gathered.copy_(views.staged[number], non_blocking=self.is_pinned)
            self._bridge.launch()
            for page, rows in zip(self._pages[move.group], views.pages, strict=True):
                page.index_copy_(0, views.ids, rows)
            self._bridge.launch()
            slot.event.record(direction.stream)
        return slot

    def _prepare(self, direction: _Buffers, move: StagedMove, number: int) -> tuple[_Views, _Slot]:
        slot = direction.slots[number]
        count = len(move.block_ids)
        slot.ids_on_host[:count] = move.block_ids
        slot.ids_on_host[count : move.bucket] = move.block_ids[-1]  # a gather's padding may be any block
        return direction.views_of(move), slot

    @contextlib.contextmanager
    def _issue(self, direction: _Buffers) -> Generator[None]:
        with self._issuing, self._bridge.issuing(direction.stream):
            yield

    # --- warming up and checking ----------------------------------------------------------------------------------

    def _read_rows(self, move: StagedMove) -> Bytes:
        slot = self._gather(self._stores, move, 0)
        slot.event.synchronize()
        return slot.bytes_on_host[: move.bucket * self._shapes[move.group].block_size_bytes].copy()

    def _write_rows(self, move: StagedMove, rows: Bytes) -> None:
        self._retrieves.slots[0].bytes_on_host[: len(rows)] = rows
        self._scatter(self._retrieves, move, 0).event.synchronize()

    def _check(self, number: int, tensors: Sequence[Any]) -> None:
        """Check that reads and writes of byte views reach the engine's tensors: a view may be a private copy."""
        move = StagedMove(number, 1, np.zeros(1, np.int64), ())
        saved = self._first_blocks(tensors)
        arrives = np.array_equal(self._read_rows(move), saved)
        if arrives:
            try:
                self._write_rows(move, ~saved)
                arrives = np.array_equal(self._first_blocks(tensors), ~saved)
            finally:
                self._write_rows(move, saved)
            arrives = arrives and np.array_equal(self._first_blocks(tensors), saved)
        if not arrives:
            raise LayoutError(
                f"group {number}: bytes copied through the int8 views do not arrive in the engine's tensors: on"
                f" {self._bridge.device_type}, torch copied instead of making a view, or a wait ended too early; please"
                " report it with the versions of torch and of the device's software"
            )

    def _first_blocks(self, tensors: Sequence[Any]) -> Bytes:
        """Return the bytes of block 0 of each tensor, without the byte views."""
        return np.concatenate([self._first_block(tensor) for tensor in tensors])

    def _first_block(self, tensor: Any) -> Bytes:
        with self._issuing:
            block = tensor[:1].to("cpu")
        return block.contiguous().view(self._bridge.torch.uint8).numpy().reshape(-1)
