"""The index: which chunks are here, and where.

`ChunkIndex` is the facade that `server.depot` and the tiers drive. It wires the parts, each in a module of its own, and
writes entries. Nothing here does I/O but for the table, and nothing knows of sessions.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvdepot.index.entries import EntryPlace, pack_extent
from kvdepot.index.eviction import AUTO, POLICIES, EvictionPolicy, Preference
from kvdepot.index.parts import Parts
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.restore import Restoring
from kvdepot.index.space import Space, digest_of
from kvdepot.index.tree import NO_NODE, ChunkTree
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.table import OWNER_BYTES, IndexTable
from kvdepot.wire.histogram import Histogram
from kvdepot.wire.messages import CacheSpec

__all__ = ["MOST_EVICTED", "ChunkIndex", "EntryPlace", "Space", "digest_of", "pack_extent"]

logger = logging.getLogger(__name__)

MOST_EVICTED: Final = 80  # chunks, to make room for one request: two milliseconds, with ARC four
_REVEAL_STEP: Final = 500  # restored chunks between two pauses


class ChunkIndex:
    """Nodes, entries, space and eviction."""

    def __init__(
        self, extents: ExtentAllocator, table: IndexTable, policy: str = AUTO, quotas: QuotaTable | None = None
    ) -> None:
        self.table = table
        self.quotas = quotas or QuotaTable(extents.capacity_bytes)
        self.spaces: list[Space] = []
        self.num_over_share = 0  # entries that were declined because their share has enough unfinished ones
        self.num_not_ready = 0  # entries that were declined because the pool was still growing
        self.num_restore_errors = 0
        # Called for a share that must get room when nothing can leave: ends an unfinished store of one above its quota.
        self.end_store: Callable[[], bool] = lambda: False
        self.on_shown: Callable[[int], object] | None = None  # called with each node that lookups find from now on
        self.on_hidden: Callable[[int], object] | None = None  # and with each that they do not find any more
        self.on_ended: Callable[[bytes], object] = lambda _key: None  # called with the key of each chunk that ended
        self._space_by_spec: dict[bytes, Space] = {}
        self.preference = Preference()  # that the policy "auto" follows
        self._policy = policy
        self._wire(extents)

    def _wire(self, extents: ExtentAllocator) -> None:
        """Begin without a node or a record."""
        self.extents = extents
        self.parts = parts = Parts.make(
            self.table, extents, self.spaces, self.quotas, self._make_policy, self._tell_shown, self._tell_hidden,
            lambda key: self.on_ended(key),
        )  # fmt: skip
        parts.room.end_store = lambda: self.end_store()
        nodes, visibility, entries, room = parts.nodes, parts.visibility, parts.entries, parts.room
        priorities = parts.priorities
        self.node, self.key_of, self.space_of = nodes.find, nodes.key_of, nodes.space_of
        self.label_of, self.share_of, self.depth_of = nodes.label_of, nodes.share_of, nodes.depth_of
        self.parent_of, self.num_children, self.idle_seconds = nodes.parent_of, nodes.num_children, nodes.idle_seconds
        self.is_held, self.is_chain = nodes.is_held, nodes.is_chain
        self.visible, self.is_reachable = visibility.find, visibility.is_reachable
        self.longest_prefix, self.full_prefix = visibility.longest_prefix, visibility.full_prefix
        self.entry, self.has_entry, self.entries = entries.find, entries.has, entries.sealed
        self.extent_of, self.node_of = entries.extent_of, entries.node_of
        self.free_abandoned = entries.free_abandoned
        self.pin, self.unpin, self.clear, self.clear_end = room.pin, room.unpin, room.clear, room.clear_end
        self.evict_one, self.next_victim, self.evict = room.evict_one, room.next_victim, room.evict
        self.set_quota = room.set_quota
        self.used, self.set_priority = priorities.used, priorities.set_priority
        self.end_session, self.end_session_at = priorities.end_session, priorities.end_session_at
        self.has_ended, self.expire = priorities.has_ended, priorities.expire

    def _make_policy(self, tree: ChunkTree) -> EvictionPolicy:
        return POLICIES[self._policy](tree, self.preference)

    def _tell_shown(self, node: int) -> None:
        if self.on_shown is not None:
            self.on_shown(node)

    def _tell_hidden(self, node: int) -> None:
        if self.on_hidden is not None:
            self.on_hidden(node)

    def space(self, spec: CacheSpec) -> Space:
        """Return the space of a spec, made if it is new."""
        digest = digest_of(spec)
        space = self._space_by_spec.get(digest)
        if space is None:
            space = Space(len(self.spaces), spec)
            self.spaces.append(space)
            self._space_by_spec[digest] = space
        return space

    # --- figures --------------------------------------------------------------------------------------------------

    @property
    def now(self) -> int:
        """Seconds of the depot's clock, which sets it now and then."""
        return self.parts.nodes.now

    @now.setter
    def now(self, seconds: int) -> None:
        self.parts.nodes.now = seconds

    @property
    def is_restoring(self) -> bool:
        """Whether an earlier server's table is being read; nothing leaves then."""
        return self.parts.room.is_frozen

    @property
    def num_chunks(self) -> int:
        """Nodes, ghosts included."""
        return len(self.parts.nodes)

    @property
    def num_entries(self) -> int:
        """Sealed entries."""
        return self.parts.entries.num_sealed

    @property
    def num_evicted(self) -> int:
        """Chunks that were evicted."""
        return self.parts.room.num_evicted

    @property
    def num_leased_evicted(self) -> int:
        """Chunks of these that were evicted in spite of a lease."""
        return self.parts.room.num_leased_evicted

    @property
    def num_room_steps(self) -> int:
        """Evictions, and unfinished stores that were ended, to make room."""
        return self.parts.room.num_steps

    @property
    def eviction_ages(self) -> Histogram:
        """Seconds since the last use of evicted chunks."""
        return self.parts.room.eviction_ages

    @property
    def num_deadlines(self) -> int:
        """Deadlines of sessions that take memory."""
        return self.parts.priorities.num_deadlines

    def priority_of(self, node: int) -> int:
        """Return the priority of a node within its share: `ENDED`, `NORMAL` or above."""
        return self.parts.nodes.tree.priority[node]

    def check_integrity(self) -> None:
        """Check that all parts, the table, the extents and the quotas agree; not while the index `is_restoring`.

        Raises:
            IntegrityError: they do not; the text says where.
        """
        parts = self.parts
        parts.nodes.check_integrity()
        parts.entries.check_integrity(parts.visibility.sealed_groups)
        parts.visibility.check_integrity()
        parts.room.check_integrity()

    # --- entries --------------------------------------------------------------------------------------------------

    def begin_entry(self, place: EntryPlace, most_evicted: int = MOST_EVICTED) -> int | None:
        """Make an entry that is being written, evicting chunks for it.

        Its header once sealed is the present one with the state SEALED. The chunk before it must have a node.

        Returns:
            its record. None without room if nothing more can be evicted, or if its share has as many unfinished
            bytes as it may. Also None if `most_evicted` chunks did not make room, as small chunks that leave are
            rarely neighbours: the next attempt continues from there.
        """
        share, size, is_owed = self.quotas.share_of(place.label), extent_size(place.num_bytes), False
        if self.quotas.num_shares > 1:
            if not self.quotas.may_write(share, size):
                self.num_over_share += 1
                return None
            is_owed = self.quotas.is_owed(share, size)
        node = place.space.nodes.get(place.key)
        if node is None:
            node = self._make_node(place, share)
            if node is None:
                return None
        holds = self.parts.nodes.tree.holds
        holds[node] += 1  # neither it nor a chunk before it leaves to make room for it
        offset = self._allocate(place.num_bytes, share, is_owed, most_evicted)
        record = self._take_record(share, is_owed) if offset is not None else None
        if offset is None or record is None:
            if offset is not None:
                self.extents.free(offset, place.num_bytes)
            self.parts.room.release(node)
            return None
        self.parts.entries.begin(place, node, record, offset)
        return record

    def _make_node(self, place: EntryPlace, share: int) -> int | None:
        """Make a node, evicting others if there are too many ghosts; None if nothing can leave."""
        nodes, room = self.parts.nodes, self.parts.room
        if not nodes.is_full:
            return self._add_node(place)
        if place.parent != NO_NODE:
            nodes.tree.holds[place.parent] += 1
        while nodes.is_full and self.evict_one(share):
            pass
        node = None if nodes.is_full else self._add_node(place)
        if place.parent != NO_NODE:
            room.release(place.parent)
        return node

    def _add_node(self, place: EntryPlace) -> int:
        return self.parts.add_node(place.space, place.key, place.parent, place.depth, place.label)

    def _take_record(self, share: int, is_owed: bool) -> int | None:
        record = self.parts.entries.take_record()
        while record is None and self.evict_one(share, is_owed=is_owed):
            record = self.parts.entries.take_record()
        return record

    def _allocate(self, num_bytes: int, share: int, is_owed: bool, most_evicted: int) -> int | None:
        offset = self.extents.allocate(num_bytes)
        if offset is None and self.extents.is_growing:
            self.num_not_ready += 1  # its space comes soon: nothing needs to leave for it
            return None
        if extent_size(num_bytes) > self.extents.ready_bytes:
            return None
        for _ in range(most_evicted):
            if offset is not None or not self.evict_one(share, is_owed=is_owed):
                break
            offset = self.extents.allocate(num_bytes)
        return offset

    def seal_entries(self, records: Sequence[int], now: int = 0, checksums: bytes = b"") -> None:
        """Say that the bytes of entries are in place; `checksums` are packed, or none."""
        parts = self.parts
        tree, entries, visibility = parts.nodes.tree, parts.entries, parts.visibility
        fresh: list[int] = []
        for place, record in enumerate(records):
            node = entries.node_of(record)
            if entries.seal(record, now, checksums[place * OWNER_BYTES : (place + 1) * OWNER_BYTES]):
                fresh.append(node)
            parts.nodes.last_use[node] = now
            visibility.sealed_groups[node] |= entries.is_whole(record)
            tree.holds[node] -= 1
        for node in reversed(fresh):  # deepest first: the chunk that leaves first is added first
            parts.shares.policy_of(node).added(node)
        for record in records:
            node = entries.node_of(record)
            visibility.reveal(node)
            if tree.evictable(node):
                parts.shares.policy_of(node).unpinned(node)

    def discard_entry(self, record: int) -> None:
        """Take back an entry that is not sealed; nothing writes to it any more."""
        node = self.node_of(record)
        if node == NO_NODE:  # it was abandoned, or is an earlier server's
            self.free_abandoned(record)
            return
        self.parts.entries.remove(record)
        self.parts.room.release(node)

    def abandon_entry(self, record: int) -> None:
        """Take an entry that is not sealed off its chunk, which can be stored again from now on.

        A writer may still be at work: the space stays taken, and counts against its tenant, until `free_abandoned`.
        """
        node = self.node_of(record)
        self.parts.entries.abandon(record)
        self.parts.room.release(node)

    def remove_entry(self, record: int) -> None:
        """Take away a sealed entry, leased or not, because its bytes are wrong.

        Its header changes, so a copy of it fails. Lookups find its chunk and those after it once it is stored again.
        Not while the index `is_restoring`.
        """
        assert not self.is_restoring
        parts, node = self.parts, self.node_of(record)
        group, _ = self.table.place_of(record)
        parts.entries.remove(record)
        parts.visibility.lose(node, group)
        if not parts.entries.is_ghost(node):
            return
        if parts.nodes.tree.evictable(node):
            parts.room.settle(node)
        else:
            parts.shares.policy_of(node).removed(node)  # `added` again when it is stored again

    def begin_reading(self, record: int) -> int:
        """Keep a sealed entry and its extent, which are being copied for a tier; return its node."""
        node = self.node_of(record)
        self.parts.nodes.tree.holds[node] += 1
        self.parts.entries.begin_reading(record)
        return node

    def end_reading(self, record: int, node: int) -> None:
        """Undo one `begin_reading`; an entry that was removed in the meantime frees its space now."""
        self.parts.entries.end_reading(record)
        self.parts.room.release(node)

    # --- restoring ------------------------------------------------------------------------------------------------

    def restore(self, spaces: Sequence[CacheSpec], num_labels: int = 1 << 32) -> Iterator[int | None]:
        """Rebuild everything from the table of an earlier server; call once, before any space or entry.

        The records name `spaces` and labels by number; a record with another number is freed.

        Returns an iterator that does the work. Between steps (None) its caller can do other things, as long as it
        begins no entry; nothing leaves until then (`is_restoring`). It yields the records of unfinished entries, whose
        writers may still be writing: they have an extent and belong to no chunk. `discard_entry` takes them back, once
        the iterator has ended.

        A step that fails by a bug is logged and counted. Before anything can be found, the index is then empty but for
        the space of unfinished entries; later, some are not found.
        """
        for spec in spaces:
            self.space(spec)
        self.parts.room.is_frozen = True
        return self._restore(num_labels)

    def _restore(self, num_labels: int) -> Iterator[int | None]:
        restoring = Restoring(self.parts, len(self.spaces), num_labels)
        try:
            try:
                yield from restoring.run()
            except Exception:
                self.num_restore_errors += 1
                logger.exception("reading back the table of an earlier server failed: its entries are gone")
                restoring = self._start_cold()
                yield from restoring.run()
            for count, node in enumerate(restoring.nodes):
                self._reveal_restored(node)
                if count % _REVEAL_STEP == 0:
                    yield None
            yield from restoring.unfinished
        finally:
            self.parts.room.is_frozen = False

    def _reveal_restored(self, node: int) -> None:
        try:
            self.parts.visibility.reveal(node)
        except Exception:
            if not self.num_restore_errors:
                logger.exception("an entry of an earlier server may never be found")
            self.num_restore_errors += 1

    def _start_cold(self) -> Restoring:
        """Begin again with nothing but the extents of unfinished entries."""
        now = self.now
        self.quotas.forget_usage()
        for space in self.spaces:
            space.nodes.clear()
        self.extents.clear()
        self._wire(self.extents)
        self.now = now
        self.parts.room.is_frozen = True
        return Restoring(self.parts, 0, 0)
