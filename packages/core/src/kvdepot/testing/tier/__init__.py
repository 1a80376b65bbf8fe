"""The conformance suite of tiers: storage below the pool that moves `(key, extent)` descriptors.

A tier's tests inherit `TierSuite` and open a tier over a given pool. The suite uses it through the depot's own queue.
It also puts each tier behind a `FaultyTier` (`FaultyBench`), which stands between queue and tier and fails like real
storage: it hangs, raises, claims entries that it lacks, reports too few outcomes, returns wrong bytes, and recovers.
"""

from kvdepot.testing.tier.faulty import NUM_THREADS, PATIENCE_SECONDS, Clock, FaultyBench, FaultyTier, Wrong
from kvdepot.testing.tier.suite import SIZES, Damage, TierSuite
from kvdepot.testing.tier.traffic import (
    EXTENT_BYTES,
    NUM_EXTENTS,
    PLACE,
    clear,
    contains,
    content,
    extents_of,
    fill,
    make_key,
    make_pool,
    read,
    read_from,
    run,
    write,
    write_to,
)

__all__ = [
    "EXTENT_BYTES",
    "NUM_EXTENTS",
    "NUM_THREADS",
    "PATIENCE_SECONDS",
    "PLACE",
    "SIZES",
    "Clock",
    "Damage",
    "FaultyBench",
    "FaultyTier",
    "TierSuite",
    "Wrong",
    "clear",
    "contains",
    "content",
    "extents_of",
    "fill",
    "make_key",
    "make_pool",
    "read",
    "read_from",
    "run",
    "write",
    "write_to",
]
