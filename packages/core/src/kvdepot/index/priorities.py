"""Priorities: clients' hints to evict prefixes before or after others, and the ends of sessions.

Each share of the pool has an eviction policy for each of its priorities (`Shares`). `Priorities` applies hints and
uses.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final, Protocol

from kvdepot.index.columns import make_column
from kvdepot.index.eviction import ENDED, NORMAL, EvictionPolicy, ShareTree
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import NO_NODE, ChunkTree, Nodes

_STEP: Final = 40  # chunks changed per step, in 0.1 ms; the first two steps are made in the request itself
_MOVE_STEP: Final = 40  # chunks moved to another share per step, in 0.2 ms
_SCAN_STEP: Final = 500  # unchanged chunks per step, in 0.03 ms
_MOST_RECENT: Final = 1024  # used prefixes: a list of the hottest ones has room for 6,000 of their chunks
_SPARE_DEADLINES: Final = 1024  # stale heap entries to tolerate: clearing 1,024 takes 0.3 ms


class SealedEntries(Protocol):
    """The operations on entries that shares need."""

    def has_sealed(self, node: int, /) -> bool:
        """Return whether a node has a sealed entry."""
        ...

    def move(self, node: int, share: int, /) -> None:
        """Count the entries of a node against another share."""
        ...


class Shares:
    """The eviction policies by share and priority."""

    def __init__(
        self,
        nodes: Nodes,
        entries: SealedEntries,
        quotas: QuotaTable,
        make_policy: Callable[[ChunkTree], EvictionPolicy],
    ) -> None:
        self.quotas = quotas
        self._nodes = nodes
        self._entries = entries
        self._make_policy = make_policy
        self.outdated: set[int] = set()  # labels whose chunks have the lowest priority despite hints and uses
        self._policies: list[dict[int, EvictionPolicy]] = []  # lowest priority first
        self._need(quotas.num_shares - 1, NORMAL)

    def add_nodes(self, nodes: Sequence[int], label: int) -> None:
        """Initialise nodes with the share of their label and without a hint."""
        tree, share = self._nodes.tree, self.quotas.share_of(label)
        priority = ENDED if label in self.outdated else NORMAL
        for node in nodes:
            tree.share[node], tree.priority[node] = share, priority
        if priority == ENDED:
            self._need(share, ENDED)

    def added(self, nodes: Sequence[int]) -> None:
        """Add nodes with their first sealed entry to their policies: deepest first."""
        for policy, own in self._by_policy(nodes):
            policy.added(own)

    def evicted(self, nodes: Sequence[int]) -> None:
        """Tell their policies that nodes are evicted to make room: each before its parent."""
        for policy, own in self._by_policy(nodes):
            policy.evicted(own)

    def removed(self, nodes: Sequence[int]) -> None:
        """Remove nodes from their policies: each before its parent."""
        for policy, own in self._by_policy(nodes):
            policy.removed(own)

    def _by_policy(self, nodes: Sequence[int]) -> Iterator[tuple[EvictionPolicy, Sequence[int]]]:
        """Cut a sequence of nodes into parts of one policy each."""
        if not nodes:
            return
        if len(self._policies) == 1 and len(self._policies[0]) == 1:  # no quota and no ended session: the common case
            yield self._policies[0][NORMAL], nodes
            return
        shares, priorities, start = self._nodes.tree.share, self._nodes.tree.priority, 0
        while start < len(nodes):
            share, priority = shares[nodes[start]], priorities[nodes[start]]
            stop = start + 1
            while stop < len(nodes) and shares[nodes[stop]] == share and priorities[nodes[stop]] == priority:
                stop += 1
            yield self._policies[share][priority], nodes[start:stop]
            start = stop

    def policy_of(self, node: int) -> EvictionPolicy:
        """Return the policy that a node belongs to."""
        return self._policies[self._nodes.tree.share[node]][self._nodes.tree.priority[node]]

    def victim(self, share: int) -> int | None:
        """Return the next chunk of a share to evict, None if there is none."""
        for policy in self._policies[share].values():
            node = policy.victim()
            if node is not None:
                return node
        return None

    def set_priority(self, node: int, priority: int) -> None:
        """Set the priority of a node within its share. If its label is `outdated`, it gets the lowest."""
        if self._nodes.label[node] in self.outdated:
            priority = ENDED
        if self._nodes.tree.priority[node] != priority:
            self._set(node, self._nodes.tree.share[node], priority)

    def set_quota(self, tenant: str, num_bytes: int, on_moved: Callable[[int], object]) -> Iterator[int]:
        """Set a tenant's quota (0: none), and count its chunks against it.

        The chunks get a new order of eviction, as if they had been used in the order of their numbers. Call `on_moved`
        with each. Yield the number of moved chunks after each step. Between steps, the index may be used freely, except
        for another `set_quota`.

        Raises:
            ConfigError: the pool has no room for the quota. Raised in the first step.
        """
        if num_bytes:
            self.quotas.set_quota(tenant, num_bytes)
        elif not self.quotas.end_quota(tenant):
            return
        tree, moved = self._nodes.tree, 0
        self._need(self.quotas.num_shares - 1, NORMAL)
        for node in range(len(tree.keys)):
            share = self.quotas.share_of(self._nodes.label[node])
            if tree.keys[node] is not None and tree.share[node] != share:
                self._entries.move(node, share)
                self._set(node, share, tree.priority[node])
                on_moved(node)
                moved += 1
            if moved >= _MOVE_STEP or node % _SCAN_STEP == 0:
                yield moved
                moved = 0
        if not num_bytes:
            self.quotas.forget_quota(tenant)
        yield moved

    def _set(self, node: int, share: int, priority: int) -> None:
        is_known = self._entries.has_sealed(node)
        if is_known:
            self.policy_of(node).removed([node])
        self._nodes.tree.share[node], self._nodes.tree.priority[node] = share, priority
        if priority not in self._policies[share]:
            self._need(share, priority)
        if is_known:
            self.policy_of(node).added([node])

    def _need(self, share: int, priority: int) -> None:
        while len(self._policies) <= share:
            self._policies.append({NORMAL: self._make(len(self._policies), NORMAL)})
        policies = self._policies[share]
        if priority not in policies:
            self._policies[share] = dict(sorted([*policies.items(), (priority, self._make(share, priority))]))

    def _make(self, share: int, priority: int) -> EvictionPolicy:
        return self._make_policy(ShareTree.of(self._nodes.tree, share, priority))


class Priorities:
    """Hints for prefixes, their uses, and the deadlines of sessions.

    Calls `on_ended` with the key of each ended chunk. `recent` has the last nodes of the prefixes that were used last.
    """

    def __init__(self, nodes: Nodes, shares: Shares, on_ended: Callable[[bytes], object]) -> None:
        self._nodes = nodes
        self._shares = shares
        self._on_ended = on_ended
        self.recent: deque[int] = deque(maxlen=_MOST_RECENT)
        self._num_uses = 0
        self._used_at = make_column("Q", nodes.tree.capacity)  # by node: the global count of uses at its last use
        self._deadlines: dict[int, int] = {}  # seconds, by the last node of a session
        self.by_deadline: list[tuple[int, int]] = []  # heap; an entry missing from `_deadlines` is stale

    def used(self, node: int) -> Iterator[int] | None:
        """Tell the policy that the prefix ending here was used. This revokes the end of its session.

        For a long prefix, return the rest of the work in steps like those of `set_priority`, else None.
        """
        self.recent.append(node)
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

    def forget(self, nodes: Iterable[int]) -> None:
        """Forget the deadlines and the last uses of nodes that are about to be removed from the tree."""
        used_at, deadlines = self._used_at, self._deadlines
        for node in nodes:
            used_at[node] = 0
            if deadlines:
                deadlines.pop(node, None)

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
