"""Names the weights with which an engine computes its KV, so that replicas with equal weights share.

At start, the weight files determine the name. Later, a trainer may write new weights into the running engine. The
engine signals this by a reset of its caches, before or after the update. So after a reset, the weights have no name.
When the first request needs one, all workers report digests of their weights (`kvdepot.engines.identity`).
"""

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from kvdepot.engines.identity import digest_of
from kvdepot.keys import GENERATION, Namespace

logger = logging.getLogger(__name__)

# Until then, KV has no name. Afterwards the weights get a random name, and the cache starts cold.
_PATIENCE_SECONDS: Final = 60.0  # the longest wait for workers that do not report their weights


class Generation:
    """The weights of one engine.

    Args:
        namespace: the namespace of the weights that the engine loaded at start.
        num_workers: the number of workers that report their weights.
        weights: by worker, a digest of the weights that it loaded, for engines that sleep; "" if it has no digest.
        clock: returns monotonic seconds.

    Attributes:
        namespace: the namespace of the weights that the engine computes with; valid while `is_known`.
        name: the name of the generation, "" for the weights that were loaded at start.
    """

    def __init__(
        self,
        namespace: Namespace,
        num_workers: int,
        weights: Mapping[int, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.namespace = namespace
        self.name = ""
        self._num_workers = num_workers
        self._weights: str = digest_of_ranks(weights or {}, num_workers)
        self._clock = clock
        self._told: dict[int, str] = {}
        self._has_slept = False
        self._version: str = ""
        self._named_version: str = ""
        self.is_known = True  # whether KV that is computed now has a name
        self._asked_at: float | None = None
        self._number = 0  # number of the last question

    def reset(self) -> None:
        """Note that the weights may have changed, so that they have no name now."""
        self.is_known, self._asked_at = False, None
        self._told, self._has_slept = {}, False

    def set_version(self, version: str) -> bool:
        """Take the engine's own version of its weights. Return whether it changed, which means new weights."""
        has_changed = version != self._version
        self._version = version
        return has_changed

    def ask(self) -> int:
        """Return the number of the question to send to the workers now that a request needs a name; 0 for none."""
        if self.is_known or self._asked_at is not None:
            return 0
        self._asked_at = self._clock()
        self._number += 1
        return self._number

    def tell(self, weights: Mapping[int, tuple[int, str]], *, has_slept: bool) -> bool:
        """Take the workers' answers. Return whether the weights have just received a name.

        Unchanged weights keep their name only if a worker has slept. Otherwise the reset is a request for a cold cache.

        Args:
            weights: by worker, the number of the question that it answers, and the digest of its weights. Answers to
                earlier questions are ignored, because the weights may have changed since.
            has_slept: whether one of these workers has slept since its last answer.
        """
        if self._asked_at is None or self.is_known:
            return False
        self._told.update((worker, told) for worker, (number, told) in weights.items() if number == self._number)
        self._has_slept |= has_slept
        if len(self._told) < self._num_workers and self._clock() < self._asked_at + _PATIENCE_SECONDS:
            return False
        found = digest_of_ranks(self._told, self._num_workers)
        is_same = found == self._weights and self._version == self._named_version
        self.is_known = True
        self._weights, self._named_version = found, self._version
        if not (found and is_same and self._has_slept):
            name = found if found and not is_same else uuid.uuid4().hex
            self.name = f"{self._version} {name}".strip()
            self.namespace = of_generation(self.namespace, self.name)
        logger.info("the caches were reset: KV of the weights %s from now on", self.name or "that were loaded")
        return True


def of_generation(namespace: Namespace, name: str) -> Namespace:
    """Return the namespace of the generation of keys called `name`."""
    extra = tuple(item for item in namespace.extra if item[0] != GENERATION)
    return replace(namespace, extra=(*extra, (GENERATION, name)))


def digest_of_ranks(weights: Mapping[int, str], num_workers: int) -> str:
    """Return one digest of all workers' weights, "" if a worker's digest is missing."""
    if len(weights) < num_workers or "" in weights.values():
        return ""
    return digest_of("weights of ranks", sorted(weights.items()))
