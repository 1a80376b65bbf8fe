"""A tier on disk, `disk:///path?capacity=200GiB`: one file per entry, copied directly between pool and drive.

On a full or read-only file system, the tier opens and only reads. Several other errors in a row suspend it.
"""

import contextlib
import errno
import logging
import os
import shutil
import threading
from collections.abc import Container, Iterator, Sequence
from pathlib import Path
from typing import Final

from kvdepot.config import format_size
from kvdepot.counting import Counts, tier_counter
from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.disk import listing
from kvdepot.tiers.disk.capacity import Capacity
from kvdepot.tiers.disk.files import NO_ROOM, NOT_WRITABLE, PAGE, STORAGE_AWAY, Folder, round_up, size_on_disk
from kvdepot.tiers.keys import generation_of
from kvdepot.tiers.trailer import TRAILER_BYTES
from kvdepot.tiers.url import DEFAULT_THREADS, TierUrl

logger = logging.getLogger(__name__)

_NOT_WRITABLE: Final = tier_counter("not_writable", "Entries not written because the file system cannot be written")

_CLEARED_AT_ONCE: Final = 256  # files removed per step
_LEAST_SLOTS: Final = 2  # with one slot, the drive idles while the slot is passed on


class DiskTier(Tier):
    """A tier in its own folder.

    Args:
        pool: contains the extents.
        directory: created if needed.
        capacity_bytes: the limit for the disk space of all files.
        num_threads: the number of concurrent calls. All but one may be writes.

    Raises:
        ConfigError: the folder cannot be created or written, or another depot uses it. A full or read-only file system
            is no error: the tier serves its entries, and declines writes until one succeeds.
    """

    reads_apart = True
    contains_is_instant = True

    def __init__(
        self, pool: TierPool, directory: Path, capacity_bytes: int, num_threads: int = DEFAULT_THREADS
    ) -> None:
        self._pool = pool
        self._counters = Counts()
        self._entries = listing.FileIndex()
        # Concurrent writes share the drive's rate and so end together. If all of them then renamed files and computed
        # the next checksums, the drive would idle. Therefore one running write fewer than allowed moves bytes.
        self._folder = Folder(directory, max(_LEAST_SLOTS, num_threads - 2))
        self._capacity = Capacity(self._folder, self._entries, capacity_bytes, self._remove, self._counters)
        self._naming = threading.Lock()  # held while changing a file together with the index
        self._opening = threading.Lock()  # guards the next three attributes
        self._closed = False
        self._lister: threading.Thread | None = None
        try:
            self._open_folder()
        except OSError as error:
            if error.errno not in STORAGE_AWAY:
                words = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
                raise ConfigError(f"--tier disk://{directory}: {words}") from error
            self._capacity.decline(f"it cannot be made: {error.strerror}")

    @property
    def is_listed(self) -> bool:
        """Whether the index is complete."""
        return self._entries.is_listed

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [key in self._entries for key in keys]

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """See `Tier`."""
        for key in reversed(keys):  # so that the first chunk is the most recently used
            self._entries.use(key)
        return self.contains(keys)

    def write(self, keys: Sequence[bytes], trailers: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`. An entry that fails does not fail the others. Raise if none could be written."""
        outcomes, failed = list[bool](), None
        for key, trailer, extent in zip(keys, trailers, extents, strict=True):
            try:
                outcomes.append(self._write(key, trailer, *extent))
            except OSError as error:
                outcomes.append(False)
                failed = error
        if failed is not None and not any(outcomes):
            raise failed
        return outcomes

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bytes | None]:
        """See `Tier`."""
        return [self._read(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See `Tier`. Forget an entry whose file cannot be removed."""
        for key in keys:
            try:
                self._remove(key)
            except OSError:
                self._entries.forget(key)

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        if self._lister is not None:
            self._lister.join()
        wanted = self._entries.matching(tenant, model)
        failed: OSError | None = None
        while wanted:
            step = wanted[-_CLEARED_AT_ONCE:]
            del wanted[-_CLEARED_AT_ONCE:]  # deleting a million at once would block other threads for 50 ms
            for key in step:
                try:
                    self._remove(key)
                except OSError as error:
                    self._entries.forget(key, is_unremoved=True)
                    failed = error
            yield len(step)
        if failed is not None:
            raise OSError(failed.errno, f"not all files could be removed, clear again: {failed.strerror}")

    def outdate(self, generations: Container[bytes]) -> None:
        """See `Tier`."""
        self._entries.outdate(lambda key: generation_of(key) in generations)

    def probe(self) -> None:
        """See `Tier`."""
        with self._capacity.lock:
            if self._folder.root < 0:
                self._open_folder()
        try:
            self._folder.probe_write()
        except OSError as error:
            if error.errno not in (*NO_ROOM, *NOT_WRITABLE):
                raise
            self._capacity.decline(f"it cannot be written: {error.strerror}")
            newest = self._entries.newest()
            if newest is not None:
                self._folder.probe_read(newest)

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage(
            len(self._entries), self._entries.used_bytes, self._capacity.capacity_bytes, dict(self._counters)
        )

    def close(self) -> None:
        """See `Tier`."""
        with self._opening:
            if self._closed:
                return
            self._closed = True
            root, self._folder.root = self._folder.root, -1  # so that running calls find no files from now on
        if self._lister is not None:
            self._lister.join()
        self._entries.clear()
        if root >= 0:
            os.close(root)

    # --- one entry ------------------------------------------------------------------------------------------------

    def _write(self, key: bytes, trailer: bytes, offset: int, num_bytes: int) -> bool:
        size = size_on_disk(num_bytes)
        if self._entries.use_if_size(key, size):
            return True
        try:
            if not self._make_room(size):
                return False
            try:
                self._write_file(key, trailer, offset, num_bytes)
            finally:
                self._capacity.release(size)
        except OSError as error:
            if error.errno in NO_ROOM:
                self._capacity.no_space(size)
            elif error.errno in NOT_WRITABLE:
                self._counters[_NOT_WRITABLE] += 1
                self._capacity.decline(f"it cannot be written: {error.strerror}")
            else:
                raise
            return False
        self._capacity.was_written()
        if not self._folder.knows_direct:  # the folder could not be written so far
            with self._capacity.lock, contextlib.suppress(OSError):
                if not self._folder.knows_direct:
                    self._folder.find_direct(self._folder.root)
        return True

    def _make_room(self, size: int) -> bool:
        """Open the folder if it is not open, and reserve room in it."""
        if size > self._capacity.capacity_bytes:
            return False
        with self._capacity.lock:
            if self._folder.root < 0:
                self._open_folder()
            return self._capacity.reserve(size)

    def _write_file(self, key: bytes, trailer: bytes, offset: int, num_bytes: int) -> None:
        temporary = self._folder.write(key, self._pool.view[offset : offset + round_up(num_bytes)], trailer)
        try:
            with self._naming:
                self._folder.keep(temporary, key)
                self._entries.put(key, size_on_disk(num_bytes))
        except OSError:
            self._folder.drop(temporary)
            raise

    def _read(self, key: bytes, offset: int, num_bytes: int) -> bytes | None:
        rounded = round_up(num_bytes)
        # A cleared entry whose file could not be removed would be found by its name, and served nevertheless.
        if (self._folder.root < 0 and not self._closed) or self._entries.is_unremoved(key):
            return None
        try:
            num_read, page = self._folder.read(key, self._pool.view[offset : offset + rounded])
        except FileNotFoundError:
            self._forget_missing(key)
            return None
        except OSError as error:
            if error.errno == errno.EIO:
                logger.error("%s: removing entry %s, which cannot be read", self._folder.path, key.hex()[-16:])
                self.remove([key])
            raise
        if num_read < rounded + PAGE:  # truncated, as the key contains the payload's size
            return b""
        self._entries.use(key)
        return bytes(page[:TRAILER_BYTES])

    def _remove(self, key: bytes) -> None:
        """Remove an entry.

        Raises:
            OSError: the file cannot be removed, and the entry stays.
        """
        with self._naming:
            self._folder.remove(key)
            self._entries.forget(key)

    def _forget_missing(self, key: bytes) -> None:
        """Remove an entry whose file was removed, unless it was written again."""
        with self._naming:
            if not self._folder.has(key):
                self._entries.forget(key)

    # --- the folder -----------------------------------------------------------------------------------------------

    def _open_folder(self) -> None:
        """Open the folder and begin to list it. Callers on other threads hold the lock of `Capacity`.

        Raises:
            ConfigError: another depot uses it, or it can be neither locked nor written.
            OSError: it cannot be made or opened.
        """
        root, error = self._folder.open()
        if error is not None:
            self._capacity.decline(f"it cannot be written: {error.strerror}")
        with self._opening:
            if not self._closed:
                self._folder.root = root
                self._lister = threading.Thread(target=self._list, name="kvdepot-disk-list", daemon=True)
                self._lister.start()
                return
        os.close(root)
        raise OSError(errno.EBADF, "the tier is closed")

    def _list(self) -> None:
        """Find the entries of an earlier depot."""
        found = self._entries.add_found(listing.found_files(self._folder, lambda: self._closed))
        if found and not self._closed:
            used = format_size(self._entries.used_bytes)
            logger.info("%s: %d entries, %s", self._folder.path, len(self._entries), used)
            with contextlib.suppress(OSError):  # the next write reports the error
                self._capacity.shrink()


def open_tier(url: TierUrl, pool: TierPool) -> DiskTier:
    """Open `disk:///path?capacity=SIZE`."""
    if url.host or not url.path.startswith("/"):
        raise ConfigError(f"--tier {url.name}: write three slashes and an absolute path, disk:///var/cache/kvdepot")
    capacity = url.take_size("capacity", 0)
    if not capacity:
        url.check_done()  # before reporting a missing capacity: it may be mistyped
        raise ConfigError(f"--tier {url.name} needs its capacity: disk://{url.path}?capacity=200GiB")
    place = Path(url.path)
    tier = DiskTier(pool, place, capacity, url.num_threads)
    size = 0
    with contextlib.suppress(OSError):  # its drive may be away, which the tier has reported
        size = shutil.disk_usage(place).total
    if 0 < size < capacity:  # 900TiB instead of GiB: the tier would fill the drive for other programs, too
        logger.warning(
            "--tier %s: its capacity of %s is more than its whole drive, %s, which the tier will fill: lower it",
            url.name,
            format_size(capacity),
            format_size(size),
        )
    return tier
