"""The names of an engine for operators and routers. Keys do not depend on them."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

_UUID: Final = r"^([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_DEFAULT_PORT: Final = "8000"  # of `vllm serve`


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
