"""The index of the pool: its chunks, the places of their bytes, and the order in which chunks leave.

Modules import only those above them in this list:

- `columns`, `space`, `prefix`: numbers by place, chunks by key, the prefix rule.
- `tree`: nodes, and their holds.
- `eviction`: the policies LRU and ARC.
- `policy_selector`, `hit_rate_curve`: which of both finds more of the present traffic, on a sample of it.
- `quotas`: bytes by tenant, and one policy for each share of the pool and each priority.
- `visibility`, `entries`: the chunks that lookups find, records and extents.
- `priorities`: clients' hints, and the ends of sessions.
- `evictor`: leases, evicting and clearing.
- `index`: makes all of these over one table, and has the verbs that concern several of them.
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
