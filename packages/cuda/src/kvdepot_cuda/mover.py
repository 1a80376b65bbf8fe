"""The mover of CUDA workers, `python -m kvdepot_cuda.mover`: opens a worker's IPC handles and copies for it.

The worker offers its memory by `offer_of`. The depot starts one mover per worker (`kvdepot.movers.child`). It needs
cuda-bindings and numpy, but not torch, and sees only the worker's device, which it finds by UUID. From the first copy
on, the pool is registered with the device in the background. `kvdepot_cuda.copy` copies.

A worker's claims about its memory are not trusted: each page must be within the opened allocation, as reported by the
driver, and each run is checked against the opened ranges and the pool before the first copy.
"""

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.backends import CopyBatch
from kvdepot.copying.runs import EXTENT_DTYPE, BatchRuns, Runs
from kvdepot.errors import LayoutError
from kvdepot.layout import CacheLayout, LayerGroup, PageLayout, Part, Plane
from kvdepot.movers.child import CopyNow, run_mover
from kvdepot.movers.protocol import Copy, CopyRefused, MoverError, Setup
from kvdepot.pool.files import PoolMemory
from kvdepot.wire.messages import MAXIMUM_ALLOCATIONS, MoverOffer, PagePlace, RegisterKVCache
from kvdepot_cuda.copy import PIECE_BYTES, CopyEngine
from kvdepot_cuda.driver import Driver, DriverError, OpenDriver
from kvdepot_cuda.nvidia import CudaDriver, see_only

MOVER: Final = "cuda"  # its entry point


def offer_of(driver: Driver, layout: CacheLayout, mover: str) -> MoverOffer:
    """Return the offer that lets a mover open the pages of `layout`.

    Tensors of one allocation share its handle, as a process opens each handle only once.

    Raises:
        DriverError: another process cannot open the memory, or a tensor crosses the end of its allocation.
    """
    numbers: dict[bytes, int] = {}

    def place_of(page: PageLayout) -> PagePlace:
        handle, base, num_bytes = driver.export_memory(page.address)
        if _last_byte_of(page) > base + num_bytes:
            raise DriverError("export_memory", "blocks beyond the end of their allocation", f"of {num_bytes} bytes")
        return PagePlace(numbers.setdefault(handle, len(numbers)), page.address - base, page.stride_bytes)

    with driver.activated():
        pages = tuple(tuple(map(place_of, group.pages)) for group in layout.groups)
    if len(numbers) > MAXIMUM_ALLOCATIONS:
        raise DriverError("export_memory", f"{len(numbers)} allocations", f"at most {MAXIMUM_ALLOCATIONS} are shared")
    return MoverOffer(mover, driver.uuid, tuple(numbers), pages)


class CheckedRuns(BatchRuns):
    """Computes runs, and checks that they are within the opened memory and the pool.

    Args:
        layout: the layout of the pages. Each is within one of the ranges.
        ranges: `(address, bytes)` of the opened allocations.
        pool_size_bytes: the size of the pool.
    """

    def __init__(self, layout: CacheLayout, ranges: Sequence[tuple[int, int]], pool_size_bytes: int) -> None:
        super().__init__(layout)
        self._layout = layout
        ordered = sorted(ranges)
        self._range_starts = np.array([start for start, _ in ordered], np.uint64)
        self._range_ends = np.array([start + size for start, size in ordered], np.uint64)
        self._pool_size_bytes = pool_size_bytes

    def of(self, batch: CopyBatch) -> Runs:
        """Return the runs of a batch, one per page.

        Raises:
            CopyRefused: a copy would access foreign memory, or the batch does not fit the cache.
        """
        self._check_batch(batch)
        runs = super().of(batch)
        if not len(runs):
            return runs
        places = np.searchsorted(self._range_starts, runs.blocks, "right").astype(np.int64) - 1
        inside = (places >= 0) & (runs.blocks + runs.sizes <= self._range_ends[np.maximum(places, 0)])
        inside &= runs.sizes <= np.uint64(self._pool_size_bytes)
        inside &= runs.offsets <= np.uint64(self._pool_size_bytes) - np.minimum(runs.sizes, self._pool_size_bytes)
        if not inside.all():
            wrong = int(np.argmin(inside))
            raise CopyRefused(
                f"{runs.sizes[wrong]} bytes at {runs.offsets[wrong]} of the pool and at {int(runs.blocks[wrong]):#x} of"
                " the device: not all of that is the pool's and the worker's"
            )
        return runs

    def _check_batch(self, batch: CopyBatch) -> None:
        records = np.frombuffer(batch.extents, EXTENT_DTYPE)
        for number, group in enumerate(self._layout.groups):
            mine = records[records["group"] == number]
            ids: npt.NDArray[np.int32] = np.asarray(batch.block_ids[number])
            if len(ids) and not (int(ids.min()) >= -1 and int(ids.max()) < group.num_blocks):
                raise CopyRefused(
                    f"block ids from {ids.min()} to {ids.max()}: group {number} has {group.num_blocks} blocks"
                )
            if not len(mine):
                continue
            chunks = mine["chunk"].astype(np.int64) - batch.first_covered[number]
            num_chunks, rest = divmod(len(ids), group.blocks_per_chunk(self._layout.chunk_tokens))
            if rest or not (int(chunks.min()) >= 0 and int(chunks.max()) < num_chunks):
                raise CopyRefused(f"{len(ids)} blocks of group {number} do not cover the chunks that are to be copied")
            for heads, layers in {*zip(mine["heads"].tolist(), mine["layers"].tolist(), strict=True)}:
                size = group.readable_bytes(Part.of(layers << 16 | heads), self._layout.chunk_tokens)
                of_part = mine[(mine["heads"] == heads) & (mine["layers"] == layers)]
                if not size or (of_part["num_bytes"] != size).any():
                    raise CopyRefused(f"the extents of group {number} are not {size} bytes of heads {heads:#x}")
        if int(records["group"].max(initial=0)) >= len(self._layout.groups):
            raise CopyRefused(f"there are extents of an unknown group: the cache has {len(self._layout.groups)} groups")


