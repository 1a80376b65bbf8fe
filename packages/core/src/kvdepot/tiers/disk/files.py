"""The folder of a disk tier: one file per entry, named after its key, accessed with `O_DIRECT` where that works.

A file is the payload, padded to 4 KiB, and one page with the trailer. It is written under a temporary name and then
renamed, but never synced. A crash of the machine may leave an incomplete file, which does not match its trailer.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import threading
from itertools import count
from pathlib import Path
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.ownership import is_own, open_folder, refuse_foreign
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES
from kvdepot.tiers.keys import KEY_BYTES, NAME_HASH_BYTES, PLACE_BYTES

logger = logging.getLogger(__name__)

PAGE: Final = EXTENT_ALIGNMENT_BYTES
NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
STORAGE_AWAY: Final = (errno.EROFS, *NO_ROOM)  # the tier opens despite these errors
NOT_WRITABLE: Final = (errno.EROFS, errno.EACCES, errno.EPERM)
LEAST_FREE_SHARE: Final = 0.02  # share of the file system to keep free for its other users
_TEMPORARY: Final = ".tmp"
_PROBE: Final = "probe"
_TOKEN_DIGITS: Final = 8  # in the names of temporary files, of which few exist: 32 bits hardly ever meet
_HASH_DIGITS: Final = 2 * NAME_HASH_BYTES
FOLDER_DIGITS: Final = (_HASH_DIGITS, _HASH_DIGITS, 2)  # digits in the names of nested folders
SLOT_SECONDS: Final = 0.1  # the longest time that a write waits for a slot


class _Slots:
    """Admits `num_slots` threads at a time. After a full wait, all slots count as free, as their holders may hang."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._changed = threading.Condition()
        self._users: set[int] = set()  # threads

    def __enter__(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._users) < self._num_slots, SLOT_SECONDS):
                self._users.clear()
            self._users.add(threading.get_ident())

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._users.discard(threading.get_ident())
            self._changed.notify()


