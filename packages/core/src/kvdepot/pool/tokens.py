"""The file of the chunks' tokens that engines described for routers. The next server reads it.

It grows by one frame per accepted message. `rewrite` drops messages that are no longer wanted. An incomplete or damaged
frame ends the file. Engines describe the chunks after it again with later prompts.
"""

import contextlib
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

logger = logging.getLogger(__name__)

MAGIC: Final = b"KVDEPOTT\x01\x00\x00\x00"  # includes the version of the file
_FRAME: Final = struct.Struct("<II")  # size of the body, crc32 of the body
_LARGEST_FRAME: Final = 16 << 20  # far beyond any message: a larger length means damage


class TokensFile:
    """The open file of a pool's tokens. The caller closes it."""

    def __init__(self, fd: int, path: Path, size_bytes: int) -> None:
        """Take ownership of the descriptor of a file that has its magic."""
        self.size_bytes = size_bytes
        self._fd = fd
        self._path = path
        self._is_full = False

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a file without tokens. Replace an existing file.

        Raises:
            OSError: the disk is full.
        """
        return cls(_create(path), path, len(MAGIC))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an earlier server's file, or create one if there is none of this version.

        Raises:
            OSError: the file can neither be opened nor created.
        """
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            if os.pread(fd, len(MAGIC), 0) == MAGIC:
                return cls(fd, path, os.fstat(fd).st_size)
            os.close(fd)
        return cls.create(path)

    def moved(self, path: Path) -> None:
        """Note that the file was renamed."""
        self._path = path

    def append(self, body: bytes) -> None:
        """Append a message. Without room, log a warning and drop it."""
        frame = _FRAME.pack(len(body), zlib.crc32(body)) + body
        try:
            if os.pwrite(self._fd, frame, self.size_bytes) == len(frame):
                self.size_bytes += len(frame)
                self._is_full = False
                return
        except OSError as error:
            if not self._is_full:
                logger.warning(
                    "no room for the tokens of %s: the next server will not know them (%s)", self._path, error
                )
        self._is_full = True

    def clear(self) -> None:
        """Drop all messages."""
        self.size_bytes = len(MAGIC)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self.size_bytes)

    def rewrite(self, is_wanted: Callable[[bytes], bool]) -> Iterator[int]:
        """Rewrite the file with the wanted messages and messages appended meanwhile, one per step.

        If the server is killed before the end, the file stays as it was. Without room for a new file it stays, too, but
        `is_wanted` learns of all its messages.
        """
        old_fd, old_bytes, name = self._fd, self.size_bytes, self._path
        unfinished = name.with_name(f".tokens-{os.urandom(8).hex()}")
        try:
            self._fd, self.size_bytes = _create(unfinished), len(MAGIC)
        except OSError as error:
            logger.warning("cannot rewrite the tokens of %s: %s", name, error)
            for body in _bodies(old_fd, old_bytes):
                is_wanted(body)
                yield 0
            return
        try:
            for body in _bodies(old_fd, old_bytes):
                if is_wanted(body):
                    self.append(body)
                yield 0
            unfinished.rename(name)  # only now: until then, a kill leaves the whole old file
        finally:
            os.close(old_fd)

    def close(self) -> None:
        """Close it; the file stays."""
        os.close(self._fd)


def _create(path: Path) -> int:
    """Return a descriptor of a new file that has its magic."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if os.pwrite(fd, MAGIC, 0) < len(MAGIC):
            raise OSError("no room for a file of tokens")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _bodies(fd: int, size_bytes: int) -> Iterator[bytes]:
    """Yield the messages in a file, up to the first that is damaged."""
    place = len(MAGIC)
    while place + _FRAME.size <= size_bytes:
        length, crc = _FRAME.unpack(os.pread(fd, _FRAME.size, place))
        body = os.pread(fd, length, place + _FRAME.size) if length <= _LARGEST_FRAME else b""
        if len(body) < length or zlib.crc32(body) != crc:
            logger.warning(
                "the tokens of an earlier server are damaged after %d bytes: engines will describe the rest again",
                place,
            )
            return
        yield body
        place += _FRAME.size + length
