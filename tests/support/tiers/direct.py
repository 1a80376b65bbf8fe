"""Reads and writes on the caller's thread, as a queue's threads make them, but without deadlines; errors propagate."""

from collections.abc import Sequence

from kvdepot.tiers.base import Extents, Tier, TierPool
from kvdepot.tiers.checked import CheckedTier
from kvdepot.tiers.jobs import Call, Job, JobKind


def write_to(tier: Tier, pool: TierPool, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    call = Call(Job(JobKind.WRITE, keys, extents), 0, len(keys))
    CheckedTier(tier, pool, "test").write(call)
    return list(call.outcomes or ())


def read_from(tier: Tier, pool: TierPool, keys: Sequence[bytes], extents: Extents) -> list[bool]:
    call = Call(Job(JobKind.READ, keys, extents), 0, len(keys))
    CheckedTier(tier, pool, "test").read(call)
    return list(call.outcomes or ())
