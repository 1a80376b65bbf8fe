"""Shared files that others change as a target: what the tier and `kvdepot tier gc` read from them.

The tier may always miss. It never returns other bytes than were written, and both leave objects of others alone.
"""

import contextlib
import shutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Final
from unittest.mock import patch

from obstore.exceptions import BaseError
from obstore.store import LocalStore

from fuzz.depot import Bytes
from fuzz.tiers import FOLDER, change
from kvdepot.keys import Namespace, digest_at, hash_prefix
from kvdepot.operate.cleanup import collect
from kvdepot.testing.tier_traffic import EXTENT_BYTES, PLACE, content, extents_of, fill, make_pool
from kvdepot.tiers import object as module
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.keys import name_hash, tier_key, with_run
from kvdepot.tiers.object import NAME, ObjectTier
from support.tiers.direct import read_from, write_to

_NUM_CHUNKS: Final = 6
_CUTS: Final = (0, 2, 3, 4, 6)  # stores of a prompt: the walk of its first run, of four chunks, finds three objects
_RUN_CHUNKS: Final = 4
_SECTION_CHUNKS: Final = 2
_SIZE: Final = 100
_NOW: Final = 2e9  # all objects are old


def _keys_of(tenant: str) -> list[bytes]:
    """Return the keys of a prompt's chunks."""
    run = hash_prefix(Namespace("model", tenant=tenant), 1, range(_NUM_CHUNKS))
    digests = [digest_at(run.digests, chunk) for chunk in range(_NUM_CHUNKS)]
    return [
        with_run(
            tier_key(name_hash(tenant), name_hash("a model"), PLACE, digest),
            digests[chunk - chunk % _RUN_CHUNKS],
            digests[chunk - chunk % _SECTION_CHUNKS],
            chunk,
        )
        for chunk, digest in enumerate(digests)
    ]


_PROMPTS: Final = [_keys_of(tenant) for tenant in "ab"]
_KEYS: Final = [key for keys in _PROMPTS for key in keys]
_SIZES: Final = [_SIZE] * len(_KEYS)


@cache
def _pool() -> TierPool:
    return make_pool(2 * len(_KEYS) * EXTENT_BYTES)


def objects(data: bytes) -> None:
    """A folder whose files others changed, cut, swapped and renamed, and foreign files."""
    source, pool, folder = Bytes(data), _pool(), FOLDER / "objects"
    shutil.rmtree(folder, ignore_errors=True)
    fill(pool, 0, _KEYS, _SIZES)
    with patch.object(module, "LAST_STEPS_SECONDS", 0.0):
        with contextlib.closing(ObjectTier(pool, LocalStore(folder, mkdir=True))) as tier:
            for number, keys in enumerate(_PROMPTS):
                for start, stop in pairwise(_CUTS):
                    extents = extents_of(number * _NUM_CHUNKS + start, _SIZES[start:stop])
                    assert write_to(tier, pool, keys[start:stop], extents) == [True] * (stop - start)
            choice = source.byte()
            foreign = change(source, folder, sorted(path for path in folder.rglob("*") if path.is_file()))
            if choice & 1:
                _use(tier, pool)
        with contextlib.closing(ObjectTier(pool, LocalStore(folder, mkdir=True))) as tier:
            _use(tier, pool)
            _collect(tier, folder, choice >> 1)
            _use(tier, pool)
            with contextlib.suppress(OSError):
                list(tier.clear(None, None))
                assert not _ours(folder), "a clear left entries"
    assert all(path.exists() for path in foreign), "a file of somebody else was removed"


def _ours(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and NAME.fullmatch(str(path.relative_to(folder)))]


def _use(tier: ObjectTier, pool: TierPool) -> None:
    """Ask for the entries, read them and write them again."""
    spare = extents_of(len(_KEYS), _SIZES)
    with contextlib.suppress(OSError):
        assert len(tier.contains(_KEYS)) == len(_KEYS)
    for keys in (_KEYS, _KEYS[_RUN_CHUNKS - 1 : _RUN_CHUNKS]):  # all, and one whose walk is not known
        extents = spare[: len(keys)]
        with contextlib.suppress(OSError):
            for key, (offset, size), is_here in zip(keys, extents, read_from(tier, pool, keys, extents), strict=True):
                assert not is_here or pool.view[offset : offset + size] == content(key, size), "other bytes"
    with contextlib.suppress(OSError):
        assert len(write_to(tier, pool, _KEYS, extents_of(0, _SIZES))) == len(_KEYS)


def _collect(tier: ObjectTier, folder: Path, choice: int) -> None:
    """Count the objects and remove some, as `kvdepot tier gc` does."""
    with contextlib.suppress(BaseError):
        found = collect(
            tier.patient,
            _NOW,
            capacity_bytes=1000 if choice & 1 else 0,
            older_than_seconds=1e9 if choice & 2 else 0.0,
            unwritten_seconds=1e9 if choice & 4 else 0.0,
            format_name="entries" if choice & 8 else "",
            model="a model" if choice & 16 else "",
            kept_generations=["1"] if choice & 32 else [],
        )
        assert found.num_objects.total() - found.num_removed == len(_ours(folder))


def seeds() -> list[bytes]:
    """Return changes of heads, names and bytes, for the tier that wrote and for the next one."""
    head = [  # where a head has the count, and a first chunk's key, offset, size and trailer
        bytes([0, 0, place, 0, length - 1]) + bytes([value]) * length
        for place, length in ((0, 8), (8, 8), (16, 8), (48, 8), (56, 8), (64, 8))
        for value in (0, 1, 255)
    ]
    changes = [
        *head,
        bytes([1, 0, 0, 0]),
        bytes([1, 1, 20, 0]),
        bytes([1, 2, 200, 0]),
        bytes([2, 0, 1]),
        bytes([2, 4, 1]),
        bytes([3, 0]),
        bytes([4, 0]),
        bytes([4 + 6 * 22, 1]),
        bytes([5, 0, 5]) + b"names",
        bytes([5 + 6 * 22, 0, 5]) + b"names",
        bytes([5 + 6 * 22, 0, 64 % 40]) + b"0123456789abcdef" * 4,
        bytes([5, 0, 5]) + b"a\nb%#",
    ]
    each = [bytes([1]) + change for change in changes]
    return [*each, *(bytes([choice]) + b"".join(changes) for choice in (0, 1, 7, 0x3E, 0x60))]