class CudaMover:
    """One worker's opened memory, and its copy engine.

    Args:
        driver: the driver of the worker's device. This object takes ownership of it.
        registration: the worker's registration, with an offer.
        pool: the pool, mapped in this process.
        piece_bytes: the bytes of the pool that are registered per call.

    Raises:
        DriverError: a handle cannot be opened.
        MoverError: the device or its memory differs from the worker's claims.
        LayoutError: the layout is impossible.
    """

    def __init__(
        self, driver: Driver, registration: RegisterKVCache, pool: PoolMemory, piece_bytes: int = PIECE_BYTES
    ) -> None:
        offer = registration.offer
        assert offer is not None
        if driver.uuid != offer.device:
            raise MoverError(f"the worker is on device {offer.device}, but the mover found {driver.uuid}")
        with driver.activated():
            ranges = [driver.open_memory(handle) for handle in offer.allocations]
        layout = _layout_of(registration, [address for address, _ in ranges])
        for group, places in zip(layout.groups, offer.pages, strict=True):
            for page, place in zip(group.pages, places, strict=True):
                start, size = ranges[place.allocation]
                if _last_byte_of(page) > start + size:
                    raise MoverError(
                        f"the worker offers {_last_byte_of(page) - start} bytes of an allocation, but the driver"
                        f" gives its size as {size}"
                    )
        self._pool = pool
        self._attach = threading.Lock()
        self._is_attached = False
        self._engine = CopyEngine(
            driver, layout, None, piece_bytes=piece_bytes, runs=CheckedRuns(layout, ranges, pool.size_bytes)
        )

    def copy(self, request: Copy) -> bool:
        """Copy until the bytes are in place. Return whether all possible parts of the pool are registered."""
        with self._attach:
            if not self._is_attached:
                self._is_attached = True
                self._engine.attach(self._pool, contextlib.nullcontext)
        batch = self._batch_of(request)
        if request.is_store:
            self._engine.store(batch)
        else:
            self._engine.retrieve(batch)
        return self._engine.is_warm

    def _batch_of(self, request: Copy) -> CopyBatch:
        try:
            block_ids = tuple(np.frombuffer(ids, "<i4") for ids in request.block_ids)
        except ValueError as error:
            raise CopyRefused(f"malformed block ids: {error}") from error
        return CopyBatch(
            self._pool,
            request.extents,
            block_ids,  # pyright: ignore[reportArgumentType]  # an array is a sequence for all that is done with it
            request.first_covered,
            request.skip_blocks,
        )


def open_mover(open_driver: OpenDriver, piece_bytes: int = PIECE_BYTES) -> Callable[[Setup, PoolMemory], CopyNow]:
    """Return a function that opens a worker's memory with this kind of driver."""

    def open_device(setup: Setup, pool: PoolMemory) -> CopyNow:
        offer = setup.registration.offer
        if offer is None:
            raise MoverError("the worker offers no memory", is_final=True)
        see_only(offer.device)
        try:
            return CudaMover(open_driver(0), setup.registration, pool, piece_bytes).copy
        except LayoutError as error:
            raise MoverError(f"impossible layout: {error}", is_final=True) from error
        except DriverError as error:
            raise MoverError(f"device {offer.device} or its memory cannot be opened by the depot: {error}") from error

    return open_device


def _layout_of(registration: RegisterKVCache, bases: list[int]) -> CacheLayout:
    """Return the layout of an offer, given the addresses of its allocations in this process.

    Raises:
        LayoutError: the offer is inconsistent.
    """
    offer = registration.offer
    assert offer is not None
    spec = registration.spec
    groups = tuple(
        LayerGroup(
            shape.kind,
            shape.row_tokens * detail.rows,
            tuple(
                PageLayout(bases[place.allocation] + place.offset, detail.num_blocks, size, place.stride_bytes)
                for place, size in zip(places, detail.page_sizes_bytes, strict=True)
            ),
            shape.window_tokens,
            Part.of(detail.part),
            Plane(shape.layers, shape.heads),
            detail.rows,
        )
        for shape, detail, places in zip(spec.groups, registration.details, offer.pages, strict=True)
    )
    return CacheLayout(groups, spec.chunk_tokens, spec.dtype, spec.format)


def _last_byte_of(page: PageLayout) -> int:
    """Return the end address of the last block."""
    return page.address + (page.num_blocks - 1) * page.stride_bytes + page.page_size_bytes


if __name__ == "__main__":
    run_mover(sys.argv[1:], open_mover(CudaDriver))
