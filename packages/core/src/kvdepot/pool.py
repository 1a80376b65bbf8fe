"""The pool's files: KV bytes, the index table and the names that records refer to, in one folder on tmpfs.

The server owns them; workers get the descriptors over the session socket. A server that is started again in the same
folder finds all three; what does not fit together is refused as a whole and replaced. The server never maps
the pool: only whoever copies does (`PoolMemory`).
"""

import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvdepot.config import format_size
from kvdepot.errors import PoolError
from kvdepot.names import NamesFile
from kvdepot.table import IndexTable, TableReader

logger = logging.getLogger(__name__)

POOL_FILE = "pool"
TABLE_FILE = "index"
NAMES_FILE = "names"

_FIRST_ALLOCATION_BYTES = 64 << 20
_ALLOCATION_STEP_BYTES = 256 << 20
_POPULATE_STEP_BYTES = 64 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it


_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process


@dataclass(slots=True)
class PoolFiles:
    """The files of one pool, open."""

    directory: Path
    size_bytes: int
    pool_fd: int
    table: IndexTable
    table_fd: int  # read only, for workers
    names: NamesFile
    is_new: bool

    def close(self, *, remove: bool) -> None:
        """Close everything; with `remove` leave nothing behind."""
        self.table.close()
        self.names.close()
        os.close(self.pool_fd)
        os.close(self.table_fd)
        if remove:
            for name in (TABLE_FILE, NAMES_FILE, POOL_FILE):
                (self.directory / name).unlink(missing_ok=True)
            try:
                self.directory.rmdir()
            except OSError:
                logger.info("%s holds other files and stays", self.directory)


def open_pool(directory: Path, size_bytes: int, num_records: int, *, fresh: bool = False) -> PoolFiles:
    """Open the pool in `directory`, an earlier server's if it verifies, else a new one.

    A new pool has no space allocated yet: see `allocate_in_background`.

    Raises:
        PoolError: the files cannot be made.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not fresh:
        try:
            return _reopen(directory, size_bytes)
        except FileNotFoundError:
            logger.info("no pool in %s yet", directory)
        except (PoolError, OSError) as error:
            logger.warning("the cache of an earlier server is not used: %s", error)
    return _create(directory, size_bytes, num_records)


def _pool_id(fd: int, size_bytes: int) -> bytes:
    """Name this very file in this very boot: after a crash of the machine nothing in it is believed."""
    stat = os.fstat(fd)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return blake3(f"{boot} {stat.st_dev} {stat.st_ino} {size_bytes}".encode()).digest()[:16]


def _reopen(directory: Path, size_bytes: int) -> PoolFiles:
    fd = os.open(directory / POOL_FILE, os.O_RDWR | os.O_CLOEXEC)
    try:
        stat = os.fstat(fd)
        if stat.st_size != size_bytes:
            raise PoolError(f"it has {format_size(stat.st_size)}, this one {format_size(size_bytes)}")
        if stat.st_blocks * 512 < size_bytes:
            raise PoolError("its space was not allocated to the end")
        table = IndexTable.open(directory / TABLE_FILE, size_bytes, _pool_id(fd, size_bytes))
        names = NamesFile.open(directory / NAMES_FILE)
        return PoolFiles(directory, size_bytes, fd, table, _read_only(directory), names, is_new=False)
    except BaseException:
        os.close(fd)
        raise


def _create(directory: Path, size_bytes: int, num_records: int) -> PoolFiles:
    # New files, not the old ones truncated: a client of an earlier server may still have those mapped.
    for name in (TABLE_FILE, NAMES_FILE, POOL_FILE):
        (directory / name).unlink(missing_ok=True)
    fd = os.open(directory / POOL_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size_bytes)
        table = IndexTable.create(directory / TABLE_FILE, num_records, size_bytes, _pool_id(fd, size_bytes))
        names = NamesFile.create(directory / NAMES_FILE)
        return PoolFiles(directory, size_bytes, fd, table, _read_only(directory), names, is_new=True)
    except BaseException:
        os.close(fd)
        raise


def _read_only(directory: Path) -> int:
    return os.open(directory / TABLE_FILE, os.O_RDONLY | os.O_CLOEXEC)


def open_with_lock(fd: int, number: int) -> int:
    """Open a file once more, with a lock on one byte, far behind its end, that nobody else has.

    The lock lasts as long as anything of the new descriptor: itself, what was handed to other processes or inherited by
    them, and mappings made through it. So it tells of writers that have no process number here.
    """
    copy = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(copy, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    except BaseException:
        os.close(copy)
        raise
    return copy


def is_locked(fd: int, number: int) -> bool:
    """Whether anything of a descriptor of `open_with_lock` is left; `fd` is another one of the same file."""
    lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    return _FLOCK.unpack(lock)[0] != fcntl.F_UNLCK


def allocate_first(fd: int, size_bytes: int) -> int:
    """Give a new pool's file its first 64 MiB, so that the very first store finds room; return the bytes.

    Raises:
        PoolError: there is not even that much.
    """
    length = min(size_bytes, _FIRST_ALLOCATION_BYTES)
    try:
        os.posix_fallocate(fd, 0, length)
    except OSError as error:
        raise PoolError(f"no room for the first {format_size(length)} of the pool: {error}") from error
    return length


def allocate_in_background(
    fd: int,
    start_bytes: int,
    size_bytes: int,
    on_progress: Callable[[int], None],
    on_failure: Callable[[OSError], None],
) -> threading.Thread:
    """Give the rest of the pool's file its space, step by step: a full tmpfs is then an error, not a SIGBUS later.

    `on_progress` gets the bytes that are ready so far. Both are called on the thread, which ends by itself.
    """

    def work() -> None:
        for start in range(start_bytes, size_bytes, _ALLOCATION_STEP_BYTES):
            length = min(_ALLOCATION_STEP_BYTES, size_bytes - start)
            try:
                os.posix_fallocate(fd, start, length)
            except OSError as error:
                on_failure(error)
                return
            on_progress(start + length)

    thread = threading.Thread(target=work, name="kvdepot-allocate", daemon=True)
    thread.start()
    return thread


class PoolMemory:
    """A process's own mapping of the pool, writable."""

    def __init__(self, pool_fd: int, pool_size_bytes: int) -> None:
        self.size_bytes = pool_size_bytes
        self.pool = mmap.mmap(pool_fd, pool_size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pool))

    def populate(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Touch every page of the mapping, so that the first copy is as fast as later ones. Releases the GIL."""
        libc = ctypes.CDLL(None, use_errno=True)
        madvise = libc.madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            if should_stop() or madvise(self.address + start, length, _MADV_POPULATE_WRITE):
                return  # an old kernel or a full tmpfs: pages come as they are touched


class PoolMapping(PoolMemory):
    """A process's own mapping of the pool, writable, and of the index table, read only."""

    def __init__(self, pool_fd: int, pool_size_bytes: int, table_fd: int, table_size_bytes: int) -> None:
        super().__init__(pool_fd, pool_size_bytes)
        self.table = TableReader(mmap.mmap(table_fd, table_size_bytes, prot=mmap.PROT_READ))
