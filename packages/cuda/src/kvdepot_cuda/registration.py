"""Registers the pool with the device piece by piece, so that copies need no staging.

A registration is slow (reported: 0.1 s per GB) and can fail, so nothing waits for it or depends on it: until a piece is
registered, or if the driver refuses it, copies there are pageable, which is correct but slower. Small pieces also bound
the time for which the driver's lock blocks other processes.

When a device's memory is full, drivers refuse pieces at random (reported). So a refused piece is tried again in halves,
down to a **unit**. Registered ranges are always whole units, so a copy within one unit never crosses the end of a
registered range.
"""

import logging
import threading
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdepot.config import format_size
from kvdepot.copying.runs import Addresses
from kvdepot.pool.files import PoolMemory
from kvdepot_cuda.driver import Driver, DriverError

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 64 << 20  # smaller halves are not tried
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
        self._units_per_piece = piece_bytes // self.unit_bytes
        self._is_registered = np.zeros(-(-mapping.size_bytes // self.unit_bytes), np.bool_)
        # Device addresses of units, 0 for unregistered ones.
        self._on_device = np.zeros(len(self._is_registered), np.uint64)
        self._ranges: dict[int, int] = {}  # sizes of registered ranges by offset

    @property
    def num_registered(self) -> int:
        """The number of registered ranges: whole pieces, and parts of refused pieces."""
        return len(self._ranges)

    def covers(self, offsets: Addresses) -> npt.NDArray[np.bool_]:
        """Return, for each offset in the pool, whether its unit is registered."""
        return self._is_registered[(offsets // np.uint64(self.unit_bytes)).astype(np.int64)]

    def device_addresses(self, offsets: Addresses) -> Addresses:
        """Return, for each offset in the pool, its device address, 0 if kernels cannot access it."""
        units, rests = np.divmod(offsets, np.uint64(self.unit_bytes))
        bases = self._on_device[units.astype(np.int64)]
        return np.where(bases == 0, bases, bases + rests)

    def register(self, stop: threading.Event) -> None:
        """Register the pieces, until `stop` is set. One warning lists the refused pieces.

        Refused pieces are halved as long as that helps: after a piece whose halves were all refused, pieces are not
        halved until another piece is accepted.

        Args:
            stop: checked between driver calls.
        """
        num_units = len(self._is_registered)
        refused: DriverError | None = None
        halves = True
        for first in range(0, num_units, self._units_per_piece):
            last = min(first + self._units_per_piece, num_units)
            refused = self._register(first, last, stop, halves=halves) or refused
            if stop.is_set():
                return
            if refused is not None and refused.is_permanent:
                break
            halves = bool(self._is_registered[first:last].any())
        if refused is not None:
            missing = self.mapping.size_bytes - sum(self._ranges.values())
            logger.warning(
                "cannot register %s of the pool's %s with the device, so copies there are slower: %s",
                format_size(missing),
                format_size(self.mapping.size_bytes),
                refused,
            )

    def close(self) -> None:
        """Unregister all pieces. No copy may be running here any more. Idempotent.

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

    def _register(self, first: int, last: int, stop: threading.Event, *, halves: bool) -> DriverError | None:
        """Register the units from `first` up to, not including, `last`. Return an error if some are refused."""
        if stop.is_set():
            return None
        start = first * self.unit_bytes
        size = min(last * self.unit_bytes, self.mapping.size_bytes) - start
        try:
            with self._driver.activated():
                self._driver.register_host(self.mapping.address + start, size)
        except DriverError as error:
            if error.is_permanent or last - first == 1 or not halves:
                return error
            middle = (first + last + 1) // 2
            lower = self._register(first, middle, stop, halves=True)
            if lower is not None and lower.is_permanent:
                return lower
            return self._register(middle, last, stop, halves=True) or lower
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
