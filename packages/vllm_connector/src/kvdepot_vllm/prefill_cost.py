"""Measures the time that the engine needs for one more prompt token, which is the value of a hit.

A step costs a fixed time and a time per token. A hit saves only the latter. With many hits, most steps compute so few
tokens that they take little more than the fixed time. So the cost of a token is computed from two sizes of steps: the
smallest and the largest seen.
"""

from collections import deque
from statistics import median
from typing import Final

_LEAST_TOKENS: Final = 128  # in the larger steps: with fewer, the cost is lost in noise
_STEPS: Final = 5  # steps of each size; their median tolerates two that waited for something else
_LEAST_STEPS: Final = 3  # steps of one size: the first often compiles


class PrefillCost:
    """Fits the cost of a token to timed steps, grouped by powers of two of their tokens."""

    def __init__(self) -> None:
        self._steps: dict[int, deque[tuple[int, float]]] = {}
        self._num_tokens = 0
        self._planned_at = 0.0
        self._num_running = 0

    def planned(self, now: float, num_tokens: int) -> None:
        """Begin a step of `num_tokens` and end the one before. `now` is in seconds, monotonic."""
        self._take(now)
        self._num_tokens, self._planned_at = num_tokens, now
        self._num_running += 1

    def reported(self, now: float) -> None:
        """End a step that the workers have reported. If no other is running, the engine idles from now on."""
        self._num_running = max(self._num_running - 1, 0)
        if not self._num_running:
            self._take(now)

    def _take(self, now: float) -> None:
        if self._num_tokens:
            size = self._num_tokens.bit_length()
            self._steps.setdefault(size, deque(maxlen=_STEPS)).append((self._num_tokens, now - self._planned_at))
        self._num_tokens = 0

    @property
    def token_seconds(self) -> float:
        """Seconds per token, 0.0 while unknown. At most the average time per token of the larger steps."""
        sizes = sorted(size for size, steps in self._steps.items() if len(steps) >= _LEAST_STEPS)
        if not sizes:
            return 0.0
        tokens, seconds = self._typical(sizes[-1])
        if tokens < _LEAST_TOKENS:
            return 0.0
        few_tokens, fixed_seconds = self._typical(sizes[0]) if len(sizes) > 1 else (0.0, 0.0)
        return min(max(seconds - fixed_seconds, 0.0) / (tokens - few_tokens), seconds / tokens)

    def _typical(self, size: int) -> tuple[float, float]:
        tokens, seconds = zip(*self._steps[size], strict=True)
        return median(tokens), median(seconds)
