"""kvdepot's backend for Intel GPUs (XPU): attaches engines whose KV cache is in GPU memory to a depot.

The entry point is `backend`, which does not import torch. `XpuTransferContext` is in `kvdepot_cpu.xpu.context`. It has
never run on an Intel GPU: it is tested only on a simulated device (see `docs/devices.md`).
"""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from kvdepot.backends import Backend, Capability, KVCache
from kvdepot.config import DEADLINE_SECONDS

if TYPE_CHECKING:
    from kvdepot_cpu.xpu.context import XpuTransferContext

_WAY_OUT = "engines with their KV cache in host memory use kvdepot[cpu]"


class XpuBackend(Backend):
    """See `kvdepot.backends.Backend`."""

    name = "xpu"
    device_type = "xpu"
    capabilities = frozenset({Capability.ASYNCHRONOUS})

    def why_unavailable(self) -> str | None:
        """Return None if the backend can be used here, else the reason and the remedy.

        If torch is installed, this loads it to ask for the device.
        """
        for package in ("numpy", "torch"):
            if importlib.util.find_spec(package) is None:
                return (
                    f"{package} is not installed: install PyTorch's own build for xpu, then pip install 'kvdepot[xpu]';"
                    f" {_WAY_OUT}"
                )
        try:
            torch: Any = importlib.import_module("torch")
            is_built = torch.version.xpu is not None
            is_available = bool(torch.xpu.is_available())
        except Exception as error:  # a torch that is too old or does not fit its driver may raise anything
            return (
                f"torch is installed and does not answer for xpu ({type(error).__name__}: {error}): torch 2.6 or newer"
                f" is needed, in PyTorch's own build for xpu; {_WAY_OUT}"
            )
        if is_available:
            return None
        if not is_built:
            return (
                f"torch {torch.__version__} is not built for xpu: install PyTorch's own build for xpu in its place;"
                f" {_WAY_OUT}"
            )
        return (
            "torch is built for xpu and finds no Intel GPU: look at xpu-smi or clinfo, give the container /dev/dri and"
            f" this user the group render, and see that ZE_AFFINITY_MASK hides none; {_WAY_OUT}"
        )

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS, **options: Any
    ) -> "XpuTransferContext":
        """Return an `XpuTransferContext`; see `Backend`."""
        from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext

        return XpuTransferContext(cache, XpuOptions(url=url, deadline_seconds=deadline_seconds, **options))


backend = XpuBackend()
