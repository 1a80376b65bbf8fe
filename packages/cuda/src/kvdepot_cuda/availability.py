"""Whether a CUDA device can be used here, found out without loading CUDA."""

import ctypes
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def why_unavailable() -> str | None:
    """Say why no NVIDIA device can be used here, None if one probably can.

    Initialises nothing: a process that forks after `cuInit` leaves its children without CUDA. So a driver that is
    there and refuses is found out by opening it.
    """
    if importlib.util.find_spec("numpy") is None:
        return "numpy is not installed: pip install 'kvdepot[cuda]'"
    try:
        bindings = version("cuda-bindings")
    except PackageNotFoundError:
        return "cuda-bindings is not installed: pip install 'kvdepot[cuda]'"
    if tuple(int(part) for part in bindings.split(".")[:2]) < (12, 8):
        return f"cuda-bindings {bindings} is too old: pip install 'cuda-bindings>=12.8'"
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return (
            "no NVIDIA driver is installed here (libcuda.so.1 does not load): install it, or start the container with"
            " the devices (--gpus all); engines with their KV cache in host memory use kvdepot[cpu]"
        )
    if not any(next(Path("/dev").glob(name), None) for name in ("nvidia[0-9]*", "dxg", "nvmap")):
        return "there is a driver and no NVIDIA device (no /dev/nvidia0): start the container with the devices"
    return None
