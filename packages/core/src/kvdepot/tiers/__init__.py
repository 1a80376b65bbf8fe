"""Storage below the pool, given by URLs, fastest first: `kvdepot serve --tier disk:///path?capacity=200GiB`.

The author of a tier needs the names below, `kvdepot.tiers.trailer` (checksums; needs xxhash) and
`kvdepot.testing.tier.TierSuite` (the conformance suite). See "Your own tier" in `docs/tiers.md`.
"""

from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, NAME_HASH_BYTES, has_names
from kvdepot.tiers.url import TierUrl

__all__ = ["KEY_BYTES", "NAME_HASH_BYTES", "Extents", "Tier", "TierPool", "TierUrl", "TierUsage", "has_names"]
