"""Writes a trailer beside each entry that is demoted to a tier, and verifies the trailers of entries that it returns.

It runs on the threads of the tier's queue. The tier keeps each trailer beside its payload and returns both. An entry
that differs from the one written under its key is a miss. It is removed and counted as "corrupt". Each payload is
hashed only once: the trailers contain the checksums that `--verify` keeps in the pool.
"""

import logging
from collections.abc import Sequence
from typing import TypeVar

from kvdepot.tiers.base import Tier, TierPool
from kvdepot.tiers.jobs import Call
from kvdepot.tiers.keys import KEY_BYTES
from kvdepot.tiers.trailer import BrokenEntry, checksum_of, make_trailer, verify

logger = logging.getLogger(__name__)

T = TypeVar("T")


class CheckedTier:
    """A tier whose entries are checked by their trailers. Called from several threads.

    Args:
        tier: stores payloads and trailers.
        pool: the pool that the tier was opened with.
        name: the tier's name for logs.
    """

    def __init__(self, tier: Tier, pool: TierPool, name: str) -> None:
        self._tier = tier
        self._pool = pool
        self._name = name

    def _names(self, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return keys in the form that the tier expects."""
        return keys if self._tier.wants_places else [key[:KEY_BYTES] for key in keys]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return one answer per key."""
        return _whole(self._tier.contains(self._names(keys)), len(keys), False)

    def touch(self, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """Return one answer per key. The tier counts a use of each."""
        return _whole(self._tier.touch(self._names(keys), sizes), len(keys), False)

    def write(self, call: Call) -> None:
        """Write the entries of a call, and set its outcomes.

        An entry whose bytes do not match the job's checksum is corrupt and is not written.
        """
        keys, extents, checksums = call.keys, call.extents, call.job.checksums[call.first : call.last]
        outcomes = [False] * len(keys)
        places, trailers, corrupt = list[int](), list[bytes](), list[int]()
        for place, (key, (offset, num_bytes)) in enumerate(zip(keys, extents, strict=True)):
            checksum = checksum_of(self._pool.view[offset : offset + num_bytes])
            # Written with a trailer of its present bytes, a damaged entry would pass for right from then on.
            if checksums and any(checksums[place]) and checksums[place] != checksum:
                corrupt.append(call.first + place)
                continue
            places.append(place)
            trailers.append(make_trailer(key[:KEY_BYTES], num_bytes, checksum))
        call.corrupt = corrupt
        if places:
            names = self._names([keys[place] for place in places])
            written = self._tier.write(names, trailers, [extents[place] for place in places])
            for place, ok in zip(places, _whole(written, len(places), False), strict=True):
                outcomes[place] = bool(ok)
        call.outcomes = outcomes

    def read(self, call: Call) -> None:
        """Fill and verify the extents of a call, and set its outcomes and checksums. Remove broken entries."""
        checksums, corrupt = list[bytes](), list[int]()
        trailers = _whole(self._tier.read(self._names(call.keys), call.extents), len(call.keys), None)
        for place, (key, (offset, num_bytes), trailer) in enumerate(
            zip(call.keys, call.extents, trailers, strict=True)
        ):
            checksum = b""
            if trailer is not None:
                try:
                    checksum = verify(trailer, key[:KEY_BYTES], num_bytes, self._pool.view[offset : offset + num_bytes])
                except BrokenEntry as error:
                    corrupt.append(call.first + place)
                    logger.error("tier %s: removing entry %s: %s", self._name, key[:KEY_BYTES].hex()[-16:], error)
            checksums.append(checksum)
        if corrupt:
            try:
                self._tier.remove(self._names([call.job.keys[place] for place in corrupt]))
            except Exception as error:
                logger.warning("tier %s: cannot remove broken entries: %r", self._name, error)
        call.corrupt, call.checksums = corrupt, checksums
        call.outcomes = [bool(checksum) for checksum in checksums]


def _whole(outcomes: Sequence[T], num_keys: int, missing: T) -> list[T]:
    """Return one outcome per key: `missing` if the tier did not report one."""
    return [*outcomes[:num_keys], *[missing] * (num_keys - len(outcomes))]
