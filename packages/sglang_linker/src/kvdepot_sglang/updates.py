"""The hook around SGLang's methods that write new weights into a running engine without telling the linker."""

import logging
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger(__name__)

METHODS: Final = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "end_weight_update",  # packs the received weights, or completes those that peers wrote into memory
)
"""Methods of SGLang's `SchedulerWeightUpdaterManager`, called on every rank between two batches."""


def around_update(original: Callable[..., Any], manager: Any, *args: Any, **options: Any) -> Any:
    """Tell the linker first which model gets new weights, because SGLang may flush its cache in the same call."""
    try:
        wrapper = getattr(manager.scheduler.tree_cache, "linker", None)
        note: Callable[[Any], None] | None = getattr(getattr(wrapper, "cache_linker", None), "note_update", None)
        if note is not None:
            note(manager.tp_worker.model_runner.model)
    except Exception:
        logger.exception(
            "the linker was not told of an update of weights: flush the cache, and this engine shares with nobody"
        )
    return original(manager, *args, **options)
