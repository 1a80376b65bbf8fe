"""Keeps a disk tier within its capacity, and 2 % of the file system free.

It evicts the least recently used entries: down to 90 % when the capacity is reached, or until the file system has
enough free space again. If other files take that space, or the folder cannot be written, it declines writes and logs
one line.
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
from kvdepot.tiers.disk.listing import FileIndex

logger = logging.getLogger(__name__)

_FILE_SYSTEM_FULL: Final = tier_counter(
    "file_system_full", "Writes that found the file system fuller than the tier's capacity"
)
_NO_SPACE: Final = tier_counter("no_space", "Entries not written because the storage had no space")
_NOT_EVICTED: Final = tier_counter("not_evicted", "Entries that could not be removed to make room")

_LOW_WATERMARK: Final = 0.9  # evict down to this share of the capacity, so that most writes need no eviction
_PATIENCE_SECONDS: Final = 10.0  # after evictions freed no space: more of them at once would empty the tier in vain
_QUIET_SECONDS: Final = 60.0  # between two log lines about declined writes, which come with every store
_VICTIMS_AT_ONCE: Final = 64  # files; then other threads get the lock
_MOST_STUCK: Final = 16  # entries that cannot be removed, per attempt: with more, the file system is at fault


class Capacity:
    """Makes room for files.

    Args:
        folder: contains the files.
        entries: the tier's index.
        capacity_bytes: the limit for all files.
        remove: removes an entry and its file. It raises `OSError` if the file stays.
        counters: the counters of the tier.
    """

    def __init__(
        self,
        folder: Folder,
        entries: FileIndex,
        capacity_bytes: int,
        remove: Callable[[bytes], None],
        counters: Counts,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.lock = threading.Lock()  # held while evicting and while opening the folder
        self._folder = folder
        self._entries = entries
        self._remove = remove
        self._counters = counters
        self._coming_bytes = 0  # reserved for files that are being written
        self._coming_lock = threading.Lock()
        self._patient_until = 0.0
        self._is_declining = False  # whether that was logged
        self._quiet_until = 0.0

    def reserve(self, size: int) -> bool:
        """Reserve `size` bytes until `release`, evicting if needed. Return False if that is impossible. Needs `lock`.

        Raises:
            OSError: victims cannot be removed.
        """
        entries = self._entries
        missing = self._folder.missing_bytes(size)
        if missing > 0:
            self._counters[_FILE_SYSTEM_FULL] += 1
            # Other files take the space. Without this, the tier would evict everything, and the file system would still
            # be full.
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
            self._evict(int(_LOW_WATERMARK * self.capacity_bytes) - self._coming_bytes - size)
        if missing > 0 or self._is_too_much(size):
            return False
        with self._coming_lock:
            self._coming_bytes += size
        return True

    def release(self, size: int) -> None:
        """End a reservation: the file was written and is counted, or the write failed."""
        with self._coming_lock:
            self._coming_bytes -= size

    def no_space(self, size: int) -> None:
        """Evict after a write unexpectedly found no space, because of a quota or other files."""
        self._counters[_NO_SPACE] += 1
        with self.lock:
            if self._entries.used_bytes < 2 * size or time.monotonic() < self._patient_until:
                self.decline("no space is left, and evicting does not help")
                return
            self._patient_until = time.monotonic() + _PATIENCE_SECONDS  # ends early when a write succeeds
            self._evict(self._entries.used_bytes - 2 * size)

    def shrink(self) -> None:
        """Evict if the tier is larger than its capacity.

        Raises:
            OSError: victims cannot be removed.
        """
        if self._entries.used_bytes > self.capacity_bytes:
            with self.lock:
                self._evict(int(_LOW_WATERMARK * self.capacity_bytes))

    def decline(self, why: str) -> None:
        """Log that writes are declined, but only once until a write succeeds."""
        if not self._is_declining and time.monotonic() >= self._quiet_until:
            logger.error("%s: declining writes, still serving stored entries: %s", self._folder.path, why)
            self._is_declining = True
            self._quiet_until = time.monotonic() + _QUIET_SECONDS

    def was_written(self) -> None:
        """Note that a write succeeded."""
        self._patient_until = 0.0
        if self._is_declining:
            self._is_declining = False
            logger.warning("%s: accepting writes again", self._folder.path)

    def _is_too_much(self, size: int) -> bool:
        return self._entries.used_bytes + self._coming_bytes + size > self.capacity_bytes

    def _evict(self, target_bytes: int) -> None:
        """Remove entries until at most `target_bytes` are left. The caller holds `lock`.

        Raises:
            OSError: the folder is read-only, or too many entries cannot be removed.
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
                    entries.use(key)  # move it out of the way, and evict others
                else:
                    self._counters[EVICTED] += 1
