# pyright: basic
"""Finds vLLM's objects that no hook passes: the runner with its model, and the engine core.

They construct or call the connector, so a frame of the call stack refers to them.
"""

import logging
import sys
from collections.abc import Callable
from typing import Any

from kvdepot.engines.weights import models_digest

logger = logging.getLogger(__name__)

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
        return models_digest([runner.get_model(), *(each for each in drafters if hasattr(each, "named_parameters"))])
    except Exception:
        logger.exception("the weights have no digest: after each reset this engine shares with no other")
        return ""


def _find(*names: str) -> Any | None:
    frame = sys._getframe(2)  # noqa: SLF001
    while frame is not None:
        found = frame.f_locals.get("self")
        if all(hasattr(found, name) for name in names):
            return found
        frame = frame.f_back
    return None