class Folder:
    """The files of one tier.

    Args:
        path: the path of the folder.
        num_slots: the number of concurrent writes to the drive.
    """

    def __init__(self, path: Path, num_slots: int) -> None:
        self.path = path
        self.root = -1  # the folder's descriptor, -1 while it is not open
        self.knows_direct = False
        self.token = secrets.token_hex(_TOKEN_DIGITS // 2)  # in the names of its temporary files
        self._direct = 0
        self._slots = _Slots(num_slots)
        self._pages = threading.local()
        self._numbers = count()
        self._folders: set[str] = set()  # nested folders known to exist

    def open(self) -> tuple[int, OSError | None]:
        """Create, open and lock the folder. Return its descriptor, and the error if it cannot be written now.

        Raises:
            ConfigError: another depot uses it, it can be neither locked nor written, or another user owns it or may
                write to it.
            OSError: it cannot be created or opened.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        root = open_folder(self.path)
        try:
            refuse_foreign(os.fstat(root), self.path, "--tier")
            self._lock(root)
            try:
                self.find_direct(root)
            except OSError as error:
                if error.errno not in STORAGE_AWAY:
                    raise ConfigError(f"--tier disk://{self.path} cannot be written: {error.strerror}") from error
                return root, error
        except BaseException:
            os.close(root)
            raise
        return root, None

    def _lock(self, root: int) -> None:
        try:
            fcntl.flock(root, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the descriptor is closed
        except BlockingIOError:
            raise ConfigError(f"--tier disk://{self.path}: another depot uses this folder") from None
        except OSError as error:
            raise ConfigError(f"--tier disk://{self.path} cannot be locked: {error.strerror}") from error

    def missing_bytes(self, size: int) -> int:
        """Return how many bytes to free before writing `size` bytes; 0 or less for none."""
        stat = os.fstatvfs(self.root)
        return size + int(LEAST_FREE_SHARE * stat.f_blocks * stat.f_frsize) - stat.f_bavail * stat.f_frsize

    # --- entries --------------------------------------------------------------------------------------------------

    def write(self, key: bytes, payload: memoryview, trailer: bytes) -> str:
        """Write an entry under a temporary name, and return the name.

        Raises:
            OSError: it could not be written, and the temporary file is removed.
        """
        name, page = self._temporary(name_of(key)), memoryview(self._page())
        page[: len(trailer)] = trailer
        try:
            fd = self._create(name)
            try:
                with self._slots:
                    done = 0
                    while done < payload.nbytes + PAGE:
                        done += os.pwritev(fd, _rest(payload, page, done), done)
                    self._drop_cache(fd)
            finally:
                os.close(fd)
        except OSError:
            self.drop(name)
            raise
        return name

    def keep(self, temporary: str, key: bytes) -> None:
        """Give a written entry its final name."""
        os.rename(temporary, name_of(key), src_dir_fd=self.root, dst_dir_fd=self.root)

    def drop(self, temporary: str) -> None:
        """Remove a temporary file, if possible."""
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=self.root)

    def read(self, key: bytes, payload: memoryview) -> tuple[int, memoryview]:
        """Fill a payload. Return the number of bytes read, including the page after it, and that page.

        Read nothing of a file that another user may have written, before this folder was private.

        Raises:
            FileNotFoundError: the entry does not exist.
            OSError: it cannot be read.
        """
        page, done = memoryview(self._page()), 0
        fd = os.open(name_of(key), os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self.root)
        try:
            if not is_own(os.fstat(fd)):  # its checksum proves nothing
                return 0, page
            while done < payload.nbytes + PAGE:
                num_bytes = os.preadv(fd, _rest(payload, page, done), done)
                done += num_bytes
                # End of file; also, `O_DIRECT` can continue only at a page boundary.
                if not num_bytes or num_bytes % PAGE:
                    break
            self._drop_cache(fd)
        finally:
            os.close(fd)
        return done, page

    def remove(self, key: bytes) -> None:
        """Remove an entry's file, if there is one.

        Raises:
            OSError: the file cannot be removed.
        """
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name_of(key), dir_fd=self.root)

    def has(self, key: bytes) -> bool:
        """Return whether an entry has a file."""
        try:
            os.stat(name_of(key), dir_fd=self.root)
        except FileNotFoundError:
            return False
        return True

    # --- probes ---------------------------------------------------------------------------------------------------

    def find_direct(self, root: int) -> None:
        """Test, by writing, whether this file system supports `O_DIRECT`.

        Raises:
            OSError: it cannot be written.
        """
        try:
            self.probe_write(root, os.O_DIRECT)
            self._direct = os.O_DIRECT
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                raise
            logger.warning("%s has no O_DIRECT: entries go through the page cache, which is slower", self.path)
        self.knows_direct = True

    def probe_read(self, key: bytes) -> None:
        """Read a page of an entry, if it has a file."""
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(name_of(key), os.O_RDONLY | os.O_CLOEXEC | self._direct, dir_fd=self.root)
            try:
                os.preadv(fd, [self._page()], 0)
            finally:
                os.close(fd)

    def probe_write(self, root: int = -1, direct: int | None = None) -> None:
        """Write a page to a file, and remove the file."""
        root = self.root if root < 0 else root
        name, flags = self._temporary(_PROBE), self._direct if direct is None else direct
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600, dir_fd=root)
            try:
                os.pwrite(fd, self._page(), 0)
            finally:
                os.close(fd)
        finally:
            with contextlib.suppress(OSError):  # `open` may have created it although it refused `O_DIRECT`
                os.unlink(name, dir_fd=root)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _temporary(self, name: str) -> str:
        return f"{name}.{self.token}-{next(self._numbers)}{_TEMPORARY}"

    def _page(self) -> mmap.mmap:
        """Return this thread's aligned page."""
        page: mmap.mmap | None = getattr(self._pages, "page", None)
        if page is None:
            page = self._pages.page = mmap.mmap(-1, PAGE)
        return page

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct
        folder = name.rpartition("/")[0]
        if folder not in self._folders:
            _make_folders(self.root, folder)
            self._folders.add(folder)
        try:
            return os.open(name, flags, 0o600, dir_fd=self.root)
        except FileNotFoundError:  # the nested folder was removed
            _make_folders(self.root, folder)
            return os.open(name, flags, 0o600, dir_fd=self.root)

    def _drop_cache(self, fd: int) -> None:
        if not self._direct:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def round_up(num_bytes: int) -> int:
    """Return the padded size of a payload."""
    return -(-num_bytes // PAGE) * PAGE


def size_on_disk(num_bytes: int) -> int:
    """Return the size of the file for a payload."""
    return round_up(num_bytes) + PAGE


def name_of(key: bytes) -> str:
    """Return the path of an entry's file: hashes of tenant and model, two digits of the chunk, the rest of the key."""
    text = key.hex()
    tenant, model, rest = text[:_HASH_DIGITS], text[_HASH_DIGITS : 2 * _HASH_DIGITS], text[2 * _HASH_DIGITS :]
    return f"{tenant}/{model}/{rest[2 * PLACE_BYTES :][:2]}/{rest}"


def key_of(name: str) -> bytes | None:
    """Return the key whose file has this path, None if the path is not an entry's."""
    parts = name.split("/")
    try:
        key = bytes.fromhex(parts[0] + parts[1] + parts[3])
    except (IndexError, ValueError):
        return None
    return key if len(key) == KEY_BYTES and name_of(key) == name else None


def is_hex(name: str, num_digits: int) -> bool:
    """Return whether a name consists of `num_digits` lower-case hexadecimal digits."""
    return len(name) == num_digits and not name.strip("0123456789abcdef")


def is_temporary(name: str) -> bool:
    """Return whether this is a temporary name of a disk tier."""
    entry, _, rest = name.removesuffix(_TEMPORARY).rpartition(".")
    token, _, number = rest.partition("-")
    is_ours = name.endswith(_TEMPORARY) and is_hex(token, _TOKEN_DIGITS) and number.isdecimal()
    return is_ours and (entry == _PROBE or key_of(entry) is not None)


def _rest(payload: memoryview, page: memoryview, done: int) -> list[memoryview]:
    """Return the rest of payload and page after `done` bytes."""
    return [payload[done:], page] if done < payload.nbytes else [page[done - payload.nbytes :]]


def _make_folders(root: int, folder: str) -> None:
    path = ""
    for part in folder.split("/"):
        path = f"{path}/{part}" if path else part
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=root)
