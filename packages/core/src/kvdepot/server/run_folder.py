"""The directory of a depot's sockets: one server locks it, and makes its files again if they are removed.

Without `$XDG_RUNTIME_DIR` it lies below /tmp, where cleaners remove old files. Attached engines would not notice, but
no other could attach, and a second server could take the directory.
"""

import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvdepot.config import CONTROL_SOCKET
from kvdepot.errors import DepotBusy, KVDepotError
from kvdepot.server.access import Access, open_lock

logger = logging.getLogger(__name__)

_LOCK: Final = "lock"


class RunFolder:
    """The locked directory of one server.

    Args:
        path: created if needed.
        access: decides which processes may connect.

    Raises:
        ConfigError: it cannot be created, or another user owns it or may write to it.
        DepotBusy: another server has it.
    """

    def __init__(self, path: Path, access: Access) -> None:
        self.path = path
        self.access = access
        self.control = path / CONTROL_SOCKET
        self._lock_fd = -1
        self._kept: dict[Path, tuple[Callable[[], None], os.stat_result]] = {}
        self._why_broken = ""
        access.prepare_directory(path)
        self._take_lock()
        self.keep(path / _LOCK, self._take_lock)

    def keep(self, path: Path, make: Callable[[], None]) -> None:
        """Have `restore` call `make` when the file at `path`, which this server made, is gone or another one."""
        self._kept[path] = make, path.lstat()

    def restore(self) -> None:
        """Make removed files again, the lock first. If that is impossible, log an error once, and try at the next call.

        A stranger may have made the directory meanwhile, or another server may have it.
        """
        lost = [path for path, (_, status) in self._kept.items() if not _is_at(path, status)]
        if not lost:
            return
        try:
            self.access.prepare_directory(self.path)
            for path in lost:
                make = self._kept[path][0]
                make()
                self.keep(path, make)
        except (KVDepotError, OSError) as error:
            if str(error) != self._why_broken:
                self._why_broken = str(error)
                logger.error(
                    "files of this depot are gone from %s and cannot be made again, so no other engine can attach: %s",
                    self.path,
                    error,
                )
            return
        self._why_broken = ""
        names = ", ".join(path.name for path in lost)
        logger.warning(
            "made %s in %s again, as someone removed it: exempt the directory from the cleaner of old files, or choose"
            " another --dir",
            names,
            self.path,
        )

    def close(self) -> None:
        """Unlock the directory: the next server may start."""
        os.close(self._lock_fd)

    def _take_lock(self) -> None:
        fd = open_lock(self.path / _LOCK)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            pid = os.pread(fd, 32, 0).decode(errors="replace").strip()
            os.close(fd)
            raise DepotBusy(f"process {pid} already serves {self.path}: stop it, or choose another --dir") from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
        self._lock_fd = fd


def _is_at(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), status)
    except OSError:
        return False
