"""Shares of the pool: each has an eviction policy for chunks in use, and one for chunks that have ended.

Chunks that have **ended** are the first of their share to leave: their session ended, or their weights are outdated.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from kvdepot.index.columns import make_column
from kvdepot.index.eviction import EvictionPolicy, ShareTree
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import NO_NODE, ChunkTree, Nodes

_STEP: Final = 40  # chunks changed per step, in 0.1 ms; the first two steps are made in the request itself
_MOVE_STEP: Final = 40  # chunks moved to another share per step, in 0.2 ms
_SCAN_STEP: Final = 500  # unchanged chunks per step, in 0.03 ms


class SealedEntries(Protocol):
    """The operations on entries that shares need."""

    def has_sealed(self, node: int, /) -> bool:
        """Return whether a node has a sealed entry."""
        ...

    def move(self, node: int, share: int, /) -> None:
        """Count the entries of a node against another share."""
        ...


class Shares:
    """The eviction policies of each share. Calls `on_ended` with the key of each chunk that ends."""

    def __init__(
        self,
        nodes: Nodes,
        entries: SealedEntries,
        quotas: QuotaTable,
        make_policy: Callable[[ChunkTree], EvictionPolicy],
        on_ended: Callable[[bytes], object],
    ) -> None:
        self.quotas = quotas
        self.outdated: set[int] = set()  # labels whose chunks have ended, whatever their sessions and uses
        self._nodes = nodes
        self._entries = entries
        self._make_policy = make_policy
        self._on_ended = on_ended
        self._policies: list[tuple[EvictionPolicy, EvictionPolicy]] = []  # by share: of chunks in use, of ended ones
        self._num_uses = 0
        self._used_at = make_column("Q", nodes.tree.capacity)  # by node: the number of its last use; stale in new nodes
        self._make_policies()

    def add_nodes(self, nodes: Sequence[int], label: int) -> None:
        """Initialise nodes with the share of their label. They have ended if it is `outdated`."""
        tree, share, is_outdated = self._nodes.tree, self.quotas.share_of(label), label in self.outdated
        for node in nodes:
            tree.share[node], tree.ended[node] = share, is_outdated

    def added(self, nodes: Sequence[int]) -> None:
        """Add nodes with their first sealed entry to their policies: deepest first."""
        for policy, own in self._by_policy(nodes):
            policy.added(own)

    def removed(self, nodes: Sequence[int]) -> None:
        """Remove nodes from their policies: each before its parent."""
        for policy, own in self._by_policy(nodes):
            policy.removed(own)

    def _by_policy(self, nodes: Sequence[int]) -> Iterator[tuple[EvictionPolicy, Sequence[int]]]:
        """Cut a sequence of nodes into parts of one policy each."""
        tree = self._nodes.tree
        names = [tree.share[node] << 1 | tree.ended[node] for node in nodes]
        start = 0
        while start < len(nodes):
            name = names[start]
            stop = start + 1
            while stop < len(nodes) and names[stop] == name:
                stop += 1
            yield self._policies[name >> 1][name & 1], nodes[start:stop]
            start = stop

    def policy_of(self, node: int) -> EvictionPolicy:
        """Return the policy that a node belongs to."""
        return self._policies[self._nodes.tree.share[node]][self._nodes.tree.ended[node]]

    def victim(self, share: int) -> int | None:
        """Return the next chunk of a share to evict, None if there is none."""
        in_use, ended = self._policies[share]
        node = ended.victim()
        return in_use.victim() if node is None else node

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
        self._make_policies()
        for node in range(len(tree.keys)):
            share = self.quotas.share_of(self._nodes.label[node])
            if tree.keys[node] is not None and tree.share[node] != share:
                self._entries.move(node, share)
                self._set(node, share, is_ended=tree.ended[node])
                on_moved(node)
                moved += 1
            if moved >= _MOVE_STEP or node % _SCAN_STEP == 0:
                yield moved
                moved = 0
        if not num_bytes:
            self.quotas.forget_quota(tenant)
        yield moved

    def used(self, node: int) -> Iterator[int] | None:
        """Tell the policy that the prefix ending here was used. This revokes the end of its session.

        For a long prefix, return the rest of the work in steps like those of `end_session`, else None.
        """
        ended, rest = self._nodes.tree.ended, None
        self._nodes.last_use[node] = self._nodes.now
        self._num_uses += 1
        self._used_at[node] = self._num_uses
        if ended[node]:
            rest = self._spread(node, lambda above, _count: ended[above], is_ended=False)
            if next(rest) < _STEP:
                rest = None
        self.policy_of(node).used(node)
        return rest

    def end_session(self, node: int, is_own: Callable[[int], bool]) -> Iterator[int]:
        """End the chunks that only this prefix needs.

        End only chunks whose label `is_own`, beginning at the end of the prefix. Yield the number of changed chunks
        after each step. Between steps, the index may be used freely. A use of the prefix meanwhile wins.
        """
        num_children, label = self._nodes.tree.num_children, self._nodes.label
        used_at, began = self._used_at, self._num_uses

        def is_only_of_this(above: int, count: int) -> bool:
            return num_children[above] <= (count > 0) and is_own(label[above]) and used_at[above] <= began

        return self._spread(node, is_only_of_this, is_ended=True)

    def outdate(self, labels: Mapping[int, bool]) -> Iterator[int]:
        """End all chunks of labels that became `outdated` (True). Revoke this for labels that no longer are (False).

        Yield like `end_session`. A chunk that is added meanwhile is right from the start.
        """
        tree, label, count = self._nodes.tree, self._nodes.label, 0
        for node in range(len(tree.keys)):
            is_outdated = labels.get(label[node])
            if tree.keys[node] is not None and is_outdated is not None and (is_outdated or tree.ended[node]):
                self._change(node, is_ended=is_outdated)
                count += 1
            if count == _STEP or node % _SCAN_STEP == 0:
                yield count
                count = 0
        yield count

    def _spread(self, start: int, is_wanted: Callable[[int, int], object], *, is_ended: bool) -> Iterator[int]:
        """Change chunks towards the root while `is_wanted(node, num_changed)`."""
        tree, keys = self._nodes.tree, self._nodes.tree.keys
        node, count, start_key = start, 0, keys[start]
        while node != NO_NODE and is_wanted(node, count):
            self._change(node, is_ended=is_ended)
            below, node = node, tree.parent[node]
            count += 1
            if count % _STEP == 0 and node != NO_NODE:
                key, below_key = keys[node], keys[below]
                yield _STEP
                if keys[node] != key:
                    break  # it was evicted meanwhile
                if keys[start] == start_key and tree.ended[start] != is_ended:
                    break
                # If the chunk below had ended and has since been evicted, continue. Otherwise a use may have revoked
                # its end, so stop.
                if (tree.ended[below] if keys[below] == below_key else True) != is_ended:
                    break
        yield count % _STEP

    def _change(self, node: int, *, is_ended: bool) -> None:
        """End a chunk, or revoke its end. If its label is `outdated`, it has ended in any case."""
        tree = self._nodes.tree
        if tree.ended[node] != (is_ended or self._nodes.label[node] in self.outdated):
            self._set(node, tree.share[node], is_ended=not tree.ended[node])
        if is_ended and (key := tree.keys[node]) is not None:
            self._on_ended(key)

    def _set(self, node: int, share: int, *, is_ended: int) -> None:
        is_known = self._entries.has_sealed(node)
        if is_known:
            self.policy_of(node).removed([node])
        self._nodes.tree.share[node], self._nodes.tree.ended[node] = share, is_ended
        if is_known:
            self.policy_of(node).added([node])

    def _make_policies(self) -> None:
        """Make the policies of new shares."""
        for share in range(len(self._policies), self.quotas.num_shares):
            in_use, ended = (ShareTree.of(self._nodes.tree, share, is_ended=is_ended) for is_ended in (False, True))
            self._policies.append((self._make_policy(in_use), self._make_policy(ended)))
