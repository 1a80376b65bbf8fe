"""Registers vLLM's kernels for CPU, once: each engine would search all modules for them, for a third of a second."""

import importlib

_platform = importlib.import_module("vllm.platforms").current_platform
_platform.register_triton_kernel_overrides()
type(_platform).register_triton_kernel_overrides = classmethod(lambda _cls: None)
