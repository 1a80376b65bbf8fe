"""The index of the pool: its chunks, their extents, and the order of eviction.

Modules import only modules above them in this list:

- `columns`: preallocated columns.
- `tree`: chunks by key, their nodes, and the holds of these.
- `eviction`: the policies LRU and ARC.
- `quotas`: bytes by tenant and by share of the pool.
- `visibility`, `entries`: the prefix rule and the chunks that lookups find; records and extents.
- `shares`: the policies of each share; ended chunks leave first.
- `evictor`: leases, eviction and clearing.
- `index`: assembles these over one table, and has the operations that involve several of them.
- `restore`: fills an index from an earlier server's table.
- `leases`: prefixes that requests keep.
"""
