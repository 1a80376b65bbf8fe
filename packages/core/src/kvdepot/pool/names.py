"""The file of the names that records of the index table refer to by number: caches, tenants and models.

It only grows, by a frame for each batch of new names, so the cost of a name does not depend on their number.
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

MAGIC: Final = b"KVDEPOTN\x01\x00\x00\x00"  # with the version of the file
_FRAME: Final = struct.Struct("<II")  # bytes of the body, its crc32


class Label(NamedTuple):
    """The owner of chunks, by which tiers, quotas and eviction tell them apart."""

    tenant: str
    model: str
    weights: str = ""  # `Namespace.weights`; "" if nobody said, and in files of earlier releases


class Names(msgspec.Struct, array_like=True, frozen=True):
    """Names in the order of their numbers."""

    spaces: list[CacheSpec] = []
    labels: list[Label] = []


_decoder: Final = msgspec.msgpack.Decoder(Names)


def encode_names(names: Names) -> bytes:
    """Return the frame that adds names."""
    body = msgspec.msgpack.encode(names)
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def decode_names(raw: bytes) -> tuple[Names, int]:
    """Return the names in a file, and the bytes that they take: a frame that was not written to its end is none.

    Raises:
        PoolError: it is damaged, or not such a file.
    """
    if not raw.startswith(MAGIC):
        raise PoolError("its names are those of another release, or none")
    names, end = Names(), len(MAGIC)
    while len(raw) >= end + _FRAME.size:
        length, crc = _FRAME.unpack_from(raw, end)
        body = raw[end + _FRAME.size : end + _FRAME.size + length]
        if len(body) < length:
            break
        if zlib.crc32(body) != crc:
            raise PoolError("its names are damaged")
        try:
            more = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise PoolError(f"its names are none: {error}") from error
        names.spaces.extend(more.spaces)
        names.labels.extend(more.labels)
        end += _FRAME.size + length
    if len(set(names.spaces)) < len(names.spaces) or len(set(names.labels)) < len(names.labels):
        raise PoolError("its names are there twice")
    return names, end


class NamesFile:
    """The names of a pool, open; `close` it."""

    def __init__(self, fd: int, names: Names, size_bytes: int) -> None:
        """Take over a descriptor of a file whose first `size_bytes` hold `names`."""
        self.found = names
        self._fd = fd
        self._size_bytes = size_bytes

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make a file without names.

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
        """Open an earlier server's file, and cut off a name that it did not write to its end.

        Raises:
            PoolError: it is damaged, or not such a file.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            raw = path.read_bytes()
            names, size_bytes = decode_names(raw)
            if size_bytes < len(raw):
                logger.warning("the last %d bytes of %s are not a whole name: cut off", len(raw) - size_bytes, path)
                os.ftruncate(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, names, size_bytes)

    def add(self, names: Names) -> None:
        """Add the names that follow those that are here, all or nothing.

        Raises:
            OSError: the disk is full.
        """
        self._append(encode_names(names))

    def _append(self, frame: bytes) -> None:
        written = os.pwrite(self._fd, frame, self._size_bytes)
        if written < len(frame):
            os.ftruncate(self._fd, self._size_bytes)
            raise OSError(f"only {written} of {len(frame)} bytes of a name found room")
        self._size_bytes += written

    def flush(self) -> None:
        """Write the file to its disk, if it is on one."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close it; the file stays."""
        os.close(self._fd)
