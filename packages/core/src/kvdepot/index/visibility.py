"""Visibility: determines the chunks that a lookup finds.

A chunk is complete when sealed entries have all cells of all of its full-attention groups. It is visible when it is
complete and the chunks before it are visible. With full attention, visible chunks are prefix-closed, so a lookup probes
some 16 chunks of 512. The exception is a broken chunk, which was removed from the middle because its bytes are wrong.
The chunks after it stay marked, but a lookup ends there.

The prefix rule, `usable_prefix`, computes the number of usable leading chunks from the present groups of each chunk.
Full attention needs all chunks before the boundary. A sliding window needs only the chunks that it spans before the
boundary. A recurrent state needs only the last chunk, so it is a window of one chunk.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.keys import DIGEST_BYTES, digest_at, not_whole, slice_digests, split_digests

_MOST_WALKED: Final = 8192  # chunks back from the end of full attention, in 2 ms; boundaries further back are ignored


def usable_prefix(
    limit: int,
    has: Callable[[int, int], bool],
    full: Sequence[int] = (),
    windows: Sequence[tuple[int, int]] = (),
    *,
    start: int = 0,
    last_boundary: Callable[[int, int], int] | None = None,
) -> int:
    """Return the length of the longest usable prefix; `start` if none is longer.

    Args:
        limit: the number of chunks of the prompt.
        has: returns whether a chunk has a group.
        full: the full-attention groups.
        windows: other groups, each with the number of chunks that it needs before the boundary. Smallest first is
            cheapest.
        start: the number of chunks known to be usable.
        last_boundary: given a limit and a least length, returns the longest prefix between them whose last chunk
            has all `windows`, 0 for none. It only saves calls of `has`.
    """
    for group in full:
        limit = next((chunk for chunk in range(start, limit) if not has(chunk, group)), limit)
    if not windows:
        return max(start, limit)
    lowest = max(start, limit - _MOST_WALKED)
    while limit > lowest:
        if last_boundary is not None:
            limit = last_boundary(limit, lowest)
            if limit <= lowest:
                break
        missing = _missing_before(limit, windows, has)
        if missing is None:
            return limit
        limit = missing  # all prefixes in between need this chunk in the same window
    return start


def _missing_before(limit: int, windows: Sequence[tuple[int, int]], has: Callable[[int, int], bool]) -> int | None:
    """Return a chunk that is missing in a window before `limit`, None if all windows are whole."""
    for group, num_chunks in windows:
        for chunk in range(max(0, limit - num_chunks), limit):
            if not has(chunk, group):
                return chunk
    return None


class Match(NamedTuple):
    """The longest usable prefix in the pool, from chunk 0 on.

    It is valid until the next store or eviction. `Evictor.pin` of its nodes keeps it valid.
    """

    num_chunks: int
    nodes: tuple[int, ...]  # the nodes to pin, deepest last; with full attention, only the deepest; empty for none


NO_MATCH: Final = Match(0, ())


class Watcher:
    """Receives notes of evicted, hidden and promoted chunks. This base class ignores them."""

    @property
    def awaits_promoted(self) -> bool:
        """Whether `promoted` has an effect now: finding the nodes of its chunks takes time."""
        return False

    def evicted(self, nodes: Sequence[int], keys: Sequence[bytes], /) -> None:
        """Note that chunks are about to be evicted."""

    def hidden(self, nodes: Sequence[int], /, *, has_children: bool) -> None:
        """Note that lookups no longer find the chunks of nodes."""

    def promoted(self, space: Space, digests: bytes, above: int, nodes: Sequence[int], /) -> None:
        """Note that a tier brought consecutive chunks. `above` and `nodes`: as from `Visibility.find_run`."""

    def ended(self, key: bytes, /) -> None:
        """Note that the session of a chunk ended, so that it is evicted before others."""

    def forget_tiers(self) -> bool:
        """Forget some chunks that only tiers have, as tiers were cleared. Return whether there are more."""
        return False


class Watchers(Watcher):
    """Passes notes on to several watchers."""

    def __init__(self) -> None:
        self.all: list[Watcher] = []

    @property
    def awaits_promoted(self) -> bool:
        """See `Watcher`."""
        return any(each.awaits_promoted for each in self.all)

    def evicted(self, nodes: Sequence[int], keys: Sequence[bytes], /) -> None:
        """See `Watcher`."""
        for each in self.all:
            each.evicted(nodes, keys)

    def hidden(self, nodes: Sequence[int], /, *, has_children: bool) -> None:
        """See `Watcher`."""
        for each in self.all:
            each.hidden(nodes, has_children=has_children)

    def promoted(self, space: Space, digests: bytes, above: int, nodes: Sequence[int], /) -> None:
        """See `Watcher`."""
        for each in self.all:
            each.promoted(space, digests, above, nodes)

    def ended(self, key: bytes, /) -> None:
        """See `Watcher`."""
        for each in self.all:
            each.ended(key)

    def forget_tiers(self) -> bool:
        """See `Watcher`."""
        left = [each.forget_tiers() for each in self.all]  # of all, not up to the first that has more
        return any(left)


class Visibility:
    """The marks of visible nodes, and the search for the longest prefix."""

    def __init__(self, nodes: Nodes, watcher: Watcher) -> None:
        self._nodes = nodes
        self._watcher = watcher
        self.is_visible = make_column("B", nodes.tree.capacity)
        self.sealed_groups = make_column("Q", nodes.tree.capacity)  # bit g: all cells of group g are sealed
        self.broken: set[int] = set()  # nodes that were visible; nodes after them may still be marked
        self._waiting: dict[int, set[int]] = {}  # complete nodes, by their invisible parent

    def forget(self, nodes: Sequence[int]) -> None:
        """Hide nodes that are about to be removed from the tree, and reset their sealed groups."""
        is_visible, sealed_groups = self.is_visible, self.sealed_groups
        hidden = [node for node in nodes if is_visible[node]]
        for node in nodes:
            is_visible[node] = sealed_groups[node] = 0
        if hidden:
            self._watcher.hidden(hidden, has_children=False)
        if self._waiting:
            for node in nodes:
                self._waiting.get(self._nodes.tree.parent[node], set()).discard(node)
                self._waiting.pop(node, None)
        if self.broken:
            self.broken.difference_update(nodes)

    def is_complete(self, node: int) -> bool:
        """Return whether all full-attention groups of a node, and at least one group, are sealed."""
        full_mask = self._nodes.space_of(node).full_mask
        sealed = self.sealed_groups[node]
        return bool(sealed) and sealed & full_mask == full_mask

    def reveal(self, nodes: Sequence[int]) -> None:
        """Make nodes visible if possible, each followed by the nodes that waited for it."""
        parents, spaces, space_number = self._nodes.tree.parent, self._nodes.spaces, self._nodes.space_number
        is_visible, sealed_groups, waiting, broken = self.is_visible, self.sealed_groups, self._waiting, self.broken
        pending = [*nodes]
        for node in pending:  # grows meanwhile
            full_mask, sealed = spaces[space_number[node]].full_mask, sealed_groups[node]
            if is_visible[node] or not sealed or sealed & full_mask != full_mask:
                continue
            parent = parents[node]
            if parent != NO_NODE and not is_visible[parent] and full_mask:
                waiting.setdefault(parent, set()).add(node)
                continue
            is_visible[node] = 1
            if broken:
                broken.discard(node)
            if waiting:
                pending += waiting.pop(node, ())

    def lose(self, node: int, group: int) -> None:
        """Note that a group of a node is not whole any more."""
        self.sealed_groups[node] &= ~(1 << group)
        if self.is_visible[node] and not self.is_complete(node):
            self.is_visible[node] = 0
            self._watcher.hidden([node], has_children=self._nodes.tree.num_children[node] > 0)
            if self._nodes.space_of(node).full_mask:
                self.broken.add(node)

    # --- finding --------------------------------------------------------------------------------------------------

    def find(self, space: Space, key: bytes, depth: int) -> int | None:
        """Return the node of a visible chunk."""
        node = space.nodes.get(key)
        return node if node is not None and self.is_visible[node] and self._nodes.depth[node] == depth else None

    def find_nodes(self, space: Space, digests: bytes, depth: int) -> list[int]:
        """Return the nodes of consecutive chunks, `NO_NODE` for a chunk that is not visible.

        With full attention, the list ends before the first of these.
        """
        find, is_visible, depths, full_mask = space.nodes.get, self.is_visible, self._nodes.depth, space.full_mask
        found: list[int] = []
        for chunk, key in enumerate(split_digests(digests), depth):
            node = find(key, NO_NODE)
            if node == NO_NODE or not is_visible[node] or depths[node] != chunk:
                if full_mask:
                    break
                node = NO_NODE
            found.append(node)
        return found

    def find_run(self, space: Space, digests: bytes, depth: int) -> tuple[int, list[int]]:
        """Return the node before consecutive chunks, and the nodes of the first ones that are visible.

        The list ends before a chunk that is not visible or, in a forged chain, not below the one before it. Without
        nodes, the node before them is `NO_NODE`.
        """
        find, is_visible, depths, parents = space.nodes.get, self.is_visible, self._nodes.depth, self._nodes.tree.parent
        nodes, above, parent = list[int](), NO_NODE, NO_NODE
        for chunk, key in enumerate(split_digests(digests), depth):
            node = find(key, NO_NODE)
            if node == NO_NODE or not is_visible[node] or depths[node] != chunk:
                break
            if not nodes:
                above = parents[node]
            elif parents[node] != parent:
                break
            nodes.append(node)
            parent = node
        return above, nodes

    def promoted(self, space: Space, digests: bytes, first: int, stop: int) -> None:
        """Tell the watcher that a tier brought the chunks from `first` on, up to `stop`, of a prefix."""
        if self._watcher.awaits_promoted:
            run = slice_digests(digests, first, stop)
            self._watcher.promoted(space, run, *self.find_run(space, run, first))

    def is_reachable(self, node: int) -> bool:
        """Return whether a lookup reaches a node: it is visible, and with full attention so are all nodes before it."""
        has_full = bool(self._nodes.space_of(node).full_mask)
        while node != NO_NODE:
            if not self.is_visible[node]:
                return False
            node = self._nodes.tree.parent[node] if has_full else NO_NODE
        return True

    def match(self, space: Space, digests: bytes) -> Match:
        """Find the longest usable prefix of packed digests `(num_chunks, 32)`, from chunk 0 on.

        Raises:
            KeyFormatError: the bytes are not whole digests.
        """
        limit, nodes = self.full_prefix(space, digests), space.nodes
        if space.windows:
            limit = self._last_whole_window(space, digests, limit)
        if not limit:
            return NO_MATCH
        if space.full_mask:
            return Match(limit, (nodes[digests[(limit - 1) * DIGEST_BYTES : limit * DIGEST_BYTES]],))
        start = max(0, limit - space.windows[-1][1])
        found = (self.find(space, digest_at(digests, chunk), chunk) for chunk in range(start, limit))
        return Match(limit, tuple(node for node in found if node is not None))

    def _last_whole_window(self, space: Space, digests: bytes, limit: int) -> int:
        """Return the length of the longest prefix of at most `limit` visible chunks whose windows are whole."""
        nodes, is_visible, depths, sealed = space.nodes, self.is_visible, self._nodes.depth, self.sealed_groups

        def last_boundary(limit: int, lowest: int) -> int:
            mask = space.window_mask
            for chunk in range(limit - 1, lowest - 1, -1):
                node = nodes.get(digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES])
                if node is not None and sealed[node] & mask == mask and is_visible[node] and depths[node] == chunk:
                    return chunk + 1
            return 0

        def has(chunk: int, bits: int) -> bool:
            node = nodes.get(digests[chunk * DIGEST_BYTES : (chunk + 1) * DIGEST_BYTES])
            return node is not None and is_visible[node] != 0 and depths[node] == chunk and sealed[node] & bits == bits

        return usable_prefix(limit, has, windows=space.windows, last_boundary=last_boundary)

    def full_prefix(self, space: Space, digests: bytes) -> int:
        """Return how many leading chunks are visible, whether or not their windows are whole."""
        limit, rest = divmod(len(digests), DIGEST_BYTES)
        if rest:  # not `num_digests`: see below
            raise not_whole(digests)
        mask = space.full_mask
        if not mask:
            return limit
        if self.broken:
            limit = self._first_break(space, digests, limit)
        nodes, is_visible, depths, sealed = space.nodes, self.is_visible, self._nodes.depth, self.sealed_groups
        # Chunks before `low` are visible, and chunk `high` is not, or is the limit. Try the last chunk first, as most
        # prompts are whole or new. Then gallop, then bisect.
        low, high, probe, step = 0, limit, limit - 1, 1
        while low < high:
            # Not `digest_at`: a lookup of 512 chunks probes some 16 of them, and a call would add 40 ns to each.
            node = nodes.get(digests[probe * DIGEST_BYTES : (probe + 1) * DIGEST_BYTES])
            if node is not None and is_visible[node] and depths[node] == probe and sealed[node] & mask == mask:
                low = probe + 1
            else:
                high = probe
            probe = min(low + step - 1, (low + high) // 2)
            step *= 2
        return low

    def _first_break(self, space: Space, digests: bytes, limit: int) -> int:
        """Return the number of chunks before the first broken one.

        Iterate over chunks or broken nodes, whichever are fewer.
        """
        if len(self.broken) > limit:
            for chunk in range(limit):
                if space.nodes.get(digest_at(digests, chunk)) in self.broken:
                    return chunk
            return limit
        for node in self.broken:
            chunk = self._nodes.depth[node]
            key = digest_at(digests, chunk)
            if chunk < limit and self._nodes.space_number[node] == space.number and self._nodes.tree.keys[node] == key:
                limit = chunk
        return limit

    def check_integrity(self) -> None:
        """Check that lookups reach each complete node whose parent they reach.

        Raises:
            IntegrityError: a lookup misses such a node, or finds another.
        """
        for space in self._nodes.spaces:
            for node in space.nodes.values():
                parent = self._nodes.tree.parent[node] if space.full_mask else NO_NODE
                is_below = parent == NO_NODE or self.is_reachable(parent)
                expected = self.is_complete(node) and is_below
                require(self.is_reachable(node) == expected, f"lookups of node {node} are wrong")
                if parent != NO_NODE and self.is_visible[node] and not self.is_visible[parent]:
                    require(parent in self.broken, f"a lookup would pass over node {parent}")
                require(not (node in self.broken and self.is_visible[node]), f"node {node} is broken and visible")
