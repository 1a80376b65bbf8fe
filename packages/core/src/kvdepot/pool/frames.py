"""A file of frames, which grows at its end: the form of the file of names, and of files of features.

Each frame has a checksum. An incomplete or damaged frame ends the file, so a kill leaves all frames that were complete.
"""

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Final, Self

from kvdepot.errors import PoolError

logger = logging.getLogger(__name__)

_FLAGS: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
_FRAME: Final = struct.Struct("<II")  # size of the body, crc32 of the body


class FrameFile:
    """An open file of frames behind the magic of its kind. The caller closes it."""

    MAGIC: ClassVar[bytes]  # includes the version of the file

    def __init__(self, fd: int, path: Path, size_bytes: int) -> None:
        """Take ownership of the descriptor of a file that has its magic.

        Raises:
            PoolError: no depot wrote the file; the descriptor stays open.
        """
        self.path = path
        self.size_bytes = size_bytes
        self._fd = fd

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a file without frames. Replace an existing file.

        Raises:
            OSError: the disk is full.
        """
        return cls(cls._make(path), path, len(cls.MAGIC))

    @classmethod
    def _make(cls, path: Path) -> int:
        """Return a descriptor of a new file that has its magic."""
        fd = os.open(path, _FLAGS | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            if os.pwrite(fd, cls.MAGIC, 0) < len(cls.MAGIC):
                raise OSError(f"no room for {path.name}")
        except BaseException:
            os.close(fd)
            raise
        return fd

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an earlier server's file.

        Raises:
            PoolError: another release wrote it, or no depot did.
            OSError: it cannot be read.
        """
        fd = os.open(path, _FLAGS)
        try:
            if os.pread(fd, len(cls.MAGIC), 0) != cls.MAGIC:
                raise PoolError(f"{path.name}: it is empty or was written by another release")
            return cls(fd, path, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise

    def add_frame(self, body: bytes) -> None:
        """Append a frame, all or nothing.

        Raises:
            OSError: the disk is full.
        """
        self._write(_FRAME.pack(len(body), zlib.crc32(body)) + body)

    def _write(self, frame: bytes) -> None:
        written = os.pwrite(self._fd, frame, self.size_bytes)
        if written < len(frame):
            os.ftruncate(self._fd, self.size_bytes)
            raise OSError(f"only {written} of {len(frame)} bytes of {self.path.name} could be written")
        self.size_bytes += written

    def bodies(self) -> Iterator[bytes]:
        """Yield the body of each frame. Cut off the first incomplete or damaged frame, and all after it."""
        place = len(self.MAGIC)
        while place < self.size_bytes:
            body = self._body(place)
            if body is None:
                logger.warning("%s: cutting off %d damaged bytes", self.path.name, self.size_bytes - place)
                self.cut(place)  # a shorter new frame would be followed by the rest of the old one
                return
            yield body
            place += _FRAME.size + len(body)

    def _body(self, place: int) -> bytes | None:
        header = os.pread(self._fd, _FRAME.size, place)
        if len(header) < _FRAME.size:
            return None
        length, crc = _FRAME.unpack(header)
        # A damaged length can be 4 GiB: to make room for that many bytes could end the server.
        if length > self.size_bytes - place - _FRAME.size:
            return None
        body = os.pread(self._fd, length, place + _FRAME.size)
        return body if zlib.crc32(body) == crc else None

    def cut(self, size_bytes: int) -> None:
        """Drop the bytes after the first `size_bytes`."""
        self.size_bytes = size_bytes
        os.ftruncate(self._fd, size_bytes)

    def close(self) -> None:
        """Close it; the file stays."""
        os.close(self._fd)
