"""Registers the pool with the device piece by piece, so that copies need no staging.

A registration is slow (measured: 0.3 s per GiB) and can fail, so nothing waits for it or depends on it: until a piece
is registered, or if the driver refuses it, copies there are pageable, which is correct but slower. Small pieces also
bound the time for which the driver's lock blocks other processes, and one process of a pool registers at a time.

A worker registers the pieces that its copies touch, those with most bytes first. The depot keeps the extents of a part
together (`kvdepot.pool.extents`), so one of eight ranks registers an eighth of the pool. A pool of at most
`SMALL_POOL_BYTES` is registered whole.

When a device's memory is full, drivers refuse pieces at random (reported). So a refused piece is tried again in halves,
down to a **unit**. Registered ranges are always whole units, so a copy within one unit never crosses the end of a
registered range.
"""

import logging
import threading
import time
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.config import format_size
from kvdepot.copying.runs import Addresses, Runs
from kvdepot.pool.files import PoolMemory
from kvdepot_cuda.driver import Driver, DriverError

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 64 << 20  # smaller halves are not tried
SMALL_POOL_BYTES: Final = 64 << 30  # eight workers register it in 2.5 minutes; larger pools have arenas
_REST_SHARE: Final = 1 / 16  # of the time of a piece: lets the calls and processes in that waited for it
_PAGE_BYTES: Final = 4096  # of the host: drivers register whole pages
still_registered: Final[list[PoolMemory]] = []
"""Mappings that the driver has not released: while it may hold their pages, their addresses must not be reused."""


def unit_bytes_of(piece_bytes: int) -> int:
    """Return the unit: a piece, halved as long as halves are whole pages and at least `SMALLEST_BYTES`."""
    unit = piece_bytes
    while not unit % (2 * _PAGE_BYTES) and unit // 2 >= SMALLEST_BYTES:
        unit //= 2
    return unit


