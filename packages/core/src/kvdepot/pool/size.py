"""Determines the memory available for a pool, and the size of the pool from a depot's settings."""

import contextlib
import logging
import mmap
import os
from pathlib import Path
from typing import Final

from kvdepot.config import ServerConfig, format_size
from kvdepot.errors import ConfigError
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES
from kvdepot.pool.files import ENLARGE_TMPFS, allocated_bytes, size_of_pool

logger = logging.getLogger(__name__)

SHARE_OF_FREE_MEMORY: Final = 0.25  # the default leaves room for engines that start later
MEMORY_FILE_SYSTEMS: Final = frozenset({"tmpfs", "hugetlbfs", "ramfs"})


def available_memory_bytes() -> int:
    """Return the bytes usable without swapping: the kernel's estimate, bounded by this process's cgroup limit."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):
        return available
    return available if limit == "max" else max(0, min(available, int(limit) - used))


def file_system_of(place: Path) -> str:
    """Return the type of the file system that a file or folder is on, as in /proc/mounts; "?" if unknown."""
    found = ("", "?")
    with contextlib.suppress(OSError):
        for line in Path("/proc/mounts").read_text().splitlines():
            _, mount, kind, *_ = line.split()
            inside = place.absolute() == Path(mount) or Path(mount) in place.absolute().parents
            if inside and len(mount) >= len(found[0]):
                found = mount, kind
    return found[1]


def resolve_pool_size(config: ServerConfig) -> int:
    """Return the pool's size in bytes.

    That is the configured size; else the size of an existing pool, so that its cache is kept; else a quarter of the
    free memory, if the file system has room for it. The memory of an existing pool counts as free, as it is reused or
    replaced. Warn if the folder is not in memory, or is too small for the default size.

    Raises:
        ConfigError: the size is too small, or the file system has no room for it.
    """
    folder = config.pool_path
    place = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    kind = file_system_of(place)
    if kind not in MEMORY_FILE_SYSTEMS:
        logger.warning(
            "the pool in %s is on %s: its pages go to disk, and copies wait for that; set --pool-dir to a folder on"
            " tmpfs, for example below /dev/shm",
            folder,
            kind,
        )
    stat = os.statvfs(place)
    earlier = allocated_bytes(folder)
    room = stat.f_bavail * stat.f_frsize + earlier
    if config.pool_size_bytes is None:
        share = (available_memory_bytes() + earlier) * SHARE_OF_FREE_MEMORY
        kept = None if config.fresh else size_of_pool(folder)
        size = int(min(share, room * 0.8)) if kept is None else kept
        size -= size % (2 << 20) if kept is None else 0
        if size < 16 << 20:
            raise ConfigError(
                f"only {format_size(room)} are free in {folder}: make room, choose another --pool-dir, or"
                f" {ENLARGE_TMPFS}"
            )
        if room * 0.8 < share:
            logger.warning(
                "the pool has only %s, as %s has room for %s and a quarter of the free memory is %s: %s",
                format_size(size),
                folder,
                format_size(room),
                format_size(share),
                ENLARGE_TMPFS,
            )
        return size
    # With pages of 64 KiB (aarch64), a pool that ended within one would show its trailer to clients.
    size = config.pool_size_bytes - config.pool_size_bytes % max(EXTENT_ALIGNMENT_BYTES, mmap.PAGESIZE)
    if size < 1 << 20:
        raise ConfigError(f"--pool-size {format_size(config.pool_size_bytes)} is too small: at least 1 MiB")
    if size > room:
        raise ConfigError(
            f"--pool-size {format_size(size)} does not fit into {folder}, which has room for {format_size(room)}:"
            f" lower --pool-size, name another --pool-dir, or {ENLARGE_TMPFS}"
        )
    return size
