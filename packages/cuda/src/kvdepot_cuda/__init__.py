"""kvdepot's backend for CUDA: attaches engines whose KV cache is in device memory to a depot.

The entry point is `backend`, which imports nothing heavy. `CudaTransferContext` is in `kvdepot_cuda.context`.
"""

import ctypes
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from kvdepot.backends import Backend, Capability, KVCache
from kvdepot.config import DEADLINE_SECONDS

if TYPE_CHECKING:
    from kvdepot_cuda.context import CudaTransferContext

# A mover idles between batches, because it never has a second one queued. With 256 MiB instead of 64, 10,000 tokens of
# an 8B model take 43 ms instead of 59, and with the layers apart 51 instead of 71 (H200). In mode `direct`, a second
# batch is queued, and 64 MiB are faster: 25 ms instead of 27.
_MOVER_BATCH_BYTES: Final = 256 << 20
_OLDEST_BINDINGS: Final = (12, 9, 1)
"""The first whose calls release the GIL:
https://nvidia.github.io/cuda-python/cuda-bindings/latest/release/12.9.1-notes.html"""


class CudaBackend(Backend):
    """See `kvdepot.backends.Backend`."""

    name = "cuda"
    device_type = "cuda"
    capabilities = frozenset({Capability.ASYNCHRONOUS, Capability.DEPOT_DRIVEN})
    settings = frozenset({"mode", "batch_runs", "gather_kernel"})

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
        """See `Backend`.

        It initialises nothing, because after `cuInit`, forked children cannot use CUDA. So a driver that is present but
        refuses is noticed only when it is opened.
        """
        if importlib.util.find_spec("numpy") is None:
            return "numpy is not installed: pip install 'kvdepot[cuda]'"
        try:
            bindings = version("cuda-bindings")
        except PackageNotFoundError:
            return "cuda-bindings is not installed: pip install 'kvdepot[cuda]'"
        if _release_of(bindings) < _OLDEST_BINDINGS:
            return (
                f"cuda-bindings {bindings} is too old: before {'.'.join(map(str, _OLDEST_BINDINGS))} it keeps Python's"
                " lock while it waits for the device, which stops the engine or hangs it: pip install"
                f" 'cuda-bindings>={'.'.join(map(str, _OLDEST_BINDINGS))}'"
            )
        try:
            ctypes.CDLL("libcuda.so.1")
        except OSError:
            return (
                "no NVIDIA driver is installed here (libcuda.so.1 does not load): install it, or start the container"
                " with the devices (--gpus all); engines with their KV cache in host memory use kvdepot[cpu]"
            )
        if not any(next(Path("/dev").glob(name), None) for name in ("nvidia[0-9]*", "dxg", "nvmap")):
            return "there is a driver and no NVIDIA device (no /dev/nvidia0): start the container with the devices"
        return None

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS, **options: Any
    ) -> "CudaTransferContext":
        """Return a `CudaTransferContext`; see `Backend`."""
        from kvdepot_cuda.context import IPC, CudaOptions, CudaTransferContext

        if options.get("mode") == IPC:
            options.setdefault("batch_bytes", _MOVER_BATCH_BYTES)
        return CudaTransferContext(cache, CudaOptions(url=url, deadline_seconds=deadline_seconds, **options))


def _release_of(number: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at most three: (12, 9, 1) for 12.9.1.post1 and for 12.9.1rc2."""
    found = re.match(r"\d+(?:\.\d+){0,2}", number)
    return tuple(map(int, found.group().split("."))) if found else ()


backend = CudaBackend()
