# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for tests: an fp8 KV cache on a CPU, as on a GPU.

SGLang 0.5.23 refuses `fp8_e5m2` on a CPU, and `fp8_e4m3` on a CPU without AMX. The plugin gives engines with
`--kv-cache-dtype auto` the pool of a GPU with `fp8_e5m2`, which `torch_native` can read.
"""

import importlib
from typing import Any, Final

_DTYPE: Final = "sglang.srt.mem_cache.kv_cache_dtype.configure_kv_cache_dtype"


def around_dtype(original: Any, **options: Any) -> Any:
    return "fp8_e5m2", importlib.import_module("torch").float8_e5m2


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_DTYPE, around_dtype, hooks.HookType.AROUND)
