"""The pool's files in one folder: KV bytes, the index table, the names that records refer to, and files of features.

The server owns them. Workers get their descriptors when they open a session. A server that is restarted with the same
folder finds all files again. If they do not fit together, it discards all of them and creates new ones. Only processes
that copy map the pool (`PoolMemory`); the server does not.
"""

import contextlib
import ctypes
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, Self, TypeVar

from blake3 import blake3

from kvdepot.config import format_size
from kvdepot.errors import DepotBusy, KVDepotError, PoolError
from kvdepot.pool.folder import (
    NAMES_FILE,
    OF_FEATURES,
    POOL_FILE,
    POOL_MAGIC,
    TABLE_FILE,
    TRAILER_BYTES,
    PoolFolder,
)
from kvdepot.pool.names import NamesFile
from kvdepot.pool.table import HEADER_PAGE_BYTES, IndexTable, TableReader, holder_of
from kvdepot.pool.throttle import Throttle

logger = logging.getLogger(__name__)

ENLARGE_TMPFS = (
    "enlarge the tmpfs (mount -o remount,size=SIZE /dev/shm; docker run --shm-size=SIZE or --ipc=host; in Kubernetes an"
    " emptyDir of medium Memory)"
)
"""Advice for a machine with too little room for a pool; containers have 64 MiB in /dev/shm by default."""

_FIRST_ALLOCATION_BYTES = 64 << 20  # takes 14 ms, and has room for the first prompt
_ALLOCATION_STEP_BYTES = 16 << 20  # takes 4 ms; between two steps, an engine gets the core
_POPULATE_STEP_BYTES = 8 << 20  # takes 3 ms; for the same reason
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the module `mmap` lacks the constant

_FLOCK = struct.Struct("@hhqqi0q")  # type, whence, start, length, process
_SERVER_LOCK = 1 << 60  # the byte of the pool's file that its server locks, far beyond the end of any pool
_TURN_LOCK = _SERVER_LOCK + 1  # ... and that of the worker whose turn it is: `PoolMemory.turn`
_TURN_POLL_SECONDS = 0.002  # less than the rest of a process between two turns
TURN_SECONDS = 10.0  # a process that holds the turn for longer hangs in its driver
_TRAILER = struct.Struct("<8sQ")  # magic, generation; after the pool's last byte


class KeptFile(Protocol):
    """A file of a feature, created anew or opened as an earlier server left it."""

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create it. Raises `OSError`."""
        ...

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open it. Raises `PoolError` if it is of another release or damaged, or `OSError`."""
        ...

    def close(self) -> None:
        """Close it; the file stays."""
        ...


K = TypeVar("K", bound=KeptFile)


