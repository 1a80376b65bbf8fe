"""Controls which processes of this machine may connect: modes of the sockets, credentials of peers, and the listener.

A depot admits its own user and root. With a group it admits the members, too: the directory has mode 0710 and the
sockets 0660, and the depot checks the credentials that the kernel reports. Only the server can open the pool's files.
"""

import contextlib
import ctypes
import grp
import logging
import os
import select
import socket
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from kvdepot.errors import ConfigError
from kvdepot.ownership import open_folder, own_users, peer_credentials, refuse_foreign
from kvdepot.processes import is_reserve_touched

logger = logging.getLogger(__name__)

_SO_PEERGROUPS: Final = 59  # Linux 4.13
_LONGEST_SOCKET_PATH: Final = 107  # bytes; the kernel's limit
_MAXIMUM_GROUPS: Final = 65_536  # the kernel's limit


@dataclass(frozen=True, slots=True)
class Access:
    """Lets the server's user, root and the members of `group` connect; None: no group."""

    group: int | None = None

    @classmethod
    def of_group(cls, name: str | None) -> Self:
        """Return the access for a group, given by name or number.

        Raises:
            ConfigError: the group does not exist.
        """
        if name is None:
            return cls()
        if name.isdecimal() and int(name) < (1 << 32) - 1:  # to chown, the last number means "do not change"
            return cls(int(name))
        try:
            return cls(grp.getgrnam(name).gr_gid)
        except KeyError:
            raise ConfigError(
                f"--socket-group {name}: no such group; 'getent group' lists them, 'groupadd {name}' makes one"
            ) from None

    def prepare_directory(self, directory: Path) -> None:
        """Create the directory of the sockets if needed, and let the group pass through it.

        Change the mode of an existing directory only if it was private or open to another group. Leave it alone if
        everybody may pass, and refuse it if it was shared in any other way.

        Raises:
            ConfigError: it cannot be created, or opened to the group, or another user owns it or may write to it.
        """
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = open_folder(directory)
        except (OSError, ValueError) as error:
            why = "it is there and no directory" if isinstance(error, FileExistsError) else _reason(error)
            raise ConfigError(f"cannot make the directory {directory}: {why}; choose another --dir") from error
        try:
            self._prepare(fd, directory)
        finally:
            os.close(fd)

    def _prepare(self, fd: int, directory: Path) -> None:
        status = os.fstat(fd)
        refuse_foreign(status, directory, "--dir")
        if self.group is None:
            return
        mode = status.st_mode & 0o777
        if mode & 0o001:
            return
        if mode not in (0o700, 0o710) and not (mode & 0o010 and status.st_gid == self.group):
            raise ConfigError(
                f"{directory} has mode {mode:04o}, so --socket-group would change who uses it: choose another --dir,"
                f" or chmod 700 {directory}"
            )
        if mode in (0o700, 0o710):
            self._open(fd, directory, 0o710)

    def open_socket(self, path: Path) -> None:
        """Let the group use a socket that only this user can connect to so far.

        Raises:
            ConfigError: the socket cannot be given to the group.
            OSError: the socket is gone.
        """
        if self.group is not None:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)  # `chmod` would follow a link
            try:
                self._open(fd, path, 0o660)
            finally:
                os.close(fd)

    def _open(self, fd: int, path: Path, mode: int) -> None:
        assert self.group is not None
        this = f"/proc/self/fd/{fd}"
        try:
            os.chown(this, -1, self.group)  # before the mode, so that no other group can connect in between
            os.chmod(this, mode)
        except PermissionError as error:
            raise ConfigError(
                f"cannot give {path} to --socket-group {self.group}: user {os.geteuid()} has to own it and be a member"
                " of that group (usermod -aG GROUP USER, then log in again)"
            ) from error

    def why_not(self, connection: socket.socket) -> str | None:
        """Return why the process at the other end of a Unix socket may not connect, None if it may.

        The kernel reports the peer's user and groups as of the time of its connect.
        """
        _, uid, gid = peer_credentials(connection)
        if uid in own_users():
            return None
        if self.group is None:
            return f"user {uid} is neither the server's nor root (--socket-group lets a group in)"
        if self.group == gid or self.group in _supplementary_groups(connection):
            return None
        return f"user {uid} is not a member of group {self.group}"


def make_room(path: Path) -> None:
    """Remove the socket that an earlier server left at a path.

    Raises:
        ConfigError: no socket can be created there, or the path is not a socket. It is not removed then.
    """
    num_bytes = len(os.fsencode(path))
    if num_bytes > _LONGEST_SOCKET_PATH:
        raise ConfigError(
            f"{path} has {num_bytes} bytes, a socket's path at most {_LONGEST_SOCKET_PATH}: choose a shorter one"
        )
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(
                f"{path} exists and is not a socket: move it away, or choose another place for the socket"
            )
        path.unlink()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError(f"cannot make a socket at {path}: {_reason(error)}") from error


