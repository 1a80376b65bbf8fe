"""The toolkit of backend authors: turns a `CopyBatch` into copies. Needs numpy.

- `arrays`: the tensors of a cache, as pages and as bytes.
- `runs`: for devices whose blocks have addresses.
- `staged`: for devices that torch drives and whose blocks have no addresses; `moves` cuts their batches.
"""

from kvdepot.copying.runs import EXTENT_DTYPE, Addresses, BatchRuns, Rows, Runs, merge, split

__all__ = ["EXTENT_DTYPE", "Addresses", "BatchRuns", "Rows", "Runs", "merge", "split"]
