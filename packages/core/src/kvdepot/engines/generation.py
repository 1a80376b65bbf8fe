"""Names the weights with which an engine computes its KV, so that replicas with equal weights share.

At start the files of the weights name them. Afterwards a trainer may write others into the running engine. An engine
says so by a reset of its caches, before or after the update. So after a reset nothing has a name until all workers have
told what their weights are now (`kvdepot.engines.weights`), when the first request needs one.
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

_PATIENCE_SECONDS: Final = 60.0  # with workers that do not tell their weights


class Generation:
    """The weights of one engine.

    Args:
        namespace: of the weights that the engine has loaded.
        num_workers: that tell what their weights are.
        weights: by worker, a digest of what it has loaded, for engines that sleep; "" if it cannot tell.
        clock: seconds, monotonic.

    Attributes:
        namespace: of the weights that the engine computes with; while `is_known`.
        name: of the generation, "" for the weights that were loaded.
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
        self._is_known = True
        self._asked_at: float | None = None
        self._number = 0  # of the last question

    @property
    def is_known(self) -> bool:
        """Whether the weights have a name now."""
        return self._is_known

    def reset(self) -> None:
        """Note that the weights may be others from now on."""
        self._is_known, self._asked_at = False, None
        self._told, self._has_slept = {}, False

    def set_version(self, version: str) -> bool:
        """Take the engine's own name for its weights. Return whether it is another one, which means other weights."""
        has_changed = version != self._version
        self._version = version
        return has_changed

    def ask(self) -> int:
        """Return the number of the question to ask the workers now, as a request needs a name; 0 if there is none."""
        if self._is_known or self._asked_at is not None:
            return 0
        self._asked_at = self._clock()
        self._number += 1
        return self._number

    def tell(self, weights: Mapping[int, tuple[int, str]], *, has_slept: bool) -> bool:
        """Take what workers told, each for itself. Return whether the weights have a name now, for the first time.

        Equal weights keep their name only if the workers slept since. Without that a reset asks for a cold cache.

        Args:
            weights: by worker, the number of the question and the digest. Answers to earlier ones are ignored: the
                weights may be others since.
            has_slept: whether one of them slept since it last told.
        """
        if self._asked_at is None or self._is_known:
            return False
        self._told.update((worker, told) for worker, (number, told) in weights.items() if number == self._number)
        self._has_slept |= has_slept
        if len(self._told) < self._num_workers and self._clock() < self._asked_at + _PATIENCE_SECONDS:
            return False
        found = digest_of_ranks(self._told, self._num_workers)
        is_same = found == self._weights and self._version == self._named_version
        self._is_known = True
        self._weights, self._named_version = found, self._version
        if not (found and is_same and self._has_slept):
            name = found if found and not is_same else uuid.uuid4().hex
            self.name = f"{self._version} {name}".strip()
            self.namespace = of_generation(self.namespace, self.name)
        logger.info("the caches were reset: KV of the weights %s from now on", self.name or "that were loaded")
        return True


def of_generation(namespace: Namespace, name: str) -> Namespace:
    """Return the namespace of another generation of keys."""
    extra = tuple(item for item in namespace.extra if item[0] != GENERATION)
    return replace(namespace, extra=(*extra, (GENERATION, name)))


def digest_of_ranks(weights: Mapping[int, str], num_workers: int) -> str:
    """Return the digest of all workers' weights, "" if one is missing."""
    if len(weights) < num_workers or "" in weights.values():
        return ""
    return digest_of("weights of ranks", sorted(weights.items()))
