"""The pool's files: KV bytes, the index table and the names that records refer to, in one folder on tmpfs.

The server owns them; workers get the descriptors over the session socket. A server that is started again in the same
folder finds all three. If they do not fit together, it refuses all of them and makes new ones. It never maps the pool:
only copying processes do (`PoolMemory`).
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from kvdepot.config import format_size
from kvdepot.errors import DepotBusy, PoolError
from kvdepot.pool.names import MAGIC as NAMES_MAGIC
from kvdepot.pool.names import NamesFile
from kvdepot.pool.pace import Pace
from kvdepot.pool.table import HEADER_PAGE_BYTES, IndexTable, TableReader, holder_of
from kvdepot.pool.table import MAGIC as TABLE_MAGIC

logger = logging.getLogger(__name__)

ENLARGE_TMPFS = (
    "enlarge the tmpfs (mount -o remount,size=SIZE /dev/shm; docker run --shm-size=SIZE or --ipc=host; in Kubernetes an"
    " emptyDir of medium Memory)"
)
"""Advice for a machine with too little room for a pool; containers have 64 MiB in /dev/shm by default."""

POOL_FILE = "pool"
TABLE_FILE = "index"
NAMES_FILE = "names"

_FIRST_ALLOCATION_BYTES = 64 << 20
_ALLOCATION_STEP_BYTES = 16 << 20
_POPULATE_STEP_BYTES = 8 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14; `mmap` has no name for it

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process
_SERVER_LOCK = 1 << 60  # the byte of the pool's file that its server has locked: far behind the end of any pool
_TRAILER = struct.Struct("<8sQ")  # magic, generation: behind the pool's last byte, in a page that no client maps
_TRAILER_BYTES = 4096
_MAGIC = b"KVDEPOTP"
MAGICS = {POOL_FILE: _MAGIC, TABLE_FILE: TABLE_MAGIC, NAMES_FILE: NAMES_MAGIC[:8]}


@dataclass(slots=True)
class PoolFiles:
    """The files of one pool, open and locked."""

    directory: Path
    size_bytes: int
    pool_fd: int
    lock_fd: int  # another descriptor of the pool's file, handed to nobody: it alone keeps the lock
    table: IndexTable
    table_fd: int  # read only, for workers
    names: NamesFile
    is_new: bool

    def advance(self) -> None:
        """Begin a new generation, so that copies of the files that were made before do not fit together any more."""
        self.table.generation += 1
        os.pwrite(self.lock_fd, _TRAILER.pack(_MAGIC, self.table.generation), self.size_bytes)

    def close(self, *, remove: bool) -> None:
        """Close everything; with `remove` leave nothing behind."""
        self.table.close()
        self.names.close()
        os.close(self.pool_fd)
        os.close(self.table_fd)
        if remove:
            for name in MAGICS:
                (self.directory / name).unlink(missing_ok=True)
            try:
                self.directory.rmdir()
            except OSError:
                logger.info("%s holds other files and stays", self.directory)
        os.close(self.lock_fd)


def open_pool(directory: Path, size_bytes: int, num_records: int, *, server: str, fresh: bool = False) -> PoolFiles:
    """Open the pool in `directory`, an earlier server's if it verifies, else a new one.

    A new pool has no space allocated yet: see `allocate_in_background`. The pool's file stays locked until `close`, so
    no other server opens it, whichever path, container or PID namespace it comes from.

    Args:
        directory: made if it is not there.
        size_bytes: of the pool.
        num_records: of the index table, if it is new.
        server: named in the error of a second server that finds the pool locked.
        fresh: make a new pool in any case.

    Raises:
        DepotBusy: another server has this pool.
        PoolError: the files cannot be made, or are not a pool's.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PoolError(f"--pool-dir {directory} cannot be made: {error}") from error
    _refuse_foreign(directory)
    earlier_fd = lock_earlier(directory)
    try:
        files = None
        if earlier_fd is not None and not fresh:
            try:
                files = _reopen(directory, size_bytes, earlier_fd)
            except (PoolError, OSError) as error:
                logger.warning("the cache of an earlier server in %s is thrown away: %s", directory, error)
        if files is None:
            files = _create(directory, size_bytes, num_records, replaces=earlier_fd is not None)
        else:
            earlier_fd = None  # it is the files' now
    finally:
        if earlier_fd is not None:
            os.close(earlier_fd)
    files.table.holder = server
    files.advance()
    return files


