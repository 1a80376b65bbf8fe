# pyright: basic
"""Names the weights with which an engine computes its KV, so that replicas with equal weights share.

At start, the weight files determine the name. An update of the running engine makes the name random, because until
SGLang flushes its cache, pages on the device may come from the weights before. After that flush, digests of the weights
of all ranks determine the name. A flush without an update is a request for a cold cache, so the name is random. All
ranks must make the same calls.
"""

import logging
from typing import Any

from kvdepot.engines.generation import digest_of_ranks, of_generation
from kvdepot.engines.weights import models_digest
from kvdepot.keys import GENERATION, Namespace
from kvdepot_sglang.ranks import Ranks

logger = logging.getLogger(__name__)


class Weights:
    """The weights of one engine.

    Args:
        namespace: the namespace of the weights that the engine loaded at start.
        ranks: the ranks that hold the weights.

    Attributes:
        namespace: the namespace of the weights that the engine computes with; valid while `is_named`.
    """

    def __init__(self, namespace: Namespace, ranks: Ranks) -> None:
        self.namespace = of_generation(namespace, "")
        self.is_named = True
        self._ranks = ranks
        self._updated: Any = None  # the model, if it was updated since the weights were last named

    def update(self, model: Any) -> bool:
        """Note that a model is about to get new weights. Return whether this changes the namespace."""
        is_first, self._updated = self._updated is None, model
        if is_first and self.is_named:
            self.namespace = of_generation(self.namespace, self._ranks.common_random())
            return True
        return False

    def flush(self) -> None:
        """Note that the device has no pages any more, so that the weights need a name when the next request arrives.

        They are not named here: a trainer may flush with the first of several updates, or before SGLang packs the
        received weights.
        """
        self.is_named = False

    def name(self, version: str) -> None:
        """Name the weights after a flush.

        Args:
            version: the version that people gave them, which is part of the name; "" for none.
        """
        name = ""
        if self._updated is not None:
            name = digest_of_ranks(self._ranks.all_tell(_digest(self._updated)), self._ranks.size)
        self.namespace = of_generation(self.namespace, f"{version} {name or self._ranks.common_random()}".strip())
        self.is_named, self._updated = True, None
        logger.info("the cache was flushed: KV of the weights %s from now on", dict(self.namespace.extra)[GENERATION])


def _digest(model: Any) -> str:
    """Return a digest of the weights with which a rank computes KV; "" if that fails."""
    try:
        return models_digest([model])
    except Exception:
        logger.exception("the weights have no digest: this engine shares with no other until the next update")
        return ""
