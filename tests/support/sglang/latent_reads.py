# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for tests: latent attention reads what it keeps, on a CPU without AMX.

SGLang 0.5.23 has `torch_native` compute a prompt's first pass with whole keys, and gives it a pool of latent ones, so
that the shapes do not fit. With latent attention everywhere they do.
"""

import importlib
from typing import Any, Final

_ATTENTION: Final = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.dispatch_attn_forward_method"
_METHODS: Final = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods"


def around_dispatch(original: Any, attention: Any, forward_batch: Any) -> Any:
    return importlib.import_module(_METHODS).AttnForwardMethod.MLA


def register() -> None:
    hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
    hooks.HookRegistry.register(_ATTENTION, around_dispatch, hooks.HookType.AROUND)
