"""The index: which chunks are here, and where.

`ChunkIndex` makes the parts, each in a module of its own, and has the verbs that concern several of them. Everything
else is asked of one part: `index.nodes`, `index.visibility`, `index.entries`, `index.quotas`, `index.priorities`,
`index.evictor`. Nothing here does I/O but for the table, and nothing knows of sessions.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from kvdepot.index.entries import Entries, EntryPlace
from kvdepot.index.eviction import AUTO, POLICIES, EvictionPolicy, Preference
from kvdepot.index.evictor import Evictor
from kvdepot.index.priorities import Priorities
from kvdepot.index.quotas import QuotaTable, Shares
from kvdepot.index.space import Space, digest_of
from kvdepot.index.tree import NO_NODE, ChunkTree, Nodes
from kvdepot.index.visibility import Visibility
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.table import OWNER_BYTES, IndexTable
from kvdepot.wire.messages import CacheSpec

MOST_EVICTED: Final = 80  # chunks, to make room for one request: two milliseconds, with ARC four
_SPARE_NODES: Final = 1024  # beyond twice the records, for ghosts


class ChunkIndex:
    """Nodes, entries, space and eviction.

    A store is `begin_entry` (or `discard_entry`, `abandon_entry`), then `seal`. A read is `match`, `pin`, `release`.
    """

    def __init__(
        self, extents: ExtentAllocator, table: IndexTable, policy: str = AUTO, quotas: QuotaTable | None = None
    ) -> None:
        self.table = table
        self.extents = extents
        self.quotas = quotas or QuotaTable(extents.capacity_bytes)
        self.spaces: list[Space] = []
        self.preference = Preference()  # that the policy "auto" follows
        self.num_over_share = 0  # entries that were declined because their share has enough unfinished ones
        self.num_not_ready = 0  # entries that were declined because the pool was still growing
        self.num_restore_errors = 0
        # Called for a share that must get room when nothing can leave: ends an unfinished store of one above its quota.
        self.end_store: Callable[[], bool] = lambda: False
        # Called with each node that lookups find from now on, with each that they no longer find, and with the key of
        # each chunk that ended.
        self.on_shown: Callable[[int], object] = lambda _node: None
        self.on_hidden: Callable[[int], object] = lambda _node: None
        self.on_ended: Callable[[bytes], object] = lambda _key: None
        self._space_by_spec: dict[bytes, Space] = {}
        self._policy = policy
        self.make_parts()

    def make_parts(self) -> None:
        """Make all parts, each over those before it, without a node or a record."""
        self.nodes = nodes = Nodes(2 * self.table.num_records + _SPARE_NODES, self.spaces)
        self.visibility = Visibility(nodes, lambda node: self.on_shown(node), lambda node: self.on_hidden(node))
        self.entries = Entries(nodes, self.table, self.extents, self.quotas)
        self.shares = Shares(nodes, self.entries, self.quotas, self._make_policy)
        self.priorities = Priorities(nodes, self.shares, lambda key: self.on_ended(key))
        self.evictor = Evictor(
            nodes, self.visibility, self.entries, self.shares, self.priorities, lambda: self.end_store()
        )

    def _make_policy(self, tree: ChunkTree) -> EvictionPolicy:
        return POLICIES[self._policy](tree, self.preference)

    # --- the verbs ------------------------------------------------------------------------------------------------

    def match(self, space: Space, digests: bytes) -> tuple[int, tuple[int, ...]]:
        """Find the longest usable prefix of packed digests `(num_chunks, 32)`, from chunk 0 on.

        Returns:
            its chunks, and the nodes to `pin` so that all of it stays. They are valid until anything else is stored or
            evicted, unless they are pinned.
        """
        return self.visibility.longest_prefix(space, digests)

    def pin(self, nodes: Iterable[int]) -> None:
        """Keep nodes in use, and so everything before them, until as many calls of `release`.

        Other shares that are within their quota may still take the bytes that this share has above its own.
        """
        self.evictor.pin(nodes)

    def release(self, nodes: Iterable[int]) -> None:
        """Undo one `pin` of nodes. Those that nothing else needs may leave from now on."""
        self.evictor.unpin(nodes)

    def begin_entry(self, place: EntryPlace, most_evicted: int = MOST_EVICTED) -> int | None:
        """Make an entry that is being written, evicting chunks for it.

        The chunk before it must have a node, and the chunk no such entry. The new entry holds its chunk until `seal`,
        `discard_entry` or `abandon_entry`. A policy that raises leaves everything as it was.

        Returns:
            its record. None without room if nothing more can be evicted, or if its share has as many unfinished
            bytes as it may. Also None if `most_evicted` chunks did not make room, as small chunks that leave are
            rarely neighbours: the next attempt continues from there.
        """
        share, is_owed = 0, False
        if len(self.quotas.quota_bytes) > 1:  # otherwise all tenants share the pool, and nobody owes anybody room
            share, size = self.quotas.share_of(place.label), extent_size(place.num_bytes)
            if not self.quotas.may_write(share, size):
                self.num_over_share += 1
                return None
            is_owed = self.quotas.is_owed(share, size)
        node = place.space.nodes.get(place.key)
        if node is None:
            node = self._make_node(place, share)
            if node is None:
                return None
        self.nodes.tree.holds[node] += 1  # neither it nor a chunk before it leaves to make room for it
        offset = record = None
        try:
            offset = self._allocate(place.num_bytes, share, is_owed, most_evicted)
            if offset is not None:
                record = self._take_record(share, is_owed)
        finally:
            if offset is not None and record is None:
                self.extents.free(offset, place.num_bytes)
            if record is None:
                self.evictor.release(node)
        if offset is None or record is None:
            return None
        self.entries.begin(place, node, record, offset)
        return record

    def seal(self, records: Sequence[int], now: int = 0, checksums: bytes = b"") -> None:
        """Seal entries that are being written: their bytes are in place, and lookups find them.

        Args:
            records: those of `begin_entry`, neither discarded nor abandoned since.
            now: seconds of the depot's clock.
            checksums: 16 bytes each, concatenated; empty if they are unknown.
        """
        tree, entries, visibility = self.nodes.tree, self.entries, self.visibility
        nodes: list[int] = []
        fresh: list[int] = []
        for place, record in enumerate(records):
            checksum = checksums[place * OWNER_BYTES : (place + 1) * OWNER_BYTES]
            node, is_first, groups = entries.seal(record, now, checksum)
            nodes.append(node)
            if is_first:
                fresh.append(node)
            self.nodes.last_use[node] = now
            visibility.sealed_groups[node] |= groups
            tree.holds[node] -= 1
        for node in reversed(fresh):  # deepest first: the chunk that leaves first is added first
            self.shares.policy_of(node).added(node)
        for node in nodes:
            visibility.reveal(node)
            if tree.evictable(node):
                self.shares.policy_of(node).unpinned(node)

    def evict(self, node: int) -> bool:
        """Remove a chunk and its entries. Return False, and change nothing, if it is needed or `is_restoring`."""
        return self.evictor.evict(node)

    # --- entries that end otherwise -------------------------------------------------------------------------------

    def discard_entry(self, record: int) -> None:
        """Take back an entry that is not sealed; nothing writes to it any more."""
        node = self.entries.node_of(record)
        if node == NO_NODE:  # it was abandoned, or is an earlier server's
            self.entries.free_abandoned(record)
            return
        self.entries.remove(record)
        self.evictor.release(node)

    def abandon_entry(self, record: int) -> None:
        """Take an entry that is not sealed off its chunk, which can be stored again from now on.

        A writer may still be at work: the space stays taken, and counts against its tenant, until
        `entries.free_abandoned`.
        """
        node = self.entries.node_of(record)
        self.entries.abandon(record)
        self.evictor.release(node)

    def remove_entry(self, record: int) -> None:
        """Take away a sealed entry, leased or not, because its bytes are wrong.

        Its header changes, so a copy of it fails. Lookups find its chunk and those after it once it is stored again.
        Not while the index `is_restoring`.
        """
        assert not self.is_restoring
        node = self.entries.node_of(record)
        group, _ = self.table.place_of(record)
        self.entries.remove(record)
        self.visibility.lose(node, group)
        if not self.entries.is_ghost(node):
            return
        if self.nodes.tree.evictable(node):
            self.evictor.settle(node)
        else:
            self.shares.policy_of(node).removed(node)  # `added` again when it is stored again

    def begin_reading(self, record: int) -> int:
        """Keep a sealed entry and its extent, which are being copied for a tier; return its node."""
        node = self.entries.node_of(record)
        self.nodes.tree.holds[node] += 1
        self.entries.begin_reading(record)
        return node

    def end_reading(self, record: int, node: int) -> None:
        """Undo one `begin_reading`; an entry that was removed in the meantime frees its space now."""
        self.entries.end_reading(record)
        self.evictor.release(node)

    # --- spaces, nodes and room -----------------------------------------------------------------------------------

    def space(self, spec: CacheSpec) -> Space:
        """Return the space of a spec, made if it is new."""
        digest = digest_of(spec)
        space = self._space_by_spec.get(digest)
        if space is None:
            space = Space(len(self.spaces), spec)
            self.spaces.append(space)
            self._space_by_spec[digest] = space
        return space

    def add_node(self, space: Space, key: bytes, parent: int, depth: int, label: int) -> int:
        """Make a node without entries. A free number must be left."""
        node = self.nodes.add(space, key, parent, depth, label)
        self.shares.add_node(node)
        self.entries.add_node(node)
        self.priorities.add_node(node)
        return node

    def _make_node(self, place: EntryPlace, share: int) -> int | None:
        """Make a node, evicting others if there are too many ghosts; None if nothing can leave."""
        nodes = self.nodes
        if not nodes.is_full:
            return self._add_node_of(place)
        if place.parent != NO_NODE:
            nodes.tree.holds[place.parent] += 1
        try:
            while nodes.is_full and self.evictor.evict_one(share):
                pass
            return None if nodes.is_full else self._add_node_of(place)
        finally:
            if place.parent != NO_NODE:
                self.evictor.release(place.parent)

    def _add_node_of(self, place: EntryPlace) -> int:
        return self.add_node(place.space, place.key, place.parent, place.depth, place.label)

    def _allocate(self, num_bytes: int, share: int, is_owed: bool, most_evicted: int) -> int | None:
        offset = self.extents.allocate(num_bytes)
        if offset is not None:
            return offset
        if self.extents.is_growing:
            self.num_not_ready += 1  # its space comes soon: nothing needs to leave for it
            return None
        if extent_size(num_bytes) > self.extents.ready_bytes:
            return None
        for _ in range(most_evicted):
            if offset is not None or not self.evictor.evict_one(share, is_owed=is_owed):
                break
            offset = self.extents.allocate(num_bytes)
        return offset

    def _take_record(self, share: int, is_owed: bool) -> int | None:
        record = self.entries.take_record()
        while record is None and self.evictor.evict_one(share, is_owed=is_owed):
            record = self.entries.take_record()
        return record

    @property
    def is_restoring(self) -> bool:
        """Whether an earlier server's table is being read; nothing leaves then."""
        return self.evictor.is_frozen

    def check_integrity(self) -> None:
        """Check that all parts, the table, the extents and the quotas agree; not while the index `is_restoring`.

        Raises:
            IntegrityError: they do not; the text says where.
        """
        self.nodes.check_integrity()
        self.entries.check_integrity(self.visibility.sealed_groups)
        self.visibility.check_integrity()
        self.evictor.check_integrity()