@dataclass(slots=True)
class PoolFiles:
    """The files of one pool, open and locked."""

    directory: Path
    size_bytes: int
    pool_fd: int
    lock_fd: int  # a separate descriptor of the pool's file, which holds the lock and is not passed on
    table: IndexTable
    table_fd: int  # read only, for workers
    names: NamesFile
    is_new: bool
    unnamed: dict[str, str] = field(default_factory=dict[str, str])  # temporary names of new files, until `take_place`
    earlier_fd: int | None = None  # locks the pool that new files replace
    why_new: str = ""  # the reason why an earlier pool was not used
    kept: dict[str, KeptFile] = field(default_factory=dict[str, KeptFile])  # the files of features, by name

    def keep(self, name: str, form: type[K]) -> K:
        """Open a feature's file, and close it with the others. Create it for a new pool, or if it is damaged.

        Call this before `take_place`, which removes the files of features that did not open theirs.

        Raises:
            PoolError: it cannot be created.
        """
        with PoolFolder(self.directory, through_links=True) as folder:
            if not self.is_new:
                with contextlib.suppress(OSError, PoolError):
                    file = self.kept[name] = form.open(folder.path / name)
                    return file
            unfinished = folder.unfinished_name(name)
            try:
                file = form.create(folder.path / unfinished)
            except OSError as error:
                folder.remove(unfinished)
                raise PoolError(f"no room for the file {name!r} in {self.directory}: {error}") from error
            self.kept[name], self.unnamed[name] = file, unfinished
        return file

    def take_place(self) -> None:
        """Give new files their names, in place of an earlier server's. Call this when nothing else can fail at startup.

        By then the files are complete, locked and allocated, so after a crash a later start recognises them as a
        depot's. Earlier files are not truncated, because a client of an earlier server may still have them mapped.

        Raises:
            DepotBusy: another server has created a pool here meanwhile.
            PoolError: the folder has no room for the names.
        """
        with PoolFolder(self.directory, through_links=True) as folder:
            try:
                for kind, name in self.unnamed.items():
                    folder.give_name(name, kind, replaces=kind != POOL_FILE or self.earlier_fd is not None)
                    self.unnamed[kind] = kind
            except (FileExistsError, FileNotFoundError):
                raise busy(folder, "a server that is starting") from None
            except OSError as error:
                raise PoolError(f"no pool in {self.directory}: {error}") from error
            self.unnamed = {}
            folder.remove_files(only_unfinished=True)  # of killed starts; a concurrent start has lost the race
            for kind in OF_FEATURES.keys() - self.kept:
                folder.remove(kind)
        if self.why_new:
            logger.warning("discarding the cache of an earlier server in %s: %s", self.directory, self.why_new)
        if self.earlier_fd is not None:
            os.close(self.earlier_fd)
            self.earlier_fd = None

    def advance(self) -> None:
        """Begin a new generation, so that older copies of single files no longer fit together with the others."""
        self.table.generation += 1  # first: after a kill in between, `_reopen` accepts a table that is one ahead
        os.pwrite(self.lock_fd, _TRAILER.pack(POOL_MAGIC, self.table.generation), self.size_bytes)

    def close(self, *, remove: bool) -> None:
        """Close all files. If `remove`, delete them. Files that did not get their names are deleted in any case."""
        self.table.close()
        self.names.close()
        for file in self.kept.values():
            file.close()
        os.close(self.pool_fd)
        os.close(self.table_fd)
        with PoolFolder(self.directory, through_links=True) as folder:
            if self.unnamed:
                for name in self.unnamed.values():
                    folder.remove(name)
                with contextlib.suppress(OSError):  # another server has put its files there
                    self.directory.rmdir()
            elif remove and not folder.remove_pool():
                logger.info("%s holds other files and stays", self.directory)
        if self.earlier_fd is not None:
            os.close(self.earlier_fd)
        os.close(self.lock_fd)


