"""The index of a disk tier: its entries, their sizes, and the order of their last use.

When the tier is opened, a thread rebuilds it from the names of the files. The tier serves known entries meanwhile.
"""

import heapq
import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Final, TypeAlias

from kvdepot.tiers.disk.files import FOLDER_DIGITS, Folder, is_hex, is_temporary, key_of
from kvdepot.tiers.keys import has_names

logger = logging.getLogger(__name__)

_BEFORE_ALL_SECONDS: Final = 1e10  # more than any time since 1970; smaller times keep their order below 0
_SORTED_AT_ONCE: Final = 1000  # other threads wait meanwhile

File: TypeAlias = tuple[float, bytes, int]  # mtime, see `found_files`, key, size


class FileIndex:
    """The entries of a tier. Methods are thread-safe and make no system call."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self.is_listed = False  # whether the index is complete
        self._sizes = OrderedDict[bytes, int]()  # sizes on disk, the least recently used first
        self._gone: set[bytes] = set()  # entries removed while the folder was being listed
        self._unremoved: dict[bytes, None] = {}  # cleared entries whose files could not be removed
        self._outdated: list[Callable[[bytes], bool]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def use(self, key: bytes) -> None:
        """Mark an entry as most recently used, if it still exists."""
        with self._lock:
            if key in self._sizes:
                self._sizes.move_to_end(key)

    def use_if_size(self, key: bytes, size: int) -> bool:
        """Return whether an entry exists with this size. If so, mark it as used."""
        with self._lock:
            if self._sizes.get(key) != size:
                return False
            self._sizes.move_to_end(key)
            return True

    def put(self, key: bytes, size: int) -> None:
        """Add an entry whose file was written."""
        with self._lock:
            self.used_bytes += size - self._sizes.pop(key, 0)
            self._sizes[key] = size
            self._unremoved.pop(key, None)

    def forget(self, key: bytes, *, is_unremoved: bool = False) -> None:
        """Remove an entry. With `is_unremoved`, its file still exists and must not be served."""
        with self._lock:
            self.used_bytes -= self._sizes.pop(key, 0)
            self._unremoved.pop(key, None)
            if is_unremoved:
                self._unremoved[key] = None
            if not self.is_listed:
                self._gone.add(key)

    def is_unremoved(self, key: bytes) -> bool:
        """Return whether an entry was cleared but still has a file."""
        return key in self._unremoved

    def oldest(self, count: int) -> list[bytes]:
        """Return the least recently used entries."""
        with self._lock:
            return list(islice(self._sizes, count))

    def newest(self) -> bytes | None:
        """Return the most recently used entry."""
        with self._lock:
            return next(reversed(self._sizes), None)

    def matching(self, tenant: bytes | None, model: bytes | None) -> list[bytes]:
        """Return the entries with these hashes of names, including entries whose files could not be removed."""
        with self._lock:
            return [key for key in chain(self._sizes, self._unremoved) if has_names(key, tenant, model)]

    def outdate(self, is_meant: Callable[[bytes], bool]) -> None:
        """Make the entries for which `is_meant` holds the least recently used."""
        with self._lock:
            _outdate(self._sizes, is_meant)
            if not self.is_listed:
                self._outdated.append(is_meant)  # applied to entries that are found later

    def clear(self) -> None:
        """Remove all entries."""
        with self._lock:
            self._sizes.clear()
            self.used_bytes = 0

    def add_found(self, files: Iterator[File]) -> bool:
        """Add the files of an earlier depot, newest last. Return whether there were any."""
        found: list[list[File]] = []
        while some := sorted(islice(files, _SORTED_AT_ONCE), reverse=True):
            found.append(some)
        sizes, used_bytes = OrderedDict[bytes, int](), 0
        for _, key, size in heapq.merge(*map(_taken_from_end, found)):
            sizes[key] = size
            used_bytes += size
        # Reads and writes wait for the lock, so only the entries that changed meanwhile are handled under it.
        with self._lock:
            for key in self._gone:
                used_bytes -= sizes.pop(key, 0)
            # Entries written meanwhile are newer than all of them.
            for key, size in self._sizes.items():
                used_bytes -= sizes.pop(key, 0)
                sizes[key] = size
            self._sizes = sizes
            self.used_bytes += used_bytes
            while self._outdated:
                _outdate(sizes, self._outdated.pop())
            self._gone.clear()
            self.is_listed = True
        return bool(found)


def _outdate(sizes: OrderedDict[bytes, int], is_meant: Callable[[bytes], bool]) -> None:
    for key in [key for key in reversed(sizes) if is_meant(key)]:
        sizes.move_to_end(key, last=False)


def found_files(folder: Folder, is_over: Callable[[], bool]) -> Iterator[File]:
    """Yield all files of entries. Remove temporary files that a killed writer left.

    Files with times after now count as the oldest, in their order: the clock ran ahead when they were written, before
    something set it right. As the newest, they would outlast all files that are used.
    """
    now = time.time()
    try:
        for name in ["", *_found_folders(folder)]:
            for item in items_in(folder, name):
                if is_over():
                    return
                file = _entry_of(folder, _joined(name, item.name), item, now)
                if file is not None:
                    yield file
    except OSError as error:
        logger.error("%s cannot be listed completely: %s", folder.path, error)


def items_in(folder: Folder, name: str) -> list[os.DirEntry[str]]:
    """Return the contents of a nested folder; empty if it cannot be listed."""
    try:
        with os.scandir(folder.path / name) as items:
            return list(items)
    except FileNotFoundError:
        return []
    except OSError as error:
        logger.error("%s cannot be listed, so its entries are missing: %s", folder.path / name, error)
        return []


def _entry_of(folder: Folder, name: str, item: os.DirEntry[str], now: float) -> File | None:
    key = key_of(name)
    if key is None:
        if folder.token not in name and is_temporary(name):
            folder.drop(name)
        return None
    try:
        stat = item.stat(follow_symlinks=False)
    except FileNotFoundError:  # it was just removed
        return None
    except OSError as error:
        logger.error("%s cannot be examined, so it is missing: %s", folder.path / name, error)
        return None
    return stat.st_mtime - (_BEFORE_ALL_SECONDS if stat.st_mtime > now else 0.0), key, stat.st_size


def _found_folders(folder: Folder) -> list[str]:
    """Return the nested folders that may contain entries."""
    names = [""]
    for num_digits in FOLDER_DIGITS:
        names = [
            _joined(name, item.name)
            for name in names
            for item in items_in(folder, name)
            if is_hex(item.name, num_digits) and item.is_dir(follow_symlinks=False)
        ]
    return names


def _taken_from_end(files: list[File]) -> Iterator[File]:
    while files:
        yield files.pop()


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