class PoolRegistration:
    """Registers one mapping of the pool in pieces. It keeps the mapping alive until `close` has succeeded.

    Args:
        driver: the device's driver.
        mapping: the mapping to register.
        piece_bytes: the size of all pieces but the last; a multiple of the page size.
    """

    def __init__(self, driver: Driver, mapping: PoolMemory, piece_bytes: int) -> None:
        self.mapping = mapping
        self.unit_bytes = unit_bytes_of(piece_bytes)
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._units_per_piece = piece_bytes // self.unit_bytes
        self._is_registered = np.zeros(-(-mapping.size_bytes // self.unit_bytes), np.bool_)
        # Device addresses of units, 0 for unregistered ones.
        self._on_device = np.zeros(len(self._is_registered), np.uint64)
        self._ranges: dict[int, int] = {}  # sizes of registered ranges by offset
        num_pieces = -(-mapping.size_bytes // piece_bytes)
        # By piece: the bytes that were copied there, and whether it was tried.
        self._heat = np.full(num_pieces, int(mapping.size_bytes <= SMALL_POOL_BYTES), np.uint64)
        self._is_tried = np.zeros(num_pieces, np.bool_)
        self._wanted = threading.Condition()
        self._stop = threading.Event()
        self._halves = True  # whether refused pieces are halved
        self._refused: DriverError | None = None
        self._refused_bytes = 0
        self._has_warned = False

    @property
    def num_registered(self) -> int:
        """The number of registered ranges: whole pieces, and parts of refused pieces."""
        return len(self._ranges)

    @property
    def is_idle(self) -> bool:
        """Whether all pieces that are wanted so far were tried."""
        with self._wanted:
            return self._next() is None

    def covers(self, offsets: Addresses) -> npt.NDArray[np.bool_]:
        """Return, for each offset in the pool, whether its unit is registered."""
        return self._is_registered[(offsets // np.uint64(self.unit_bytes)).astype(np.int64)]

    def device_addresses(self, offsets: Addresses) -> Addresses:
        """Return, for each offset in the pool, its device address, 0 if kernels cannot access it."""
        units, rests = np.divmod(offsets, np.uint64(self.unit_bytes))
        bases = self._on_device[units.astype(np.int64)]
        return np.where(bases == 0, bases, bases + rests)

    def want(self, runs: Runs) -> None:
        """Note copies outside registered memory. `register` registers their pieces soon."""
        pieces = (runs.offsets // np.uint64(self._piece_bytes)).astype(np.int64)
        with self._wanted:
            np.add.at(self._heat, pieces, runs.sizes)
            self._wanted.notify_all()

    def register(self) -> None:
        """Register pieces as they are wanted, until all were tried or `stop` is called."""
        while not self._stop.is_set() and not self._is_tried.all():
            began = time.monotonic()
            if self.register_next():
                self._stop.wait((time.monotonic() - began) * _REST_SHARE)
                continue
            with self._wanted:
                self._wanted.wait_for(lambda: self._stop.is_set() or self._next() is not None)

    def register_next(self) -> bool:
        """Register the wanted piece with most bytes. Return False if no piece is wanted.

        Refused pieces are halved as long as that helps: after a piece whose halves were all refused, pieces are not
        halved until another piece is accepted. When no more pieces are wanted, a warning names the refused bytes, once.
        """
        with self._wanted:
            piece = self._next()
        if piece is None:
            return False
        first = piece * self._units_per_piece
        last = min(first + self._units_per_piece, len(self._is_registered))
        error = self._register(first, last, halves=self._halves)
        self._halves = bool(self._is_registered[first:last].any())
        self._refused = error or self._refused
        with self._wanted:
            self._is_tried[piece] = True
            if error is not None and error.is_permanent:
                self._is_tried[:] = True
            is_last = self._next() is None
        if is_last and self._refused is not None and not self._has_warned and not self._stop.is_set():
            self._has_warned = True
            logger.warning(
                "cannot register %s of the pool's %s with the device, so copies there are slower: %s",
                format_size(self._refused_bytes),
                format_size(self.mapping.size_bytes),
                self._refused,
            )
        return True

    def stop(self) -> None:
        """Make `register` return after the piece that it is registering. Idempotent."""
        with self._wanted:
            self._stop.set()
            self._wanted.notify_all()

    def close(self) -> None:
        """Unregister all pieces. No copy may be running here any more, and no `register`. Idempotent.

        If the driver does not release a range, the mapping stays for the life of the process.
        """
        kept: list[DriverError] = []
        ranges, self._ranges = self._ranges, {}
        self._is_registered[:] = False
        self._on_device[:] = 0
        for start in ranges:
            try:
                with self._driver.activated():
                    self._driver.unregister_host(self.mapping.address + start)
            except DriverError as error:
                kept.append(error)
        if kept:
            still_registered.append(self.mapping)
            logger.warning("cannot unregister %d pieces of the pool from the device: %s", len(kept), kept[-1])

    def _next(self) -> int | None:
        """Return the wanted piece with most bytes that was not tried. Call this with `_wanted` held."""
        heat = np.where(self._is_tried, 0, self._heat)
        piece = int(np.argmax(heat))
        return piece if heat[piece] else None

    def _register(self, first: int, last: int, *, halves: bool) -> DriverError | None:
        """Register the units from `first` up to, not including, `last`. Return an error if some are refused."""
        if self._stop.is_set():
            return None
        start = first * self.unit_bytes
        size = min(last * self.unit_bytes, self.mapping.size_bytes) - start
        try:
            # One process at a time: otherwise a call of another process waits behind the pieces of all of them.
            with self.mapping.turn(self._stop), self._driver.activated():
                self._driver.register_host(self.mapping.address + start, size)
        except DriverError as error:
            if error.is_permanent or last - first == 1 or not halves:
                self._refused_bytes += size
                return error
            middle = (first + last + 1) // 2
            lower = self._register(first, middle, halves=True)
            if lower is not None and lower.is_permanent:
                return lower
            return self._register(middle, last, halves=True) or lower
        self._ranges[start] = size
        base = self._device_address(start)
        if base:
            units = np.arange(last - first, dtype=np.uint64)
            self._on_device[first:last] = np.uint64(base) + units * np.uint64(self.unit_bytes)
        self._is_registered[first:last] = True
        return None

    def _device_address(self, start: int) -> int:
        try:
            with self._driver.activated():
                return self._driver.device_address_of(self.mapping.address + start)
        except DriverError:  # then no kernel reads it; copies need no device address
            return 0
