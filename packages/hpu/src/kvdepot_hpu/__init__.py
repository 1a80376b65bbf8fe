"""kvdepot's backend for Intel Gaudi: attaches engines whose KV cache is in the memory of an HPU to a depot.

The entry point is `backend`, which imports neither torch nor habana_frameworks. `HpuTransferContext` is in
`kvdepot_hpu.context`. It has never run on a Gaudi: it is tested only on a simulated device (see `docs/devices.md`).
"""

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvdepot.backends import Backend, Capability, EngineTraits, KVCache
from kvdepot.config import DEADLINE_SECONDS
from kvdepot.layout import GroupKind

if TYPE_CHECKING:
    from kvdepot_hpu.context import HpuTransferContext

_OFF: Final = ("0", "false", "f", "no", "n", "off")  # as vllm-gaudi reads its flags
_WAY_OUT = "engines with their KV cache in host memory use kvdepot[cpu]"


class HpuBackend(Backend):
    """See `kvdepot.backends.Backend`."""

    name = "hpu"
    device_type = "hpu"
    # Not ASYNCHRONOUS: it is unknown whether a second thread may submit work to a Gaudi, and vllm-gaudi's runner reuses
    # the blocks of a store without notice.
    capabilities = frozenset[Capability]()

    def why_unsuited(self, engine: EngineTraits) -> str | None:
        """See `Backend`: vllm-gaudi's differences from vLLM."""
        return _why_vllm_gaudi_is_unsuited(engine, os.environ) if engine.name == "vllm" else None

    def why_unavailable(self) -> str | None:
        """Return None if the backend can be used here, else the reason and the remedy.

        If habana_frameworks is installed, this loads it and torch to ask for the device.
        """
        if importlib.util.find_spec("numpy") is None:
            return "numpy is not installed: pip install 'kvdepot[hpu]'"
        if importlib.util.find_spec("habana_frameworks") is None:
            return (
                "habana_frameworks is not installed: run inside an Intel Gaudi image, which has it together with the"
                f" torch that fits; {_WAY_OUT}"
            )
        try:
            importlib.import_module("habana_frameworks.torch")
            torch: Any = importlib.import_module("torch")
            is_available = bool(torch.hpu.is_available())
        except Exception as error:  # a bridge that does not fit its torch or driver may raise anything
            return (
                f"habana_frameworks is installed and does not load ({type(error).__name__}: {error}): its version must"
                f" fit torch and the driver, as in an Intel Gaudi image; {_WAY_OUT}"
            )
        if not is_available:
            return (
                "habana_frameworks finds no Gaudi: look at hl-smi, give the container --runtime=habana and"
                f" HABANA_VISIBLE_DEVICES, and end what else holds the device; {_WAY_OUT}"
            )
        return None

    def create_context(
        self, cache: KVCache, *, url: str | None = None, deadline_seconds: float = DEADLINE_SECONDS, **options: Any
    ) -> "HpuTransferContext":
        """Return an `HpuTransferContext`; see `Backend`."""
        from kvdepot_hpu.context import HpuOptions, HpuTransferContext

        return HpuTransferContext(cache, HpuOptions(url=url, deadline_seconds=deadline_seconds, **options))


def _why_vllm_gaudi_is_unsuited(engine: EngineTraits, environment: Mapping[str, str]) -> str | None:
    """Return why an engine's block ids or tensors do not match its block table, None if they do.

    Based on the source of vllm-gaudi. `kvdepot_hpu.context` checks the tensors themselves.

    Args:
        engine: vLLM on a Gaudi.
        environment: the environment of the worker's process.
    """
    if GroupKind.RECURRENT in engine.kinds:
        return (
            "the model keeps recurrent states, which vllm-gaudi hands over as if they were blocks of attention: models"
            " with them cannot use a depot on Gaudi"
        )
    if _moves_blocks(environment, prefix_caching=engine.prefix_caching):
        return (
            "vllm-gaudi moves blocks in device memory behind the scheduler's ids (VLLM_DEFRAG, on with"
            " VLLM_CONTIGUOUS_PA, which is on without prefix caching): start vLLM with --enable-prefix-caching, or with"
            " VLLM_DEFRAG=false"
        )
    return None


def _moves_blocks(environment: Mapping[str, str], *, prefix_caching: bool) -> bool:
    """Return whether the defragmenter may be on. The first set flag decides; without one, prefix caching does."""
    for name in ("VLLM_DEFRAG", "VLLM_CONTIGUOUS_PA"):
        value = environment.get(name)
        if value is not None:
            return value.strip().lower() not in _OFF
    return not prefix_caching


backend = HpuBackend()