def open_pool(directory: Path, size_bytes: int, num_records: int, *, server: str, fresh: bool = False) -> PoolFiles:
    """Open the pool in `directory`: an earlier server's if it verifies, else a new one under temporary names.

    Only the first 64 MiB of a new pool are allocated: see `allocate_in_background`. The pool's file stays locked until
    `close`, so no other server opens it from any path, container or PID namespace.

    A pool of another size is replaced only by `PoolFiles.take_place`, so a failed start leaves the present cache in
    place.

    Args:
        directory: created if needed.
        size_bytes: the size of the pool.
        num_records: the records of the index table, if it is new.
        server: names this server in the error of another server that finds the pool locked.
        fresh: create a new pool in any case.

    Raises:
        DepotBusy: another server uses this pool.
        ConfigError: another user owns the folder or a file in it, or may write to it.
        PoolError: the files cannot be created, or are not a pool's.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = PoolFolder(directory, through_links=True)
    except OSError as error:
        raise PoolError(f"cannot create --pool-dir {directory}: {error}") from error
    with folder:
        folder.refuse_foreign()
        earlier_fd = lock_earlier(folder)
        try:
            files, why_not = None, ""
            if earlier_fd is not None and not fresh:
                try:
                    files = _reopen(folder, size_bytes, earlier_fd)
                except (PoolError, OSError) as error:
                    why_not = str(error)
            if files is None:
                is_kept = earlier_fd is not None and not fresh and _size_of(earlier_fd) != size_bytes
                if earlier_fd is not None and not is_kept:
                    folder.remove_files()  # it is useless, and the new pool may need its memory
                try:
                    files = _create(folder, size_bytes, num_records)
                except (PoolError, OSError) as error:
                    text = str(error) if isinstance(error, PoolError) else f"no pool in {directory}: {error}"
                    if is_kept:
                        text += f" (the cache in {directory} stays: {why_not}; --fresh discards it first)"
                    raise PoolError(text) from error
                files.why_new = why_not
                if is_kept:
                    files.earlier_fd, earlier_fd = earlier_fd, None
            else:
                earlier_fd = None  # `files` owns it now
        finally:
            if earlier_fd is not None:
                os.close(earlier_fd)
    files.table.holder = server
    files.advance()
    return files


def _size_of(pool_fd: int) -> int:
    return os.fstat(pool_fd).st_size - TRAILER_BYTES


def size_of_pool(directory: Path) -> int | None:
    """Return the size of the pool in a folder in bytes, None without a pool."""
    try:
        with PoolFolder(directory, through_links=True) as folder:
            folder.refuse_foreign()  # a stranger's pool decides nothing, and `open_pool` refuses it
            return folder.status(POOL_FILE).st_size - TRAILER_BYTES if POOL_FILE in folder.pool_files() else None
    except (OSError, KVDepotError):
        return None


def allocated_bytes(directory: Path) -> int:
    """Return the bytes of memory allocated to the pool's files in a folder, 0 without a pool."""
    try:
        with PoolFolder(directory, through_links=True) as folder:
            folder.refuse_foreign()
            return sum(folder.status(name).st_blocks * 512 for name in folder.pool_files())
    except (OSError, KVDepotError):
        return 0


