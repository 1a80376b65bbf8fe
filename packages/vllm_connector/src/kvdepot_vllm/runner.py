# pyright: basic, reportMissingImports=false
"""Finds vLLM's objects that no hook passes: the runner with its model, and the engine core.

They construct or call the connector, so a frame of the call stack refers to them.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvdepot.engines.weights import models_digest

logger = logging.getLogger(__name__)

_PRODUCTS = 32  # of each layer: together they take as long as a prompt of 32 tokens, after each reset
_SEED = 20261127  # arbitrary, but equal in all processes that compare digests
_UNNAMED = "default"  # vLLM's version of weights to which nobody gave a version


def find_runner() -> Any | None:
    """Return the model runner that is calling `register_kv_caches`, None if none is found."""
    return _find("get_model", "model", "kv_cache_config")


def find_version() -> Callable[[], str]:
    """Return a function that returns the version that people gave the weights of the calling engine core.

    That function returns "" if they gave none, or if this vLLM has no versions.
    """
    core = _find("get_weight_version")
    if core is None:
        return lambda: ""

    def version() -> str:
        told = str(core.get_weight_version())
        return "" if told == _UNNAMED else told

    return version


def digest_of_weights(runner: Any | None) -> str:
    """Return a digest of the weights with which a runner computes KV; "" without a runner, or if that fails."""
    if runner is None:
        return ""
    try:
        drafters = (getattr(getattr(runner, name, None), "model", None) for name in ("drafter", "speculator"))
        models = [runner.get_model(), *(each for each in drafters if hasattr(each, "named_parameters"))]
        return models_digest(models, _hidden_weights)
    except Exception:
        logger.exception("the weights have no digest: after each reset this engine shares with no other")
        return ""


def _hidden_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield tensors that stand for the weights that vLLM on CPU keeps packed, outside of parameters and buffers.

    vLLM empties the parameter of such a layer (`dispatch_cpu_unquantized_gemm`; `uses_amx_bmm` in latent attention).
    oneDNN does not give its packed weights back, so the layer multiplies vectors whose elements are 1 or -1. In each
    product, every weight counts. Rounding may hide a small change of one weight in some products, but rarely in all.
    """
    import torch

    generator = torch.Generator().manual_seed(_SEED)
    for name, module in model.named_modules():
        backend = getattr(module, "impl", None)
        if getattr(backend, "uses_amx_bmm", False):
            for field in ("_w_uk_packed", "_w_uv_packed"):
                yield f"{name}.{field}", getattr(backend, field)
        is_packed = hasattr(module, "cpu_linear") and not getattr(module, "_cpu_skip_gemm_dispatch", False)
        if is_packed and not (weight := module.weight).numel():
            shape = _PRODUCTS, getattr(module, "input_size_per_partition", module.input_size)
            vectors = torch.randint(2, shape, generator=generator).mul_(2).sub_(1).to(weight.dtype)
            yield f"{name}.products", module.cpu_linear(vectors, weight, None)


def _find(*names: str) -> Any | None:
    frame = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        found = frame.f_locals.get("self")
        if all(hasattr(found, name) for name in names):
            return found
        frame = frame.f_back
    return None
