"""Seals: how the depot recognizes in a tier the bytes that it wrote there. The format is the same for every tier.

A **seal** lies beside each payload: the key, the payload's size and checksum (XXH3-128), and a checksum of the seal
itself. It detects what disks and networks do to bytes: flipped bits, truncation, one entry in another's place. It does
not protect against people who can write to the storage.
"""

import struct
from typing import Final

import xxhash

SEAL_BYTES: Final = 120

_SEAL: Final = struct.Struct("<8sIIQ64s16s")
_MAGIC: Final = b"KVDEPOT1"
_VERSION: Final = 1


class BrokenEntry(Exception):
    """The bytes that a tier returned are not those written under the key; the text says why."""


def checksum_of(payload: bytes | memoryview) -> bytes:
    """Return the checksum of a payload: about a ninth of a millisecond per MiB, without the GIL."""
    return xxhash.xxh3_128_digest(payload)


def make_seal(key: bytes, num_bytes: int, checksum: bytes) -> bytes:
    """Return the seal of a payload of this size and checksum."""
    body = _SEAL.pack(_MAGIC, _VERSION, 0, num_bytes, key, checksum)
    return body + xxhash.xxh3_128_digest(body)


def verify(seal: bytes, key: bytes, num_bytes: int, payload: bytes | memoryview) -> bytes:
    """Compare a payload of `num_bytes` with the seal that lay beside it; return the payload's checksum.

    Raises:
        BrokenEntry: this is not the entry stored under `key`.
    """
    body = seal[: _SEAL.size]
    if len(seal) != SEAL_BYTES or xxhash.xxh3_128_digest(body) != seal[_SEAL.size :]:
        raise BrokenEntry("its seal is damaged")
    magic, version, _, sealed_bytes, sealed_key, checksum = _SEAL.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise BrokenEntry(f"it was written by another version ({version})")
    if sealed_key != key:
        raise BrokenEntry("it is another entry")
    if sealed_bytes != num_bytes:
        raise BrokenEntry(f"it has {sealed_bytes} bytes instead of {num_bytes}")
    if checksum_of(payload) != checksum:
        raise BrokenEntry("its bytes are damaged")
    return checksum
