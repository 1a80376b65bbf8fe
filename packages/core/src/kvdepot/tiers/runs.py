"""Runs: the objects of a store that is paid and slow by the request, of up to 128 chunks and 16 MiB of one place each.

A prefix is cut where the number of a chunk is a multiple of `keys.chunks_a_run`. Between two cuts, an object has the
chunks that one store brought, and others follow behind them. **The walk** finds them. It begins with the object that is
named after the cut. The next object is named after the first chunk of the prefix that the objects before it lack, and
so on, until there is no such object. Prompts that part between two cuts share the objects before that, and each finds
its own behind them. A writer takes the same walk and adds an object at its end. Objects never change, so a walk only
becomes longer; when one of them is removed, the next writer puts another one in its place.

An object begins with its **head**: for each chunk its key, its trailer, and the place of its payload.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvdepot.keys import DIGEST_BYTES
from kvdepot.tiers.keys import LABEL_BYTES, MOST_CHUNKS_A_RUN, PLACE_BYTES, RUN_BYTES
from kvdepot.tiers.trailer import TRAILER_BYTES

_MAGIC: Final = b"KVDRUN\0\1"
_START: Final = struct.Struct("<8sQ")  # and the number of chunks
_CHUNK: Final = struct.Struct(f"<{DIGEST_BYTES}sQQ{TRAILER_BYTES}s")  # and offset and size of the payload
HEAD_BYTES: Final = _START.size + MOST_CHUNKS_A_RUN * _CHUNK.size  # at most
NO_CHUNK: Final = bytes(RUN_BYTES)  # the first object of a walk is named after its cut alone


@dataclass(frozen=True, slots=True)
class RunHead:
    """The chunks of an object: offset, size and trailer by key of the chunk."""

    chunks: dict[bytes, tuple[int, int, bytes]]

    @classmethod
    def parse(cls, data: bytes) -> "RunHead | None":
        """Read the head at the beginning of an object; None if it is not one."""
        if len(data) < _START.size:
            return None
        magic, count = _START.unpack_from(data)
        end = _START.size + count * _CHUNK.size
        if magic != _MAGIC or not 0 < count <= MOST_CHUNKS_A_RUN or len(data) < end:
            return None
        rows = _CHUNK.iter_unpack(data[_START.size : end])
        return cls({digest: (offset, size, trailer) for digest, offset, size, trailer in rows})


def make_head(digests: Sequence[bytes], sizes: Sequence[int], trailers: Sequence[bytes]) -> bytes:
    """Return the head of an object; the payloads follow it in the same order."""
    rows, offset = list[bytes](), _START.size + len(digests) * _CHUNK.size
    for digest, size, trailer in zip(digests, sizes, trailers, strict=True):
        rows.append(_CHUNK.pack(digest, offset, size, trailer))
        offset += size
    return _START.pack(_MAGIC, len(digests)) + b"".join(rows)


def object_name(run: bytes, first: bytes = NO_CHUNK) -> str:
    """Return the name of the object of a run that begins with a chunk whose key begins with `first`.

    Two digits of the cut follow the labels and spread the names.
    """
    digits, label, labels = run.hex(), 2 * LABEL_BYTES, 4 * LABEL_BYTES
    cut = digits[labels + 2 * PLACE_BYTES :]
    return f"{digits[:label]}/{digits[label:labels]}/{cut[:2]}/{digits[labels:]}{first.hex()}"
