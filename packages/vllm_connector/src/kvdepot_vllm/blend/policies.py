# pyright: basic, reportMissingImports=false
"""Policies: choose the reused tokens to recompute.

A run is a stretch of reused tokens with one source. Recomputation is cheapest in grains: neighbouring tokens of one
run, which the engine computes as one row of a batch. All ranks choose the same tokens, because scores are summed over
the ranks.

- `none` chooses nothing, `all` everything.
- `heads` chooses the first tokens of each run: as attention sinks of their source they mislead most.
- `deviation` chooses the tokens whose K in the second layer differs most from the reused K.
- `query` chooses the tokens that the question attends to.
- `mixkq` chooses heads with up to half of the budget, then the tokens that are both attended to and wrong: it ranks by
  attention times the root of the deviation. Without a question, or with a long one, it ranks by the deviation alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

Run = tuple[int, int]
"""Begin and end of a stretch of positions."""

DEFAULT: Final = "mixkq"
_LONGEST_QUESTION: Final = 256  # tokens; each token of a longer question says little about the answer


@dataclass(frozen=True, slots=True)
class Budget:
    """How many tokens to recompute.

    Attributes:
        ratio: the share of the reused tokens.
        run_tokens: the least number for each run, as short runs need their heads more.
        grain: the number of tokens that are chosen together.
    """

    ratio: float = 0.15  # docs/blend.md compares it with other shares
    run_tokens: int = 16
    grain: int = 16

    def tokens(self, runs: Sequence[Run]) -> int:
        """Return the number of tokens to recompute."""
        reused = sum(end - begin for begin, end in runs)
        return min(reused, max(round(self.ratio * reused), self.run_tokens * len(runs)))


class Scores(Protocol):
    """Scores of the reused tokens, `(n,)` float32 on the CPU in the order of the runs. Each is costly."""

    @property
    def question_tokens(self) -> int:
        """The number of tokens of the question; 0 without one."""
        ...

    def deviation(self) -> Any:
        """Return the squared distance of each token's K in the second layer from the reused one."""
        ...

    def attention(self) -> Any:
        """Return how much the question attends to each token."""
        ...


Policy = Callable[[Sequence[Run], Budget, Scores], Any]
"""Returns the positions to recompute, ascending, int64.

Args: runs, not empty, ascending, without overlap; how many tokens to choose, which the last grain may exceed; and the
scores of the tokens in the runs.
"""


def _none(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    return torch.empty(0, dtype=torch.int64)


def _all(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    return torch.cat([torch.arange(begin, end) for begin, end in runs])


def _heads(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    """Choose the same number of tokens from each run. Longer runs make up for tokens that short runs lack."""
    left, chosen = budget.tokens(runs), dict[int, int]()
    by_length = sorted(range(len(runs)), key=lambda number: runs[number][1] - runs[number][0])
    for rank, number in enumerate(by_length):
        begin, end = runs[number]
        chosen[number] = min(end - begin, left // (len(runs) - rank))
        left -= chosen[number]
    return torch.cat([torch.arange(begin, begin + chosen[number]) for number, (begin, _) in enumerate(runs)])


def _deviation(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    return _Grains(runs, budget.grain).best(scores.deviation(), budget.tokens(runs))


def _query(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    score = scores.attention() if scores.question_tokens else scores.deviation()
    return _Grains(runs, budget.grain).best(score, budget.tokens(runs))


def _mixkq(runs: Sequence[Run], budget: Budget, scores: Scores) -> Any:
    score = scores.deviation()
    if 0 < scores.question_tokens <= _LONGEST_QUESTION:
        score = scores.attention() * score.sqrt()
    tokens = budget.tokens(runs)
    return _Grains(runs, budget.grain).best(score, tokens, head_tokens=tokens // 2)


POLICIES: Final[Mapping[str, Policy]] = {
    "none": _none,
    "all": _all,
    "heads": _heads,
    "deviation": _deviation,
    "query": _query,
    "mixkq": _mixkq,
}


class _Grains:
    """The runs cut into grains; each run begins a new one."""

    def __init__(self, runs: Sequence[Run], size: int) -> None:
        self._positions = torch.cat([torch.arange(begin, end) for begin, end in runs])
        within = torch.cat([torch.arange(end - begin) for begin, end in runs])
        starts = within % size == 0
        self._grain = starts.long().cumsum(0) - 1  # the grain of each token
        self._is_head = within[starts] == 0
        self._lengths = torch.bincount(self._grain)

    def best(self, score: Any, tokens: int, head_tokens: int = 0) -> Any:
        """Return the positions in the grains with the largest sums of `score`, until there are `tokens`.

        The first grains of the runs come before all others, until there are `head_tokens` of them.
        """
        sums = torch.zeros(len(self._lengths), dtype=torch.float64).index_add_(0, self._grain, score.double())
        chosen = torch.zeros(len(sums), dtype=torch.bool)
        self._take(chosen, torch.where(self._is_head, sums, -1.0), head_tokens)
        self._take(chosen, sums, tokens)
        return self._positions[chosen[self._grain]]

    def _take(self, chosen: Any, sums: Any, tokens: int) -> None:
        """Add the grains with the largest sums, which are not negative, until `tokens` are chosen."""
        left = tokens - int(self._lengths[chosen].sum())
        for number in torch.where(chosen, -1.0, sums).argsort(descending=True, stable=True).tolist():
            if left <= 0 or chosen[number] or sums[number] < 0:
                break
            chosen[number] = True
            left -= int(self._lengths[number])
