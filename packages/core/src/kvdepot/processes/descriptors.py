"""Descriptors of this process: as many as it may have, and a reserve that no connection takes.

Tiers open files, movers are started and a session is handed its pool: all of that needs descriptors while strangers
connect. Whoever accepts asks first whether the reserve is touched, and leaves new connections in the kernel's queue
until it is not.
"""

import errno
import os
import resource
from typing import Final

EXHAUSTED: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

_MAXIMUM_DESCRIPTORS: Final = 65_536
_RESERVE: Final = 256
_RESERVE_SHARE: Final = 8  # of a small limit the reserve is this part


def raise_descriptor_limit() -> None:
    """Allow this process as many descriptors as it may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAXIMUM_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAXIMUM_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reserve_of(limit: int) -> int:
    """Return how many of the descriptors of a process are not for connections."""
    return min(_RESERVE, limit // _RESERVE_SHARE)


def is_reserve_touched(fd: int) -> bool:
    """Return whether so many descriptors are open that no connection may take another.

    The kernel gives the lowest number that is free, so a copy of `fd`, which is closed again, tells how many there are.
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
    """Raise an error again that says nothing about the process that was looked for."""
    if isinstance(error, OSError) and error.errno in EXHAUSTED:
        raise error
