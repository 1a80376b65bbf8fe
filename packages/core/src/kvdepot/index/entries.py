"""Entries: one per node, layer group and part, each with an extent of the pool and a record of the table.

A record is free, being written, sealed, abandoned (its chunk can be stored again, but a writer may still be using its
extent) or lingering (removed while a tier copies it).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, cast

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.layout import Part, fewest, layers_of_both, mask_of
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.table import OWNER_BYTES, PARENT_BYTES, SEALED, Entry, IndexTable, Record, Writer
from kvdepot.wire.messages import EXTENT

_NO_LABEL: Final = 1 << 32  # above any label of a record
_NO_ENTRY: Final = Entry(0xFFFFFFFF)  # the end of a list


@dataclass(frozen=True, slots=True)
class PartPlace:
    """One part of one layer group of one model: identifies its entries and describes their form."""

    group: int
    part: int  # number of a `Part`
    num_bytes: int
    check: int  # 32 bits of a digest of a cell's page sizes: entries with a different check are misses

    @property
    def num_cells(self) -> int:
        """The number of cells: layers times heads."""
        return Part.of(self.part).num_cells

    def differs(self, part: int, check: int) -> bool:
        """Return whether an entry of this group has layers of this place, but other page sizes."""
        return check != self.check and bool(layers_of_both(Part.of(self.part), Part.of(part)))


Extent: TypeAlias = tuple[Entry, int, int, int]  # an entry, its header once sealed, offset and payload bytes
Wanted: TypeAlias = tuple[int, PartPlace]  # an entry: its chunk within the run, and its place


class NewRun(NamedTuple):
    """Consecutive chunks whose entries one process is about to write."""

    space: Space
    digests: bytes  # packed, `(num_chunks, 32)`
    first_chunk: int = 0
    parent: int = NO_NODE  # the node before the first chunk
    label: int = 0  # number of the tenant, model and weights that they belong to
    writer: Writer = Writer()
    owner: bytes = bytes(OWNER_BYTES)
    request_id: str = ""  # for the log


Begun: TypeAlias = tuple[int, PartPlace, Extent]  # a wanted entry that is being written, with its extent
Room: TypeAlias = tuple[Entry, int, int]  # an entry of a free record, and the offset and the size of an extent


def pack_extent(chunk: int, group: int, part: int, extent: Extent) -> bytes:
    """Return the packed `EXTENT` of an entry."""
    entry, header, offset, num_bytes = extent
    return EXTENT.pack(chunk, group, part & 0xFFFF, entry, part >> 16, header, offset, num_bytes)


class Entries:
    """The entries of each node, and their extents and bytes."""

    def __init__(self, nodes: Nodes, table: IndexTable, extents: ExtentAllocator, quotas: QuotaTable) -> None:
        self.num_sealed = 0
        self.abandoned: dict[Entry, int] = {}  # labels of entries that belong to no node any more
        self.lingering: set[Entry] = set()  # entries that were removed while a tier copies them
        self._nodes = nodes
        self._table = table
        self._extents = extents
        self._quotas = quotas
        self._first = cast("memoryview[Entry]", make_column("I", nodes.tree.capacity))
        # Next entry of the same node; of a free record: the next free one.
        self._next = cast("memoryview[Entry]", make_column("I", table.num_records))
        self._node_of = make_column("I", table.num_records)
        self._writing_share = make_column("I", table.num_records)  # share + 1 of an unfinished entry, else 0
        self._free = _NO_ENTRY  # of the record freed last
        self.num_known = 0  # records that were ever used
        self._readers: dict[Entry, int] = {}  # number of copies to tiers

    # --- reading --------------------------------------------------------------------------------------------------

    def of(self, node: int) -> Iterator[Entry]:
        """Yield the entries of a node, sealed or being written."""
        entry = self._first[node]
        while entry != _NO_ENTRY:
            yield entry
            entry = self._next[entry]

    def is_tombstone(self, node: int) -> bool:
        """Return whether a node has no entries (any more)."""
        return self._first[node] == _NO_ENTRY

    def is_sealed(self, entry: Entry) -> bool:
        """Return whether an entry is sealed."""
        return self._table.is_sealed(entry)

    def sealed(self, node: int) -> list[Entry]:
        """Return the sealed entries of a node."""
        is_sealed, entry = self._table.is_sealed, self._first[node]
        found: list[Entry] = []
        while entry != _NO_ENTRY:
            if is_sealed(entry):
                found.append(entry)
            entry = self._next[entry]
        return found

    def has_sealed(self, node: int) -> bool:
        """Return whether a node has a sealed entry, so that it is listed in its eviction policy."""
        entry = self._first[node]
        while entry != _NO_ENTRY and not self._table.is_sealed(entry):
            entry = self._next[entry]
        return entry != _NO_ENTRY

    def find(self, node: int, group: int, part: int) -> Entry | None:
        """Return the entry of a place, sealed or being written. None if there is none."""
        place = group, part
        entry = self._first[node]
        while entry != _NO_ENTRY:
            if self._table.place_of(entry) == place:
                return entry
            entry = self._next[entry]
        return None

    def has(self, node: int, group: int, part: int) -> bool:
        """Return whether all cells of a part are present or being written, in one entry or several."""
        # Some of the cells are not enough: the rest would never be promoted, and the chunk stay a miss.
        return self.find(node, group, part) is not None or not self._cells(node, group, part)[1]

    def _cells(self, node: int, group: int, part: int) -> tuple[int, int]:
        """Return two masks of a part's cells: cells that entries have or are being written with, and the rest."""
        heads, here = self._nodes.space_of(node).heads[group], 0
        for entry in self.of(node):
            number, other = self._table.place_of(entry)
            if number == group:
                here |= mask_of(other, heads)
        mask = mask_of(part, heads)
        return mask & here, mask & ~here

    def missing(
        self, space: Space, nodes: Sequence[int], wanted: Sequence[Wanted]
    ) -> tuple[list[Wanted], int, list[int]]:
        """Return the wanted entries of a run that can be begun, the number of present ones, and the overlapping ones.

        The first list ends before an entry whose chunk has no node in `nodes`, or which no lookup could reach: with
        full attention, each chunk needs the chunk before it. An entry is present if all of its cells are sealed or
        being written. It overlaps if other entries have some of its cells, but not all. Overlapping entries are given
        by their positions in the first list.
        """
        missing: list[Wanted] = []
        overlapping: list[int] = []
        num_present, last = 0, -1
        for each in wanted:
            chunk, place = each
            if chunk >= len(nodes):
                break
            node = nodes[chunk]
            if node != NO_NODE:
                if self.find(node, place.group, place.part) is not None:
                    num_present += 1
                    continue
                held, lacking = self._cells(node, place.group, place.part)
                if not lacking:
                    num_present += 1
                    continue
                if held:
                    overlapping.append(len(missing))
            elif chunk and space.full_mask and nodes[chunk - 1] == NO_NODE and last < chunk - 1:
                break
            last = chunk
            missing.append(each)
        return missing, num_present, overlapping

    def extent_of(self, node: int, place: PartPlace) -> Extent | None:
        """Return the sealed entry of a place, None if there is none."""
        entry = self.find(node, place.group, place.part)
        if entry is None or self._table.check_of(entry) != place.check:
            return None
        return self._table.sealed_entry(entry)

    def cover(self, node: int, place: PartPlace) -> list[tuple[int, Extent]]:
        """Return the fewest sealed entries, with their parts, that together have all cells of a part (`layout.fewest`).

        Empty if cells are missing.
        """
        here: dict[int, Entry] = {}
        for entry in self.of(node):
            group, part = self._table.place_of(entry)
            if group == place.group and self.is_sealed(entry) and self._table.check_of(entry) == place.check:
                here[part] = entry
        found: list[tuple[int, Extent]] = []
        for part in fewest(place.part, tuple(here), self._nodes.space_of(node).heads[place.group]):
            entry = here[part]
            found.append((part, (entry, self._table.header(entry), *self._table.extent(entry))))
        return found

    def node_of(self, entry: Entry) -> int:
        """Return the node of an entry, `NO_NODE` if it was abandoned."""
        return self._node_of[entry]

    def nodes_of(self, entries: Iterable[Entry]) -> list[int]:
        """Return the node of each entry, `NO_NODE` for one that was abandoned."""
        return [self._node_of[entry] for entry in entries]

    def is_whole(self, entry: Entry) -> int:
        """Return the bit of the entry's group if all cells of the group are sealed, else 0."""
        group, part = self._table.place_of(entry)
        return self.whole_bit(self._node_of[entry], group, part)

    def whole_bit(self, node: int, group: int, sealed: int | None = None) -> int:
        """Return the bit of a group if all cells of its plane are sealed, else 0. The part `sealed` is known to be."""
        space = self._nodes.spaces[self._nodes.space_number[node]]  # not `space_of`: this runs for every sealed entry
        missing, heads = space.cells[group], space.heads[group]
        if sealed is not None:
            missing &= ~mask_of(sealed, heads)
        entry = self._first[node]
        while missing and entry != _NO_ENTRY:
            number, part = self._table.place_of(entry)
            if number == group and self._table.is_sealed(entry):
                missing &= ~mask_of(part, heads)
            entry = self._next[entry]
        return 0 if missing else 1 << group

    # --- writing --------------------------------------------------------------------------------------------------

    def add_nodes(self, nodes: Iterable[int]) -> None:
        """Initialise nodes without entries."""
        for node in nodes:
            self._first[node] = _NO_ENTRY

    @property
    def has_free_record(self) -> bool:
        """Whether `take_record` may be called."""
        return self._free != _NO_ENTRY or self.num_known < self._table.num_records

    def take_record(self) -> Entry:
        """Take a free record, and name its entry. There must be one."""
        entry = self._free
        if entry == _NO_ENTRY:
            self.num_known += 1
            return Entry(self.num_known - 1)
        self._free = self._next[entry]
        return entry

    def give_back(self, entry: Entry) -> None:
        """Return the record of an entry to the free list."""
        self._next[entry], self._free = self._free, entry

    def begin(self, run: NewRun, nodes: Sequence[int], wanted: Sequence[Wanted], room: Sequence[Room]) -> list[Begun]:
        """Fill the record of each wanted entry of a run, and hold its chunk. All chunks have nodes."""
        tree, labels = self._nodes.tree, self._nodes.label
        begun: list[Begun] = []
        for (chunk, place), (entry, offset, size) in zip(wanted, room, strict=True):
            node, num_bytes = nodes[chunk], place.num_bytes
            key, parent, share = tree.keys[node], tree.parent[node], tree.share[node]
            assert key is not None
            header = self._table.write(
                entry,
                space=run.space.number,
                group=place.group,
                part=place.part,
                offset=offset,
                num_bytes=num_bytes,
                key=key,
                parent=(tree.keys[parent] or b"")[:PARENT_BYTES] if parent != NO_NODE else b"",
                depth=run.first_chunk + chunk,
                check=place.check,
                label=run.label,
                writer=run.writer,
                owner=run.owner,
            )
            self._link(entry, node)
            tree.holds[node] += 1
            self._begin_writing(entry, share, size)
            self._quotas.account(labels[node], share, size)  # the label and the share of the chunk's first entry
            begun.append((chunk, place, (entry, header, offset, num_bytes)))
        return begun

    def seal(self, entries: Sequence[Entry], now: int, checksums: bytes) -> list[tuple[int, bool, int]]:
        """Mark entries as sealed: their bytes are in place.

        Returns:
            for each entry its node, whether it is the first sealed entry there, and the bit of its group if that is
            whole.
        """
        table = self._table
        sealed: list[tuple[int, bool, int]] = []
        for place, entry in enumerate(entries):
            node = self._node_of[entry]
            is_alone = self._first[node] == entry and self._next[entry] == _NO_ENTRY  # the common case
            is_first = is_alone or not self.has_sealed(node)
            table.seal(entry, now, checksums[place * OWNER_BYTES : (place + 1) * OWNER_BYTES] or bytes(OWNER_BYTES))
            (group, part), (_, num_bytes) = table.place_of(entry), table.extent(entry)
            share, self._writing_share[entry] = self._writing_share[entry], 0
            if share:
                self._quotas.writing_bytes[share - 1] -= extent_size(num_bytes)
            sealed.append((node, is_first, self.whole_bit(node, group, part)))
        self.num_sealed += len(entries)
        return sealed

    def restore(self, record: Record, node: int) -> None:
        """Take over a sealed entry of an earlier server. Its extent is taken already."""
        self._link(record.entry, node)
        self._quotas.account(self._nodes.label[node], self._nodes.tree.share[node], extent_size(record.num_bytes))
        self.num_sealed += 1

    def restore_unfinished(self, record: Record) -> None:
        """Take over an unfinished entry as abandoned. Its extent counts against its tenant."""
        share, size = self._quotas.share_of(record.label), extent_size(record.num_bytes)
        self._node_of[record.entry] = NO_NODE
        # If the end of the file of names was lost, the label's number may later be assigned to another tenant.
        label = record.label if self._quotas.tenant_of(record.label) else _NO_LABEL
        self.abandoned[record.entry] = label
        self._quotas.account(label, share, size)
        self._begin_writing(record.entry, share, size)

    def move(self, node: int, share: int) -> None:
        """Count the entries of a node against another share. The caller changes the node."""
        quotas = self._quotas
        for entry in self.of(node):
            size = extent_size(self._table.extent(entry)[1])
            quotas.move(size, self._nodes.tree.share[node], share)
            if self._writing_share[entry]:
                self._end_writing(entry)
                self._begin_writing(entry, share, size)

    # --- taking back ----------------------------------------------------------------------------------------------

    def remove(self, entry: Entry) -> None:
        """Free an entry, sealed or not. While a tier copies it, its extent stays taken until `end_reading`."""
        node = self._node_of[entry]
        self._unlink(entry, node)
        freed: list[tuple[int, int]] = []
        self._free_record(entry, node, freed)
        self._extents.free_all(freed)

    def remove_all(self, nodes: Iterable[int]) -> None:
        """Free all entries of nodes, like `remove`."""
        freed: list[tuple[int, int]] = []
        for node in nodes:
            entry, self._first[node] = self._first[node], _NO_ENTRY
            while entry != _NO_ENTRY:
                following = self._next[entry]
                self._free_record(entry, node, freed)
                entry = following
        self._extents.free_all(freed)

    def _free_record(self, entry: Entry, node: int, freed: list[tuple[int, int]]) -> None:
        """Free the record of an entry. Add its extent to `freed`, which the caller frees, unless a tier copies it."""
        extent = self._table.extent(entry)
        self._quotas.account(self._nodes.label[node], self._nodes.tree.share[node], -extent_size(extent[1]))
        if self._writing_share[entry]:
            self._end_writing(entry)
        else:
            self.num_sealed -= 1
        self._table.free(entry)  # the header changes before the extent is reused
        self._node_of[entry] = NO_NODE
        if entry in self._readers:
            self.lingering.add(entry)
            return
        freed.append(extent)
        self.give_back(entry)

    def abandon(self, entry: Entry) -> None:
        """Detach an unfinished entry from its node. Its extent stays taken until `free_abandoned`."""
        node = self._node_of[entry]
        self.abandoned[entry] = self._nodes.label[node]
        self._unlink(entry, node)
        self._node_of[entry] = NO_NODE

    def free_abandoned(self, entry: Entry) -> None:
        """Free an abandoned entry whose writer has ended."""
        offset, num_bytes = self._table.extent(entry)
        self._quotas.account(self.abandoned.pop(entry), self._writing_share[entry] - 1, -extent_size(num_bytes))
        self._end_writing(entry)
        self._table.free(entry)
        self._extents.free(offset, num_bytes)
        self.give_back(entry)

    def begin_reading(self, entries: Sequence[Entry]) -> list[int]:
        """Keep the extents of sealed entries while they are being copied to a tier. Return the entries' nodes."""
        for entry in entries:
            self._readers[entry] = self._readers.get(entry, 0) + 1
        return self.nodes_of(entries)

    def is_reading(self, entry: Entry) -> bool:
        """Return whether an entry is being copied to a tier."""
        return entry in self._readers

    def end_reading(self, entries: Sequence[Entry]) -> None:
        """Undo one `begin_reading`. Free the extents of entries that were removed meanwhile."""
        for entry in entries:
            self._readers[entry] -= 1
            if self._readers[entry]:
                continue
            del self._readers[entry]
            if entry in self.lingering:
                self.lingering.remove(entry)
                self._extents.free(*self._table.extent(entry))
                self.give_back(entry)

    # --- links and bytes ------------------------------------------------------------------------------------------

    def _link(self, entry: Entry, node: int) -> None:
        self._node_of[entry] = node
        self._next[entry] = self._first[node]
        self._first[node] = entry

    def _unlink(self, entry: Entry, node: int) -> None:
        following = self._next[entry]
        if self._first[node] == entry:
            self._first[node] = following
            return
        before = self._first[node]
        while self._next[before] != entry:
            before = self._next[before]
        self._next[before] = following

    def _begin_writing(self, entry: Entry, share: int, size: int) -> None:
        """Count an entry as unfinished until `_end_writing`."""
        self._writing_share[entry] = share + 1
        self._quotas.writing_bytes[share] += size

    def _end_writing(self, entry: Entry) -> None:
        share, self._writing_share[entry] = self._writing_share[entry] - 1, 0
        self._quotas.writing_bytes[share] -= extent_size(self._table.extent(entry)[1])

    def check_integrity(self, sealed_groups: Sequence[int]) -> None:
        """Check that records, nodes, extents, quotas and `sealed_groups` of the nodes agree.

        Raises:
            IntegrityError: they disagree.
        """
        records = {record.entry: record for record in self._table.records()}
        require(self.num_sealed == sum(r.state == SEALED for r in records.values()), "sealed entries are miscounted")
        self._extents.check_integrity(self._table.extent(entry) for entry in {*records, *self.lingering})
        quotas = self._quotas
        used, writing, of_labels = [0] * quotas.num_shares, [0] * quotas.num_shares, Counter[int]()
        for entry, record in records.items():
            node, size = self._node_of[entry], extent_size(record.num_bytes)
            is_linked = node != NO_NODE
            share = self._nodes.tree.share[node] if is_linked else self._writing_share[entry] - 1
            used[share] += size
            of_labels[self._nodes.label[node] if is_linked else self.abandoned[entry]] += size
            if record.state != SEALED:
                writing[share] += size
        require(used == quotas.used_bytes, f"the shares use {used} bytes, {quotas.used_bytes} are counted")
        of_tenants = Counter[int]()
        for label, size in of_labels.items():
            of_tenants[quotas.tenant_of(label)] += size
        require(
            [of_tenants[tenant] for tenant in range(len(quotas.tenant_bytes))] == quotas.tenant_bytes,
            "the bytes of tenants are miscounted",
        )
        require(
            [of_labels[label] for label in range(len(quotas.label_bytes))] == quotas.label_bytes,
            "the bytes of labels are miscounted",
        )
        require(writing == quotas.writing_bytes, "unfinished bytes are miscounted")
        linked = 0
        for space in self._nodes.spaces:
            for node in space.nodes.values():
                linked += self._check_node(space, node, sealed_groups[node])
        require(linked == sum(self._node_of[entry] != NO_NODE for entry in records), "entries are in no list")

    def _check_node(self, space: Space, node: int, sealed_groups: int) -> int:
        """Check a node, and return its number of entries."""
        tree, own = self._nodes.tree, list(self.of(node))
        places = [self._table.place_of(entry) for entry in own]
        require(len(places) == len(set(places)), f"node {node} has an entry twice")
        whole = 0
        for number in range(len(space.spec.groups)):
            whole |= self.whole_bit(node, number)
        require(whole == sealed_groups, f"node {node} has other groups than it says")
        num_writing = sum(not self.is_sealed(entry) for entry in own)
        require(tree.holds[node] >= num_writing, f"node {node} is not held for {num_writing} unfinished entries")
        require(bool(own or tree.num_children[node] or tree.holds[node]), f"node {node} is an idle tombstone")
        return len(own)
