"""kvdepot's backend for CUDA: attaches engines whose KV cache is in device memory to a depot.

The entry point is `backend`, which imports nothing heavy. `CudaTransferContext` is in `kvdepot_cuda.context`.
"""

from typing import TYPE_CHECKING, Any, Final

from kvdepot.backends import Capability, EngineTraits, KVCache
from kvdepot.errors import BackendUnavailable
from kvdepot_cuda.availability import why_unavailable

if TYPE_CHECKING:
    from kvdepot_cuda.context import CudaTransferContext

# A mover idles between batches, because it never has a second one queued. With 256 MiB instead of 64, 10,000 tokens of
# an 8B model take 43 ms instead of 59, and with the layers apart 51 instead of 71 (H200). In mode `direct`, a second
# batch is queued, and 64 MiB are faster: 25 ms instead of 27.
_MOVER_BATCH_BYTES: Final = 256 << 20


class CudaBackend:
    """See `kvdepot.backends.Backend`."""

    name = "cuda"
    device_type = "cuda"
    capabilities = frozenset({Capability.ASYNCHRONOUS, Capability.DEPOT_DRIVEN})
    settings = frozenset({"mode", "batch_runs", "gather_kernel"})

    def why_unsuited(self, engine: EngineTraits) -> str | None:
        """See `Backend`."""
        del engine
        return None

    def cuts_pages(
        self, row_tokens: int, *, mode: str = "direct", gather_kernel: bool | None = None, **options: Any
    ) -> bool:
        """See `Backend`. A row of one token is a run of some hundred bytes, which only the kernel copies fast."""
        del options
        # All workers of an engine must give the same answer before one of them knows whether its kernel can be loaded.
        # If it cannot, retrieves are right, but slow where the entries have other heads: DMA copies about one row per
        # us (batches of 4096, H100, PCIe 5.0 x16). 10,000 tokens in 32 layers are 320,000 rows, twice as many if keys
        # and values are apart: 0.3 to 0.6 s, about as long as the device would compute them.
        return row_tokens > 1 or (gather_kernel is not False and mode == "direct")

    def why_unavailable(self) -> str | None:
        """Return None if the backend can probably be used here, else the reason and the remedy.

        Initialises no device.
        """
        return why_unavailable()

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = 2.0, **options: Any
    ) -> "CudaTransferContext":
        """Return a `CudaTransferContext`; see `Backend`.

        Raises:
            BackendUnavailable: the device or its driver is missing.
        """
        reason = self.why_unavailable()
        if reason is not None:
            raise BackendUnavailable(f"backend 'cuda': {reason}")
        from kvdepot_cuda.context import CudaTransferContext
        from kvdepot_cuda.copy_route import IPC, CudaOptions

        if options.get("mode") == IPC:
            options.setdefault("batch_bytes", _MOVER_BATCH_BYTES)
        return CudaTransferContext(cache, CudaOptions(url=url, deadline_seconds=deadline_seconds, **options))


backend = CudaBackend()
