"""Kernels, compiled for one kind of device: how they are made of the modules that import Triton, and their fields."""

import importlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from kvdepot.errors import KVDepotError


class KernelUnavailable(KVDepotError):
    """A kernel cannot be compiled here; the text gives the reason."""


@dataclass(frozen=True, slots=True)
class KernelImage:
    """A compiled kernel. After its own parameters it has hidden ones, which are null pointers."""

    image: bytes
    name: str
    num_threads: int
    shared_bytes: int
    num_hidden: int


def has_triton() -> bool:
    """Return whether Triton is installed, without importing it."""
    return importlib.util.find_spec("triton") is not None


def compile_kernels(module: str, capability: int) -> tuple[KernelImage, ...]:
    """Compile the kernels of a module with the installed Triton, in the order of its `compile_for`.

    The first time takes some seconds; Triton caches the result.

    Args:
        module: a module of this package that imports Triton.
        capability: a compute capability (90 is 9.0).

    Raises:
        KernelUnavailable: Triton is missing or cannot compile them.
    """
    if not has_triton():
        raise KernelUnavailable("triton is not installed: pip install 'triton>=3.3'")
    try:
        compiled = importlib.import_module(f"kvdepot_cuda.{module}").compile_for(capability)
        return tuple(map(_image_of, compiled))
    except Exception as error:  # a compiler may raise anything
        raise KernelUnavailable(f"triton cannot compile it: {type(error).__name__}: {error}") from error


def _image_of(compiled: Any) -> KernelImage:
    """Return a kernel that Triton has compiled, ready to load.

    Raises:
        ValueError: it needs scratch memory, which it does not get here.
    """
    metadata = compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size"):
        if getattr(metadata, name, 0):
            raise ValueError(f"this version of triton asks for a {name} of {getattr(metadata, name)}")
    entry = re.search(r"\.entry\s.*?\)", compiled.asm["ptx"], re.DOTALL)
    assert entry is not None
    num_parameters = sum(kind != "constexpr" for kind in compiled.src.signature.values())
    return KernelImage(
        compiled.asm["cubin"],
        metadata.name,
        metadata.num_warps * 32,
        metadata.shared,
        entry.group().count(".param") - num_parameters,
    )
