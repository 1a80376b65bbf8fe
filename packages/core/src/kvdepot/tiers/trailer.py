"""Trailers: let the depot verify the bytes that a tier returns. The format is the same for all tiers.

A **trailer** is stored beside each payload. It has the key, the payload's size and checksum (XXH3-128), and a checksum
of the trailer itself. It detects errors of disks and networks: flipped bits, truncation, one entry in another's place.
It does not protect against people who can write to the storage.
"""

import struct
from typing import Final

import xxhash

TRAILER_BYTES: Final = 120  # 104 of `_TRAILER` and their checksum

_TRAILER: Final = struct.Struct("<8sIIQ64s16s")
_MAGIC: Final = b"KVDEPOT1"
_VERSION: Final = 1


class BrokenEntry(Exception):
    """A tier returned other bytes than were written under the key; the text gives the reason."""


def checksum_of(payload: bytes | memoryview) -> bytes:
    """Return the checksum of a payload. Takes about a ninth of a millisecond per MiB, and releases the GIL."""
    return xxhash.xxh3_128_digest(payload)


def make_trailer(key: bytes, num_bytes: int, checksum: bytes) -> bytes:
    """Return the trailer for a payload with this size and checksum."""
    body = _TRAILER.pack(_MAGIC, _VERSION, 0, num_bytes, key, checksum)
    return body + xxhash.xxh3_128_digest(body)


def verify(trailer: bytes, key: bytes, num_bytes: int, payload: bytes | memoryview) -> bytes:
    """Compare a payload of `num_bytes` with the trailer stored beside it. Return the payload's checksum.

    Raises:
        BrokenEntry: this is not the entry stored under `key`.
    """
    body = trailer[: _TRAILER.size]
    if len(trailer) != TRAILER_BYTES or xxhash.xxh3_128_digest(body) != trailer[_TRAILER.size :]:
        raise BrokenEntry("its trailer is damaged")
    magic, version, _, written_bytes, written_key, checksum = _TRAILER.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise BrokenEntry(f"it was written by another version ({version})")
    if written_key != key:
        raise BrokenEntry("it is another entry")
    if written_bytes != num_bytes:
        raise BrokenEntry(f"it has {written_bytes} bytes instead of {num_bytes}")
    if checksum_of(payload) != checksum:
        raise BrokenEntry("its bytes are damaged")
    return checksum
