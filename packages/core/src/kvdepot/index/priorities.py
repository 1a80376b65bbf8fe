"""Priorities: clients' hints to evict prefixes before or after others, and the ends of sessions."""

from collections.abc import Callable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final

from kvdepot.index.columns import make_column
from kvdepot.index.eviction import ENDED, NORMAL
from kvdepot.index.quotas import Shares
from kvdepot.index.tree import NO_NODE, Nodes

_STEP: Final = 40  # chunks changed per step, in 0.1 ms; the first two steps are made in the request itself
_SCAN_STEP: Final = 500  # unchanged chunks per step, in 0.03 ms
_SPARE_DEADLINES: Final = 1024  # stale heap entries to tolerate: clearing 1,024 takes 0.3 ms


class Priorities:
    """Hints for prefixes, and the deadlines of sessions. Calls `on_ended` with the key of each ended chunk."""

    def __init__(self, nodes: Nodes, shares: Shares, on_ended: Callable[[bytes], object]) -> None:
        self._nodes = nodes
        self._shares = shares
        self._on_ended = on_ended
        self._num_uses = 0
        self._used_at = make_column("Q", nodes.tree.capacity)  # by node: the global count of uses at its last use
        self._deadlines: dict[int, int] = {}  # seconds, by the last node of a session
        self.by_deadline: list[tuple[int, int]] = []  # heap; an entry missing from `_deadlines` is stale

    def used(self, node: int) -> Iterator[int] | None:
        """Tell the policy that the prefix ending here was used. This revokes the end of its session.

        For a long prefix, return the rest of the work in steps like those of `set_priority`, else None.
        """
        self._deadlines.pop(node, None)
        priority, rest = self._nodes.tree.priority, None
        self._nodes.last_use[node] = self._nodes.now
        self._num_uses += 1
        self._used_at[node] = self._num_uses
        if priority[node] == ENDED:
            rest = self._spread(node, lambda above, _count: priority[above] == ENDED, NORMAL)
            if next(rest) < _STEP:
                rest = None
        self._shares.policy_of(node).used(node)
        return rest

    def set_priority(self, node: int, is_own: Callable[[int], bool], priority: int) -> Iterator[int]:
        """Set the priority of the chunks that only this prefix needs.

        Change only chunks whose label `is_own`, beginning at the end of the prefix. Yield the number of changed chunks
        after each step. Between steps, the index may be used freely. A later hint for the prefix wins, and so does a
        use of a prefix whose session ends.
        """
        return self._hint(node, is_own, NORMAL + priority)

    def end_session(self, node: int, is_own: Callable[[int], bool]) -> Iterator[int]:
        """Mark the chunks that only this prefix needs to be evicted before all others. Yield like `set_priority`."""
        return self._hint(node, is_own, ENDED)

    def end_session_at(self, node: int, is_own: Callable[[int], bool], deadline: float) -> None:
        """Schedule `end_session` at a deadline, unless the prefix is used before."""
        if not is_own(self._nodes.label[node]):
            return
        second = self._deadlines[node] = max(1, ceil(deadline))
        heappush(self.by_deadline, (second, node))
        if len(self.by_deadline) > 2 * len(self._deadlines) + _SPARE_DEADLINES:
            self.by_deadline = [(second, node) for node, second in self._deadlines.items()]
            heapify(self.by_deadline)

    def forget(self, node: int) -> None:
        """Forget the deadline and the last use of a node that is about to be removed from the tree."""
        self._deadlines.pop(node, None)
        self._used_at[node] = 0

    def has_ended(self, now: float) -> bool:
        """Return whether `expire` has work."""
        return bool(self.by_deadline) and self.by_deadline[0][0] <= now

    def expire(self, now: float) -> Iterator[int]:
        """End the sessions whose deadline has passed. Yield like `set_priority`."""
        while self.has_ended(now):
            second, node = heappop(self.by_deadline)
            if self._deadlines.get(node) == second:
                del self._deadlines[node]
                yield from self.end_session(node, self._nodes.label[node].__eq__)

    def outdate(self, labels: Mapping[int, bool]) -> Iterator[int]:
        """Rank all chunks of labels that became `Shares.outdated` (True) or no longer are (False).

        Yield like `set_priority`. A chunk that is added meanwhile has the right priority from the start.
        """
        tree, label, count = self._nodes.tree, self._nodes.label, 0
        for node in range(len(tree.keys)):
            key = tree.keys[node]
            is_outdated = labels.get(label[node])
            if key is not None and is_outdated:
                self._shares.set_priority(node, ENDED)
                self._on_ended(key)
                count += 1
            elif key is not None and is_outdated is False and tree.priority[node] == ENDED:
                self._shares.set_priority(node, NORMAL)
                count += 1
            if count == _STEP or node % _SCAN_STEP == 0:
                yield count
                count = 0
        yield count

    def _hint(self, node: int, is_own: Callable[[int], bool], priority: int) -> Iterator[int]:
        """Change chunks from the end of a prefix up to the first that another prefix needs or another tenant owns."""
        num_children, label = self._nodes.tree.num_children, self._nodes.label
        if is_own(label[node]):
            self._deadlines.pop(node, None)
        return self._spread(
            node, lambda above, count: num_children[above] <= (count > 0) and is_own(label[above]), priority
        )

    def _spread(self, start: int, is_wanted: Callable[[int, int], bool], priority: int) -> Iterator[int]:
        """Change chunks towards the root while `is_wanted(node, num_changed)`."""
        tree, keys = self._nodes.tree, self._nodes.tree.keys
        node, count, began, start_key = start, 0, self._num_uses, keys[start]
        while node != NO_NODE and is_wanted(node, count) and (priority != ENDED or self._used_at[node] <= began):
            self._shares.set_priority(node, priority)
            if priority == ENDED and (ended := keys[node]) is not None:
                self._on_ended(ended)
            below, node = node, tree.parent[node]
            count += 1
            if count % _STEP == 0 and node != NO_NODE:
                key, below_key = keys[node], keys[below]
                yield _STEP
                if keys[node] != key:
                    break  # it was evicted meanwhile
                if keys[start] == start_key and tree.priority[start] != priority:
                    break
                # If the chunk below was ENDED and has since been evicted, continue. Otherwise a later hint may have
                # changed its priority, so stop.
                if (tree.priority[below] if keys[below] == below_key else ENDED) != priority:
                    break
        yield count % _STEP
