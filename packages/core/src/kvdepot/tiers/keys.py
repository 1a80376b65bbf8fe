"""Keys of entries in tiers, equal for all kinds of storage.

A key contains everything that determines whether bytes may be used: the chunk (and thereby model, weights, adapter and
salt), the layer group, the part and the page sizes. It begins with hashes of the names of tenant and model, so that
their entries can be found without an index. For weights that a trainer wrote, the place ends with their mark.
"""

from functools import lru_cache
from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.keys import DIGEST_BYTES

NAME_HASH_BYTES: Final = 8  # of tenants and models, of which there are few: equal hashes are unlikely
PLACE_BYTES: Final = 16  # a digest: no two places share one by chance
KEY_BYTES: Final = 2 * NAME_HASH_BYTES + PLACE_BYTES + DIGEST_BYTES  # tenant, model, place, chunk
MARK_BYTES: Final = 4  # at the end of the place
RUN_BYTES: Final = 8  # after a key, for tiers that want it: the first chunk of the chunk's run, then of its section
DEPTH_BYTES: Final = 4  # after both: the number of the chunk in its prefix
_RUN: Final = slice(KEY_BYTES, KEY_BYTES + RUN_BYTES)
_SECTION: Final = slice(_RUN.stop, _RUN.stop + RUN_BYTES)
_MARK: Final = slice(2 * NAME_HASH_BYTES + PLACE_BYTES - MARK_BYTES, 2 * NAME_HASH_BYTES + PLACE_BYTES)
MOST_CHUNKS_A_RUN: Final = 128  # 2,048 tokens in chunks of 16; release 0.1 removes objects with more as malformed
MOST_BYTES_A_RUN: Final = 64 << 20  # a put of S3 costs as much as twelve gets, so there are few of them
_BYTES_A_SECTION: Final = 16 << 20  # a run of release 0.1, by which objects are still named


def name_hash(name: str) -> bytes:
    """Return the hash of the name of a tenant or a model, which does not reveal the name."""
    return blake3(name.encode()).digest(NAME_HASH_BYTES)


def mark_of(weights: str) -> bytes:
    """Return the mark of a generation of weights (`kvdepot.keys.Namespace.weights`).

    It is empty for the weights that an engine loaded. Their entries have no mark and cannot be outdated.
    """
    generation = weights.partition(" ")[2]
    return blake3(generation.encode()).digest(MARK_BYTES) if generation else b""


def generation_of(key: bytes) -> bytes:
    """Return the hash of a key's model and the mark of its weights; without a mark, other bytes of its place."""
    return key[NAME_HASH_BYTES : 2 * NAME_HASH_BYTES] + key[_MARK]


@lru_cache(1024)  # weights in training have new marks all the time
def place_of(space: bytes, group: int, part: int, check: int, num_bytes: int, mark: bytes = b"") -> bytes:
    """Return the place: the section of a key that all entries of one part of one layer group share.

    Args:
        space: the digest of the `CacheSpec`.
        group: the layer group.
        part: the number of the part.
        check: the check of the writer's page sizes.
        num_bytes: the size of a payload.
        mark: the mark of the generation of weights.
    """
    digest = blake3(msgspec.msgpack.encode((space, group, part, check, num_bytes))).digest(PLACE_BYTES)
    return digest[: PLACE_BYTES - len(mark)] + mark


def chunks_a_run(num_bytes: int) -> int:
    """Return the chunks per run for payloads of this size: a power of two, so that runs of all lengths align."""
    return _chunks_in(MOST_BYTES_A_RUN, num_bytes)


def chunks_a_section(num_bytes: int) -> int:
    """Return the chunks per section of a run for payloads of this size."""
    return _chunks_in(_BYTES_A_SECTION, num_bytes)


def _chunks_in(most_bytes: int, num_bytes: int) -> int:
    return min(MOST_CHUNKS_A_RUN, 1 << max(1, most_bytes // max(1, num_bytes)).bit_length() - 1)


def tier_key(tenant: bytes, model: bytes, place: bytes, chunk: bytes) -> bytes:
    """Return the key of an entry: hashes of tenant and model, place, and the chunk's key."""
    return tenant + model + place + chunk


def with_run(key: bytes, run: bytes, section: bytes, depth: int) -> bytes:
    """Return a key as tiers get it that want places: with the first chunks of its run and section, and its depth."""
    return key + run[:RUN_BYTES] + section[:RUN_BYTES] + depth.to_bytes(DEPTH_BYTES, "big")


def digest_of(key: bytes) -> bytes:
    """Return the key of an entry's chunk."""
    return key[KEY_BYTES - DIGEST_BYTES : KEY_BYTES]


def run_of(key: bytes) -> bytes:
    """Return the section of a key that all entries between two cuts share. A key without a cut is its own run."""
    return key[: KEY_BYTES - DIGEST_BYTES] + (key[_RUN] or key[KEY_BYTES - RUN_BYTES :])


def section_of(key: bytes) -> bytes:
    """Return the section of a key that all entries of one section of a run share, like `run_of`."""
    return key[: KEY_BYTES - DIGEST_BYTES] + (key[_SECTION] or key[KEY_BYTES - RUN_BYTES :])


def begins_run(key: bytes) -> bool:
    """Return whether an entry's chunk is the first one after a cut."""
    return key[_RUN] in (b"", digest_of(key)[:RUN_BYTES])


def begins_section(key: bytes) -> bool:
    """Return whether an entry's chunk is the first one of its section."""
    return key[_SECTION] in (b"", digest_of(key)[:RUN_BYTES])


def depth_of(key: bytes) -> int:
    """Return the number of an entry's chunk in its prefix, 0 for a key without it."""
    return int.from_bytes(key[_SECTION.stop :], "big")


def place_in(key: bytes) -> bytes:
    """Return the place in a key, without its end, which may be a mark of weights."""
    return key[2 * NAME_HASH_BYTES : _MARK.start]


def has_names(key: bytes, tenant: bytes | None, model: bytes | None) -> bool:
    """Return whether a key has the hashes of these names (None: any)."""
    return tenant in (None, key[:NAME_HASH_BYTES]) and model in (None, key[NAME_HASH_BYTES : 2 * NAME_HASH_BYTES])
