"""Gathers stores that follow each other, so that they become few objects of a tier that keeps runs.

Engines store a long prompt in many pieces, and each step of decoding a chunk or two. Chunks wait while more are stored
right behind them: pieces that another node waits for a twentieth of a second, others a quarter, few chunks two seconds,
ten at most, and from the first second on none beyond the end of a run. A prefix that is used meanwhile is written at
once.
"""

import math
from dataclasses import dataclass
from typing import Final

from kvdepot.index.eviction import NO_NODE
from kvdepot.index.tree import Nodes

_FEW_CHUNKS: Final = 8  # a run with fewer waits longest: the next ones of its prompt make it worth a request
_IDLE_SECONDS: Final = (0.05, 0.25, 2.0)  # after a piece that another node waits for, another, and few chunks
_LEAST_SECONDS: Final = 1.0  # before a complete run goes: each is a question of its own
_MOST_SECONDS: Final = 10.0  # then an incomplete run goes, too
_MOST_WAITING: Final = 1024  # chunks, then no run waits: they are pinned in the pool


@dataclass(frozen=True, slots=True)
class Gathered:
    """Stored chunks that wait for more behind them."""

    last: int  # node
    key: bytes  # of that chunk
    is_first: bool  # written before others
    began: float
    until: float


class Gathering:
    """The stores that wait for more behind them, by the node of their last chunk."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._waiting: tuple[dict[int, Gathered], ...] = tuple({} for _ in _IDLE_SECONDS)  # the next to end first

    @property
    def next_deadline(self) -> float:
        """The time by which `next_over` must be called."""
        return min((next(iter(waiting.values())).until for waiting in self._waiting if waiting), default=math.inf)

    def adds(self, before: int, last: int, run_chunks: int, now: float, *, is_first: bool) -> bool:
        """Let the chunks behind `before` up to `last` wait, with those that end at `before`. False: write them now.

        Args:
            before: node, `NO_NODE` before a first chunk.
            last: node.
            run_chunks: chunks of a run.
            now: seconds of the clock.
            is_first: an engine of another node waits for them.
        """
        nodes, began = self._nodes, now
        for waiting in self._waiting:
            earlier = waiting.pop(before, None)
            if earlier is not None and nodes.tree.keys[before] == earlier.key:
                began, is_first = earlier.began, is_first or earlier.is_first
        depth = nodes.depth_of(last)
        num_chunks = depth - (nodes.depth_of(before) if before != NO_NODE else -1)
        has_waited = is_first or now - began >= _LEAST_SECONDS
        is_over = now - began >= _MOST_SECONDS or (has_waited and (depth + 1) % run_chunks == 0)
        if is_over or sum(map(len, self._waiting)) >= _MOST_WAITING:
            return False
        kind = 0 if is_first else 2 if num_chunks < _FEW_CHUNKS else 1
        self._waiting[kind][last] = Gathered(last, nodes.key_of(last), is_first, began, now + _IDLE_SECONDS[kind])
        return True

    def next_over(self, now: float) -> Gathered | None:
        """Return a store behind which no more came, to be written with the chunks before it; None without one."""
        for waiting in self._waiting:
            while waiting:
                last, gathered = next(iter(waiting.items()))
                if now < gathered.until:
                    break
                del waiting[last]
                if self._nodes.tree.keys[last] == gathered.key:
                    return gathered
        return None
