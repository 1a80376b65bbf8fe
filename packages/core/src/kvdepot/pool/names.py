"""The file of the names that records of the index table refer to by number: caches, tenants and models.

It only grows, by one frame per batch of new names, so the cost of a name does not depend on their number.
"""

import os
from pathlib import Path
from typing import ClassVar, Final, NamedTuple

import msgspec

from kvdepot.errors import PoolError
from kvdepot.pool.frames import FrameFile
from kvdepot.wire.messages import CacheSpec


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


class NamesFile(FrameFile):
    """The open file of a pool's names."""

    MAGIC: ClassVar[bytes] = b"KVDEPOTN\x01\x00\x00\x00"

    def __init__(self, fd: int, path: Path, size_bytes: int) -> None:
        super().__init__(fd, path, size_bytes)
        names = self.found = Names()
        try:
            for more in map(_decoder.decode, self.bodies()):
                names.spaces.extend(more.spaces)
                names.labels.extend(more.labels)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise PoolError(f"{path.name}: it is malformed: {error}") from error
        if len(set(names.spaces)) < len(names.spaces) or len(set(names.labels)) < len(names.labels):
            raise PoolError(f"{path.name}: it lists a name twice")

    def add(self, names: Names) -> None:
        """Append names, all or nothing.

        Raises:
            OSError: the disk is full.
        """
        self.add_frame(msgspec.msgpack.encode(names))

    def flush(self) -> None:
        """Write the file to its disk, if it is on a disk."""
        os.fsync(self._fd)
