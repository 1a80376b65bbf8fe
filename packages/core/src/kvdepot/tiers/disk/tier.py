"""A tier on disk, `disk:///path?capacity=200GiB`: one file an entry, moved by `O_DIRECT` straight from and to the pool.

A file is the payload, rounded up to 4 KiB, and one page with its seal. It is written under a temporary name and then
renamed, never synced: what a crash of the machine leaves behind is found by the seal when it is read. The names of the
files are the keys, so the index (which entries are here, how large, which was used longest ago) is rebuilt by listing
folders when the tier is opened: on a thread, while the tier serves what it knows so far.

The tier evicts by itself the entries that were used longest ago: down to 90 % when its capacity is reached, or as much
as brings the file system's free space back over its limit. Where that cannot be reached, because other files take the
space, or where the folder cannot be written any more, writes are declined, which is said once, and what is there is
served. That a file system is full or read-only when the tier is opened keeps it from writing, not from opening. Every
other error opens the breaker, if it comes several times. `O_DIRECT` is probed; without it the tier says so and drops
pages after their use.

Writes that are under way share the drive's rate and so end together, and if all of them then renamed files and computed
checksums, the drive would idle: at a time, one write fewer moves bytes than are under way.
"""

import contextlib
import errno
import fcntl
import heapq
import logging
import mmap
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from typing import Final, TypeAlias

from kvdepot.config import EXTENT_ALIGNMENT_BYTES, format_size
from kvdepot.errors import ConfigError
from kvdepot.tiers.base import Extents, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, LABEL_BYTES, PLACE_BYTES, has_labels
from kvdepot.tiers.seal import SEAL_BYTES, make_seal, why_broken
from kvdepot.tiers.sizes import LruSizes
from kvdepot.tiers.url import DEFAULT_THREADS, TierUrl

logger = logging.getLogger(__name__)

PAGE: Final = EXTENT_ALIGNMENT_BYTES
HIGH_WATERMARK: Final = 1.0  # of the capacity: above it, entries leave
LOW_WATERMARK: Final = 0.9
_LEAST_FREE_SHARE: Final = 0.02  # of the file system, that is never taken
_PATIENCE_SECONDS: Final = 10.0  # with a file system on which evicting did not help, before more leaves for its sake
_QUIET_SECONDS: Final = 60.0  # between two times that writes are said to be declined
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_STORAGE_AWAY: Final = (errno.EROFS, *_NO_ROOM)  # when the tier is opened
_NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
_TEMPORARY: Final = ".tmp"
_PROBE: Final = "probe"
_TOKEN_DIGITS: Final = 8
_LABEL_DIGITS: Final = 2 * LABEL_BYTES
_FOLDER_DIGITS: Final = (_LABEL_DIGITS, _LABEL_DIGITS, 2)  # of the names of folders, one in the other
_VICTIMS_AT_ONCE: Final = 64
_CLEARED_AT_ONCE: Final = 256
_SORTED_AT_ONCE: Final = 1000  # no other thread runs meanwhile
_MOST_STUCK: Final = 16  # entries that cannot be removed, of those that are to make room for one
_LEAST_LANES: Final = 2  # with one, the drive waits while it changes hands
_LANE_SECONDS: Final = 0.1  # that a write waits for one, at most

_File: TypeAlias = tuple[float, bytes, int]  # time of its last change, key, bytes


