"""Runs: objects of up to 128 chunks and 16 MiB of one place, for stores that cost money and time per request.

A prefix is cut at chunks whose number is a multiple of `keys.chunks_a_run`. Between two cuts, each store adds an object
with its chunks after the objects of earlier stores. **The walk** finds these objects. It begins with the object named
after the cut. The next object is named after the first chunk of the prefix that the objects before it lack, and so on,
until there is no such object. Prompts that diverge between two cuts share the objects before that point and have their
own objects after it. A writer walks in the same way and adds an object at the end. Objects never change, so a walk
only grows. If an object is removed, the next writer puts another one in its place.

An object begins with its **head**: the key, the trailer and the place of the payload of each chunk.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers.keys import MOST_CHUNKS_A_RUN, NAME_HASH_BYTES, PLACE_BYTES, RUN_BYTES
from kvdepot.tiers.trailer import TRAILER_BYTES

_MAGIC: Final = b"KVDRUN\0\1"
_START: Final = struct.Struct("<8sQ")  # magic, number of chunks
_CHUNK: Final = struct.Struct(f"<{DIGEST_BYTES}sQQ{TRAILER_BYTES}s")  # key, offset and size of the payload, trailer
HEAD_BYTES: Final = _START.size + MOST_CHUNKS_A_RUN * _CHUNK.size  # maximum size of a head
NO_CHUNK: Final = bytes(RUN_BYTES)  # for the first object of a walk, which is named only after its cut


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


def object_name(run: bytes, first: bytes = NO_CHUNK) -> str:
    """Return the name of a run's object whose first chunk has a key that begins with `first`.

    The hashes of the names are followed by two digits of the cut, which spread the objects over many prefixes.
    """
    digits, half, hashes = run.hex(), 2 * NAME_HASH_BYTES, 4 * NAME_HASH_BYTES
    cut = digits[hashes + 2 * PLACE_BYTES :]
    return f"{digits[:half]}/{digits[half:hashes]}/{cut[:2]}/{digits[hashes:]}{first.hex()}"
