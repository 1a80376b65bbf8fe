"""Names of entries in tiers, the same for every kind of storage.

A key contains everything that decides whether bytes may be used: the chunk (and with it model, weights, adapter and
salt), the layer group, the part and the page sizes. It begins with labels of tenant and model, so that their entries
can be found without an index. The place of weights that a trainer wrote ends with their mark.
"""

from typing import Final

import msgspec
from blake3 import blake3

from kvdepot.keys import DIGEST_BYTES

LABEL_BYTES: Final = 8
PLACE_BYTES: Final = 16
KEY_BYTES: Final = 2 * LABEL_BYTES + PLACE_BYTES + DIGEST_BYTES  # tenant, model, place, chunk
MARK_BYTES: Final = 4  # at the end of the place
RUN_BYTES: Final = 8  # behind a key, for tiers that want it: the first chunk of the run that the chunk is in
DEPTH_BYTES: Final = 4  # behind the run: the number of the chunk in its prefix
_RUN: Final = slice(KEY_BYTES, KEY_BYTES + RUN_BYTES)
_MARK: Final = slice(2 * LABEL_BYTES + PLACE_BYTES - MARK_BYTES, 2 * LABEL_BYTES + PLACE_BYTES)
MOST_CHUNKS_A_RUN: Final = 128  # 2,048 tokens in chunks of 16
_MOST_BYTES_A_RUN: Final = 16 << 20  # at 1 GB/s 16 ms: a request's own cost is small beside it


def label_of(name: str) -> bytes:
    """Return the label of a tenant's or a model's name, a hash that does not reveal the name."""
    return blake3(name.encode()).digest(LABEL_BYTES)


def mark_of(weights: str) -> bytes:
    """Return the mark of a generation of weights (`kvdepot.keys.Namespace.weights`).

    It is empty for weights that were loaded: their entries have no mark, and nobody finds them by it.
    """
    generation = weights.partition(" ")[2]
    return blake3(generation.encode()).digest(MARK_BYTES) if generation else b""


def generation_of(key: bytes) -> bytes:
    """Return the label of a key's model and the mark of its weights; without a mark, other bytes of its place."""
    return key[LABEL_BYTES : 2 * LABEL_BYTES] + key[_MARK]


def place_of(space: bytes, group: int, part: int, check: int, num_bytes: int, mark: bytes = b"") -> bytes:
    """Return the part of a key that all entries of one part of one layer group share.

    Args:
        space: digest of the `CacheSpec`.
        group: layer group.
        part: its number.
        check: of the page sizes with which the bytes were written.
        num_bytes: size of a payload.
        mark: of the generation of the weights.
    """
    digest = blake3(msgspec.msgpack.encode((space, group, part, check, num_bytes))).digest(PLACE_BYTES)
    return digest[: PLACE_BYTES - len(mark)] + mark


def chunks_a_run(num_bytes: int) -> int:
    """Return how many chunks with payloads of this size a run has: a power of two, so long runs end where short do."""
    return min(MOST_CHUNKS_A_RUN, 1 << max(1, _MOST_BYTES_A_RUN // max(1, num_bytes)).bit_length() - 1)


def tier_key(tenant: bytes, model: bytes, place: bytes, chunk: bytes) -> bytes:
    """Return the key of an entry: labels of tenant and model, its place, and the chunk's key."""
    return tenant + model + place + chunk


def digest_of(key: bytes) -> bytes:
    """Return the key of an entry's chunk."""
    return key[KEY_BYTES - DIGEST_BYTES : KEY_BYTES]


def run_of(key: bytes) -> bytes:
    """Return the part of a key that all entries between two cuts share; a key that names no cut is one by itself."""
    return key[: KEY_BYTES - DIGEST_BYTES] + (key[_RUN] or key[KEY_BYTES - RUN_BYTES :])


def begins_run(key: bytes) -> bool:
    """Whether an entry's chunk is the first one behind a cut."""
    return key[_RUN] in (b"", digest_of(key)[:RUN_BYTES])


def depth_of(key: bytes) -> int:
    """Return the number of an entry's chunk in its prefix, 0 for a key that does not say it."""
    return int.from_bytes(key[_RUN.stop :], "big")


def has_labels(key: bytes, tenant: bytes | None, model: bytes | None) -> bool:
    """Whether a key has these labels (None: any)."""
    return tenant in (None, key[:LABEL_BYTES]) and model in (None, key[LABEL_BYTES : 2 * LABEL_BYTES])
