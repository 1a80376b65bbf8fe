"""Checks whether a CUDA device can be used here, without loading CUDA."""

import ctypes
import importlib.util
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

OLDEST_BINDINGS: Final = (12, 9, 1)
"""The first whose calls release the GIL:
https://nvidia.github.io/cuda-python/cuda-bindings/latest/release/12.9.1-notes.html"""


def why_unavailable() -> str | None:
    """Return why no NVIDIA device can be used here, None if one probably can.

    It initialises nothing, because after `cuInit`, forked children cannot use CUDA. So a driver that is present but
    refuses is noticed only when it is opened.
    """
    if importlib.util.find_spec("numpy") is None:
        return "numpy is not installed: pip install 'kvdepot[cuda]'"
    try:
        bindings = version("cuda-bindings")
    except PackageNotFoundError:
        return "cuda-bindings is not installed: pip install 'kvdepot[cuda]'"
    if _release_of(bindings) < OLDEST_BINDINGS:
        return (
            f"cuda-bindings {bindings} is too old: before {'.'.join(map(str, OLDEST_BINDINGS))} it keeps Python's lock"
            " while it waits for the device, which stops the engine or hangs it: pip install"
            f" 'cuda-bindings>={'.'.join(map(str, OLDEST_BINDINGS))}'"
        )
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


def _release_of(number: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, at most three: (12, 9, 1) for 12.9.1.post1 and for 12.9.1rc2."""
    found = re.match(r"\d+(?:\.\d+){0,2}", number)
    return tuple(map(int, found.group().split("."))) if found else ()