def open_lock(path: Path) -> int:
    """Open the file that a server locks. Create it if needed.

    Raises:
        ConfigError: the file cannot be opened, is not a regular file, or belongs to another user.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise ConfigError(f"cannot open {path}: {_reason(error)}; choose another --dir") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path} is not a file: move it away, or choose another --dir")
        refuse_foreign(status, path, "--dir")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)


def describe_peer(connection: socket.socket) -> str:
    """Describe the peer of a Unix socket for the log: its process and user, or HTTP if it is this process's child."""
    pid, uid, _ = peer_credentials(connection)
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if parent == os.getpid():
            return "a client over HTTP"
    return f"process {pid} of user {uid}"


def _supplementary_groups(connection: socket.socket) -> list[int]:
    # Calls libc because socket.getsockopt returns 1,024 bytes at most, and users of a directory service have more than
    # 256 groups.
    groups = (ctypes.c_uint32 * _MAXIMUM_GROUPS)()
    size = ctypes.c_uint32(ctypes.sizeof(groups))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, ctypes.byref(groups), ctypes.byref(size)
    ):
        return []
    return groups[: size.value // ctypes.sizeof(ctypes.c_uint32)]


_BACKLOG: Final = 1024  # after a restart, all engines of a node reconnect at once
_SECONDS_BETWEEN_WARNINGS: Final = 10.0  # refused processes try again at once


class Warnings:
    """Logs at most one warning in ten seconds. Peers cause them and could flood the log."""

    def __init__(self) -> None:
        self._warned_at = float("-inf")

    def warn(self, text: str, *values: object) -> None:
        """Log a warning, unless another one was logged within the last ten seconds."""
        if time.monotonic() >= self._warned_at + _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = time.monotonic()
            logger.warning(text, *values)


class Listener:
    """The control socket, on which new connections arrive.

    Args:
        path: the path of the socket.
        access: decides which processes may connect.
        epoll: the caller's epoll object. It reports when `accept` has work.
        warnings: logs refused and failed connections.

    Raises:
        ConfigError: the socket cannot be created.
    """

    def __init__(self, path: Path, access: Access, epoll: select.epoll, warnings: Warnings) -> None:
        self._path = path
        self._access = access
        self._epoll = epoll
        self._warnings = warnings
        self._is_listening = True
        self._socket = self._listen()

    def _listen(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            # The file gets this mode: no umask, which threads of tiers that make folders would have meanwhile, too.
            os.fchmod(listening.fileno(), 0o600)
            listening.bind(str(self._path))
            self._access.open_socket(self._path)
            listening.listen(_BACKLOG)
        except BaseException as error:
            listening.close()
            if isinstance(error, OSError):
                raise ConfigError(f"cannot listen on {self._path}: {error}") from error
            raise
        self._epoll.register(listening.fileno(), select.EPOLLIN)
        return listening

    def listen_again(self) -> None:
        """Make the socket again after its file was removed. Accepted connections stay.

        Raises:
            ConfigError: the socket cannot be created.
        """
        make_room(self._path)
        listening = self._listen()
        self._socket.close()  # its clients in the queue connect again
        self._socket, self._is_listening = listening, True

    def accept(self) -> socket.socket | None:
        """Accept a connection. Return None if no permitted process waits."""
        if self._is_crowded():
            self._warnings.warn("few descriptors are left: new connections wait")
            self._set_listening(False)
            return None
        try:
            accepted, _ = self._socket.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            self._warnings.warn("cannot accept a connection: %s", error)
            self._set_listening(False)
            return None
        reason = self._access.why_not(accepted)
        if reason is not None:
            self._warnings.warn("refused a connection of process %d: %s", peer_credentials(accepted)[0], reason)
            accepted.close()
            return None
        accepted.setblocking(False)
        return accepted

    def fileno(self) -> int:
        """Return the descriptor that the epoll set reports, or -1 once closed."""
        return self._socket.fileno()

    def resume(self) -> None:
        """Listen again, if it was paused and there are enough descriptors now."""
        if not self._is_listening:
            self._set_listening(not self._is_crowded())

    def _is_crowded(self) -> bool:
        return is_reserve_touched(self._epoll.fileno())

    def _set_listening(self, is_listening: bool) -> None:
        if is_listening != self._is_listening:
            self._is_listening = is_listening
            self._epoll.modify(self._socket.fileno(), select.EPOLLIN if is_listening else 0)

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            with contextlib.suppress(OSError):  # its folder may be gone, or a stranger's by now
                self._path.unlink()
