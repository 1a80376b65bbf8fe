# pyright: basic, reportMissingImports=false
"""The platform-dependent part of a worker: identifies how the bytes of a block are written, and permits AMX on CPUs."""

import logging

logger = logging.getLogger(__name__)


def device_of_bytes(dtype: str) -> str:
    """Return the kind of device, with everything else about the platform that changes how values are written."""
    from vllm import envs
    from vllm.platforms import current_platform

    parts = [str(current_platform.device_name)]
    if dtype not in ("float32", "float16", "bfloat16") and current_platform.is_fp8_fnuz():
        parts.append("fnuz")  # 8-bit floats of older AMD GPUs: other bits for the same value
    if current_platform.is_rocm() and envs.VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT:
        parts.append("shuffled")
    return " ".join(parts)


def permit_tiles(device: str) -> None:
    """Request AMX tiles from the kernel for this process, if vLLM's attention on CPU uses them.

    The first use of a tile without this permission ends the process with SIGILL
    (https://docs.kernel.org/arch/x86/xstate.html). vLLM 0.32 relies on an earlier matrix product of oneDNN to request
    it. No such product has run yet if an engine without warm-up loads all but one token for its first step.
    """
    if device != "cpu":
        return
    import torch

    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():  # noqa: SLF001  # torch has no other way
        logger.warning("the kernel refuses AMX tiles to this process: vLLM's attention may end with SIGILL")
