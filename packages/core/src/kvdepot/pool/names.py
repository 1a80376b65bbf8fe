"""The file of the names that records of the index table refer to by number: caches, tenants and models.

It only grows, by one frame per batch of new names, so the cost of a name does not depend on their number.
"""

import logging
import os
import struct
import zlib
from pathlib import Path
from typing import Final, NamedTuple, Self

import msgspec

from kvdepot.errors import PoolError
from kvdepot.wire.messages import CacheSpec

logger = logging.getLogger(__name__)

MAGIC: Final = b"KVDEPOTN\x01\x00\x00\x00"  # includes the version of the file
_FRAME: Final = struct.Struct("<II")  # size of the body, crc32 of the body


class Label(NamedTuple):
    """The owner of chunks: tiers, quotas and eviction distinguish chunks by it."""

    tenant: str
    model: str
    weights: str = ""  # `Namespace.weights`; "" if unknown


class Names(msgspec.Struct, array_like=True, frozen=True):
    """Names in the order of their numbers."""

    spaces: list[CacheSpec] = []
    labels: list[Label] = []


_decoder: Final = msgspec.msgpack.Decoder(Names)


def encode_names(names: Names) -> bytes:
    """Return a frame with new names."""
    body = msgspec.msgpack.encode(names)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def decode_names(raw: bytes) -> tuple[Names, int]:
    """Return the names in a file and the size of their frames. An incomplete last frame does not count.

    Raises:
        PoolError: the file is damaged, or not a file of names.
    """
    if not raw.startswith(MAGIC):
        raise PoolError("the file of names is empty or was written by another release")
    names, end = Names(), len(MAGIC)
    while len(raw) >= end + _FRAME.size:
        length, crc = _FRAME.unpack_from(raw, end)
        body = raw[end + _FRAME.size : end + _FRAME.size + length]
        if len(body) < length:
            break
        if zlib.crc32(body) != crc:
            raise PoolError("the file of names is damaged")
        try:
            more = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise PoolError(f"the file of names is malformed: {error}") from error
        names.spaces.extend(more.spaces)
        names.labels.extend(more.labels)
        end += _FRAME.size + length
    if len(set(names.spaces)) < len(names.spaces) or len(set(names.labels)) < len(names.labels):
        raise PoolError("the file of names lists a name twice")
    return names, end


class NamesFile:
    """The open file of a pool's names. The caller closes it."""

    def __init__(self, fd: int, names: Names, size_bytes: int) -> None:
        """Take ownership of the descriptor of a file whose first `size_bytes` hold `names`."""
        self.found = names
        self._fd = fd
        self._size_bytes = size_bytes

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a file without names.

        Raises:
            OSError: the file exists, or the disk is full.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        file = cls(fd, Names(), 0)
        try:
            file._append(MAGIC)
        except BaseException:
            file.close()
            raise
        return file

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an earlier server's file. Cut off an incomplete last frame.

        Raises:
            PoolError: the file is damaged, or not a file of names.
            OSError: the file cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            raw = path.read_bytes()
            names, size_bytes = decode_names(raw)
            if size_bytes < len(raw):
                logger.warning(
                    "cutting off the last %d bytes of the file of names: an incomplete frame", len(raw) - size_bytes
                )
                os.ftruncate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, names, size_bytes)

    def add(self, names: Names) -> None:
        """Append names, all or nothing.

        Raises:
            OSError: the disk is full.
        """
        self._append(encode_names(names))

    def _append(self, frame: bytes) -> None:
        written = os.pwrite(self._fd, frame, self._size_bytes)
        if written < len(frame):
            os.ftruncate(self._fd, self._size_bytes)
            raise OSError(f"only {written} of {len(frame)} bytes of the new names could be written")
        self._size_bytes += written

    def flush(self) -> None:
        """Write the file to its disk, if it is on a disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it; the file stays."""
        os.close(self._fd)
