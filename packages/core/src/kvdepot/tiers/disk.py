"""A tier on disk, `disk:///path?capacity=200GiB`: one file an entry, moved by `O_DIRECT` straight from and to the pool.

A file is the payload, rounded up to 4 KiB, and one page with its seal. It is written under a temporary name and then
renamed, never synced: what a crash of the machine leaves behind is found by the seal when it is read. The names of the
files are the keys, so the index (which entries are here, how large, which was used longest ago) is rebuilt by listing
folders when the tier is opened: on a thread, while the tier serves what it knows so far.

The tier evicts by itself: down to 90 % when its capacity is reached, or when the file system runs full, the entries
that were used longest ago. No space is a refused write; everything else that the file system refuses is an error, and
several open the breaker. `O_DIRECT` is probed once; without it the tier says so and drops pages after their use.
"""

import contextlib
import errno
import fcntl
import itertools
import logging
import mmap
import os
import secrets
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from kvdepot.config import EXTENT_ALIGNMENT_BYTES, format_size
from kvdepot.errors import ConfigError
from kvdepot.protocols import Extents, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, LABEL_BYTES, PLACE_BYTES, has_labels
from kvdepot.tiers.seal import SEAL_BYTES, make_seal, why_broken
from kvdepot.tiers.url import TierUrl

logger = logging.getLogger(__name__)

PAGE: Final = EXTENT_ALIGNMENT_BYTES
HIGH_WATERMARK: Final = 1.0  # of the capacity: above it, entries leave
LOW_WATERMARK: Final = 0.9
_LEAST_FREE_SHARE: Final = 0.02  # of the file system, that is never taken
_TEMPORARY: Final = ".tmp"
_PROBE: Final = "probe"
_TOKEN_DIGITS: Final = 8
_LABEL_DIGITS: Final = 2 * LABEL_BYTES
_FOLDER_DIGITS: Final = (_LABEL_DIGITS, _LABEL_DIGITS, 2)  # of the names of folders, one in the other
_VICTIMS_AT_ONCE: Final = 64