def is_pool_served(folder: PoolFolder) -> bool:
    """Return whether a running depot uses the pool in a folder or is creating one. Does not disturb it.

    Raises:
        OSError: it cannot be read.
    """
    for name in folder.pool_files():
        try:
            fd = folder.open(name, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            if is_locked(fd, _SERVER_LOCK):
                return True
        finally:
            os.close(fd)
    return False


def lock_earlier(folder: PoolFolder) -> int | None:
    """Lock the file of an existing pool, and return the descriptor. None without a pool.

    Raises:
        DepotBusy: its server is running.
        PoolError: the file cannot be opened.
    """
    try:
        fd = folder.open(POOL_FILE, os.O_RDWR)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise PoolError(f"cannot open {folder.path / POOL_FILE}: {error}") from error
    try:
        lock_fd = open_with_lock(fd, _SERVER_LOCK)
    except BlockingIOError:
        raise busy(folder) from None
    finally:
        os.close(fd)
    try:
        is_same = os.path.samestat(os.fstat(lock_fd), folder.status(POOL_FILE))
    except FileNotFoundError:
        is_same = False
    # Its server replaced the file between the two calls: the lock is on a file without a name, and protects nothing.
    if not is_same:
        os.close(lock_fd)
        raise busy(folder, "a server that is starting")  # it has replaced the file
    return lock_fd


def busy(folder: PoolFolder, server: str = "") -> DepotBusy:
    """Return the error for a pool that `server` uses; by default the server named in the pool."""
    return DepotBusy(
        f"the pool in {folder.path} is in use by {server or holder_of_pool(folder)}: stop that, or choose another"
        " --pool-dir (another --dir has a pool of its own unless --pool-dir names one)"
    )


def holder_of_pool(folder: PoolFolder) -> str:
    """Return the name of the server that uses the pool in a folder, or used it last."""
    try:
        fd = folder.open(TABLE_FILE, os.O_RDONLY)
    except OSError:
        return "another server"
    try:
        return holder_of(os.pread(fd, HEADER_PAGE_BYTES, 0)) or "another server"
    finally:
        os.close(fd)


def _pool_id(fd: int, size_bytes: int) -> bytes:
    """Return an id of the pool's file that changes on reboot, so that no cache is reused after a machine crash."""
    status = os.fstat(fd)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    return blake3(f"{boot} {status.st_dev} {status.st_ino} {size_bytes}".encode()).digest()[:16]


def _reopen(folder: PoolFolder, size_bytes: int, lock_fd: int) -> PoolFiles:
    """Open the files of an earlier server, whose pool `lock_fd` has locked."""
    earlier_bytes = _size_of(lock_fd)
    if earlier_bytes != size_bytes:
        raise PoolError(
            f"its pool has {earlier_bytes:,} bytes and --pool-size is {size_bytes:,} (to keep it, start without"
            f" --pool-size or with {earlier_bytes})"
        )
    _, generation = _TRAILER.unpack(os.pread(lock_fd, _TRAILER.size, size_bytes))
    with contextlib.ExitStack() as undo:
        fd = os.open(f"/proc/self/fd/{lock_fd}", os.O_RDWR | os.O_CLOEXEC)
        undo.callback(os.close, fd)
        table = IndexTable.open(folder.place_of(TABLE_FILE), size_bytes, _pool_id(fd, size_bytes))
        undo.callback(table.close)
        if table.generation - generation not in (0, 1):  # `advance` writes the table's generation first
            raise PoolError(
                f"the index has generation {table.generation}, and the pool {generation}: one of them is an older copy"
            )
        names = NamesFile.open(folder.place_of(NAMES_FILE))
        undo.callback(names.close)
        table_fd = folder.open(TABLE_FILE, os.O_RDONLY)
        undo.callback(os.close, table_fd)
        files = PoolFiles(folder.path, size_bytes, fd, lock_fd, table, table_fd, names, is_new=False)
        undo.pop_all()
    return files


def _create(folder: PoolFolder, size_bytes: int, num_records: int) -> PoolFiles:
    """Create new files under temporary names, all or none. `PoolFiles.take_place` gives them their names."""
    unfinished = {kind: folder.unfinished_name(kind) for kind in (POOL_FILE, TABLE_FILE, NAMES_FILE)}
    with contextlib.ExitStack() as undo:
        for name in unfinished.values():
            undo.callback(folder.remove, name)
        fd = folder.open(unfinished[POOL_FILE], os.O_RDWR | os.O_CREAT | os.O_EXCL)
        undo.callback(os.close, fd)
        lock_fd = open_with_lock(fd, _SERVER_LOCK)
        undo.callback(os.close, lock_fd)
        os.pwrite(fd, _TRAILER.pack(POOL_MAGIC, 0).ljust(TRAILER_BYTES, b"\0"), size_bytes)
        allocate_first(fd, size_bytes)
        table_path = folder.path / unfinished[TABLE_FILE]
        table = IndexTable.create(table_path, num_records, size_bytes, _pool_id(fd, size_bytes))
        undo.callback(table.close)
        names = NamesFile.create(folder.path / unfinished[NAMES_FILE])
        undo.callback(names.close)
        table_fd = folder.open(unfinished[TABLE_FILE], os.O_RDONLY)
        undo.callback(os.close, table_fd)
        # Without it, a machine crash could leave files without a magic on a disk, which no depot would reuse or remove.
        os.fsync(fd)
        os.fsync(table_fd)
        names.flush()
        files = PoolFiles(folder.path, size_bytes, fd, lock_fd, table, table_fd, names, is_new=True, unnamed=unfinished)
        undo.pop_all()
    return files


def open_with_lock(fd: int, number: int) -> int:
    """Open a file again, with an exclusive lock on one byte far beyond its end.

    The lock lasts as long as the new descriptor, any copy of it in another process, or a mapping made through them. It
    thereby shows whether a writer without a pid here is still alive.
    """
    copy = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(copy, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    except BaseException:
        os.close(copy)
        raise
    return copy


def is_locked(fd: int, number: int) -> bool:
    """Return whether a lock of `open_with_lock` is still held. `fd` is another descriptor of the same file."""
    lock = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    return _FLOCK.unpack(lock)[0] != fcntl.F_UNLCK


def allocate_first(fd: int, size_bytes: int) -> int:
    """Allocate the first 64 MiB of a pool's file, so that the first store finds room. Return the allocated bytes.

    An earlier server may have allocated more, from the start of the file on.

    Raises:
        PoolError: the file system does not have that much space.
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
    """Allocate the rest of the pool's file in steps, so that a full tmpfs is an error now, not a SIGBUS later.

    `on_progress` gets the bytes allocated so far. The thread rests between two steps unless `is_urgent`. It calls all
    three functions.
    """

    def work() -> None:
        throttle = Throttle()
        for start in range(start_bytes, size_bytes, _ALLOCATION_STEP_BYTES):
            length = min(_ALLOCATION_STEP_BYTES, size_bytes - start)
            try:
                os.posix_fallocate(fd, start, length)
            except OSError as error:
                on_failure(error)
                return
            on_progress(start + length)
            throttle.rest(is_urgent)

    thread = threading.Thread(target=work, name="kvdepot-allocate", daemon=True)
    thread.start()
    return thread


class PoolMemory:
    """A writable mapping of the pool in this process."""

    def __init__(self, pool_fd: int, pool_size_bytes: int) -> None:
        self.size_bytes = pool_size_bytes
        self.pool = mmap.mmap(pool_fd, pool_size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.pool))
        # A description of its own, as a lock belongs to the description, and workers share that of `pool_fd`. A worker
        # of another user may not open the file, so it has its turns beside others.
        try:
            self._turn_fd = os.open(f"/proc/self/fd/{pool_fd}", os.O_RDWR | os.O_CLOEXEC)
        except PermissionError:
            self._turn_fd = os.dup(pool_fd)
        weakref.finalize(self, os.close, self._turn_fd)

    @contextlib.contextmanager
    def turn(self, stop: threading.Event) -> Generator[None]:
        """Wait for a turn among the processes of one user that map the pool: only one has a turn at a time.

        The wait ends if `stop` is set, and after ten seconds. The end of a process ends its turn.
        """
        end = time.monotonic() + TURN_SECONDS
        while not self._lock_turn(fcntl.F_WRLCK) and time.monotonic() < end and not stop.wait(_TURN_POLL_SECONDS):
            pass
        try:
            yield
        finally:
            self._lock_turn(fcntl.F_UNLCK)

    def _lock_turn(self, kind: int) -> bool:
        try:
            fcntl.fcntl(self._turn_fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, _TURN_LOCK, 1, 0))
        except BlockingIOError:
            return False
        return True

    def populate(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Touch every page of the mapping, so that the first copy is as fast as later ones. Releases the GIL.

        It rests between two steps: see `Throttle`.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        madvise = libc.madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        throttle = Throttle()
        for start in range(0, self.size_bytes, _POPULATE_STEP_BYTES):
            length = min(_POPULATE_STEP_BYTES, self.size_bytes - start)
            if should_stop() or madvise(self.address + start, length, _MADV_POPULATE_WRITE):
                return  # old kernel or full tmpfs: pages are allocated when they are touched
            throttle.rest(should_stop)


class PoolMapping(PoolMemory):
    """This process's mappings of the pool (writable) and of the index table (read only)."""

    def __init__(self, pool_fd: int, pool_size_bytes: int, table_fd: int, table_size_bytes: int) -> None:
        super().__init__(pool_fd, pool_size_bytes)
        self.table = TableReader(mmap.mmap(table_fd, table_size_bytes, prot=mmap.PROT_READ))
