"""Measures how long the engine takes to compute a token of prompt, which is what a hit saves."""

from collections import deque
from statistics import median
from typing import Final

_LEAST_TOKENS: Final = 128  # a smaller step is mostly decoding and overhead
_STEPS: Final = 31
_LEAST_STEPS: Final = 3


class PrefillPace:
    """Keeps the median time per token over the last steps that computed many tokens.

    A step lasts until the next step is planned. A step before an idle time therefore seems long, but the median
    tolerates a few of these.
    """

    def __init__(self) -> None:
        self._paces: deque[float] = deque(maxlen=_STEPS)
        self._num_tokens = 0
        self._planned_at = 0.0

    def step(self, now: float, num_tokens: int) -> None:
        """Record that a step of `num_tokens` is planned; `now` in seconds, monotonic."""
        if self._num_tokens >= _LEAST_TOKENS:
            self._paces.append((now - self._planned_at) / self._num_tokens)
        self._num_tokens, self._planned_at = num_tokens, now

    @property
    def token_seconds(self) -> float:
        """Seconds per token, 0.0 before enough steps were seen."""
        return median(self._paces) if len(self._paces) >= _LEAST_STEPS else 0.0
