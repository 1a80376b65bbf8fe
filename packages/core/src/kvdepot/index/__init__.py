"""The index of the pool: its chunks, their extents, and the order of eviction.

Modules import only modules above them in this list:

- `columns`, `space`, `prefix`: preallocated columns, chunks by key, the prefix rule.
- `tree`: nodes and their holds.
- `eviction`: the policies LRU and ARC.
- `policy_selector`, `hit_rate_curve`: select the policy with more hits, and estimate hit rates, on a sample of the
traffic.
- `quotas`: bytes by tenant, and one policy per share of the pool and priority.
- `visibility`, `entries`: the chunks that lookups find; records and extents.
- `priorities`: clients' hints, and the ends of sessions.
- `evictor`: leases, eviction and clearing.
- `index`: assembles these over one table, and has the operations that involve several of them.
- `restore`: fills an index from an earlier server's table.
- `leases`, `pins`: prefixes that requests and operators keep.
"""

from kvdepot.index.entries import NewRun, PartPlace, pack_extent
from kvdepot.index.eviction import POLICIES
from kvdepot.index.index import MOST_EVICTED, ChunkIndex
from kvdepot.index.leases import Lease, LeaseTable
from kvdepot.index.pins import Pin, PinTable
from kvdepot.index.prefix import usable_prefix
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.space import Space, digest_of
from kvdepot.index.tree import NO_NODE

__all__ = [
    "MOST_EVICTED",
    "NO_NODE",
    "POLICIES",
    "ChunkIndex",
    "Lease",
    "LeaseTable",
    "NewRun",
    "PartPlace",
    "Pin",
    "PinTable",
    "QuotaTable",
    "Space",
    "digest_of",
    "pack_extent",
    "usable_prefix",
]  # fmt: skip
