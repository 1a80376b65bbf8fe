"""The room of a disk tier: at most its capacity, and never the last 2 % of the file system.

The least recently used entries are evicted: down to 90 % when the capacity is reached, or until the file system's free
space is above its limit again. If other files take that space, or the folder cannot be written, writes are declined and
one log line says so.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from kvdepot.config import format_size
from kvdepot.counting import Counts, tier_counter
from kvdepot.tiers.base import EVICTED
from kvdepot.tiers.disk.files import LEAST_FREE_SHARE, NOT_WRITABLE, Folder
from kvdepot.tiers.disk.listing import Entries

logger = logging.getLogger(__name__)

_FILE_SYSTEM_FULL: Final = tier_counter(
    "file_system_full", "Writes that found the file system fuller than the tier's capacity"
)
_NO_SPACE: Final = tier_counter("no_space", "Entries not written because the storage had no space")
_NOT_EVICTED: Final = tier_counter("not_evicted", "Entries that could not be removed to make room")

HIGH_WATERMARK: Final = 1.0  # of the capacity: above it, entries leave
LOW_WATERMARK: Final = 0.9  # down to here, so that most writes find room without evicting
_PATIENCE_SECONDS: Final = 10.0  # before the next try, after evicting freed no space in the file system
_QUIET_SECONDS: Final = 60.0  # between two log lines about declined writes
_VICTIMS_AT_ONCE: Final = 64  # files; between two pieces other threads get the lock
_MOST_STUCK: Final = 16  # entries that cannot be removed, while making room for one


class Capacity:
    """Makes room for files.

    Args:
        folder: contains them.
        entries: the index.
        capacity_bytes: limit for all files.
        remove: removes an entry with its file; raises `OSError` if the file stays.
        counters: those of the tier.
    """

    def __init__(
        self,
        folder: Folder,
        entries: Entries,
        capacity_bytes: int,
        remove: Callable[[bytes], None],
        counters: Counts,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()  # held to evict, and to open the folder
        self._folder = folder
        self._entries = entries
        self._remove = remove
        self._counters = counters
        self._coming_bytes = 0  # of files being written, for which other writers leave room
        self._coming_lock = threading.Lock()
        self._patient_until = 0.0
        self._is_declining = False  # and the log said so
        self._quiet_until = 0.0

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes, evicting if needed; `release` returns them. False if that is impossible. Needs `lock`.

        Raises:
            OSError: entries that should leave cannot be removed.
        """
        entries = self._entries
        missing = self._folder.missing_bytes(size)
        if missing > 0:
            self._counters[_FILE_SYSTEM_FULL] += 1
            if missing <= entries.used_bytes and time.monotonic() >= self._patient_until:
                self._evict(entries.used_bytes - missing)
                missing = self._folder.missing_bytes(size)
                if missing > 0:
                    self._patient_until = time.monotonic() + _PATIENCE_SECONDS
        if missing > 0:
            self.decline(
                f"other files fill its file system: {format_size(missing)} are missing to the {LEAST_FREE_SHARE:.0%} "
                "that stay free"
            )
        elif self._is_too_much(size):
            self._evict(int(LOW_WATERMARK * self.capacity_bytes) - self._coming_bytes - size)
        if missing > 0 or self._is_too_much(size):
            return False
        with self._coming_lock:
            self._coming_bytes += size
        return True

    def release(self, size: int) -> None:
        """End a reservation: the file exists and is counted, or the write failed."""
        with self._coming_lock:
            self._coming_bytes -= size

    def no_space(self, size: int) -> None:
        """Evict after a write unexpectedly found no space: there is a quota, or others just took it."""
        self._counters[_NO_SPACE] += 1
        with self.lock:
            if self._entries.used_bytes < 2 * size or time.monotonic() < self._patient_until:
                self.decline("no space is left, and evicting does not help")
                return
            self._patient_until = time.monotonic() + _PATIENCE_SECONDS  # or until a write succeeds
            self._evict(self._entries.used_bytes - 2 * size)

    def shrink(self) -> None:
        """Evict if the tier is larger than its capacity.

        Raises:
            OSError: entries that should leave cannot be removed.
        """
        if self._entries.used_bytes > self.capacity_bytes:
            with self.lock:
                self._evict(int(LOW_WATERMARK * self.capacity_bytes))

    def decline(self, why: str) -> None:
        """Log that writes are declined, once until a write succeeds."""
        if not self._is_declining and time.monotonic() >= self._quiet_until:
            logger.error("%s: writes are declined, stored entries are still served: %s", self._folder.path, why)
            self._is_declining = True
            self._quiet_until = time.monotonic() + _QUIET_SECONDS

    def was_written(self) -> None:
        """Note that a write succeeded."""
        self._patient_until = 0.0
        if self._is_declining:
            self._is_declining = False
            logger.warning("%s is written again", self._folder.path)

    def _is_too_much(self, size: int) -> bool:
        return self._entries.used_bytes + self._coming_bytes + size > HIGH_WATERMARK * self.capacity_bytes

    def _evict(self, target_bytes: int) -> None:
        """Remove entries until at most `target_bytes` are left; `lock` is held.

        Raises:
            OSError: the folder is read-only, or very many entries cannot be removed; a few are left where they are.
        """
        entries, num_stuck = self._entries, 0
        while entries.used_bytes > max(0, target_bytes) and len(entries):
            for key in entries.oldest(_VICTIMS_AT_ONCE):
                if entries.used_bytes <= max(0, target_bytes):
                    break
                try:
                    self._remove(key)
                except OSError as error:
                    num_stuck += 1
                    if error.errno in NOT_WRITABLE or num_stuck > _MOST_STUCK:
                        raise
                    self._counters[_NOT_EVICTED] += 1
                    entries.use(key)  # evict others
                else:
                    self._counters[EVICTED] += 1
