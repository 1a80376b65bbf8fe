"""The listening control socket: accepts permitted processes, and pauses while few descriptors are left."""

import logging
import os
import select
import socket
import time
from pathlib import Path
from typing import Final

from kvdepot.errors import ConfigError
from kvdepot.processes.descriptors import is_reserve_touched
from kvdepot.server.access import PRIVATE_UMASK, Access, peer_credentials

logger = logging.getLogger(__name__)

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
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        umask = os.umask(PRIVATE_UMASK)
        try:
            self._socket.bind(str(path))
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {path}: {error}") from error
        finally:
            os.umask(umask)
        access.open_socket(path)
        self._socket.listen(_BACKLOG)
        self._epoll.register(self._socket.fileno(), select.EPOLLIN)

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
            self._path.unlink(missing_ok=True)
