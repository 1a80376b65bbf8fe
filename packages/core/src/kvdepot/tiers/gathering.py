"""Gathers consecutive stores, so that a tier gets few large calls, and few objects if it keeps runs.

Engines store a long prompt in many pieces, and a chunk or two in each step of decoding. So chunks wait for the stores
that continue them: 0.05 seconds if another node waits for them, otherwise 0.25 seconds, or 2 seconds if they are few.
They wait ten seconds at most, and no longer than one second once a run is complete. If the prefix is used meanwhile, it
is written with the next turn. A depot that drains or stops does not wait. The pool keeps waiting chunks while a tier
can take them (`Demotions`).
"""

import math
from dataclasses import dataclass
from typing import Final

from kvdepot.counting import Counts
from kvdepot.index.index import ChunkIndex
from kvdepot.index.tree import NO_NODE
from kvdepot.tiers.refreshing import PREFIXES_DROPPED

_FEW_CHUNKS: Final = 8  # fewer chunks wait longest: later chunks of the prompt make the request worthwhile
_IDLE_SECONDS: Final = (0.05, 0.25, 2.0)  # if another node waits; otherwise; for few chunks
_LEAST_SECONDS: Final = 1.0  # before a complete run is written: each run is a separate question
_MOST_SECONDS: Final = 10.0  # then an incomplete run is written, too


@dataclass(frozen=True, slots=True)
class Gathered:
    """Stored chunks that wait for the chunks after them."""

    last: int  # node
    key: bytes  # of that chunk
    is_first: bool  # whether to write them before others
    began: float
    until: float


class Gathering:
    """The waiting stores, by the node of their last chunk."""

    def __init__(self, index: ChunkIndex, counters: Counts) -> None:
        self.waits = True  # if False, all stores are over
        self._index = index  # not its nodes, which a failed restore replaces
        self._counters = counters
        # Ordered by the end of the wait.
        self._waiting: tuple[dict[int, Gathered], ...] = tuple({} for _ in _IDLE_SECONDS)

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    @property
    def next_deadline(self) -> float:
        """The time by which `next_over` must be called."""
        if not self.waits and self:
            return 0.0
        return min((next(iter(waiting.values())).until for waiting in self._waiting if waiting), default=math.inf)

    def adds(self, before: int, last: int, run_chunks: int, now: float, *, is_first: bool, may_wait: bool) -> bool:
        """Let the chunks after `before` up to `last` wait, joined to waiting chunks that end at `before`.

        Return False if they must be written now.

        Args:
            before: a node, or `NO_NODE` before the first chunk.
            last: a node.
            run_chunks: the chunks per run.
            now: the present time in seconds.
            is_first: whether an engine of another node waits for them.
            may_wait: whether the pool keeps them meanwhile.
        """
        nodes, began = self._index.nodes, now
        for waiting in self._waiting:
            same = waiting.pop(last, None)  # the same chunk of another rank, or one that was evicted
            if same is not None and nodes.tree.keys[last] != same.key:
                self._counters[PREFIXES_DROPPED] += 1
            earlier = waiting.pop(before, None)  # perhaps of an evicted chunk: then these only wait for a shorter time
            if earlier is not None:
                began, is_first = earlier.began, is_first or earlier.is_first
        depth = nodes.depth[last]
        num_chunks = depth - (nodes.depth[before] if before != NO_NODE else -1)
        has_waited = is_first or now - began >= _LEAST_SECONDS
        is_over = now - began >= _MOST_SECONDS or (has_waited and (depth + 1) % run_chunks == 0)
        if is_over or not self.waits or not may_wait:
            return False
        kind = 0 if is_first else 2 if num_chunks < _FEW_CHUNKS else 1
        self._waiting[kind][last] = Gathered(last, nodes.key_of(last), is_first, began, now + _IDLE_SECONDS[kind])
        return True

    def has(self, last: int) -> bool:
        """Return whether the chunks up to this node wait."""
        return any(last in waiting for waiting in self._waiting)

    def next_over(self, now: float) -> Gathered | None:
        """Return a store whose wait has ended, to be written with the chunks before it. None if there is none."""
        for waiting in self._waiting:
            while waiting:
                last, gathered = next(iter(waiting.items()))
                if self.waits and now < gathered.until:
                    break
                del waiting[last]
                if self._index.nodes.tree.keys[last] == gathered.key:
                    return gathered
                self._counters[PREFIXES_DROPPED] += 1
        return None