def _refuse_foreign(directory: Path) -> None:
    """Refuse a folder that holds foreign files under the names of ours."""
    found = [name for name in MAGICS if os.path.lexists(directory / name)]
    for name in found:
        path = directory / name
        if not stat.S_ISREG(path.lstat().st_mode):
            raise PoolError(f"{path} is not a regular file, so not a pool: remove it, or choose another --pool-dir")
    if found and not is_pool(directory):
        raise PoolError(
            f"{directory} holds a file {found[0]!r} that is not a depot's: choose another --pool-dir, or move it away"
        )


def is_pool(directory: Path) -> bool:
    """Whether a folder holds files that a depot made.

    Raises:
        OSError: it cannot be read.
    """
    files = ((directory / name, magic) for name, magic in MAGICS.items())
    return any(stat.S_ISREG(path.lstat().st_mode) and _is_ours(path, magic) for path, magic in files if path.exists())


def size_of_pool(directory: Path) -> int | None:
    """Return the bytes of the pool in a folder, None without a pool."""
    path = directory / POOL_FILE
    try:
        size = path.stat().st_size - _TRAILER_BYTES
        return size if size > 0 and _is_ours(path, _MAGIC) else None
    except OSError:
        return None


def is_pool_served(directory: Path) -> bool:
    """Whether a living depot has the pool in a folder; does not disturb one that is starting.

    Raises:
        OSError: it cannot be read.
    """
    try:
        fd = os.open(directory / POOL_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        return is_locked(fd, _SERVER_LOCK)
    finally:
        os.close(fd)


def _is_ours(path: Path, magic: bytes) -> bool:
    with path.open("rb") as file:
        if magic == _MAGIC:
            file.seek(max(0, path.stat().st_size - _TRAILER_BYTES))
        return file.read(len(magic)) == magic


def lock_earlier(directory: Path) -> int | None:
    """Return a descriptor of the existing pool's file, locked; None without one.

    Raises:
        DepotBusy: its server lives.
        PoolError: it cannot be opened.
    """
    path = directory / POOL_FILE
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PoolError(f"{path} cannot be opened: {error}") from error
    try:
        lock_fd = open_with_lock(fd, _SERVER_LOCK)
    except BlockingIOError:
        raise _busy(directory, holder_of_pool(directory)) from None
    finally:
        os.close(fd)
    if not path.exists() or not os.path.samestat(os.fstat(lock_fd), path.stat()):
        os.close(lock_fd)
        raise _busy(directory, "a server that is starting")  # which put another file in its place
    return lock_fd


def _busy(directory: Path, server: str) -> DepotBusy:
    return DepotBusy(
        f"the pool in {directory} is in use by {server}: stop that, or choose another --pool-dir"
        " (another --dir has a pool of its own unless --pool-dir names one)"
    )


def holder_of_pool(directory: Path) -> str:
    """Return which server has the pool in a folder, or had it last."""
    try:
        with (directory / TABLE_FILE).open("rb") as table:
            return holder_of(table.read(HEADER_PAGE_BYTES)) or "another server"
    except OSError:
        return "another server"


def _pool_id(fd: int, size_bytes: int) -> bytes:
    """Name this very file in this very boot: after a crash of the machine nothing in it is believed."""
    status = os.fstat(fd)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return blake3(f"{boot} {status.st_dev} {status.st_ino} {size_bytes}".encode()).digest()[:16]


def _reopen(directory: Path, size_bytes: int, lock_fd: int) -> PoolFiles:
    """Open the files of an earlier server, whose pool `lock_fd` has locked."""
    status = os.fstat(lock_fd)
    earlier_bytes = status.st_size - _TRAILER_BYTES
    if earlier_bytes != size_bytes:
        raise PoolError(
            f"its pool has {earlier_bytes:,} bytes and --pool-size is {size_bytes:,} (to keep it, start without"
            f" --pool-size or with {earlier_bytes})"
        )
    trailer = os.pread(lock_fd, _TRAILER.size, size_bytes)
    magic, generation = _TRAILER.unpack(trailer) if len(trailer) == _TRAILER.size else (b"", 0)
    if magic != _MAGIC:
        raise PoolError("the pool's end is damaged")
    with contextlib.ExitStack() as undo:
        fd = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        table = IndexTable.open(directory / TABLE_FILE, size_bytes, _pool_id(fd, size_bytes))
        undo.callback(table.close)
        if table.generation - generation not in (0, 1):  # the table's is written first
            raise PoolError(
                f"the index is of generation {table.generation} and the pool of {generation}: one of them was copied"
            )
        names = NamesFile.open(directory / NAMES_FILE)
        undo.callback(names.close)
        files = PoolFiles(directory, size_bytes, fd, lock_fd, table, _read_only(directory), names, is_new=False)
        undo.pop_all()
    return files


def _create(directory: Path, size_bytes: int, num_records: int, *, replaces: bool) -> PoolFiles:
    """Make new files. The old ones are not truncated: a client of an earlier server may still have those mapped.

    The pool's file gets its name when it is locked. With `replaces` the caller has the one before locked.
    """
    path = directory / POOL_FILE
    new_path = directory / f".{POOL_FILE}-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as undo:
        fd = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        undo.callback(os.close, fd)
        undo.callback(new_path.unlink, missing_ok=True)
        lock_fd = open_with_lock(fd, _SERVER_LOCK)
        undo.callback(os.close, lock_fd)
        os.ftruncate(fd, size_bytes + _TRAILER_BYTES)
        os.pwrite(fd, _TRAILER.pack(_MAGIC, 0), size_bytes)
        try:
            if replaces:
                new_path.rename(path)
            else:
                os.link(new_path, path)
                new_path.unlink()
        except FileExistsError:
            raise _busy(directory, "a server that is starting") from None
        undo.callback(path.unlink, missing_ok=True)
        for name in (TABLE_FILE, NAMES_FILE):
            (directory / name).unlink(missing_ok=True)
        table = IndexTable.create(directory / TABLE_FILE, num_records, size_bytes, _pool_id(fd, size_bytes))
        undo.callback(table.close)
        names = NamesFile.create(directory / NAMES_FILE)
        undo.callback(names.close)
        files = PoolFiles(directory, size_bytes, fd, lock_fd, table, _read_only(directory), names, is_new=True)
        undo.pop_all()
    return files


def _read_only(directory: Path) -> int:
    return os.open(directory / TABLE_FILE, os.O_RDONLY | os.O_CLOEXEC)


def open_with_lock(fd: int, number: int) -> int:
    """Open a file once more, with an exclusive lock on one byte far behind its end.

    The lock lasts as long as the new descriptor, any copy of it in another process, or a mapping made through them. So
    it shows whether a writer without a process number here still lives.
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
    """Give a pool's file its first 64 MiB, so that the very first store finds room. Return its bytes that have space.

    An earlier server may have given it more, from its beginning on.

    Raises:
        PoolError: the file system has not even that much.
    """
    length = min(size_bytes, _FIRST_ALLOCATION_BYTES)
    try:
        os.posix_fallocate(fd, 0, length)
    except OSError as error:
        raise PoolError(
            f"no room for the first {format_size(length)} of the pool ({error.strerror}): lower --pool-size, choose"
            f" another --pool-dir, or {ENLARGE_TMPFS}"
        ) from error
    allocated = os.fstat(fd).st_blocks * 512
    return size_bytes if allocated >= size_bytes else max(length, allocated - allocated % _ALLOCATION_STEP_BYTES)


def allocate_in_background(
    fd: int,
    start_bytes: int,
    size_bytes: int,
    on_progress: Callable[[int], None],
    on_failure: Callable[[OSError], None],
    is_urgent: Callable[[], bool],
) -> threading.Thread:
    """Give the rest of the pool's file its space, step by step: a full tmpfs is then an error, not a SIGBUS later.

    `on_progress` gets the bytes that are ready so far. The thread rests between two steps unless `is_urgent`. All three
    are called on the thread.
    """

    def work() -> None:
        pace = Pace()
        for start in range(start_bytes, size_bytes, _ALLOCATION_STEP_BYTES):
            length = min(_ALLOCATION_STEP_BYTES, size_bytes - start)
            try:
                os.posix_fallocate(fd, start, length)
            except OSError as error:
                on_failure(error)
                return
            on_progress(start + length)
            pace.rest(is_urgent)

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
        """Touch every page of the mapping, so that the first copy is as fast as later ones. Releases the GIL.

        Rests between two steps: see `Pace`.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        madvise = libc.madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        pace = Pace()
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            if should_stop() or madvise(self.address + start, length, _MADV_POPULATE_WRITE):
                return  # an old kernel or a full tmpfs: pages come as they are touched
            pace.rest(should_stop)


class PoolMapping(PoolMemory):
    """A process's own mapping of the pool, writable, and of the index table, read only."""

    def __init__(self, pool_fd: int, pool_size_bytes: int, table_fd: int, table_size_bytes: int) -> None:
        super().__init__(pool_fd, pool_size_bytes)
        self.table = TableReader(mmap.mmap(table_fd, table_size_bytes, prot=mmap.PROT_READ))