class DiskTier:
    """See the module. One object has a folder for itself.

    Args:
        pool: where payloads are read from and written to.
        directory: made if it is not there.
        capacity_bytes: of files, as they lie on disk.

    Raises:
        ConfigError: the folder cannot be made or written, or another depot uses it.
    """

    batch_entries = 1
    writer_pid = 0

    def __init__(self, pool: TierPool, directory: Path, capacity_bytes: int) -> None:
        self._pool = pool
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[bytes, int] = OrderedDict()  # key -> bytes on disk; used longest ago first
        self._used_bytes = 0
        self._counters: Counter[str] = Counter()
        self._gone: set[bytes] = set()  # what left while the folder was being listed
        self._lock = threading.Lock()  # of the index; never held across a system call
        self._naming = threading.Lock()  # held while a file gets or loses its name, and the index hears of it
        self._evicting = threading.Lock()
        self._pages = threading.local()
        self._token = secrets.token_hex(_TOKEN_DIGITS // 2)  # in the names of its temporary files
        self._numbers = itertools.count()
        self._closed = False
        self.is_listed = False  # whether the index is complete
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"--tier disk://{directory}: {error.strerror}") from error
        try:
            self._take_lock()
            self._direct = self._probe_direct()
        except BaseException:
            os.close(self._root)
            raise
        self._folders: set[str] = set()
        self._lister = threading.Thread(target=self._list, name="kvdepot-disk-list", daemon=True)
        self._lister.start()

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See `Tier`."""
        return [key in self._entries for key in keys]

    def write(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        return [self._write(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def read(self, keys: Sequence[bytes], extents: Extents) -> list[bool]:
        """See `Tier`."""
        return [self._read(key, *extent) for key, extent in zip(keys, extents, strict=True)]

    def clear(self, tenant: bytes | None, model: bytes | None) -> int:
        """See `Tier`."""
        self._lister.join()
        with self._lock:
            wanted = [key for key in self._entries if has_labels(key, tenant, model)]
        for key in wanted:
            self._remove(key)
        return len(wanted)

    def probe(self) -> None:
        """See `Tier`."""
        self._write_probe(self._direct)

    def usage(self) -> TierUsage:
        """See `Tier`."""
        return TierUsage(len(self._entries), self._used_bytes, self._capacity_bytes, dict(self._counters))

    def close(self) -> None:
        """See `Tier`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._lister.join()
        os.close(self._root)

    # --- one entry ------------------------------------------------------------------------------------------------

    def _write(self, key: bytes, offset: int, num_bytes: int) -> bool:
        size = _size_on_disk(num_bytes)
        with self._lock:
            if self._entries.get(key) == size:
                self._entries.move_to_end(key)
                return True
        if not self._make_room(size):
            return False
        name = _name_of(key)
        temporary = self._temporary(name)
        try:
            self._write_file(temporary, key, offset, num_bytes)
            with self._naming:
                os.rename(temporary, name, src_dir_fd=self._root, dst_dir_fd=self._root)
                self._note(key, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self._root)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self._counters["no_space"] += 1
                self._evict(self._used_bytes - size - _VICTIMS_AT_ONCE * PAGE)
                return False
            raise
        return True

    def _write_file(self, name: str, key: bytes, offset: int, num_bytes: int) -> None:
        view = self._pool.view
        page = self._page()
        page[:SEAL_BYTES] = make_seal(key, view[offset : offset + num_bytes])
        rounded = _round_up(num_bytes)
        buffers = [view[offset : offset + rounded], memoryview(page)]
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
        fd = self._open_in_folder(name, flags)
        try:
            written = 0
            while written < rounded + PAGE:
                rest = [buffers[0][written:], buffers[1]] if written < rounded else [buffers[1][written - rounded :]]
                written += os.pwritev(fd, rest, written)
            self._drop_cache(fd)
        finally:
            os.close(fd)

    def _read(self, key: bytes, offset: int, num_bytes: int) -> bool:
        rounded, name = _round_up(num_bytes), _name_of(key)
        try:
            fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self._root)
        except FileNotFoundError:
            self._forget_missing(key)
            return False
        page = self._page()
        try:
            size = os.fstat(fd).st_size
            if size != rounded + PAGE:
                # Another payload size is another place, so this name was never written with this size.
                self._break(key, f"it has {size} bytes instead of {rounded + PAGE}")
                return False
            buffers = [self._pool.view[offset : offset + rounded], memoryview(page)]
            done = 0
            while done < size:
                rest = [buffers[0][done:], buffers[1]] if done < rounded else [buffers[1][done - rounded :]]
                count = os.preadv(fd, rest, done)
                if not count:
                    self._break(key, f"it ends after {done} bytes")
                    return False
                done += count
            self._drop_cache(fd)
        except OSError as error:
            if error.errno == errno.EIO:
                self._break(key, "it cannot be read")
            raise
        finally:
            os.close(fd)
        why = why_broken(memoryview(page), key, self._pool.view[offset : offset + num_bytes])
        if why is not None:
            self._break(key, why)
            return False
        with self._lock:
            if key in self._entries:  # it may have left meanwhile
                self._entries.move_to_end(key)
        return True

    def _break(self, key: bytes, why: str) -> None:
        self._counters["corrupt"] += 1
        logger.error("%s: entry %s is removed: %s", self._directory, key.hex()[-16:], why)
        self._remove(key)

    def _remove(self, key: bytes) -> None:
        with self._naming:
            self._forget(key)
            with contextlib.suppress(OSError):
                os.unlink(_name_of(key), dir_fd=self._root)

    def _forget_missing(self, key: bytes) -> None:
        """Forget an entry whose file somebody removed, unless it has one again."""
        with self._naming:
            try:
                os.stat(_name_of(key), dir_fd=self._root)
            except FileNotFoundError:
                self._forget(key)

    def _note(self, key: bytes, size: int) -> None:
        with self._lock:
            self._used_bytes += size - self._entries.pop(key, 0)
            self._entries[key] = size

    def _forget(self, key: bytes) -> None:
        with self._lock:
            self._used_bytes -= self._entries.pop(key, 0)
            if not self.is_listed:
                self._gone.add(key)

    # --- room -----------------------------------------------------------------------------------------------------

    def _make_room(self, size: int) -> bool:
        """Have room for a file of `size`; False if it could never fit."""
        if size > self._capacity_bytes:
            return False
        stat = os.fstatvfs(self._root)
        is_tight = stat.f_bavail * stat.f_frsize < size + _LEAST_FREE_SHARE * stat.f_blocks * stat.f_frsize
        if is_tight:
            self._counters["file_system_full"] += 1
            self._evict(min(self._used_bytes - size, int(LOW_WATERMARK * self._used_bytes)))
            stat = os.fstatvfs(self._root)
            return stat.f_bavail * stat.f_frsize >= size
        if self._used_bytes + size > HIGH_WATERMARK * self._capacity_bytes:
            self._evict(int(LOW_WATERMARK * self._capacity_bytes) - size)
        return True

    def _evict(self, target_bytes: int) -> None:
        """Remove what was used longest ago until at most `target_bytes` are left; one thread at a time."""
        with self._evicting:
            while self._used_bytes > max(0, target_bytes) and self._entries:
                with self._lock:
                    victims = [key for key, _ in zip(self._entries, range(_VICTIMS_AT_ONCE), strict=False)]
                for key in victims:
                    if self._used_bytes <= max(0, target_bytes):
                        break
                    self._remove(key)
                    self._counters["evicted"] += 1

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
            self._folders.add(folder)
        try:
            return os.open(name, flags, 0o600, dir_fd=self._root)
        except FileNotFoundError:  # somebody removed the folder
            _make_folders(self._root, folder)
            return os.open(name, flags, 0o600, dir_fd=self._root)

    def _drop_cache(self, fd: int) -> None:
        if not self._direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._root, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the descriptor
        except BlockingIOError:
            raise ConfigError(f"--tier disk://{self._directory}: another depot uses this folder") from None
        except OSError as error:
            raise ConfigError(f"--tier disk://{self._directory} cannot be locked: {error.strerror}") from error

    def _probe_direct(self) -> int:
        """Return the flag for `O_DIRECT` if this file system has it, else 0."""
        try:
            self._write_probe(os.O_DIRECT)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise ConfigError(f"--tier disk://{self._directory} cannot be written: {error.strerror}") from error
            logger.warning("%s has no O_DIRECT: entries go through the page cache, slower", self._directory)
            return 0
        return os.O_DIRECT

    def _write_probe(self, direct: int) -> None:
        name, flags = self._temporary(_PROBE), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | direct
        try:
            fd = os.open(name, flags, 0o600, dir_fd=self._root)
            try:
                os.pwrite(fd, self._page(), 0)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):  # it may be there although `open` refused `O_DIRECT`
                os.unlink(name, dir_fd=self._root)

    # --- the index ------------------------------------------------------------------------------------------------

    def _list(self) -> None:
        """Find what an earlier depot left; newest last."""
        try:
            found = sorted(self._found_files())
        except OSError as error:
            logger.error("%s cannot be listed: %s", self._directory, error)
            found = []
        with self._lock:
            # What was written meanwhile is newer than all of them.
            newer, self._entries = self._entries, OrderedDict()
            for _, key, size in found:
                if key not in newer and key not in self._gone:
                    self._entries[key] = size
                    self._used_bytes += size
            self._entries.update(newer)
            self._gone.clear()
            self.is_listed = True
        if found and not self._closed:
            logger.info("%s: %d entries, %s", self._directory, len(self._entries), format_size(self._used_bytes))
            if self._used_bytes > self._capacity_bytes:
                self._evict(int(LOW_WATERMARK * self._capacity_bytes))

    def _found_files(self) -> Iterator[tuple[float, bytes, int]]:
        """Yield time, key and size of every file that is an entry; remove what a writer that was killed left."""
        for folder in ["", *self._found_folders()]:
            for file in self._items(folder):
                if self._closed:
                    return
                name = _joined(folder, file.name)
                key = _key_of(name)
                if key is not None:
                    with contextlib.suppress(FileNotFoundError):  # it has just left
                        stat = file.stat(follow_symlinks=False)
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
    return DiskTier(pool, Path(url.path), capacity)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // PAGE) * PAGE


def _size_on_disk(num_bytes: int) -> int:
    return _round_up(num_bytes) + PAGE


def _name_of(key: bytes) -> str:
    """Return the path of an entry's file: labels of tenant and model, two digits of the chunk, the rest of the key."""
    text = key.hex()
    tenant, model, rest = text[:_LABEL_DIGITS], text[_LABEL_DIGITS : 2 * _LABEL_DIGITS], text[2 * _LABEL_DIGITS :]
    return f"{tenant}/{model}/{rest[2 * PLACE_BYTES :][:2]}/{rest}"


def _key_of(name: str) -> bytes | None:
    parts = name.split("/")
    try:
        key = bytes.fromhex(parts[0] + parts[1] + parts[3])
    except (IndexError, ValueError):
        return None
    return key if len(key) == KEY_BYTES and _name_of(key) == name else None


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
