"""Storage below the pool. Found by URL: `kvdepot serve --tier disk:///path?capacity=200GiB`, in order, fastest first.

The author of a tier needs the names below, beside `kvdepot.tiers.trailer` (checksums, needs xxhash) and
`kvdepot.testing.tier.TierSuite` (the conformance suite). `docs/tiers.md`, "Your own tier", shows how they fit.
"""

from kvdepot.tiers.base import Extents, Tier, TierPool, TierUsage
from kvdepot.tiers.keys import KEY_BYTES, LABEL_BYTES, has_labels
from kvdepot.tiers.url import TierUrl

__all__ = ["KEY_BYTES", "LABEL_BYTES", "Extents", "Tier", "TierPool", "TierUrl", "TierUsage", "has_labels"]
