"""The operators of vllm_xpu_kernels that move blocks.

Read in its source of August 2026: registering makes host memory a target of the copy engines for one device's context;
a batch looks only at its first entry for direction and kind of memory, snapshots sources in host memory on the calling
thread (into one pinned buffer as large as all of them), and queues the copies on the calling thread's current stream.
"""

import importlib
import importlib.util
from typing import Any, Final

import numpy as np

from kvdepot.copying.runs import Addresses

_PACKAGE: Final = "vllm_xpu_kernels"
WAY_OUT: Final = "install the version of vllm_xpu_kernels that fits torch, of August 2026 or newer"
ADDRESS_MASK: Final = (1 << 64) - 1


class NoKernels(Exception):
    """They cannot be used here; the text says why and what would help."""


class Kernels:
    """Registers host memory and copies runs.

    Raises:
        NoKernels: not installed, or without the needed functions.
    """

    def __init__(self, torch: Any) -> None:
        if importlib.util.find_spec(_PACKAGE) is None:
            raise NoKernels(f"{_PACKAGE} is not installed: {WAY_OUT}")
        try:
            importlib.import_module(_PACKAGE + "._C")  # registers the operators
            self._register = torch.ops._C.xpu_host_register
            self._unregister = torch.ops._C.xpu_host_unregister
            self._copy = torch.ops._C_cache_ops.swap_blocks_batch
            first = self._register.default._schema.arguments[0]
        except Exception as error:  # an extension that does not load raises anything
            raise NoKernels(f"{_PACKAGE} lacks a needed function ({error}): {WAY_OUT}") from error
        self._torch = torch
        self._takes_tensor = str(first.type) == "Tensor"  # versions differ: a number, or a tensor of one

    def _address(self, address: int) -> Any:
        if not self._takes_tensor:
            return address
        return self._torch.from_numpy(np.array([address & ADDRESS_MASK], np.uint64))

    def register(self, address: int, num_bytes: int) -> bool:
        """Make host memory known to the current device; False if it refuses."""
        return bool(self._register(self._address(address), num_bytes))

    def unregister(self, address: int) -> bool:
        """Undo it. Nothing may be under way."""
        return bool(self._unregister(self._address(address)))

    def copy(self, sources: Addresses, targets: Addresses, sizes: Addresses) -> None:
        """Queue copies, all in one direction, on the current stream; the arrays are not needed afterwards."""
        columns = [self._torch.from_numpy(np.ascontiguousarray(each)) for each in (sources, targets, sizes)]
        self._copy(*columns)
