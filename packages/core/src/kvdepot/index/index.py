"""The index: the chunks in the pool, and their places.

`ChunkIndex` creates the parts, each in its own module, and has the operations that involve several of them. Callers use
the parts directly for everything else: `index.nodes`, `index.visibility`, `index.entries`, `index.quotas`,
`index.shares`, `index.evictor`. The index does no I/O except for the table, and knows nothing of sessions.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice
from typing import Final

from kvdepot.counting import depot_counter
from kvdepot.index.entries import Begun, Entries, NewRun, PartPlace, Wanted
from kvdepot.index.eviction import AUTO, POLICIES, EvictionPolicy, Preference
from kvdepot.index.evictor import EndStore, Evictor, cannot_end
from kvdepot.index.kept import KeptChunks
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.shares import Shares
from kvdepot.index.tree import NO_NODE, ChunkTree, Nodes, Space, digest_of
from kvdepot.index.visibility import Visibility, Watchers
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.table import Entry, IndexTable
from kvdepot.wire.messages import CacheSpec

STORE_ENTRIES_OVER_SHARE: Final = depot_counter(
    "store_entries_over_share", "Entries declined because unfinished stores already fill their tenant's share"
)
STORE_ENTRIES_NOT_READY: Final = depot_counter(
    "store_entries_not_ready", "Entries declined because the pool's memory was still being allocated"
)
ENTRIES_OVERLAPPING: Final = depot_counter(
    "entries_overlapping", "Entries begun although other engines' entries already have some of their heads"
)

MOST_EVICTED: Final = 80  # chunks per request: that takes two milliseconds, four with ARC
# Nodes sampled for entries with other page sizes, in 1 ms if each has entries of eight ranks. Engines with such pages
# come one after the other, so usually all or none of a space's entries have them.
_SAMPLED: Final = 256
_SCANNED_AT_ONCE: Final = 64  # nodes per step when such entries are removed
SPARE_NODES: Final = 1024  # in addition to twice the records, for tombstones


class ChunkIndex:
    """Nodes, entries, space and eviction.

    A store is `reserve`, then `seal`. A read is `visibility.match`, then `evictor.pin` and `evictor.unpin`.

    | verb | before | after |
    |---|---|---|
    | `visibility.match` | any state | a usable prefix, valid until the next store or eviction, or while pinned |
    | `reserve` | a parent in the tree, or none | entries with extents, which lookups ignore; each holds its chunk |
    | `seal` | reserved entries with all bytes in place | lookups count the entries; their holds are undone |
    | `evictor.release` | held chunks | one hold less; a chunk without holds and children may be evicted |
    | `evictor.make_room` | not `is_frozen` | a chunk without children is gone, and its extents are free |

    `make_room` takes an unheld chunk or, if a share within its quota needs room, one that only leases hold. Reserved
    entries that are not sealed end with `discard_entry` or `abandon_entry`, which undo their holds, too.

    Args:
        extents: allocates the pool's space.
        table: holds the records.
        policy: the name of the eviction policy.
        quotas: the quotas of tenants; None for none.

    Attributes:
        watchers: receive notes of chunks that lookups no longer find.
        preference: the policy that `auto` follows.
    """

    def __init__(
        self,
        extents: ExtentAllocator,
        table: IndexTable,
        policy: str = AUTO,
        quotas: QuotaTable | None = None,
    ) -> None:
        self.table = table
        self.extents = extents
        self.quotas = quotas or QuotaTable(extents.capacity_bytes)
        self.spaces: list[Space] = []
        self.watchers = Watchers()
        self.preference = Preference()
        self.num_over_share = 0  # `STORE_ENTRIES_OVER_SHARE`
        self.num_not_ready = 0  # `STORE_ENTRIES_NOT_READY`
        self.num_overlapping = 0  # `ENTRIES_OVERLAPPING`
        self.why_cut = ""  # for the log: the reason why the last cut run was cut
        self.kept = KeptChunks(self.begin_reading, self.end_reading)
        self.num_restore_errors = 0
        self._space_by_spec: dict[bytes, Space] = {}
        self._policy = policy
        self.make_parts()

    def make_parts(self) -> None:
        """Create all parts, without nodes and records. Each part uses the parts before it."""
        self.nodes = nodes = Nodes(2 * self.table.num_records + SPARE_NODES, self.spaces)
        self.visibility = Visibility(nodes, self.watchers)
        self.entries = Entries(nodes, self.table, self.extents, self.quotas)
        self.shares = Shares(nodes, self.entries, self.quotas, self._make_policy, self.watchers.ended)
        self.evictor = Evictor(nodes, self.visibility, self.entries, self.shares, self.watchers)

    def _make_policy(self, tree: ChunkTree) -> EvictionPolicy:
        return POLICIES[self._policy](tree, self.preference)

    # --- stores ---------------------------------------------------------------------------------------------------

    def reserve(
        self, run: NewRun, wanted: Sequence[Wanted], end_store: EndStore = cannot_end
    ) -> tuple[list[Begun], int]:
        """Begin the wanted entries of a run that are missing. Evict chunks to make room.

        They are begun in the order of `wanted`, which is that of the chunks, up to the first one without room: no more
        chunks can be evicted, its share has reached its limit of unfinished bytes, or evicting `MOST_EVICTED` chunks
        did not help, as small chunks are rarely neighbours. The next run continues from there. Each begun entry holds
        its chunk until `seal`, `discard_entry` or `abandon_entry`. If a policy raises, nothing is begun. `end_store`:
        see `Evictor.make_room`.

        Returns:
            the begun entries, and the number of entries that are present or being written.
        """
        keys, nodes = self.nodes.find_run(run.space, run.digests, run.first_chunk)
        missing, num_present, overlapping = self.entries.missing(run.space, nodes, wanted)
        if not missing:  # the common case for a prompt that another engine stored
            return [], num_present
        held = {run.parent, *nodes} - {NO_NODE}
        for node in held:  # so that neither they nor chunks before them are evicted to make room
            self.nodes.tree.holds[node] += 1
        try:
            entries, offsets = self._take_room(run, nodes, missing, end_store)
            del missing[len(offsets) :]
            self._add_nodes(run, keys, nodes, missing)
            begun = self.entries.begin(run, nodes, missing, entries, offsets)
            self.num_overlapping += bisect_left(overlapping, len(begun))
        finally:
            self.evictor.release(held)
            self.evictor.log_evicted("to make room for request %s", run.request_id or "-")
        return begun, num_present

    def seal(self, entries: Sequence[Entry], now: int = 0, checksums: bytes = b"") -> list[int]:
        """Seal entries whose bytes are in place, so that lookups find them.

        Args:
            entries: entries of `reserve` that were neither discarded nor abandoned.
            now: the depot's clock in seconds.
            checksums: 16 bytes each, concatenated; empty if unknown.

        Returns:
            the node of each entry.
        """
        last_use, sealed_groups = self.nodes.last_use, self.visibility.sealed_groups
        num_children, holds = self.nodes.tree.num_children, self.nodes.tree.holds
        nodes, new, groups = self.entries.seal(entries, now, checksums)
        for node, bit in zip(nodes, groups, strict=True):
            last_use[node] = now
            sealed_groups[node] |= bit
            holds[node] -= 1
        self.shares.added(new[::-1])  # deepest first: chunks are added in the order of their eviction
        self.visibility.reveal(nodes)
        for node in nodes:
            if not num_children[node] and not holds[node]:
                self.shares.policy_of(node).unpinned(node)
        return nodes

    # --- entries that end otherwise -------------------------------------------------------------------------------

    def discard_entry(self, entry: Entry) -> None:
        """Free an unsealed entry whose writer has ended."""
        node = self.entries.node_of(entry)
        if node == NO_NODE:  # abandoned, or of an earlier server
            self.entries.free_abandoned(entry)
            return
        self.entries.remove(entry)
        self.evictor.release([node])

    def abandon_entry(self, entry: Entry) -> None:
        """Detach an unsealed entry from its chunk, which can be stored again from now on.

        Its writer may still be writing. So the space stays taken, and counts against its tenant, until
        `entries.free_abandoned`.
        """
        node = self.entries.node_of(entry)
        self.entries.abandon(entry)
        self.evictor.release([node])

    def remove_entry(self, entry: Entry) -> None:
        """Remove a sealed entry, leased or not, because its bytes are wrong.

        Its header changes, so that retrieves under way fail. Lookups find its chunk and the chunks after it again once
        it is stored again. Do not call this while the index `is_restoring`.
        """
        assert not self.is_restoring
        node = self.entries.node_of(entry)
        group, _ = self.table.place_of(entry)
        self.entries.remove(entry)
        if not self.entries.whole_bit(node, group):
            self.visibility.lose(node, group)
        if not self.entries.is_tombstone(node):
            return
        if self.nodes.tree.evictable(node):
            self.evictor.settle(node)
        else:
            self.shares.policy_of(node).removed([node])  # `added` when it is stored again

    def remove_unreadable(self, space: Space, places: Sequence[PartPlace]) -> Iterator[int]:
        """Remove the sealed entries with layers of a worker that it cannot read, as it would write other page sizes.

        Otherwise lookups would find their chunks, retrieves would miss them, and stores would call them present. Does
        nothing if a sample has no such entry. Yields the number of removed entries after each step. Between steps, the
        index may be used freely, except that it must not be restored.

        Args:
            space: the space of the entries.
            places: the worker's place in each group.
        """
        nodes, entries, table = self.nodes, self.entries, self.table

        def is_unreadable(entry: Entry) -> bool:
            group, part = table.place_of(entry)
            return places[group].differs(part, table.check_of(entry))

        def unreadable(node: int) -> list[Entry]:
            return [entry for entry in entries.sealed(node) if is_unreadable(entry)]

        if not any(map(unreadable, islice(space.nodes.values(), _SAMPLED))):
            return
        count = 0
        for node in reversed(range(len(nodes.tree.keys))):  # mostly deepest first, so that few tombstones remain
            if nodes.tree.keys[node] is not None and nodes.space_number[node] == space.number:
                for entry in unreadable(node):
                    self.remove_entry(entry)
                    count += 1
            if node % _SCANNED_AT_ONCE == 0:
                yield count
                count = 0

    def begin_reading(self, entries: Sequence[Entry]) -> list[int]:
        """Hold sealed entries and their extents while they are copied to a tier. Return their nodes."""
        nodes = self.entries.begin_reading(entries)
        for node in nodes:
            self.nodes.tree.holds[node] += 1
        return nodes

    def end_reading(self, entries: Sequence[Entry], nodes: Sequence[int]) -> None:
        """Undo one `begin_reading`. Free the space of entries that were removed meanwhile."""
        self.entries.end_reading(entries)
        self.evictor.release(nodes)

    # --- spaces, nodes and room -----------------------------------------------------------------------------------

    def space(self, spec: CacheSpec) -> Space:
        """Return the space of a spec. Create it if it is new."""
        digest = digest_of(spec)
        space = self._space_by_spec.get(digest)
        if space is None:
            space = Space(len(self.spaces), spec)
            self.spaces.append(space)
            self._space_by_spec[digest] = space
        return space

    def add_level(
        self, space: Space, keys: Sequence[bytes], parents: Sequence[int], depth: int, labels: Sequence[int]
    ) -> None:
        """Add chunks of one depth as nodes without entries: see `Nodes.add_level`."""
        nodes = self.nodes.add_level(space, keys, parents, depth, labels)
        of_label: defaultdict[int, list[int]] = defaultdict(list)
        for node, label in zip(nodes, labels, strict=True):
            of_label[label].append(node)
        for label, own in of_label.items():
            self.shares.add_nodes(own, label)
        self.entries.add_nodes(nodes)

    def _start_nodes(self, space: Space, keys: Sequence[bytes], parent: int, depth: int, label: int) -> list[int]:
        nodes = self.nodes.add(space, keys, parent, depth, label)
        self.shares.add_nodes(nodes, label)
        self.entries.add_nodes(nodes)
        return nodes

    def _add_nodes(self, run: NewRun, keys: Sequence[bytes], nodes: list[int], wanted: Iterable[Wanted]) -> None:
        """Add the missing nodes of wanted chunks of a run, each below the one before it."""
        new = [*dict.fromkeys([chunk for chunk, _ in wanted if nodes[chunk] == NO_NODE])]
        while new:
            start = new[0]
            # Without full attention, chunks in between may not be wanted.
            count = next((place for place, chunk in enumerate(new) if chunk != start + place), len(new))
            parent = nodes[start - 1] if start else run.parent
            stop, depth = start + count, run.first_chunk + start
            nodes[start:stop] = self._start_nodes(run.space, keys[start:stop], parent, depth, run.label)
            del new[:count]

    def _take_room(
        self, run: NewRun, nodes: Sequence[int], wanted: Sequence[Wanted], end_store: EndStore
    ) -> tuple[list[Entry], list[int]]:
        """Take a record and an extent for as many entries of a run as possible, in order. Ensure room for their nodes.

        If a policy raises, nothing is taken.
        """
        quotas, share, entries, extents = self.quotas, self.quotas.share_of(run.label), self.entries, self.extents
        most_steps = self.evictor.num_steps + MOST_EVICTED
        sizes = [place.extent_bytes for _, place in wanted]
        parts = [place.part for _, place in wanted]
        anywhere = False  # at first, leave other parts the space in their arenas that evicted chunks of all parts free
        num_wanted = self._writable(share, sizes)
        offsets: list[int] = []
        num_bytes = 0
        try:
            while True:
                most = min(num_wanted, entries.num_free, self._num_with_nodes(nodes, wanted))
                more = extents.allocate(sizes[len(offsets) : most], parts[len(offsets) : most], anywhere=anywhere)
                offsets += more
                taken = sum(sizes[len(offsets) - len(more) : len(offsets)])
                num_bytes += taken
                quotas.used_bytes[share] += taken  # counts already, as usage decides whose chunks are evicted
                if len(offsets) == num_wanted:
                    break
                rest = sizes[len(offsets) : num_wanted]
                if len(offsets) < most and (extents.is_growing or rest[0] > extents.ready_bytes):
                    self.num_not_ready += extents.is_growing  # the pool will have room soon without an eviction
                    self.why_cut = "the pool is still being allocated, or too small"
                    break
                if not self._make_room(share, rest, most_steps, end_store):
                    if anywhere:
                        break
                    anywhere = True
        except BaseException:
            extents.free(zip(offsets, sizes, strict=False))
            raise
        finally:
            quotas.used_bytes[share] -= num_bytes
        return entries.take(len(offsets)), offsets

    def _writable(self, share: int, sizes: Sequence[int]) -> int:
        """Return how many entries with these extents a share may begin."""
        most_bytes = self.quotas.writable_bytes(share)
        if sum(sizes) <= most_bytes:
            return len(sizes)
        self.num_over_share += 1
        self.why_cut = "unfinished stores fill the tenant's share"
        return bisect_right([*accumulate(sizes)], most_bytes)

    def _num_with_nodes(self, nodes: Sequence[int], wanted: Sequence[Wanted]) -> int:
        """Return for how many wanted entries of a run there are nodes, or free numbers for them."""
        num_left = self.nodes.num_left
        if num_left >= len(wanted):
            return len(wanted)
        new: set[int] = set()
        for place, (chunk, _) in enumerate(wanted):
            if nodes[chunk] == NO_NODE:
                new.add(chunk)
                if len(new) > num_left:
                    return place
        return len(wanted)

    def _make_room(self, share: int, sizes: Sequence[int], most_steps: int, end_store: EndStore) -> bool:
        """Evict chunks for entries with these extents. Return False if that makes no room."""
        evictor = self.evictor
        is_owed = self.quotas.is_owed(share, sizes[0])
        if evictor.num_steps >= most_steps:
            self.why_cut = "evictions for this request left no gap that is large enough"
            return False
        most = most_steps - evictor.num_steps
        if evictor.make_room(sum(sizes), most, share, end_store, is_owed=is_owed) or self.kept.let_go_of_oldest():
            return True
        self.why_cut = "all chunks that it may evict are in use"
        return False

    @property
    def is_restoring(self) -> bool:
        """Whether an earlier server's table is being read. Meanwhile, nothing is evicted."""
        return self.evictor.is_frozen

    def check_integrity(self) -> None:
        """Check that all parts, the table, the extents and the quotas agree. Do not call this while `is_restoring`.

        Raises:
            IntegrityError: they disagree; the text tells where.
        """
        self.nodes.check_integrity()
        self.entries.check_integrity(self.visibility.sealed_groups)
        self.visibility.check_integrity()
        self.evictor.check_integrity()
