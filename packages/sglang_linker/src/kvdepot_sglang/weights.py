# pyright: basic
"""Names the weights with which an engine computes its KV, so that replicas with equal weights share.

At start the files name them. An update in the running engine makes the name a random one: until SGLang flushes its
cache, pages on the device may be of the weights before. After that flush the bytes of all weights name them, on every
rank its own. A flush without an update asks for a cold cache: its name is random. All ranks make the same calls.
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
        namespace: of the weights that the engine has loaded.
        ranks: that hold them.

    Attributes:
        namespace: of the weights that the engine computes with; while `is_named`.
    """

    def __init__(self, namespace: Namespace, ranks: Ranks) -> None:
        self.namespace = of_generation(namespace, "")
        self.is_named = True
        self._ranks = ranks
        self._updated: Any = None  # the model, if it has had other weights since the last flush that named them

    def update(self, model: Any) -> bool:
        """Note that a model gets other weights now. Return whether the namespace is another one from now on."""
        is_first, self._updated = self._updated is None, model
        if is_first and self.is_named:
            self.namespace = of_generation(self.namespace, self._ranks.common_random())
            return True
        return False

    def flush(self) -> None:
        """Note that the device has no page any more. The weights get a name when a request needs it.

        A trainer flushes with the first of several updates, too, or before SGLang packs what came.
        """
        self.is_named = False

    def name(self, version: str) -> None:
        """Name the weights after a flush.

        Args:
            version: people's name for them, a part of the name; "" for none.
        """
        name = ""
        if self._updated is not None:
            name = digest_of_ranks(self._ranks.all_tell(_digest(self._updated)), self._ranks.size)
        self.namespace = of_generation(self.namespace, f"{version} {name or self._ranks.common_random()}".strip())
        self.is_named, self._updated = True, None
        logger.info("the cache was flushed: KV of the weights %s from now on", dict(self.namespace.extra)[GENERATION])


def _digest(model: Any) -> str:
    """Return a digest of all that a rank computes KV with; "" if that cannot be told."""
    try:
        return models_digest([model])
    except Exception:
        logger.exception("the weights have no digest: this engine shares with no other until the next update")
        return ""
