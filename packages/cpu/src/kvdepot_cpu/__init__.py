"""kvdepot's backend for CPUs: attaches engines whose KV cache is in host memory to a depot.

The entry point is `backend`, which imports nothing heavy. `CpuTransferContext` is in `kvdepot_cpu.context`.
"""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdepot.backends import Backend, Capability, KVCache
from kvdepot.config import DEADLINE_SECONDS

if TYPE_CHECKING:
    from kvdepot_cpu.context import CpuTransferContext

_IS_BUILT = any(Path(__file__).with_name("kernels").glob("_copy_runs.*"))  # there was a C compiler


class CpuBackend(Backend):
    """See `kvdepot.backends.Backend`."""

    name = "cpu"
    device_type = "cpu"
    capabilities = frozenset({Capability.ASYNCHRONOUS, *([Capability.COMPILED_COPY] if _IS_BUILT else [])})
    settings = frozenset({"copy_threads"})

    def why_unavailable(self) -> str | None:
        """Return None if the backend can be used here, else the reason and the remedy."""
        if importlib.util.find_spec("numpy") is None:
            return "numpy is not installed: pip install 'kvdepot[cpu]'"
        return None

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS, **options: Any
    ) -> "CpuTransferContext":
        """Return a `CpuTransferContext`; see `Backend`."""
        from kvdepot_cpu.context import CpuOptions, CpuTransferContext

        return CpuTransferContext(cache, CpuOptions(url=url, deadline_seconds=deadline_seconds, **options))


backend = CpuBackend()
