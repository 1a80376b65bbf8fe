"""kvdepot on CUDA devices: planned, not built yet. Importing it loads neither a driver nor torch."""

from pathlib import Path

from kvdepot.registry import PlannedBackend

_way_out = "engines with their KV cache in host memory use kvdepot[cpu]"
if not Path("/dev/nvidiactl").exists():
    _way_out += "; nor is an NVIDIA driver loaded here (no /dev/nvidiactl)"

backend = PlannedBackend("cuda", "cuda", _way_out)
