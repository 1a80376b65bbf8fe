"""kvdepot's backend for CPUs: attaches engines whose KV cache is in host memory to a depot.

The entry point is `backend`, which imports nothing heavy. `CpuTransferContext` is in `kvdepot_cpu.context`.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from kvdepot.backends import Capability, EngineTraits, KVCache
from kvdepot.config import DEADLINE_SECONDS

if TYPE_CHECKING:
    from kvdepot_cpu.context import CpuTransferContext


class CpuBackend:
    """See `kvdepot.backends.Backend`."""

    name = "cpu"
    device_type = "cpu"
    settings = frozenset({"copy_threads"})

    @property
    def capabilities(self) -> frozenset[Capability]:
        """See `Backend`. The compiled copy exists if the package was installed with a C compiler."""
        is_built = importlib.util.find_spec("kvdepot_cpu.kernels._copy_runs") is not None
        return frozenset({Capability.ASYNCHRONOUS} | ({Capability.COMPILED_COPY} if is_built else set()))

    def why_unsuited(self, engine: EngineTraits) -> str | None:
        """See `Backend`."""
        del engine
        return None

    def cuts_pages(self, row_tokens: int, **options: Any) -> bool:
        """See `Backend`."""
        del row_tokens, options
        return True

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
