# pyright: basic, reportMissingImports=false
"""A plugin of SGLang for tests: latent attention on a CPU without AMX.

In SGLang 0.5.23, `torch_native` computes a prompt's first pass with whole keys but has a pool of latent ones, so the
shapes do not match. The plugin uses latent attention in every pass, and they match.
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
