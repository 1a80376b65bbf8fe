"""The pool, made known to the device piece by piece, so that copies need no staging.

Registering is slow (reported: 0.1 s a GB) and delicate, so nothing waits for it and nothing depends on it: until a
piece is registered, or if the driver refuses it, its copies are pageable ones, correct and slower. Small pieces also
bound how long the driver's lock keeps others of the machine waiting.
"""

import logging
import threading

import numpy as np
import numpy.typing as npt

from kvdepot.pool import PoolMemory
from kvdepot.runs import Addresses
from kvdepot_cuda.driver import Driver, DriverError

logger = logging.getLogger(__name__)


class PoolRegistration:
    """One mapping of the pool in pieces, which it keeps alive until `close`.

    Args:
        driver: of the device.
        mapping: what to register.
        piece_bytes: of each piece but the last; a multiple of the page size.
    """

    def __init__(self, driver: Driver, mapping: PoolMemory, piece_bytes: int) -> None:
        self.mapping = mapping
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._is_registered = np.zeros(-(-mapping.size_bytes // piece_bytes), np.bool_)
        self._on_device = np.zeros(len(self._is_registered), np.uint64)  # where kernels find a piece, 0: nowhere

    @property
    def num_registered(self) -> int:
        """Pieces that are registered now."""
        return int(self._is_registered.sum())

    def covers(self, offsets: Addresses) -> npt.NDArray[np.bool_]:
        """Return for each offset in the pool whether its piece is registered."""
        return self._is_registered[(offsets // np.uint64(self._piece_bytes)).astype(np.int64)]

    def device_addresses(self, offsets: Addresses) -> Addresses:
        """Return for each offset in the pool where kernels find it, 0 where they cannot reach it."""
        pieces, rests = np.divmod(offsets, np.uint64(self._piece_bytes))
        bases = self._on_device[pieces.astype(np.int64)]
        return np.where(bases == 0, bases, bases + rests)

    def register(self, stop: threading.Event) -> None:
        """Register the pieces, until `stop` is set. One warning says what the driver refused."""
        refused: DriverError | None = None
        for number in range(len(self._is_registered)):
            if stop.is_set():
                return
            start = number * self._piece_bytes
            size = min(self._piece_bytes, self.mapping.size_bytes - start)
            try:
                with self._driver.activated():
                    self._driver.register_host(self.mapping.address + start, size)
            except DriverError as error:
                refused = error
            else:
                self._on_device[number] = self._device_address(start)
                self._is_registered[number] = True
        if refused is not None:
            logger.warning(
                "%d of %d pieces of the pool cannot be registered with the device, copies there are slower: %s",
                len(self._is_registered) - self.num_registered, len(self._is_registered), refused,
            )  # fmt: skip

    def _device_address(self, start: int) -> int:
        try:
            with self._driver.activated():
                return self._driver.device_address_of(self.mapping.address + start)
        except DriverError:  # no kernel reads it; copies do not need it
            return 0

    def close(self) -> None:
        """Unregister what is registered. Nothing may be copied here any more. Twice is harmless."""
        kept: list[DriverError] = []
        for number in np.flatnonzero(self._is_registered).tolist():
            self._is_registered[number] = False
            self._on_device[number] = 0
            try:
                with self._driver.activated():
                    self._driver.unregister_host(self.mapping.address + number * self._piece_bytes)
            except DriverError as error:
                kept.append(error)
        if kept:
            logger.warning("%d pieces of the pool stay registered with the device: %s", len(kept), kept[-1])
