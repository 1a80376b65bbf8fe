"""How much memory there is for a pool, and the size that a depot's settings give it."""

import os
from pathlib import Path
from typing import Final

from kvdepot.config import ServerConfig, format_size
from kvdepot.errors import ConfigError
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES
from kvdepot.pool.files import size_of_pool

_SHARE_OF_FREE_MEMORY: Final = 0.25


def available_memory_bytes() -> int:
    """Return the memory usable without swapping: the kernel's estimate, within this process's cgroup limit."""
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


def resolve_pool_size(config: ServerConfig) -> int:
    """Return the pool's size in bytes.

    That is the configured size, else the size of the pool that is there, so that its cache is kept, else a quarter of
    the free memory that fits the file system. An earlier pool counts as free: it is reused or replaced.

    Raises:
        ConfigError: the size is too small, or the file system has no room for it.
    """
    folder = config.pool_path
    stat = os.statvfs(next(place for place in (folder, *folder.absolute().parents) if place.exists()))
    earlier = sum(path.stat().st_blocks * 512 for path in folder.glob("*") if path.is_file())
    room = stat.f_bavail * stat.f_frsize + earlier
    if config.pool_size_bytes is None:
        kept = None if config.fresh else size_of_pool(folder)
        if kept is not None:
            return kept
        size = int(min((available_memory_bytes() + earlier) * _SHARE_OF_FREE_MEMORY, room * 0.8))
        size -= size % (2 << 20)
        if size < 16 << 20:
            raise ConfigError(f"only {format_size(room)} are free in {folder}: make room or choose another --pool-dir")
        return size
    size = config.pool_size_bytes - config.pool_size_bytes % EXTENT_ALIGNMENT_BYTES
    if size < 1 << 20:
        raise ConfigError(f"--pool-size {format_size(config.pool_size_bytes)} is too small: at least 1 MiB")
    if size > room:
        raise ConfigError(
            f"--pool-size {format_size(size)} does not fit into {folder}, which has room for {format_size(room)}:"
            " lower --pool-size, name another --pool-dir, or enlarge the tmpfs"
            " (mount -o remount,size=SIZE /dev/shm; in containers --shm-size, or an emptyDir of medium Memory)"
        )
    return size
