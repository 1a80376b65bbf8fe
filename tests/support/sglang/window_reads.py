# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for tests: its `torch_native` attention reads windows from the slots to which it writes them.

SGLang 0.5.23 keeps windows in a pool of their own, with its own slots. `torch_native`, the only attention that runs on
every CPU, translates slots when it writes that pool, but not when it reads it. So a prompt's tokens differ between two
runs even without a linker. Here reads are translated, too.
"""

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

_BACKEND: Final = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


class _Translated:
    """The slots of a request's tokens in the pool of windows. Tokens that left it have slot 0 and are masked."""

    def __init__(self, slots: Any, pool: Any) -> None:
        self._slots, self._pool = slots, pool

    def __getitem__(self, index: Any) -> Any:
        return self._pool.translate_loc_from_full_to_swa(self._slots[index])


def around_forward(original: Callable[..., Any], backend: Any, q: Any, k: Any, v: Any, layer: Any, *rest: Any,
                   **options: Any) -> Any:  # fmt: skip
    """Make a layer with windows read from the slots of its own pool."""
    pool = backend.token_to_kv_pool
    if not (backend.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]):
        return original(backend, q, k, v, layer, *rest, **options)
    whole = backend.req_to_token_pool
    backend.req_to_token_pool = SimpleNamespace(req_to_token=_Translated(whole.req_to_token, pool))
    try:
        return original(backend, q, k, v, layer, *rest, **options)
    finally:
        backend.req_to_token_pool = whole


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    for name in ("forward_extend", "forward_decode"):
        hooks.HookRegistry.register(f"{_BACKEND}.{name}", around_forward, hooks.HookType.AROUND)
