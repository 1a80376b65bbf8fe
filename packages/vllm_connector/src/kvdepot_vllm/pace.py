"""How long the engine takes to compute a token of prompt: what a hit is worth."""

from collections import deque
from statistics import median
from typing import Final

_LEAST_TOKENS: Final = 128  # of a step that tells; smaller ones are mostly decoding and overhead
_STEPS: Final = 31
_LEAST_STEPS: Final = 3


class PrefillPace:
    """The median over the last steps that computed many tokens, each lasting until the next step was planned.

    A step after which nothing was left to do seems to last until the next request; the median does not mind a few.
    """

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=_STEPS)
        self._num_tokens = 0
        self._planned_at = 0.0

    def step(self, now: float, num_tokens: int) -> None:
        """A step of so many tokens is planned; `now` in seconds, monotonic."""
        if self._num_tokens >= _LEAST_TOKENS:
            self._paces.append((now - self._planned_at) / self._num_tokens)
        self._num_tokens, self._planned_at = num_tokens, now

    @property
    def token_seconds(self) -> float:
        """Seconds a token, 0.0 while too few steps were seen."""
        return median(self._paces) if len(self._paces) >= _LEAST_STEPS else 0.0
