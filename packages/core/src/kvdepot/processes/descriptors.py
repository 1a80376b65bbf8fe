"""Raises the limit of descriptors, and keeps a reserve that connections may not use.

Tiers open files, movers are started, and sessions receive the pool. All of that needs descriptors while any number of
clients connect. So before accepting a connection, check `is_reserve_touched`, and leave new connections in the kernel's
queue until it returns False.
"""

import errno
import os
import resource
from typing import Final

EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_MAXIMUM_DESCRIPTORS: Final = 65_536  # more than twice what 4,096 sessions of workers take, seven each
_RESERVE: Final = 256  # for files of tiers, pidfds and replies, so that only new connections suffer from a full table
_RESERVE_SHARE: Final = 8  # a small limit reserves one descriptor in 8


def raise_descriptor_limit() -> None:
    """Raise this process's limit of descriptors as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAXIMUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAXIMUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve_of(limit: int) -> int:
    """Return how many of a process's descriptors are reserved."""
    return min(_RESERVE, limit // _RESERVE_SHARE)


def is_reserve_touched(fd: int) -> bool:
    """Return whether too many descriptors are open to accept another connection.

    The kernel assigns the lowest free number, so the number of a temporary copy of `fd` tells how many are open.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return False
    try:
        copy = os.dup(fd)
    except OSError:
        return True
    os.close(copy)
    return copy >= limit - reserve_of(limit)


def raise_if_exhausted(error: Exception) -> None:
    """Re-raise an error that is caused by a lack of descriptors, and so tells nothing about the process in question."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        raise error
