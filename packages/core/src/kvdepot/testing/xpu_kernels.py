"""Pretend operators of vllm_xpu_kernels on a pretend device: what moves blocks between it and registered host memory.

    with FakeKernels(install("fakexpu")) as kernels: ...

Inside, `vllm_xpu_kernels._C` can be imported, `torch.ops` has the operators, and tensors of the device have addresses.
As strict as the device: copies out into registered memory run late and leave 0xAB there until then; copies in take
their bytes at once and arrive late; a batch is one direction, told by its first entry; copies into memory that is not
registered wait one by one, which `num_waited` counts. Registering can be made to fail, and so can copies.
"""

import ctypes
import importlib
import importlib.machinery
import sys
import types
from types import TracebackType
from typing import Any, Final, Self

from kvdepot.testing.device import ADDRESS_OFFSET, POISON, FakeDevice, Stream

_PACKAGE: Final = "vllm_xpu_kernels"
_ALL: Final = "CompositeExplicitAutograd"


class FakeKernels:
    """The operators, while the context is open. Close their users first.

    Args:
        device: where the tensors are.
        takes_tensor: an address is a tensor of one number, as in versions since August 2026, else a number.
        queues_astray: copies go to the device's default queue instead of the current one, as they did on every device
            but the first in versions before.
    """

    def __init__(self, device: FakeDevice, *, takes_tensor: bool = True, queues_astray: bool = False) -> None:
        self.registered: dict[int, int] = {}  # address -> bytes
        self.num_calls = 0
        self.num_waited = 0  # runs that each waited for the device
        self.largest_call_bytes = 0
        self.most_registered_bytes = 1 << 40  # by one call; 0 refuses all
        self.fails_after_calls: int | None = None
        self._device = device
        self._takes_tensor = takes_tensor
        self._queues_astray = queues_astray
        self._libraries: list[Any] = []

    def __enter__(self) -> Self:
        library: Any = importlib.import_module("torch").library.Library
        address = "Tensor" if self._takes_tensor else "int"
        common, caches = library("_C", "FRAGMENT"), library("_C_cache_ops", "FRAGMENT")
        self._libraries = [common, caches]
        common.define(f"xpu_host_register({address} ptr, int n_bytes) -> bool")
        common.define(f"xpu_host_unregister({address} ptr) -> bool")
        caches.define("swap_blocks_batch(Tensor src, Tensor dst, Tensor sizes) -> ()")
        common.impl("xpu_host_register", self._register, _ALL)
        common.impl("xpu_host_unregister", self._unregister, _ALL)
        caches.impl("swap_blocks_batch", self._copy, _ALL)
        for name in (_PACKAGE, _PACKAGE + "._C"):
            module = types.ModuleType(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            sys.modules[name] = module
        self._device.has_addresses = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._device.has_addresses = False
        for name in (_PACKAGE, _PACKAGE + "._C"):
            del sys.modules[name]
        operators: Any = importlib.import_module("torch").ops
        for namespace, names in ((operators._C, ("xpu_host_register", "xpu_host_unregister")),
                                 (operators._C_cache_ops, ("swap_blocks_batch",))):  # fmt: skip
            for name in names:
                if name in vars(namespace):  # torch remembers the first request
                    delattr(namespace, name)
        for library in self._libraries:
            library._destroy()

    def is_registered(self, address: int) -> bool:
        """Return whether one byte of host memory is registered."""
        return any(start <= address < start + size for start, size in self.registered.items())

    # --- the operators --------------------------------------------------------------------------------------------

    def _number(self, address: Any) -> int:
        return int(address.item()) if self._takes_tensor else address

    def _register(self, ptr: Any, n_bytes: int) -> bool:
        if not 0 < n_bytes <= self.most_registered_bytes:
            return False
        self.registered[self._number(ptr)] = n_bytes
        return True

    def _unregister(self, ptr: Any) -> bool:
        return self.registered.pop(self._number(ptr), None) is not None

    def _copy(self, src: Any, dst: Any, sizes: Any) -> None:
        self.num_calls += 1
        if self.fails_after_calls is not None and self.num_calls > self.fails_after_calls:
            raise RuntimeError("the pretend copy engine fails")
        torch: Any = importlib.import_module("torch")
        if {each.dtype for each in (src, dst, sizes)} != {torch.uint64}:
            raise RuntimeError("addresses and sizes are uint64")
        runs = [run for run in zip(src.tolist(), dst.tolist(), sizes.tolist(), strict=True) if run[2]]
        if not runs:
            return
        self.largest_call_bytes = max(self.largest_call_bytes, sum(size for _, _, size in runs))
        stream = self._device.default_stream if self._queues_astray else self._device.current_stream()
        to_device = runs[0][1] >= ADDRESS_OFFSET
        if any((target >= ADDRESS_OFFSET) != to_device or (source >= ADDRESS_OFFSET) == to_device
               for source, target, _ in runs):  # fmt: skip
            raise AssertionError("a batch has one direction")
        waits = not to_device and not self.is_registered(runs[0][1])
        for source, target, size in runs:
            if to_device:
                self._copy_in(stream, source, target - ADDRESS_OFFSET, size)
            else:
                self._copy_out(stream, source - ADDRESS_OFFSET, target, size, waits=waits)

    def _copy_in(self, stream: Stream, source: int, target: int, size: int) -> None:
        taken = ctypes.string_at(source, size)
        stream.enqueue(lambda: ctypes.memmove(target, taken, size))

    def _copy_out(self, stream: Stream, source: int, target: int, size: int, *, waits: bool) -> None:
        if waits:
            self.num_waited += 1
            stream.finish()
            ctypes.memmove(target, source, size)
            return
        if not (self.is_registered(target) and self.is_registered(target + size - 1)):
            raise AssertionError("a batch has one kind of memory")
        ctypes.memset(target, POISON, size)
        stream.enqueue(lambda: ctypes.memmove(target, source, size))
