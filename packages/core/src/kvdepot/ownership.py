"""Tells files, folders and processes of this user from other users' on the machine. Root counts as this user.

Folders below /tmp and /dev/shm have names that others can guess, so a stranger may make one before a depot does, with
files or a socket in it. Nobody can forge the owner of a file, or the user that the kernel reports for a peer.
"""

import errno
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from kvdepot.errors import ConfigError, DepotForeign

_PEER_CREDENTIALS: Final = struct.Struct("iII")
_OTHERS_WRITE: Final = 0o022  # the group and everybody; entries of an ACL show in the group's bit


def own_users() -> tuple[int, int]:
    """Return the users whose files and processes this process trusts: root and its own."""
    return 0, os.geteuid()


def open_folder(path: Path) -> int:
    """Open a folder and return its descriptor. Follow a link only if this user or root made it.

    Raises:
        OSError: it cannot be opened, or is another user's link.
    """
    link = path.lstat()
    is_link = stat.S_ISLNK(link.st_mode)
    if is_link and link.st_uid not in own_users():
        raise OSError(errno.ELOOP, f"it is a link that user {link.st_uid} made: remove it", str(path))
    # A folder that becomes a link after the look above is not followed.
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if is_link else os.O_NOFOLLOW))


def is_own(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user or root, and nobody else may write to it."""
    return status.st_uid in own_users() and not status.st_mode & _OTHERS_WRITE


def refuse_foreign(status: os.stat_result, path: Path, flag: str) -> None:
    """Refuse a file or folder that another user owns or may write to. Pass the status of an open descriptor.

    Raises:
        ConfigError: it is such a file; the text names the setting `flag`.
    """
    if is_own(status):
        return
    mode = status.st_mode & 0o7777
    if status.st_uid not in own_users():
        raise ConfigError(
            f"{path} belongs to user {status.st_uid}, who could change what this depot keeps there: remove it, run the"
            f" depot as that user, or choose another {flag}"
        )
    raise ConfigError(
        f"{path} has mode {mode:04o}, so other users could change what this depot keeps there: name a folder inside it"
        f" that the depot makes, choose another {flag}, or see what is in it and chmod go-w {path}"
    )


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return pid, uid and gid of the peer of a Unix socket. The pid is 0 for a peer in another PID namespace."""
    return _PEER_CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )


def refuse_foreign_server(connection: socket.socket, path: Path) -> None:
    """Check which user listens on the Unix socket at `path`, to which `connection` is connected.

    Accept this user, root, and the owner of the socket's folder. The owner counts only if nobody but root, this user
    and the owner can put a folder at that path.

    Raises:
        DepotForeign: another user listens there.
    """
    _, uid, _ = peer_credentials(connection)
    if uid in own_users():
        return
    folder = path.parent.absolute()
    owner = folder.stat().st_uid
    if uid != owner:
        raise DepotForeign(
            f"user {uid} answers at {path}, and the folder belongs to user {owner}: find out who made that socket,"
            " remove it, and start the depot again"
        )
    # A link on the way could be anybody's, so only a path without links tells who can change it.
    if folder.resolve() != folder:
        raise DepotForeign(f"user {uid} answers at {path}, which contains links: name the folder {folder.resolve()}")
    for place in (folder, *folder.parents):
        status = place.stat()
        if status.st_uid not in (*own_users(), uid) or status.st_mode & _OTHERS_WRITE:
            raise DepotForeign(
                f"user {uid} answers at {path}, and other users could have put that there, as they can write to"
                f" {place}: serve with a --dir such as /run/kvdepot, or ask as user {uid}"
            )
