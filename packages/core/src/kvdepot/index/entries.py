"""Entries: one per node, layer group and part, each with an extent of the pool and a record of the table.

A record is free, being written, sealed, abandoned (its chunk can be stored again, but a writer may still be using its
extent) or lingering (removed while a tier copies it).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.layout import Part, fewest, mask_of
from kvdepot.pool.extents import ExtentAllocator, extent_size
from kvdepot.pool.table import NO_RECORD, OWNER_BYTES, PARENT_BYTES, SEALED, IndexTable, Record, Writer
from kvdepot.wire.messages import EXTENT

_NO_LABEL: Final = 1 << 32  # above any label of a record


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


Extent: TypeAlias = tuple[int, int, int, int]  # record, header once sealed, offset and payload bytes of an entry
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
Room: TypeAlias = tuple[int, int, int]  # a free record, and the offset and the size in bytes of an extent


def pack_extent(chunk: int, group: int, part: int, extent: Extent) -> bytes:
    """Return the packed `EXTENT` of an entry."""
    record, header, offset, num_bytes = extent
    return EXTENT.pack(chunk, group, part & 0xFFFF, record, part >> 16, header, offset, num_bytes)


class Entries:
    """The records of each node, and their extents and bytes."""

    def __init__(self, nodes: Nodes, table: IndexTable, extents: ExtentAllocator, quotas: QuotaTable) -> None:
        self.num_sealed = 0
        self.abandoned: dict[int, int] = {}  # labels of records that belong to no node any more
        self.lingering: set[int] = set()  # records that were removed while a tier copies them
        self._nodes = nodes
        self._table = table
        self._extents = extents
        self._quotas = quotas
        self._first = make_column("I", nodes.tree.capacity)
        # Next record of the same node; of a free record: the next free record.
        self._next = make_column("I", table.num_records)
        self._node_of = make_column("I", table.num_records)
        self._writing_share = make_column("I", table.num_records)  # share + 1 of an unfinished entry, else 0
        self._free = NO_RECORD  # the first freed record
        self.num_known = 0  # records that were ever used
        self._readers: dict[int, int] = {}  # number of copies to tiers, by record

    # --- reading --------------------------------------------------------------------------------------------------

    def of(self, node: int) -> Iterator[int]:
        """Yield the records of a node, sealed or being written."""
        record = self._first[node]
        while record != NO_RECORD:
            yield record
            record = self._next[record]

    def is_ghost(self, node: int) -> bool:
        """Return whether a node has no entries (any more)."""
        return self._first[node] == NO_RECORD

    def is_sealed(self, record: int) -> bool:
        """Return whether an entry is sealed."""
        return self._table.is_sealed(record)

    def sealed(self, node: int) -> list[int]:
        """Return the sealed records of a node."""
        is_sealed, record = self._table.is_sealed, self._first[node]
        found: list[int] = []
        while record != NO_RECORD:
            if is_sealed(record):
                found.append(record)
            record = self._next[record]
        return found

    def has_sealed(self, node: int) -> bool:
        """Return whether a node has a sealed entry, so that it is listed in its eviction policy."""
        record = self._first[node]
        while record != NO_RECORD and not self._table.is_sealed(record):
            record = self._next[record]
        return record != NO_RECORD

    def find(self, node: int, group: int, part: int) -> int | None:
        """Return the record of an entry, sealed or being written. None if there is no such entry."""
        place = group, part
        record = self._first[node]
        while record != NO_RECORD:
            if self._table.place_of(record) == place:
                return record
            record = self._next[record]
        return None

    def has(self, node: int, group: int, part: int) -> bool:
        """Return whether all cells of a part are present or being written, in one entry or several."""
        return self.find(node, group, part) is not None or not self._cells(node, group, part)[1]

    def _cells(self, node: int, group: int, part: int) -> tuple[int, int]:
        """Return two masks of a part's cells: those that entries have or are being written with, and the rest."""
        heads, here = self._nodes.space_of(node).heads[group], 0
        for record in self.of(node):
            number, other = self._table.place_of(record)
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
        record = self.find(node, place.group, place.part)
        if record is None or self._table.check_of(record) != place.check:
            return None
        return self._table.sealed_entry(record)

    def cover(self, node: int, place: PartPlace) -> list[tuple[int, Extent]]:
        """Return the fewest sealed entries, with their parts, that together have all cells of a part (`layout.fewest`).

        Empty if cells are missing.
        """
        here: dict[int, int] = {}
        for record in self.of(node):
            group, part = self._table.place_of(record)
            if group == place.group and self.is_sealed(record) and self._table.check_of(record) == place.check:
                here[part] = record
        found: list[tuple[int, Extent]] = []
        for part in fewest(place.part, tuple(here), self._nodes.space_of(node).heads[place.group]):
            record = here[part]
            found.append((part, (record, self._table.header(record), *self._table.extent(record))))
        return found

    def node_of(self, record: int) -> int:
        """Return the node of a record in use, `NO_NODE` if it was abandoned."""
        return self._node_of[record]

    def is_whole(self, record: int) -> int:
        """Return the bit of the record's group if all cells of the group are sealed, else 0."""
        group, part = self._table.place_of(record)
        return self.whole_bit(self._node_of[record], group, part)

    def whole_bit(self, node: int, group: int, sealed: int | None = None) -> int:
        """Return the bit of a group if all cells of its plane are sealed, else 0. The part `sealed` is known to be."""
        space = self._nodes.space_of(node)
        missing, heads = space.cells[group], space.heads[group]
        if sealed is not None:
            missing &= ~mask_of(sealed, heads)
        record = self._first[node]
        while missing and record != NO_RECORD:
            number, part = self._table.place_of(record)
            if number == group and self._table.is_sealed(record):
                missing &= ~mask_of(part, heads)
            record = self._next[record]
        return 0 if missing else 1 << group

    # --- writing --------------------------------------------------------------------------------------------------

    def add_nodes(self, nodes: Iterable[int]) -> None:
        """Initialise nodes without entries."""
        for node in nodes:
            self._first[node] = NO_RECORD

    @property
    def has_free_record(self) -> bool:
        """Whether `take_record` may be called."""
        return self._free != NO_RECORD or self.num_known < self._table.num_records

    def take_record(self) -> int:
        """Take a free record. There must be one."""
        record = self._free
        if record == NO_RECORD:
            self.num_known += 1
            return self.num_known - 1
        self._free = self._next[record]
        return record

    def give_back(self, record: int) -> None:
        """Return a record to the free list."""
        self._next[record], self._free = self._free, record

    def begin(self, run: NewRun, nodes: Sequence[int], wanted: Sequence[Wanted], room: Sequence[Room]) -> list[Begun]:
        """Fill a record for each wanted entry of a run, and hold its chunk. All chunks have nodes."""
        tree, labels = self._nodes.tree, self._nodes.label
        begun: list[Begun] = []
        for (chunk, place), (record, offset, size) in zip(wanted, room, strict=True):
            node, num_bytes = nodes[chunk], place.num_bytes
            key, parent, share = tree.keys[node], tree.parent[node], tree.share[node]
            assert key is not None
            header = self._table.write(
                record,
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
            self._link(record, node)
            tree.holds[node] += 1
            self._begin_writing(record, share, size)
            self._quotas.account(labels[node], share, size)  # the label and the share of the chunk's first entry
            begun.append((chunk, place, (record, header, offset, num_bytes)))
        return begun

    def seal(self, records: Sequence[int], now: int, checksums: bytes) -> list[tuple[int, bool, int]]:
        """Mark entries as sealed: their bytes are in place.

        Returns:
            for each entry its node, whether it is the first sealed entry there, and the bit of its group if that is
            whole.
        """
        table = self._table
        sealed: list[tuple[int, bool, int]] = []
        for place, record in enumerate(records):
            node = self._node_of[record]
            is_alone = self._first[node] == record and self._next[record] == NO_RECORD  # the common case
            is_first = is_alone or not self.has_sealed(node)
            table.seal(record, now, checksums[place * OWNER_BYTES : (place + 1) * OWNER_BYTES] or bytes(OWNER_BYTES))
            (group, part), (_, num_bytes) = table.place_of(record), table.extent(record)
            share, self._writing_share[record] = self._writing_share[record], 0
            if share:
                self._quotas.writing_bytes[share - 1] -= extent_size(num_bytes)
            sealed.append((node, is_first, self.whole_bit(node, group, part)))
        self.num_sealed += len(records)
        return sealed

    def restore(self, record: Record, node: int) -> None:
        """Take over a sealed entry of an earlier server. Its extent is taken already."""
        self._link(record.number, node)
        self._quotas.account(self._nodes.label[node], self._nodes.tree.share[node], extent_size(record.num_bytes))
        self.num_sealed += 1

    def restore_unfinished(self, record: Record) -> None:
        """Take over an unfinished entry as abandoned. Its extent counts against its tenant."""
        share, size = self._quotas.share_of(record.label), extent_size(record.num_bytes)
        self._node_of[record.number] = NO_NODE
        # If the end of the file of names was lost, the label's number may later be assigned to another tenant.
        label = record.label if self._quotas.tenant_of(record.label) else _NO_LABEL
        self.abandoned[record.number] = label
        self._quotas.account(label, share, size)
        self._begin_writing(record.number, share, size)

    def move(self, node: int, share: int) -> None:
        """Count the entries of a node against another share. The caller changes the node."""
        quotas = self._quotas
        for record in self.of(node):
            size = extent_size(self._table.extent(record)[1])
            quotas.move(size, self._nodes.tree.share[node], share)
            if self._writing_share[record]:
                self._end_writing(record)
                self._begin_writing(record, share, size)

    # --- taking back ----------------------------------------------------------------------------------------------

    def remove(self, record: int) -> None:
        """Free an entry, sealed or not. While a tier copies it, its extent stays taken until `end_reading`."""
        node = self._node_of[record]
        self._unlink(record, node)
        freed: list[tuple[int, int]] = []
        self._free_record(record, node, freed)
        self._extents.free_all(freed)

    def remove_all(self, nodes: Iterable[int]) -> None:
        """Free all entries of nodes, like `remove`."""
        freed: list[tuple[int, int]] = []
        for node in nodes:
            record, self._first[node] = self._first[node], NO_RECORD
            while record != NO_RECORD:
                following = self._next[record]
                self._free_record(record, node, freed)
                record = following
        self._extents.free_all(freed)

    def _free_record(self, record: int, node: int, freed: list[tuple[int, int]]) -> None:
        """Free the record of an entry. Add its extent to `freed`, which the caller frees, unless a tier copies it."""
        extent = self._table.extent(record)
        self._quotas.account(self._nodes.label[node], self._nodes.tree.share[node], -extent_size(extent[1]))
        if self._writing_share[record]:
            self._end_writing(record)
        else:
            self.num_sealed -= 1
        self._table.free(record)  # the header changes before the extent is reused
        self._node_of[record] = NO_NODE
        if record in self._readers:
            self.lingering.add(record)
            return
        freed.append(extent)
        self.give_back(record)

    def abandon(self, record: int) -> None:
        """Detach an unfinished entry from its node. Its extent stays taken until `free_abandoned`."""
        node = self._node_of[record]
        self.abandoned[record] = self._nodes.label[node]
        self._unlink(record, node)
        self._node_of[record] = NO_NODE

    def free_abandoned(self, record: int) -> None:
        """Free an abandoned entry whose writer has ended."""
        offset, num_bytes = self._table.extent(record)
        self._quotas.account(self.abandoned.pop(record), self._writing_share[record] - 1, -extent_size(num_bytes))
        self._end_writing(record)
        self._table.free(record)
        self._extents.free(offset, num_bytes)
        self.give_back(record)

    def begin_reading(self, record: int) -> None:
        """Keep the extent of a sealed entry while it is being copied to a tier."""
        self._readers[record] = self._readers.get(record, 0) + 1

    def is_reading(self, record: int) -> bool:
        """Return whether an entry is being copied to a tier."""
        return record in self._readers

    def end_reading(self, record: int) -> None:
        """Undo one `begin_reading`. If the entry was removed meanwhile, free its extent."""
        self._readers[record] -= 1
        if self._readers[record]:
            return
        del self._readers[record]
        if record in self.lingering:
            self.lingering.remove(record)
            self._extents.free(*self._table.extent(record))
            self.give_back(record)

    # --- links and bytes ------------------------------------------------------------------------------------------

    def _link(self, record: int, node: int) -> None:
        self._node_of[record] = node
        self._next[record] = self._first[node]
        self._first[node] = record

    def _unlink(self, record: int, node: int) -> None:
        following = self._next[record]
        if self._first[node] == record:
            self._first[node] = following
            return
        before = self._first[node]
        while self._next[before] != record:
            before = self._next[before]
        self._next[before] = following

    def _begin_writing(self, record: int, share: int, size: int) -> None:
        """Count a record as unfinished until `_end_writing`."""
        self._writing_share[record] = share + 1
        self._quotas.writing_bytes[share] += size

    def _end_writing(self, record: int) -> None:
        share, self._writing_share[record] = self._writing_share[record] - 1, 0
        self._quotas.writing_bytes[share] -= extent_size(self._table.extent(record)[1])

    def check_integrity(self, sealed_groups: Sequence[int]) -> None:
        """Check that records, nodes, extents, quotas and `sealed_groups` of the nodes agree.

        Raises:
            IntegrityError: they disagree.
        """
        records = {record.number: record for record in self._table.records()}
        require(self.num_sealed == sum(r.state == SEALED for r in records.values()), "sealed entries are miscounted")
        self._extents.check_integrity(self._table.extent(number) for number in {*records, *self.lingering})
        quotas = self._quotas
        used, writing, of_labels = [0] * quotas.num_shares, [0] * quotas.num_shares, Counter[int]()
        for number, record in records.items():
            node, size = self._node_of[number], extent_size(record.num_bytes)
            is_linked = node != NO_NODE
            share = self._nodes.tree.share[node] if is_linked else self._writing_share[number] - 1
            used[share] += size
            of_labels[self._nodes.label[node] if is_linked else self.abandoned[number]] += size
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
        require(linked == sum(self._node_of[number] != NO_NODE for number in records), "records are in no list")

    def _check_node(self, space: Space, node: int, sealed_groups: int) -> int:
        """Check a node, and return its number of entries."""
        tree, own = self._nodes.tree, list(self.of(node))
        places = [self._table.place_of(record) for record in own]
        require(len(places) == len(set(places)), f"node {node} has an entry twice")
        whole = 0
        for number in range(len(space.spec.groups)):
            whole |= self.whole_bit(node, number)
        require(whole == sealed_groups, f"node {node} has other groups than it says")
        num_writing = sum(not self.is_sealed(record) for record in own)
        require(tree.holds[node] >= num_writing, f"node {node} is not held for {num_writing} unfinished entries")
        require(bool(own or tree.num_children[node] or tree.holds[node]), f"node {node} is an idle ghost")
        return len(own)
