"""Wakes the loop from other threads, and reports how much of the pool is allocated."""

import contextlib
import logging
import socket
from typing import Final

from kvdepot.config import format_size
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.files import PoolFiles, allocate_in_background
from kvdepot.tiers.opening import TierOpener

logger = logging.getLogger(__name__)

# Free space to allocate ahead of stores: the larger of both. The rest of a new pool is allocated slowly: zeroed at full
# speed, it made first requests take 2.7 times as long on two cores.
_AHEAD_BYTES: Final = 512 << 20
_AHEAD_SHARE: Final = 1 / 8


class Waker:
    """A socket pair that wakes the loop: `wake` makes `fileno` readable. Any thread or signal handler may call it."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_woken = False

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the loop. Further calls do nothing until `clear`."""
        if self._is_woken:
            return
        self._is_woken = True
        with contextlib.suppress(OSError):  # full, so that the loop wakes anyway; or closed
            self._writer.send(b"w")

    def clear(self) -> None:
        """Arm the next `wake`. Call this before looking for work."""
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(4096)
        self._is_woken = False

    def close(self) -> None:
        """Close both sockets."""
        self._reader.close()
        self._writer.close()


class ThreadResults:
    """Receives results of other threads: allocated memory of the pool, and opened tiers."""

    def __init__(
        self, files: PoolFiles, extents: ExtentAllocator, opener: TierOpener, waker: Waker, pool_name: str
    ) -> None:
        self._files = files
        self._extents = extents
        self._opener = opener
        self._waker = waker
        self._pool_name = pool_name
        self._ready_bytes = extents.ready_bytes
        self._error: OSError | None = None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there are results."""
        return self._waker.fileno()

    def start(self) -> None:
        """Start the thread that allocates the rest of the pool."""
        size, extents = self._files.size_bytes, self._extents
        ahead = max(_AHEAD_BYTES, int(size * _AHEAD_SHARE))
        if self._ready_bytes < size:
            allocate_in_background(
                self._files.pool_fd,
                self._ready_bytes,
                size,
                self._on_allocated,
                self._on_failure,
                lambda: self._ready_bytes - extents.used_bytes < ahead,
            )

    def take(self) -> None:
        """Take the available results."""
        self._waker.clear()
        self._opener.deliver()
        self._extents.grow(self._ready_bytes)
        if self._error is not None:
            self._extents.stop_growing()
            logger.error(
                "the pool stays at %s of %s: %s has no room left (%s); free memory there or lower --pool-size",
                format_size(self._ready_bytes),
                format_size(self._files.size_bytes),
                self._pool_name,
                self._error,
            )
            self._error = None

    def _on_allocated(self, ready_bytes: int) -> None:
        self._ready_bytes = ready_bytes
        self._waker.wake()

    def _on_failure(self, error: OSError) -> None:
        self._error = error
        self._waker.wake()
