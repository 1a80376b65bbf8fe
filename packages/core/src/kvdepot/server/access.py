"""Access on this machine: modes of the sockets, and the credentials that the kernel gives of a peer.

A depot is for its user and root. With a group its members are let in, too: they reach the sockets through directory
0710 and socket 0660, and the depot asks the kernel once more. Files of the pool stay the server's alone.
"""

import contextlib
import ctypes
import grp
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvdepot.errors import ConfigError

PRIVATE_UMASK: Final = 0o177  # sockets are bound under it, and opened to a group afterwards

_PEER_CREDENTIALS: Final = struct.Struct("iII")
_SO_PEERGROUPS: Final = 59  # Linux 4.13
_LONGEST_SOCKET_PATH: Final = 107  # bytes; the kernel's
_MAXIMUM_GROUPS: Final = 65_536  # the kernel's


@dataclass(frozen=True, slots=True)
class Access:
    """Lets the server's user and root connect, and the members of `group` unless that is None."""

    group: int | None = None

    @classmethod
    def of_group(cls, name: str | None) -> Self:
        """Return the access of a group that is named, or given as a number.

        Raises:
            ConfigError: the group does not exist.
        """
        if name is None:
            return cls()
        if name.isdecimal() and int(name) < (1 << 32) - 1:  # the last number means "leave it" to chown
            return cls(int(name))
        try:
            return cls(grp.getgrnam(name).gr_gid)
        except KeyError:
            raise ConfigError(
                f"--socket-group {name}: no such group; 'getent group' lists them, 'groupadd {name}' makes one"
            ) from None

    def prepare_directory(self, directory: Path) -> None:
        """Make the sockets' directory if needed, and let the group through it.

        A directory that was there is changed only if it was private or let another group through: one that
        everybody may pass is left as it is, one that was shared in another way is refused.

        Raises:
            ConfigError: it cannot be made, or opened to the group.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as error:
            why = "it is there and no directory" if isinstance(error, FileExistsError) else _reason(error)
            raise ConfigError(f"cannot make the directory {directory}: {why}; choose another --dir") from error
        if self.group is None:
            return
        status = directory.stat()
        mode = status.st_mode & 0o777
        if mode & 0o001:
            return
        if mode not in (0o700, 0o710) and not (mode & 0o010 and status.st_gid == self.group):
            raise ConfigError(
                f"{directory} has mode {mode:04o}, so --socket-group would change who uses it: choose another --dir,"
                f" or chmod 700 {directory}"
            )
        if mode in (0o700, 0o710):
            self._open(directory, 0o710)

    def open_socket(self, path: Path) -> None:
        """Let the group use a socket that was bound under `PRIVATE_UMASK`.

        Raises:
            ConfigError: it cannot be given to the group.
        """
        if self.group is not None:
            self._open(path, 0o660)

    def _open(self, path: Path, mode: int) -> None:
        assert self.group is not None
        try:
            os.chown(path, -1, self.group)  # before the mode: no other group ever gets in
            path.chmod(mode)
        except PermissionError as error:
            raise ConfigError(
                f"cannot give {path} to --socket-group {self.group}: user {os.geteuid()} has to own it and be a member"
                " of that group (usermod -aG GROUP USER, then log in again)"
            ) from error

    def why_not(self, connection: socket.socket) -> str | None:
        """Return why the process at the other end of a Unix socket may not connect, None if it may.

        The kernel reports its user and groups as they were when it connected.
        """
        _, uid, gid = peer_credentials(connection)
        if uid in (0, os.getuid()):
            return None
        if self.group is None:
            return f"user {uid} is neither the server's nor root (--socket-group lets a group in)"
        if self.group == gid or self.group in _supplementary_groups(connection):
            return None
        return f"user {uid} is not a member of group {self.group}"


def make_room(path: Path) -> None:
    """Remove the socket that an earlier server has left at a path.

    Raises:
        ConfigError: no socket can be made there, or something else is there, which stays.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > _LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"{path} has {num_bytes} bytes, a socket's path at most {_LONGEST_SOCKET_PATH}: choose a shorter one"
        )
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is there and no socket: move it away, or choose another place for the socket")
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot make a socket at {path}: {_reason(error)}") from error


def open_lock(path: Path) -> int:
    """Open the file that a server locks, made if it is not there.

    Raises:
        ConfigError: it cannot be opened, or is not a file.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {_reason(error)}; choose another --dir") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise ConfigError(f"{path} is not a file: move it away, or choose another --dir")
    return fd


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and primary group of the peer of a Unix socket; process 0 is in another PID namespace."""
    return _PEER_CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    )


def describe_peer(connection: socket.socket) -> str:
    """Return which process and user is the peer of a Unix socket, for the log; a child of this process serves HTTP."""
    pid, uid, _ = peer_credentials(connection)
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getpid():
            return "a client over HTTP"
    return f"process {pid} of user {uid}"


def _supplementary_groups(connection: socket.socket) -> list[int]:
    # By libc, as socket.getsockopt takes 1,024 bytes at most: users of a directory service have more than 256 groups.
    groups = (ctypes.c_uint32 * _MAXIMUM_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, ctypes.byref(groups), ctypes.byref(size)
    ):
        return []
    return groups[: size.value // ctypes.sizeof(ctypes.c_uint32)]
