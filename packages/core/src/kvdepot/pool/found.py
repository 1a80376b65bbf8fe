"""Pools on this machine, served or left behind, for operators who want the memory back."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvdepot.errors import PoolError
from kvdepot.pool.files import MAGICS, holder_of_pool, is_pool, is_pool_served, lock_earlier

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class FoundPool:
    """One pool."""

    directory: Path
    allocated_bytes: int  # memory that all its files take
    uid: int  # of the owner
    used_at: float  # when its index changed last; seconds since the epoch
    server: str  # which depot has it, or had it last
    is_served: bool


def find_pools(parent: Path = SHARED_MEMORY) -> list[FoundPool]:
    """Return the pools in the folders of `parent` that this user can read, by their paths."""
    found: list[FoundPool] = []
    for directory in sorted(path for path in parent.iterdir() if path.is_dir()):
        try:
            if is_pool(directory):
                found.append(look_at(directory))
        except OSError:
            continue  # another user's, or removed in the meantime
    return found


def look_at(directory: Path) -> FoundPool:
    """Describe the pool in `directory`.

    Raises:
        PoolError: it has no pool.
        OSError: it cannot be read.
    """
    if not is_pool(directory):
        raise PoolError(f"{directory} holds no pool of a depot")
    statuses = [path.stat() for name in MAGICS if (path := directory / name).exists()]
    return FoundPool(
        directory,
        sum(status.st_blocks * 512 for status in statuses),
        directory.stat().st_uid,
        max(status.st_mtime for status in statuses),
        holder_of_pool(directory),
        is_pool_served(directory),
    )


def remove_pool(directory: Path) -> int:
    """Remove the pool of a depot that has ended, and its folder if nothing else is in it; return the bytes freed.

    Raises:
        DepotBusy: a depot serves it.
        PoolError: the pool does not exist or cannot be opened.
        OSError: it cannot be removed.
    """
    pool = look_at(directory)
    lock_fd = lock_earlier(directory)  # held until the files are gone, so no depot opens them in the meantime
    try:
        for name in MAGICS:
            (directory / name).unlink(missing_ok=True)
        if not any(directory.iterdir()):
            directory.rmdir()
    finally:
        if lock_fd is not None:
            os.close(lock_fd)
    return pool.allocated_bytes
