"""The room that a disk tier takes: at most its capacity, and never the last 2 % of the file system.

The least recently used entries are evicted: down to 90 % when the capacity is reached, or until the file system's free
space is above its limit again. If other files take that space, or the folder cannot be written, writes are declined and
one log line says so.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Final

from kvdepot.config import format_size
from kvdepot.tiers.disk.files import LEAST_FREE_SHARE, NOT_WRITABLE, Folder
from kvdepot.tiers.disk.listing import Entries

logger = logging.getLogger(__name__)

HIGH_WATERMARK: Final = 1.0  # of the capacity: above it, entries leave
LOW_WATERMARK: Final = 0.9
_PATIENCE_SECONDS: Final = 10.0  # after evicting did not free space in the file system, before it is tried again
_QUIET_SECONDS: Final = 60.0  # between two log lines that say that writes are declined
_VICTIMS_AT_ONCE: Final = 64
_MOST_STUCK: Final = 16  # entries that cannot be removed, of those that are to make room for one


class Room:
    """Makes room for files.

    Args:
        folder: where they lie.
        entries: that are there.
        capacity_bytes: of all files.
        remove: removes an entry with its file; raises `OSError` if the file stays.
        counters: to count in.
    """

    def __init__(
        self,
        folder: Folder,
        entries: Entries,
        capacity_bytes: int,
        remove: Callable[[bytes], None],
        counters: Counter[str],
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()  # of who evicts, and of who opens the folder
        self._folder = folder
        self._entries = entries
        self._remove = remove
        self._counters = counters
        self._coming_bytes = 0  # of files that are being written, which other writers leave room for
        self._coming_lock = threading.Lock()
        self._patient_until = 0.0
        self._is_declining = False  # and the log says so
        self._quiet_until = 0.0

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes, evicting if needed; `release` returns them. False if that is impossible. Needs `lock`.

        Raises:
            OSError: entries that should leave cannot be removed.
        """
        entries = self._entries
        missing = self._folder.missing_bytes(size)
        if missing > 0:
            self._counters["file_system_full"] += 1
            if missing <= entries.used_bytes and time.monotonic() >= self._patient_until:
                self._evict(entries.used_bytes - missing)
                missing = self._folder.missing_bytes(size)
                if missing > 0:
                    self._patient_until = time.monotonic() + _PATIENCE_SECONDS
        if missing > 0:
            self.decline(
                f"{format_size(missing)} are missing to {LEAST_FREE_SHARE:.0%} of its file system, "
                "which stay free, and what others have there takes the space"
            )
        elif self._is_too_much(size):
            self._evict(int(LOW_WATERMARK * self.capacity_bytes) - self._coming_bytes - size)
        if missing > 0 or self._is_too_much(size):
            return False
        with self._coming_lock:
            self._coming_bytes += size
        return True

    def release(self, size: int) -> None:
        """Give back what was reserved: the file is there and counts by itself, or does not come."""
        with self._coming_lock:
            self._coming_bytes -= size

    def no_space(self, size: int) -> None:
        """Evict after a write that found no space although there seemed to be some: a quota, or it has just gone."""
        self._counters["no_space"] += 1
        with self.lock:
            if self._entries.used_bytes < 2 * size or time.monotonic() < self._patient_until:
                self.decline("there is no space, and evicting does not help")
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
        """Log once, until a write succeeds, that writes are declined."""
        if not self._is_declining and time.monotonic() >= self._quiet_until:
            logger.error("%s: writes are declined, entries that are there are still served: %s", self._folder.path, why)
            self._is_declining = True
            self._quiet_until = time.monotonic() + _QUIET_SECONDS

    def was_written(self) -> None:
        """Hear that a write succeeded."""
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
                    self._counters["not_evicted"] += 1
                    entries.use(key)  # others go
                else:
                    self._counters["evicted"] += 1
