"""Shares of the pool: one eviction policy for each share and priority, and the chunks that count against them."""

from collections.abc import Callable, Iterator
from typing import Final, Protocol

from kvdepot.index.eviction import NORMAL, ChunkTree, EvictionPolicy, ShareTree
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import Nodes

_MOVE_STEP: Final = 40  # chunks that change their share
_SCAN_STEP: Final = 500  # chunks that keep it


class SealedEntries(Protocol):
    """The entries, as far as shares need them."""

    def has_sealed(self, node: int, /) -> bool:
        """Whether a node has a sealed entry."""
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
        self._policies: list[dict[int, EvictionPolicy]] = []  # the lowest priority first
        self._need(quotas.num_shares - 1, NORMAL)

    def add_node(self, node: int) -> None:
        """Start a node with the share of its label and without a hint."""
        self._nodes.tree.share[node] = self.quotas.share_of(self._nodes.label[node])
        self._nodes.tree.priority[node] = NORMAL

    def policy_of(self, node: int) -> EvictionPolicy:
        """Return the policy that orders a node."""
        return self._policies[self._nodes.tree.share[node]][self._nodes.tree.priority[node]]

    def victim(self, share: int) -> int | None:
        """Return the next chunk of a share to leave, None if none can."""
        for policy in self._policies[share].values():
            node = policy.victim()
            if node is not None:
                return node
        return None

    def set_priority(self, node: int, priority: int) -> None:
        """Give a node another priority within its share."""
        if self._nodes.tree.priority[node] != priority:
            self._set(node, self._nodes.tree.share[node], priority)

    def set_quota(self, tenant: str, num_bytes: int, on_moved: Callable[[int], object]) -> Iterator[int]:
        """Change a tenant's quota, 0 for none, and count its chunks against it.

        The chunks get a new order, as if they had been used in the order of their numbers. Call `on_moved` with each,
        and yield after each step how many it moved. Between two steps the index may be used for anything but another
        `set_quota`.

        Raises:
            ConfigError: in the first step, if the pool has no room for the quota.
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
            self.policy_of(node).removed(node)
        self._nodes.tree.share[node], self._nodes.tree.priority[node] = share, priority
        self._need(share, priority)
        if is_known:
            self.policy_of(node).added(node)

    def _need(self, share: int, priority: int) -> None:
        while len(self._policies) <= share:
            self._policies.append({NORMAL: self._make(len(self._policies), NORMAL)})
        policies = self._policies[share]
        if priority not in policies:
            self._policies[share] = dict(sorted([*policies.items(), (priority, self._make(share, priority))]))

    def _make(self, share: int, priority: int) -> EvictionPolicy:
        return self._make_policy(ShareTree.of(self._nodes.tree, share, priority))
