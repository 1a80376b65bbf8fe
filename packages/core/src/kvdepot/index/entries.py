"""Entries: one per node, layer group and part, each with an extent of the pool and a record of the table.

A record is free, being written, sealed, abandoned (its chunk can be stored again, but a writer may still be using its
extent) or lingering (removed while a tier copies it).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple, TypeAlias, cast

from kvdepot.errors import require
from kvdepot.index.columns import make_column
from kvdepot.index.quotas import QuotaTable
from kvdepot.index.tree import NO_NODE, Nodes, Space
from kvdepot.layout import Part, fewest, layers_of_both, mask_of
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES, ExtentAllocator, extent_size
from kvdepot.pool.table import OWNER_BYTES, SEALED, Content, Entry, IndexTable, NewRecord, Record, Writer, place_number
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
    number: int = field(init=False)  # `place_number`
    extent_bytes: int = field(init=False)  # of an entry's extent

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", place_number(self.group, self.part))
        object.__setattr__(self, "extent_bytes", extent_size(self.num_bytes))

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


def pack_extents(extents: Iterable[tuple[int, int, int, Extent]]) -> bytes:
    """Return the packed `EXTENT` of each entry, given with its chunk, group and part."""
    pack = EXTENT.pack
    return b"".join(
        [
            pack(chunk, group, part & 0xFFFF, entry, part >> 16, header, offset, num_bytes)
            for chunk, group, part, (entry, header, offset, num_bytes) in extents
        ]
    )


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
        self._place_of = make_column("I", table.num_records)  # numbers of `_places`
        self._places: dict[int, int] = {}  # by `place_number`
        self._free = _NO_ENTRY  # of the record freed last
        self._num_given_back = 0
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
        return self._find(node, self._places.get(place_number(group, part)))

    def _find(self, node: int, place: int | None) -> Entry | None:
        place_of, following, entry = self._place_of, self._next, self._first[node]
        while entry != _NO_ENTRY:
            if place_of[entry] == place:
                return entry
            entry = following[entry]
        return None

    def _number_of(self, place: int) -> int:
        """Return the number of a place. Number it if it is new."""
        number = self._places.get(place)
        if number is None:
            number = self._places[place] = len(self._places)
        return number

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

    def bytes_of(self, nodes: Iterable[int]) -> list[int]:
        """Return the bytes that the extents of each node's entries take."""
        first, following, num_bytes_of, page = self._first, self._next, self._table.sizes, EXTENT_ALIGNMENT_BYTES
        sizes: list[int] = []
        for node in nodes:
            entry, size = first[node], 0
            while entry != _NO_ENTRY:
                size += -(-num_bytes_of[entry] // page) * page  # not `extent_size`: a call for each
                entry = following[entry]
            sizes.append(size)
        return sizes

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

    def readable(
        self, nodes: Sequence[int], places: Sequence[PartPlace], starts: Sequence[int], most: int
    ) -> tuple[bytes, int]:
        """Return the packed extents of the entries that a worker needs of consecutive chunks.

        Args:
            nodes: the node of each chunk; `NO_NODE` for one that lookups do not find.
            places: the worker's place in each group.
            starts: by group, the first chunk that it needs.
            most: the most extents. A part is read from several entries if no entry has all of it.

        Returns:
            the extents, and the number of chunks up to the first one that lacks bytes.
        """
        first, following, place_of = self._first, self._next, self._place_of
        headers, pages, sizes, checks = self._table.headers, self._table.pages, self._table.sizes, self._table.checks
        pack, extents = EXTENT.pack, list[bytes]()
        groups = [
            (start, place, self._places.get(place.number), place.part & 0xFFFF, place.part >> 16)
            for start, place in zip(starts, places, strict=True)
        ]
        for chunk, node in enumerate(nodes):
            num_before = len(extents)
            for start, place, wanted, low, high in groups:
                if chunk < start:
                    continue
                entry = _NO_ENTRY if node == NO_NODE else first[node]
                while entry != _NO_ENTRY and place_of[entry] != wanted:
                    entry = following[entry]
                if entry != _NO_ENTRY and headers[entry] & 0xFF == SEALED and checks[entry] == place.check:
                    offset = pages[entry] * EXTENT_ALIGNMENT_BYTES
                    extents.append(pack(chunk, place.group, low, entry, high, headers[entry], offset, sizes[entry]))
                    continue
                parts = [] if node == NO_NODE else self.cover(node, place)
                if not parts or len(extents) + len(parts) > most:
                    return b"".join(extents[:num_before]), chunk
                extents += [pack_extents([(chunk, place.group, *part)]) for part in parts]
        return b"".join(extents), len(nodes)

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
        first = self._first
        for node in nodes:
            first[node] = _NO_ENTRY

    @property
    def num_free(self) -> int:
        """The number of records that `take` can return."""
        return self._table.num_records - self.num_known + self._num_given_back

    def take(self, count: int) -> list[Entry]:
        """Take free records, and name their entries. There must be as many."""
        taken: list[Entry] = []
        entry, following = self._free, self._next
        while len(taken) < count and entry != _NO_ENTRY:
            taken.append(entry)
            entry = following[entry]
        self._free = entry
        self._num_given_back -= len(taken)
        new = count - len(taken)
        taken += cast("Iterable[Entry]", range(self.num_known, self.num_known + new))
        self.num_known += new
        return taken

    def give_back(self, entries: Iterable[Entry]) -> None:
        """Return the records of entries to the free list."""
        following, free = self._next, self._free
        for entry in entries:
            following[entry], free = free, entry
            self._num_given_back += 1
        self._free = free

    def begin(
        self,
        run: NewRun,
        nodes: Sequence[int],
        wanted: Sequence[Wanted],
        entries: Sequence[Entry],
        offsets: Sequence[int],
    ) -> list[Begun]:
        """Fill a free record for each wanted entry of a run, and hold its chunk. All chunks have nodes."""
        tree, all_labels, all_shares = self._nodes.tree, self._nodes.label, self._nodes.tree.share
        all_keys, all_parents, holds = tree.keys, tree.parent, tree.holds
        first, following, node_of, writing_share = self._first, self._next, self._node_of, self._writing_share
        place_of, number_of = self._place_of, self._number_of
        numbers = {
            place.number: number_of(place.number) for place in {id(place): place for _, place in wanted}.values()
        }
        own = [nodes[chunk] for chunk, _ in wanted]
        # The label and the share of a chunk's first entry: another tenant may have begun the chunk.
        shares = [all_shares[node] for node in own]
        self._account([all_labels[node] for node in own], shares, [place.extent_bytes for _, place in wanted])
        for node, entry, share, (_, place) in zip(own, entries, shares, wanted, strict=True):
            node_of[entry], following[entry] = node, first[node]
            first[node] = entry
            holds[node] += 1
            place_of[entry] = numbers[place.number]
            writing_share[entry] = share + 1
        above = [all_parents[node] for node in own]
        records: Iterable[NewRecord] = zip(
            entries,
            [place.number for _, place in wanted],
            offsets,
            [place.num_bytes for _, place in wanted],
            [all_keys[node] or b"" for node in own],
            [all_keys[node] or b"" if node != NO_NODE else b"" for node in above],
            [run.first_chunk + chunk for chunk, _ in wanted],
            [place.check for _, place in wanted],
            strict=True,
        )
        headers = self._table.write(
            records,
            space=run.space.number,
            label=run.label,
            writer=run.writer,
            owner=run.owner,
        )
        return [
            (chunk, place, (entry, header, offset, place.num_bytes))
            for (chunk, place), entry, offset, header in zip(wanted, entries, offsets, headers, strict=True)
        ]

    def _account(self, labels: Sequence[int], shares: Sequence[int], sizes: Sequence[int]) -> None:
        """Count the extents of new unfinished entries."""
        writing_bytes, account = self._quotas.writing_bytes, self._quotas.account
        if len(set(labels)) == len(set(shares)) == 1:  # the common case
            labels, shares, sizes = labels[:1], shares[:1], [sum(sizes)]
        for label, share, size in zip(labels, shares, sizes, strict=True):
            account(label, share, size)
            writing_bytes[share] += size

    def seal(self, entries: Sequence[Entry], now: int, checksums: bytes) -> tuple[list[int], list[int], list[int]]:
        """Mark entries as sealed: their bytes are in place.

        Returns:
            the node of each entry; the nodes that had no sealed entry before; the bit of each entry's group if that is
            whole, else 0.
        """
        first, following, writing_share, node_of = self._first, self._next, self._writing_share, self._node_of
        spaces, space_number, writing_bytes = self._nodes.spaces, self._nodes.space_number, self._quotas.writing_bytes
        nodes = [node_of[entry] for entry in entries]
        new: dict[int, None] = {}
        for entry, node in zip(entries, nodes, strict=True):
            is_alone = first[node] == entry and following[entry] == _NO_ENTRY  # the common case
            if is_alone or not self.has_sealed(node):
                new[node] = None
        self._table.seal(entries, now, checksums)
        places, place_of, sizes, groups = [*self._places], self._place_of, self._table.sizes, list[int]()
        page = EXTENT_ALIGNMENT_BYTES
        for entry, node in zip(entries, nodes, strict=True):
            share = writing_share[entry]
            if share:  # else it is of an earlier server
                writing_share[entry] = 0
                writing_bytes[share - 1] -= -(-sizes[entry] // page) * page
            # A part that is less than its plane asks for the node's other entries.
            place = places[place_of[entry]]
            group = spaces[space_number[node]].whole.get(place)
            groups.append(self.whole_bit(node, place & 0xFFFF) if group is None else group)
        self.num_sealed += len(entries)
        return nodes, [*new], groups

    def restore(
        self,
        space: Space,
        found: Iterable[tuple[Entry, int, Content]],
        sealed_groups: "memoryview[int]",
    ) -> list[Entry]:
        """Take over sealed entries of an earlier server, whose extents are taken already.

        Leave an entry if its node has one of the same place.

        Args:
            space: the space of all entries.
            found: the entries, each with its node and its record.
            sealed_groups: by node; gets the bits of groups that become whole.

        Returns:
            the entries that were taken over.
        """
        first, following, node_of, place_of = self._first, self._next, self._node_of, self._place_of
        last_use, labels, numbers = self._nodes.last_use, self._nodes.label, self._places
        page, num_pages = EXTENT_ALIGNMENT_BYTES, defaultdict[int, int](int)  # by label
        taken: list[Entry] = []
        for entry, node, (place, num_bytes, _, _, _, used) in found:
            number = numbers.get(place)
            if number is None:
                number = self._number_of(place)
            other = head = first[node]
            while other != _NO_ENTRY and place_of[other] != number:
                other = following[other]
            if other != _NO_ENTRY:
                continue
            first[node], following[entry], node_of[entry], place_of[entry] = entry, head, node, number
            if last_use[node] < used:  # noqa: PLR1730  # a call for each entry
                last_use[node] = used
            whole = space.whole.get(place)
            sealed_groups[node] |= self.whole_bit(node, place & 0xFFFF) if whole is None else whole
            num_pages[labels[node]] += -(-num_bytes // page)
            taken.append(entry)
        for label, count in num_pages.items():
            self._quotas.account(label, self._quotas.share_of(label), count * page)
        self.num_sealed += len(taken)
        return taken

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
            size = extent_size(self._table.sizes[entry])
            quotas.move(size, self._nodes.tree.share[node], share)
            if self._writing_share[entry]:
                self._end_writing(entry)
                self._begin_writing(entry, share, size)

    # --- taking back ----------------------------------------------------------------------------------------------

    def remove(self, entry: Entry) -> None:
        """Free an entry, sealed or not. While a tier copies it, its extent stays taken until `end_reading`."""
        node = self._node_of[entry]
        self._unlink(entry, node)
        self._free_records([entry], [node])

    def remove_all(self, nodes: Iterable[int]) -> None:
        """Free all entries of nodes, like `remove`."""
        first, following = self._first, self._next
        entries: list[Entry] = []
        owners: list[int] = []
        for node in nodes:
            entry, first[node] = first[node], _NO_ENTRY
            while entry != _NO_ENTRY:
                entries.append(entry)
                owners.append(node)
                entry = following[entry]
        self._free_records(entries, owners)

    def _free_records(self, entries: Sequence[Entry], nodes: Sequence[int]) -> None:
        """Free the records and extents of entries that their nodes no longer list."""
        node_of, writing_share, readers, quotas = self._node_of, self._writing_share, self._readers, self._quotas
        labels, shares = self._nodes.label, self._nodes.tree.share
        freed = self._table.free(entries)  # the headers change before the extents are reused
        page = EXTENT_ALIGNMENT_BYTES
        sizes = [-(-num_bytes // page) * page for _, num_bytes in freed]
        owners = {(labels[node], shares[node]) for node in nodes}
        if len(owners) == 1:  # the common case
            quotas.account(*owners.pop(), -sum(sizes))
        else:
            for node, size in zip(nodes, sizes, strict=True):
                quotas.account(labels[node], shares[node], -size)
        for place in [place for place, entry in enumerate(entries) if writing_share[entry]]:
            quotas.writing_bytes[writing_share[entries[place]] - 1] -= sizes[place]
            writing_share[entries[place]] = 0
            self.num_sealed += 1
        self.num_sealed -= len(entries)
        for entry in entries:
            node_of[entry] = NO_NODE
        if readers and not readers.keys().isdisjoint(entries):
            kept = [entry not in readers for entry in entries]
            self.lingering.update(entry for entry in entries if entry in readers)
            freed, entries = [*compress(freed, kept)], [*compress(entries, kept)]
        self._extents.free(freed)
        self.give_back(entries)

    def abandon(self, entry: Entry) -> None:
        """Detach an unfinished entry from its node. Its extent stays taken until `free_abandoned`."""
        node = self._node_of[entry]
        self.abandoned[entry] = self._nodes.label[node]
        self._unlink(entry, node)
        self._node_of[entry] = NO_NODE

    def free_abandoned(self, entry: Entry) -> None:
        """Free an abandoned entry whose writer has ended."""
        size = extent_size(self._table.sizes[entry])
        self._quotas.account(self.abandoned.pop(entry), self._writing_share[entry] - 1, -size)
        self._end_writing(entry)
        self._extents.free(self._table.free([entry]))
        self.give_back([entry])

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
                self._extents.free([self._table.extent(entry)])
                self.give_back([entry])

    # --- links and bytes ------------------------------------------------------------------------------------------

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
        self._quotas.writing_bytes[share] -= extent_size(self._table.sizes[entry])

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