class _Lanes:
    """Lets so many threads through at a time. Those that hold their lanes long may hang: they lose them to others."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._changed = threading.Condition()
        self._users: set[int] = set()  # threads

    def __enter__(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._users) < self._count, _LANE_SECONDS):
                self._users.clear()
            self._users.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._users.discard(threading.get_ident())
            self._changed.notify()


class DiskTier:
    """See the module. One object has a folder for itself.

    Args:
        pool: where payloads are read from and written to.
        directory: made if it is not there.
        capacity_bytes: of files, as they lie on disk.
        num_threads: calls at a time, all but one of them writes.

    Raises:
        ConfigError: the folder cannot be made or written, or another depot uses it. That its file system is full or
            read-only is none: entries that are there are served, and writes are declined until one succeeds.
    """

    batch_entries = 1
    writer_pid = 0

    def __init__(
        self, pool: TierPool, directory: Path, capacity_bytes: int, num_threads: int = DEFAULT_THREADS
    ) -> None:
        self._pool = pool
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._entries = LruSizes()  # bytes on disk
        self._used_bytes = 0
        self._coming_bytes = 0  # of what is being written, which other writers leave room for
        self._counters: Counter[str] = Counter()
        self._gone: set[bytes] = set()  # what left while the folder was being listed
        self._unremoved: dict[bytes, None] = {}  # what was cleared, but has a file still
        self._lock = threading.Lock()  # of the index; never held across a system call
        self._naming = threading.Lock()  # held while a file gets or loses its name, and the index hears of it
        self._evicting = threading.Lock()
        self._patient_until = 0.0
        self._is_declining = False  # and it was said
        self._quiet_until = 0.0
        self._lanes = _Lanes(max(_LEAST_LANES, num_threads - 2))
        self._pages = threading.local()
        self._token = secrets.token_hex(_TOKEN_DIGITS // 2)  # in the names of its temporary files
        self._numbers = count()
        self._closed = False
        self.is_listed = False  # whether the index is complete
        self._folders: dict[str, None] = {}  # that are known to be there
        self._root = -1  # until the folder could be made
        self._direct = 0
        self._knows_direct = False
        self._lister: threading.Thread | None = None
        try:
            self._open_folder()
        except OSError as error:
            if error.errno not in _STORAGE_AWAY:
                words = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
                raise ConfigError(f"--tier disk://{directory}: {words}") from error
            self._decline(f"it cannot be made: {error.strerror}")

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [key in self._entries for key in keys]

    def write(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        return [self._write(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        return [self._read(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def clear(self, tenant: bytes | None, model: bytes | None) -> Iterator[int]:
        """See `Tier`."""
        if self._lister is not None:
            self._lister.join()
        with self._lock:
            wanted = [key for key in chain(self._entries, self._unremoved) if has_labels(key, tenant, model)]
        failed: OSError | None = None
        while wanted:
            step = wanted[-_CLEARED_AT_ONCE:]
            del wanted[-_CLEARED_AT_ONCE:]  # a million at once would take other threads 50 ms
            for key in step:
                try:
                    self._remove(key)
                except OSError as error:
                    self._forget(key)
                    with self._lock:
                        self._unremoved[key] = None
                    failed = error
            yield len(step)
        if failed is not None:
            raise OSError(failed.errno, f"not all files could be removed, clear again: {failed.strerror}")

    def probe(self) -> None:
        """See `Tier`."""
        with self._evicting:
            if self._root < 0:
                self._open_folder()
        try:
            self._write_probe(self._root, self._direct)
        except OSError as error:
            if error.errno not in (*_NO_ROOM, *_NOT_WRITABLE):
                raise
            self._decline(f"it cannot be written: {error.strerror}")
            self._read_probe()

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage(len(self._entries), self._used_bytes, self._capacity_bytes, dict(self._counters))

    def close(self) -> None:
        """See `Tier`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            root, self._root = self._root, -1  # calls that are under way find nothing there, nor anybody else's
        if self._lister is not None:
            self._lister.join()
        with self._lock:
            self._entries.clear()
            self._used_bytes = 0
        if root >= 0:
            os.close(root)

    # --- one entry ------------------------------------------------------------------------------------------------

    def _write(self, key: bytes, offset: int, num_bytes: int) -> bool:
        size = _size_on_disk(num_bytes)
        with self._lock:
            if self._entries.get(key) == size:
                self._entries.use(key)
                return True
        name = name_of(key)
        temporary = self._temporary(name)
        try:
            if not self._make_room(size):
                return False
            try:
                self._write_file(temporary, key, offset, num_bytes)
                with self._naming:
                    os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
                    self._note(key, size)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(temporary, dir_fd=self._root)
                raise
            finally:
                with self._lock:
                    self._coming_bytes -= size
        except OSError as error:
            if error.errno in _NO_ROOM:
                self._no_space(size)
            elif error.errno in _NOT_WRITABLE:
                self._counters["not_writable"] += 1
                self._decline(f"it cannot be written: {error.strerror}")
            else:
                raise
            return False
        self._written()
        return True

    def _write_file(self, name: str, key: bytes, offset: int, num_bytes: int) -> None:
        view = self._pool.view
        page = self._page()
        page[:SEAL_BYTES] = make_seal(key, view[offset : offset + num_bytes])
        rounded = _round_up(num_bytes)
        payload, trailer = view[offset : offset + rounded], memoryview(page)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
        fd = self._open_in_folder(name, flags)
        try:
            with self._lanes:
                written = 0
                while written < rounded + PAGE:
                    written += os.pwritev(fd, _rest(payload, trailer, written), written)
                self._drop_cache(fd)
        finally:
            os.close(fd)

    def _read(self, key: bytes, offset: int, num_bytes: int) -> bool:
        rounded, name = _round_up(num_bytes), name_of(key)
        if (self._root < 0 and not self._closed) or key in self._unremoved:
            return False
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self._root)
        except FileNotFoundError:
            self._forget_missing(key)
            return False
        page = self._page()
        try:
            payload, trailer = self._pool.view[offset : offset + rounded], memoryview(page)
            done = 0
            while done < rounded + PAGE:
                count = os.preadv(fd, _rest(payload, trailer, done), done)
                done += count
                if not count or count % PAGE:  # the end; where no page begins, `O_DIRECT` cannot read on to hear so
                    # Another payload size is another place, so this name was never written with this size.
                    self._break(key, f"it has {done} bytes instead of {rounded + PAGE}")
                    return False
            self._drop_cache(fd)
        except OSError as error:
            if error.errno == errno.EIO:
                self._break(key, "it cannot be read")
            raise
        finally:
            os.close(fd)
        why = why_broken(trailer, key, self._pool.view[offset : offset + num_bytes])
        if why is not None:
            self._break(key, why)
            return False
        self._touch(key)
        return True

    def _break(self, key: bytes, why: str) -> None:
        self._counters["corrupt"] += 1
        logger.error("%s: entry %s is removed: %s", self._directory, key.hex()[-16:], why)
        try:
            self._remove(key)
        except OSError:
            self._forget(key)

    def _remove(self, key: bytes) -> None:
        """Remove an entry.

        Raises:
            OSError: its file stays, and so does the entry.
        """
        with self._naming:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name_of(key), dir_fd=self._root)
            self._forget(key)

    def _forget_missing(self, key: bytes) -> None:
        """Forget an entry whose file somebody removed, unless it has one again."""
        with self._naming:
            try:
                os.stat(name_of(key), dir_fd=self._root)
            except FileNotFoundError:
                self._forget(key)

    def _note(self, key: bytes, size: int) -> None:
        with self._lock:
            self._used_bytes += size - self._entries.pop(key)
            self._entries.put(key, size)
            self._unremoved.pop(key, None)

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._used_bytes -= self._entries.pop(key)
            self._unremoved.pop(key, None)
            if not self.is_listed:
                self._gone.add(key)

    # --- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Have a folder, and room in it for a file of `size`, which is coming then; False if that cannot be had.

        Raises:
            OSError: the folder cannot be made, or entries that should have left could not be removed.
        """
        if size > self._capacity_bytes:
            return False
        with self._evicting:
            if self._root < 0:
                self._open_folder()
            missing = self._missing_bytes(size)
            if missing > 0:
                self._counters["file_system_full"] += 1
                if missing <= self._used_bytes and time.monotonic() >= self._patient_until:
                    self._evict(self._used_bytes - missing)
                    missing = self._missing_bytes(size)
                    if missing > 0:
                        self._patient_until = time.monotonic() + _PATIENCE_SECONDS
            if missing > 0:
                self._decline(
                    f"{format_size(missing)} are missing to {_LEAST_FREE_SHARE:.0%} of its file system, "
                    "which stay free, and what others have there takes the space"
                )
            elif self._is_too_much(size):
                self._evict(int(LOW_WATERMARK * self._capacity_bytes) - self._coming_bytes - size)
            if missing > 0 or self._is_too_much(size):
                return False
            with self._lock:
                self._coming_bytes += size
        return True

    def _is_too_much(self, size: int) -> bool:
        return self._used_bytes + self._coming_bytes + size > HIGH_WATERMARK * self._capacity_bytes

    def _missing_bytes(self, size: int) -> int:
        """Return what has to be freed before `size` bytes can be written; 0 or less for nothing."""
        stat = os.fstatvfs(self._root)
        return size + int(_LEAST_FREE_SHARE * stat.f_blocks * stat.f_frsize) - stat.f_bavail * stat.f_frsize

    def _no_space(self, size: int) -> None:
        """A write found no space although there seemed to be some: it may be that of a quota, or have just gone."""
        self._counters["no_space"] += 1
        with self._evicting:
            if self._used_bytes < 2 * size or time.monotonic() < self._patient_until:
                self._decline("there is no space, and evicting does not help")
                return
            self._patient_until = time.monotonic() + _PATIENCE_SECONDS  # or until a write succeeds
            self._evict(self._used_bytes - 2 * size)

    def _evict(self, target_bytes: int) -> None:
        """Remove what was used longest ago until at most `target_bytes` are left; with `_evicting` held.

        Raises:
            OSError: the folder is read-only, or very many entries cannot be removed; a few are left where they are.
        """
        num_stuck = 0
        while self._used_bytes > max(0, target_bytes) and len(self._entries):
            with self._lock:
                victims = self._entries.oldest(_VICTIMS_AT_ONCE)
            for key in victims:
                if self._used_bytes <= max(0, target_bytes):
                    break
                try:
                    self._remove(key)
                except OSError as error:
                    num_stuck += 1
                    if error.errno in _NOT_WRITABLE or num_stuck > _MOST_STUCK:
                        raise
                    self._counters["not_evicted"] += 1
                    self._touch(key)  # others go
                else:
                    self._counters["evicted"] += 1

    def _touch(self, key: bytes) -> None:
        with self._lock:
            self._entries.use(key)  # it may have left meanwhile

    def _decline(self, why: str) -> None:
        """Say that nothing is written: once, until a write succeeds."""
        if not self._is_declining and time.monotonic() >= self._quiet_until:
            logger.error("%s: nothing is written, what is there is served: %s", self._directory, why)
            self._is_declining = True
            self._quiet_until = time.monotonic() + _QUIET_SECONDS

    def _written(self) -> None:
        self._patient_until = 0.0
        if self._is_declining:
            self._is_declining = False
            logger.warning("%s is written again", self._directory)
        if not self._knows_direct:  # as it could not be written before
            with self._evicting, contextlib.suppress(OSError):
                if not self._knows_direct:
                    self._find_direct(self._root)

    # --- files ----------------------------------------------------------------------------------------------------

    def _temporary(self, name: str) -> str:
        """Return a name that no file has, for what is to become `name`."""
        return f"{name}.{self._token}-{next(self._numbers)}{_TEMPORARY}"

    def _page(self) -> mmap.mmap:
        """Return this thread's aligned page."""
        page: mmap.mmap | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = mmap.mmap(-1, PAGE)
        return page

    def _open_in_folder(self, name: str, flags: int) -> int:
        folder = name.rpartition("/")[0]
        if folder not in self._folders:
            _make_folders(self._root, folder)
            self._folders[folder] = None
        try:
            return os.open(name, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:  # somebody removed the folder
            _make_folders(self._root, folder)
            return os.open(name, flags, 0o600, dir_fd=self._root)

    def _drop_cache(self, fd: int) -> None:
        if not self._direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _open_folder(self) -> None:
        """Make, open and lock the folder, and begin to list it; with `_evicting` held, once there are threads.

        Raises:
            ConfigError: another depot uses it, or it can be neither locked nor written.
            OSError: it cannot be made or opened.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._take_lock(root)
            try:
                self._find_direct(root)
            except OSError as error:
                if error.errno not in _STORAGE_AWAY:
                    raise ConfigError(f"--tier disk://{self._directory} cannot be written: {error.strerror}") from error
                self._decline(f"it cannot be written: {error.strerror}")
            with self._lock:
                if self._closed:
                    raise OSError(errno.EBADF, "the tier is closed")
                self._root = root
                self._lister = threading.Thread(target=self._list, name="kvdepot-disk-list", daemon=True)
                self._lister.start()
        except BaseException:
            os.close(root)
            raise

    def _take_lock(self, root: int) -> None:
        try:
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the descriptor
        except BlockingIOError:
            raise ConfigError(f"--tier disk://{self._directory}: another depot uses this folder") from None
        except OSError as error:
            raise ConfigError(f"--tier disk://{self._directory} cannot be locked: {error.strerror}") from error

    def _find_direct(self, root: int) -> None:
        """Find out by writing whether this file system has `O_DIRECT`.

        Raises:
            OSError: it cannot be written at all.
        """
        try:
            self._write_probe(root, os.O_DIRECT)
            self._direct = os.O_DIRECT
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            logger.warning("%s has no O_DIRECT: entries go through the page cache, slower", self._directory)
        self._knows_direct = True

    def _read_probe(self) -> None:
        """Read a page of the entry that was used last."""
        with self._lock:
            key = self._entries.newest()
        if key is None:
            return
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(name_of(key), os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self._root)
            try:
                os.preadv(fd, [self._page()], 0)
            finally:
                os.close(fd)

    def _write_probe(self, root: int, direct: int) -> None:
        name, flags = self._temporary(_PROBE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct
        try:
            fd = os.open(name, flags, 0o600, dir_fd=root)
            try:
                os.pwrite(fd, self._page(), 0)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):  # it may be there although `open` refused `O_DIRECT`
                os.unlink(name, dir_fd=root)

    # --- the index ------------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Find what an earlier depot left; newest last."""
        files = self._found_files()
        found: list[list[_File]] = []
        while some := sorted(islice(files, _SORTED_AT_ONCE), reverse=True):
            found.append(some)
        with self._lock:
            entries = LruSizes()
            for _, key, size in heapq.merge(*map(_taken_from_end, found)):
                if key not in self._entries and key not in self._gone:
                    entries.put(key, size)
                    self._used_bytes += size
            # What was written meanwhile is newer than all of them.
            for key in self._entries.oldest(len(self._entries)):
                entries.put(key, self._entries.get(key) or 0)
            self._entries = entries
            self._gone.clear()
            self.is_listed = True
        if found and not self._closed:
            logger.info("%s: %d entries, %s", self._directory, len(self._entries), format_size(self._used_bytes))
            if self._used_bytes > self._capacity_bytes:
                with self._evicting, contextlib.suppress(OSError):  # then the next write hears of it
                    self._evict(int(LOW_WATERMARK * self._capacity_bytes))

    def _found_files(self) -> Iterator[_File]:
        """Yield every file that is an entry; remove what a writer that was killed left."""
        try:
            yield from self._files_in(["", *self._found_folders()])
        except OSError as error:
            logger.error("%s cannot be listed, not all of it is found: %s", self._directory, error)

    def _files_in(self, folders: Sequence[str]) -> Iterator[_File]:
        for folder in folders:
            for file in self._items(folder):
                if self._closed:
                    return
                name = _joined(folder, file.name)
                key = _key_of(name)
                if key is not None:
                    try:
                        stat = file.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # it has just left
                    except OSError as error:
                        logger.error("%s cannot be looked at, it is not found: %s", self._directory / name, error)
                        continue
                    yield stat.st_mtime, key, stat.st_size
                elif self._token not in name and _is_left_over(name):
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=self._root)

    def _found_folders(self) -> list[str]:
        """Return the folders that entries may lie in; those of others are not looked into."""
        folders = [""]
        for num_digits in _FOLDER_DIGITS:
            folders = [
                _joined(folder, item.name)
                for folder in folders
                for item in self._items(folder)
                if _is_hex(item.name, num_digits) and item.is_dir(follow_symlinks=False)
            ]
        return folders

    def _items(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self._directory / folder) as items:
                return list(items)
        except FileNotFoundError:
            return []
        except OSError as error:
            logger.error("%s cannot be listed, what is in it is not found: %s", self._directory / folder, error)
            return []


