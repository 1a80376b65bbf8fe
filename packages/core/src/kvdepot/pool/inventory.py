"""Finds the pools on this machine, served or not, and removes pools that no depot serves."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvdepot.errors import DepotBusy, PoolError
from kvdepot.ownership import is_own
from kvdepot.pool.files import holder_of_pool, is_pool_served, lock_earlier
from kvdepot.pool.folder import PoolFolder

SHARED_MEMORY = Path("/dev/shm")
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class FoundPool:
    """One pool."""

    directory: Path
    allocated_bytes: int  # allocated to all its files
    uid: int  # of the owner
    used_at: float  # Unix time in whole seconds: when a depot last used it
    server: str  # the depot that uses it, or used it last
    is_served: bool
    is_own: bool  # whether only this user and root can have written it; if not, its `server` is a stranger's claim


def find_pools(parent: Path = SHARED_MEMORY) -> list[FoundPool]:
    """Return the pools in the folders of `parent` that this user can read, ordered by path.

    Links to folders are skipped, as anybody may have created them.
    """
    found: list[FoundPool] = []
    for directory in sorted(parent.iterdir()):
        try:
            found.append(look_at(directory))
        except (OSError, PoolError):
            continue  # not a pool, another user's, or removed meanwhile
    return found


def name_others(directory: Path, parent: Path = SHARED_MEMORY) -> str:
    """Name this user's running depots outside of `directory`: "; running: ...". "" if there are none.

    The default folder depends on XDG_RUNTIME_DIR, which a login has, but no service, cron job or container. So an
    engine or a command can look for a depot that runs in another folder.
    """
    any_depot, own = "the depot of --dir ", f"the depot of --dir {directory.absolute()} "
    others = [each.server for each in find_pools(parent) if each.is_served and each.is_own]
    others = [server for server in others if server.startswith(any_depot) and not server.startswith(own)]
    more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    return f"; running: {', '.join(others[:_MOST_NAMED])}{more}" if others else ""


def look_at(directory: Path) -> FoundPool:
    """Describe the pool in `directory`.

    Raises:
        PoolError: the folder has no pool, or is a link.
        OSError: it cannot be read.
    """
    with _open(directory) as folder:
        return _look_at(folder)


def _open(directory: Path) -> PoolFolder:
    if directory.is_symlink():
        raise PoolError(f"{directory} is a symbolic link; pass its target {directory.readlink()}")
    try:
        return PoolFolder(directory)
    except (FileNotFoundError, NotADirectoryError):
        raise PoolError(f"{directory} is not a folder, so it holds no pool") from None


def _look_at(folder: PoolFolder) -> FoundPool:
    names = folder.pool_files()
    if not names:
        raise PoolError(f"{folder.path} holds no pool of a depot")
    status, statuses = folder.status(), [folder.status(name) for name in names]
    return FoundPool(
        folder.path,
        sum(status.st_blocks * 512 for status in statuses),
        status.st_uid,
        max(status.st_mtime for status in statuses),
        holder_of_pool(folder),
        is_pool_served(folder),
        all(map(is_own, (status, *statuses))),
    )


def remove_pool(directory: Path) -> int:
    """Remove the pool of a stopped depot, and its folder if that is empty then. Return the bytes freed.

    Raises:
        DepotBusy: a depot serves it.
        PoolError: the pool does not exist or cannot be opened.
        OSError: it cannot be removed.
    """
    with _open(directory) as folder:
        pool = _look_at(folder)
        if pool.is_served:
            raise DepotBusy(f"the pool in {folder.path} is in use by {holder_of_pool(folder)}: stop that first")
        lock_fd = lock_earlier(folder)  # held until the files are removed, so that no depot opens them meanwhile
        try:
            folder.remove_pool()
        finally:
            if lock_fd is not None:
                os.close(lock_fd)
    return pool.allocated_bytes
