"""Runs: objects of up to 128 chunks and 64 MiB of one place, for stores that cost money and time per request.

A prefix is cut at chunks whose number is a multiple of `keys.chunks_a_run`. Between two cuts, each store adds an object
with its chunks after the objects of earlier stores. **The walk** finds these objects. It begins with the object of the
chunk after the cut. The next one is that of the first chunk of the prefix that the objects before it lack, and so on,
until there is no such object. Prompts that diverge between two cuts share the objects before that point and have their
own objects after it. A writer walks in the same way and adds an object at the end. Objects never change, so a walk
only grows. If an object is removed, the next writer puts another one in its place.

An object is named after its first chunk and the chunk that begins its **section** of 16 MiB. That was a run of release
0.1, whose objects a walk finds in this way.

An object begins with its **head**: the key, the trailer and the place of the payload of each chunk.
"""

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers.keys import (
    MOST_CHUNKS_A_RUN,
    NAME_HASH_BYTES,
    PLACE_BYTES,
    RUN_BYTES,
    begins_section,
    digest_of,
    run_of,
    section_of,
)
from kvdepot.tiers.trailer import TRAILER_BYTES

_MAGIC: Final = b"KVDRUN\0\1"
_START: Final = struct.Struct("<8sQ")  # magic, number of chunks
_CHUNK: Final = struct.Struct(f"<{DIGEST_BYTES}sQQ{TRAILER_BYTES}s")  # key, offset and size of the payload, trailer
HEAD_BYTES: Final = _START.size + MOST_CHUNKS_A_RUN * _CHUNK.size  # maximum size of a head
_NO_CHUNK: Final = bytes(RUN_BYTES)  # for an object that begins a section, and so is named only after that


@dataclass(frozen=True, slots=True)
class RunHead:
    """The chunks of an object: (offset, size, trailer) by key."""

    chunks: dict[bytes, tuple[int, int, bytes]]

    @classmethod
    def parse(cls, data: bytes) -> "RunHead | None":
        """Parse the head at the beginning of an object. None if it is malformed."""
        if len(data) < _START.size:
            return None
        magic, count = _START.unpack_from(data)
        end = _START.size + count * _CHUNK.size
        if magic != _MAGIC or not 0 < count <= MOST_CHUNKS_A_RUN or len(data) < end:
            return None
        rows = _CHUNK.iter_unpack(data[_START.size : end])
        return cls({digest: (offset, size, trailer) for digest, offset, size, trailer in rows})


def make_head(digests: Sequence[bytes], sizes: Sequence[int], trailers: Sequence[bytes]) -> bytes:
    """Return the head of an object. The payloads follow it in the same order."""
    rows, offset = list[bytes](), _START.size + len(digests) * _CHUNK.size
    for digest, size, trailer in zip(digests, sizes, trailers, strict=True):
        rows.append(_CHUNK.pack(digest, offset, size, trailer))
        offset += size
    return _START.pack(_MAGIC, len(digests)) + b"".join(rows)


def first_name(key: bytes) -> str:
    """Return the name of the first object of a key's run."""
    return _object_name(run_of(key), _NO_CHUNK)


def name_of(key: bytes, taken: Collection[str] = ()) -> str:
    """Return the name of the object that begins with the chunk of a key.

    `taken` are names of objects without that chunk: the end of a run may have been stored before its beginning.
    """
    section, first = section_of(key), digest_of(key)[:RUN_BYTES]
    name = _object_name(section, _NO_CHUNK if begins_section(key) else first)
    return _object_name(section, first) if name in taken else name


def _object_name(section: bytes, first: bytes) -> str:
    """Return a name. Two digits of the section follow the hashes, to spread objects over many prefixes."""
    digits, half, hashes = section.hex(), 2 * NAME_HASH_BYTES, 4 * NAME_HASH_BYTES
    cut = digits[hashes + 2 * PLACE_BYTES :]
    return f"{digits[:half]}/{digits[half:hashes]}/{cut[:2]}/{digits[hashes:]}{first.hex()}"
