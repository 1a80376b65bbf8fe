"""The conformance suite of tiers: storage below the pool that moves `(key, extent)` descriptors.

A tier's tests inherit `TierSuite` and open a tier over a given pool. The suite uses it through the depot's own queue.
It also puts each tier behind a `FaultyTier` (`FaultyBench`), which stands between queue and tier and fails like real
storage: it hangs, raises, claims entries that it lacks, reports too few outcomes, returns wrong bytes, and recovers.
"""

from kvdepot.testing.tier.suite import Damage, TierSuite

__all__ = ["Damage", "TierSuite"]
