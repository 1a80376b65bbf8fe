"""The folder of a pool, opened by descriptor: recognises a depot's files by their magic, and never follows links.

`--pool-dir` may hold other files, and anybody can write to /dev/shm. So a file counts as a depot's only if it is a
regular file with the magic of its kind. A depot uses it only if no other user can have written it (`refuse_foreign`).
"""

import contextlib
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final, Self

from kvdepot.errors import PoolError
from kvdepot.ownership import open_folder, refuse_foreign
from kvdepot.pool.names import NamesFile
from kvdepot.pool.table import MAGIC as TABLE_MAGIC

POOL_FILE: Final = "pool"
TABLE_FILE: Final = "index"
NAMES_FILE: Final = "names"

TRAILER_BYTES: Final = 4096  # a page after the pool's last byte, which no client maps
POOL_MAGIC: Final = b"KVDEPOTP"
OF_FEATURES: Final = {"tokens": b"KVDEPOTT", "sessions": b"KVDEPOTR"}
"""The magics of the files that features keep here: a pool is removed where no feature is installed, too."""

_MAGICS: Final = {
    POOL_FILE: POOL_MAGIC,
    TABLE_FILE: TABLE_MAGIC,
    NAMES_FILE: NamesFile.MAGIC[:8],
    **OF_FEATURES,
}
# In the order in which new files get their names: of two servers that start, the first to name its pool wins.
KINDS: Final = tuple(_MAGICS)
_UNFINISHED: Final = re.compile(rf"\.({'|'.join(KINDS)})-[0-9a-f]{{16}}")


class PoolFolder:
    """The open folder of a present or future pool. A context manager."""

    def __init__(self, path: Path, *, through_links: bool = False) -> None:
        """Open the folder. `through_links`: an operator named it, so follow a link that this user or root made.

        Raises:
            OSError: it cannot be read, or is a link or not a folder.
        """
        self.path = path
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = open_folder(path) if through_links else os.open(path, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the folder. Its files stay."""
        os.close(self._fd)

    def status(self, name: str | None = None) -> os.stat_result:
        """Return the status of a file in the folder, without following links. Without a name, return the folder's.

        Raises:
            OSError: it cannot be read.
        """
        return os.fstat(self._fd) if name is None else os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def open(self, name: str, flags: int) -> int:
        """Open a file. Do not follow links, and do not block on a FIFO.

        Raises:
            OSError: it cannot be opened.
        """
        return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600, dir_fd=self._fd)

    def place_of(self, name: str) -> Path:
        """Return a path to a file in this very folder, even if another one gets its name meanwhile."""
        return Path(f"/proc/self/fd/{self._fd}") / name

    def pool_files(self) -> list[str]:
        """Return the files that a depot created, including unfinished ones of a killed start.

        Raises:
            OSError: the folder or a file cannot be read.
        """
        return [name for name in KINDS if self._is_ours(name, name)] + self._unfinished()

    def _unfinished(self) -> list[str]:
        names = ((name, _UNFINISHED.fullmatch(name)) for name in os.listdir(self._fd))
        return [name for name, match in names if match and self._is_ours(name, match[1])]

    def _is_ours(self, name: str, kind: str) -> bool:
        try:
            if not stat.S_ISREG(self.status(name).st_mode):
                return False
            fd = self.open(name, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            size = os.fstat(fd).st_size
            if not size:  # unfinished: the magic is written first
                return name != kind
            magic = _MAGICS[kind]
            return os.pread(fd, len(magic), max(0, size - TRAILER_BYTES) if kind == POOL_FILE else 0) == magic
        finally:
            os.close(fd)

    def refuse_foreign(self) -> None:
        """Refuse a folder of another user, or in which another file has the name of a depot's file.

        Another user's pool looks like an earlier server's, and that user could read and change all KV in it. Once the
        folder has passed, only this user and root can put files there.

        Raises:
            ConfigError: another user owns the folder or such a file, or may write to it.
            PoolError: there is another file with such a name; the text names it.
            OSError: a file cannot be read.
        """
        refuse_foreign(self.status(), self.path, "--pool-dir")
        for name in KINDS:
            try:
                status = self.status(name)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                raise PoolError(
                    f"{self.path / name} is not a regular file, so not a depot's: remove it, or choose another"
                    " --pool-dir"
                )
            refuse_foreign(status, self.path / name, "--pool-dir")
            if not self._is_ours(name, name):
                raise PoolError(
                    f"{self.path} holds a file {name!r} that is not a depot's: choose another --pool-dir, or move it"
                    " away"
                )

    def unfinished_name(self, kind: str) -> str:
        """Return a temporary name for a new file."""
        return f".{kind}-{secrets.token_hex(8)}"

    def give_name(self, unfinished: str, kind: str, *, replaces: bool) -> None:
        """Give a complete file its name.

        Raises:
            FileExistsError: `replaces` is False, and another file has the name.
            FileNotFoundError: another depot has removed the unfinished file.
        """
        if replaces:
            os.rename(unfinished, kind, src_dir_fd=self._fd, dst_dir_fd=self._fd)
        else:  # a rename would replace the file of a server that starts at the same time
            os.link(unfinished, kind, src_dir_fd=self._fd, dst_dir_fd=self._fd, follow_symlinks=False)
            os.unlink(unfinished, dir_fd=self._fd)

    def remove_files(self, *, only_unfinished: bool = False) -> None:
        """Remove the files that a depot created. The caller holds the pool's lock.

        Raises:
            OSError: a file cannot be removed.
        """
        for name in self._unfinished() if only_unfinished else self.pool_files():
            self.remove(name)

    def remove_pool(self) -> bool:
        """Remove the files that a depot created, and the folder. Return False if other files keep the folder.

        Raises:
            OSError: a file cannot be removed.
        """
        self.remove_files()
        if os.listdir(self._fd) or self.path.is_symlink():
            return False
        self.path.rmdir()
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)
