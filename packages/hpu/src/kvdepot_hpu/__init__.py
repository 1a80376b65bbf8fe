"""kvdepot on Intel Gaudi: planned, not built yet. Importing it loads neither habana_frameworks nor torch."""

import importlib.util

from kvdepot.registry import PlannedBackend

_way_out = "engines with their KV cache in host memory use kvdepot[cpu]"
if importlib.util.find_spec("habana_frameworks") is None:
    _way_out += "; nor is habana_frameworks installed here, as it is in a Gaudi image"

backend = PlannedBackend("hpu", "hpu", _way_out)
