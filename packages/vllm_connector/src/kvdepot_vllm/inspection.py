# pyright: basic, reportMissingImports=false
"""Reads from vLLM's internals: its runner with the model, its engine core, the engine's name and address.

No hook is given these. The runner and the engine core construct or call the connector, so a frame of the call stack
refers to them. Operators and routers see the names; keys do not depend on them.
"""

import argparse
import logging
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvdepot.engines.identity import models_digest
from kvdepot_vllm.contents import WRITING_METHODS

logger = logging.getLogger(__name__)

_PRODUCTS: Final = 32  # of each layer: together they take as long as a prompt of 32 tokens, after each reset
_SEED: Final = 20261127  # arbitrary, but equal in all processes that compare digests
_UNNAMED: Final = "default"  # vLLM's version of weights to which nobody gave a version
_UUID: Final = r"^([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DEFAULT_PORT: Final = "8000"  # of `vllm serve`


def find_runner() -> Any | None:
    """Return the model runner that is calling `register_kv_caches`, None if none is found."""
    return _find("get_model", "model", "kv_cache_config")


def find_worker() -> Any | None:
    """Return the worker whose runner is calling `register_kv_caches`, None if none is found."""
    return _find("model_runner", *WRITING_METHODS)


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


def name_of_engine(vllm_config: Any, argv: Sequence[str]) -> str:
    """Return the engine's name in the depot's status: served model, address and id.

    vLLM generates a UUID for each engine; eight of its digits tell the engines of a node apart. An `engine_id` given in
    `--kv-transfer-config` is shown unchanged. vLLM gives connectors no address of its API server, but the processes
    that it starts by `multiprocessing` have the arguments of `vllm serve`. The address is left out if some of the
    engine's processes start in another way, because all of them must find the same name.

    Args:
        vllm_config: vLLM's configuration.
        argv: the arguments of this process, the program first.
    """
    engine_id = re.sub(_UUID, r"\1", vllm_config.kv_transfer_config.engine_id)
    parallel = vllm_config.parallel_config
    is_local = getattr(parallel, "distributed_executor_backend", "") in ("uni", "mp") and parallel.nnodes == 1
    address = address_of_server(argv) if is_local else ""
    served = str(vllm_config.model_config.served_model_name)[:160]
    return " ".join(filter(None, ("vllm", served, address[:64], engine_id)))[:256]


def served_model(vllm_config: Any) -> str:
    """Return the first name of the model in requests, by which routers know it."""
    names = vllm_config.model_config.served_model_name
    return names if isinstance(names, str) else str(names[0])


def address_of_server(argv: Sequence[str]) -> str:
    """Return the address at which `vllm serve` with these arguments answers; "" if they do not contain it.

    Args:
        argv: the arguments of any program, the program first.
    """
    program, arguments = Path(argv[0] if argv else "").name, argv[1:]
    if program != "api_server.py" and (program != "vllm" or list(arguments[:1]) != ["serve"]):
        return ""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--host", "--port", "--uds", "--config"):
        parser.add_argument(flag, default="")
    given = parser.parse_known_args(arguments)[0]
    if given.uds:
        return given.uds
    if given.config and not given.port:  # that file may give the port
        return ""
    port = given.port or _DEFAULT_PORT
    host = f"[{given.host}]" if ":" in given.host else given.host
    return f"{host}:{port}" if host else f"port {port}"