def open_tier(url: TierUrl, pool: TierPool) -> DiskTier:
    """Open `disk:///path?capacity=SIZE`."""
    if url.host or not url.path.startswith("/"):
        raise ConfigError(f"--tier {url.name}: write three slashes and an absolute path, disk:///var/cache/kvdepot")
    capacity = url.take_size("capacity", 0)
    if not capacity:
        raise ConfigError(f"--tier {url.name} needs its capacity: disk://{url.path}?capacity=200GiB")
    return DiskTier(pool, Path(url.path), capacity, url.num_threads)


def _taken_from_end(files: list[_File]) -> Iterator[_File]:
    while files:
        yield files.pop()


def _rest(payload: memoryview, trailer: memoryview, done: int) -> list[memoryview]:
    """Return what is left of a file's two parts after so many bytes."""
    return [payload[done:], trailer] if done < payload.nbytes else [trailer[done - payload.nbytes :]]


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _size_on_disk(num_bytes: int) -> int:
    return _round_up(num_bytes) + PAGE


def name_of(key: bytes) -> str:
    """Return the path of an entry's file in the tier's folder: tenant's and model's label, two digits, the rest."""
    text = key.hex()
    tenant, model, rest = text[:_LABEL_DIGITS], text[_LABEL_DIGITS : 2 * _LABEL_DIGITS], text[2 * _LABEL_DIGITS :]
    return f"{tenant}/{model}/{rest[2 * PLACE_BYTES :][:2]}/{rest}"


def _key_of(name: str) -> bytes | None:
    parts = name.split("/")
    try:
        key = bytes.fromhex(parts[0] + parts[1] + parts[3])
    except (IndexError, ValueError):
        return None
    return key if len(key) == KEY_BYTES and name_of(key) == name else None


def _joined(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _is_hex(name: str, num_digits: int) -> bool:
    return len(name) == num_digits and not name.strip("0123456789abcdef")


def _is_left_over(name: str) -> bool:
    """Whether this is a temporary name as `_temporary` makes them."""
    entry, _, rest = name.removesuffix(_TEMPORARY).rpartition(".")
    token, _, number = rest.partition("-")
    is_temporary = name.endswith(_TEMPORARY) and _is_hex(token, _TOKEN_DIGITS) and number.isdecimal()
    return is_temporary and (entry == _PROBE or _key_of(entry) is not None)


def _make_folders(root: int, folder: str) -> None:
    path = ""
    for part in folder.split("/"):
        path = f"{path}/{part}" if path else part
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=root)
