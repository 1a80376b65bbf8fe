"""kvdepot on Intel XPU: planned, not built yet. Importing it does not load torch."""

from kvdepot.registry import PlannedBackend

backend = PlannedBackend("xpu", "xpu", "engines with their KV cache in host memory use kvdepot[cpu]")
