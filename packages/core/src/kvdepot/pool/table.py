"""The index table: one record of 128 bytes per entry, in memory that outlives the server.

The server writes it. Workers map it read only. A record's **header** is one 64-bit word with generation and state. It
is written last and in one store, so that a record is never visible half-written. Each change of an extent's content
raises the generation. After a worker has copied from the pool, it compares the header with the one in its plan (a
seqlock), and treats a difference as a miss. Each record has a checksum of its fields. After a restart, records that do
not verify are dropped.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType, Self, TypeAlias, cast

from kvdepot.config import format_size
from kvdepot.errors import PoolError
from kvdepot.keys import DIGEST_BYTES
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES

RECORD_BYTES: Final = 128  # two lines of the cache: no record shares a line with another
HEADER_PAGE_BYTES: Final = 4096  # a page before the records
TABLE_VERSION: Final = 5  # another one starts with an empty pool
PARENT_BYTES: Final = 16  # leading bytes of the parent's key: enough to identify it among the chunks of one depth
OWNER_BYTES: Final = 16  # in place of which a sealed record has a checksum of as many bytes
MAXIMUM_ENTRY_BYTES: Final = (1 << 32) - 1  # records have 32 bits for it

Entry = NewType("Entry", int)
"""The opaque name of an entry: finds its record in the table. Only `pool` and `index` make one or calculate with it.

`ChunkIndex.reserve` gives it, and `restore` for an unfinished entry of an earlier server. It stays valid until the
entry is evicted, removed or discarded. Afterwards it may name another entry, whose record has another header. So while
you wait, hold the entry (`ChunkIndex.begin_reading`), or keep its header and compare. Peers name entries by number and
header, which `IndexTable.sealed_record` checks.
"""

FREE: Final = 0
WRITING: Final = 0x5A  # fewer than eight flipped bits make neither of it and SEALED the other
SEALED: Final = 0xA5

_STATE_MASK: Final = 0xFF  # the low bits of a header; the generation is above them
_LAST_GENERATION: Final = (1 << 56) - 1
MAGIC: Final = b"KVDEPOTX"
_FILE_HEADER: Final = struct.Struct("<8sIIQQ16sI")  # magic, version, record size, records, pool bytes, pool id, crc
_GENERATION: Final = 8  # word in the header page: the generation that ties the table to its pool
_HOLDER_OFFSET: Final = 128  # in the header page: length of the text, and the text
# header (in the crc: generation alone), space, group and part (16 and 48 bits), offset in pages, bytes, key, start of
# the parent's key, depth, label, check of the page sizes, start time and pid of the writer
_FIELDS: Final = struct.Struct("<QIQII32s16sIIIQI")
# crc of the fields; owner (16 bytes that identify the worker within its process; once sealed, the payload's checksum);
# last use. The crc covers neither owner nor last use, so sealing changes only these: a wrong checksum is a miss.
_END: Final = struct.Struct("<I16sQ")
_PLACE_OFFSET: Final = 12  # within a record, like the following
_EXTENT_OFFSET: Final = 20
_KEY_OFFSET: Final = 28
_CHECK_OFFSET: Final = 84
_WRITER_OFFSET: Final = 88
CRC_OFFSET: Final = _FIELDS.size
# Of a record, parts that many records are read for at once: space, place, page, bytes, depth, label and crc; and place,
# bytes, key, parent, label and last use.
_SUMMARY: Final = struct.Struct("<8xIQII48xII16xI24x")
_CONTENT: Final = struct.Struct("<12xQ4xI32s16s4xI36xQ")
_CHECKSUM_OFFSET: Final = 104  # before sealing: the owner
_PLACE: Final = struct.Struct("<Q")
_WRITER: Final = struct.Struct("<QI")
_U32: Final = struct.Struct("<I")


NewRecord: TypeAlias = tuple[Entry, int, int, int, bytes, bytes, int, int]
"""Entry, place (`place_number`), offset, payload bytes, key, the parent's key (empty without one), depth, and check."""

Summary: TypeAlias = tuple[Entry, int, int, int, int, int, int, int]
"""Entry, state, space, place (`place_number`), offset, payload bytes, depth, and label."""

Content: TypeAlias = tuple[int, int, bytes, bytes, int, int]
"""Place (`place_number`), payload bytes, key, the first 16 bytes of the parent's key, label, and last use."""


def place_number(group: int, part: int) -> int:
    """Return the number of a part of a layer group, as records have it."""
    return group | part << 16


@dataclass(frozen=True, slots=True)
class Writer:
    """A process that may be writing an extent.

    A process of another PID namespace has no pid here. Then `start_time` is the offset of a byte of the pool's file
    that stays locked as long as the process maps the pool (`kvdepot.pool.files.open_with_lock`).
    """

    pid: int = 0
    start_time: int = 0  # clock ticks since boot, from /proc: distinguishes a process from a later one with its pid


@dataclass(frozen=True, slots=True)
class Record:
    """One decoded record."""

    entry: Entry
    state: int
    space: int
    group: int
    part: int
    offset: int
    num_bytes: int
    key: bytes
    parent: bytes  # the first 16 bytes of the parent's key, zeros without one
    depth: int
    check: int  # 32 bits that distinguish page sizes
    label: int  # number of the tenant, model and weights that it belongs to
    writer: Writer
    owner: bytes
    last_use: int


def table_size_bytes(num_records: int) -> int:
    """Return the size in bytes of a table for `num_records`."""
    return HEADER_PAGE_BYTES + num_records * RECORD_BYTES


def holder_of(header_page: bytes) -> str:
    """Return the server named in the table's header page, "" if there is none."""
    (length,) = _U32.unpack_from(header_page, _HOLDER_OFFSET) if len(header_page) >= HEADER_PAGE_BYTES else (0,)
    start = _HOLDER_OFFSET + _U32.size
    return header_page[start : start + min(length, HEADER_PAGE_BYTES - start)].decode(errors="replace")


class TableReader:
    """A client's view of the table: read only, while the server changes it."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._memory = memory
        self.headers = memoryview(memory).cast("Q")

    def is_same(self, entry: Entry, header: int) -> bool:
        """Return whether a record still has the header from the plan, so that its extent was not reused."""
        return self.headers[(HEADER_PAGE_BYTES + entry * RECORD_BYTES) // 8] == header

    def holds(self, entry: Entry, header: int, key: bytes) -> bool:
        """Return whether a record has this header and belongs to the chunk with this key."""
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
        found = self._memory[base + _KEY_OFFSET : base + _KEY_OFFSET + DIGEST_BYTES]
        return self.headers[base // 8] == header and found == key

    def checksum_of(self, entry: Entry) -> bytes:
        """Return the checksum of a sealed record's payload, zeros for none.

        It is valid only while the header is unchanged.
        """
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + _CHECKSUM_OFFSET
        return bytes(self._memory[base : base + OWNER_BYTES])


class IndexTable:
    """The records, in a mapped file or in plain memory.

    Attributes:
        headers: by entry, like the following, which only `write` changes.
        pages: where its extent starts, in pages.
        sizes: its payload bytes.
        checks: the check of its writer's page sizes.
    """

    def __init__(self, memory: mmap.mmap | bytearray, num_records: int) -> None:
        self.num_records = num_records
        self._memory = memory
        self._view = memoryview(memory)
        self._header_words = self._view[:HEADER_PAGE_BYTES].cast("Q")
        # Only these two modify records. A crash leaves each header either old or new.
        self._bytes = self._view
        self.headers = self._view[HEADER_PAGE_BYTES:].cast("Q")[:: RECORD_BYTES // 8]
        words = self._view[HEADER_PAGE_BYTES:].cast("I")
        self.pages = words[_EXTENT_OFFSET // 4 :: RECORD_BYTES // 4]
        self.sizes = words[_EXTENT_OFFSET // 4 + 1 :: RECORD_BYTES // 4]
        self.checks = words[_CHECK_OFFSET // 4 :: RECORD_BYTES // 4]

    @classmethod
    def in_memory(cls, num_records: int) -> Self:
        """Return a private table that ends with the process."""
        return cls(bytearray(table_size_bytes(num_records)), num_records)

    @classmethod
    def create(cls, path: Path, num_records: int, pool_size_bytes: int, pool_id: bytes) -> Self:
        """Create an empty, fully allocated table file.

        Raises:
            PoolError: there is no room.
            OSError: the file exists, or cannot be created.
        """
        size = table_size_bytes(num_records)
        fields = _FILE_HEADER.pack(MAGIC, TABLE_VERSION, RECORD_BYTES, num_records, pool_size_bytes, pool_id, 0)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # First: the magic marks the file as a depot's.
            os.pwrite(fd, fields[:-4] + _U32.pack(zlib.crc32(fields[:-4])), 0)
            os.posix_fallocate(fd, 0, size)
            memory = mmap.mmap(fd, size)
        except (OSError, OverflowError) as error:
            raise PoolError(
                f"no room for the index of {num_records:,} entries ({format_size(size)}) in {path.parent}"
                f" ({error}): lower --max-entries or --pool-size, or choose another --pool-dir"
            ) from error
        finally:
            os.close(fd)
        return cls(memory, num_records)

    @classmethod
    def open(cls, path: Path, pool_size_bytes: int, pool_id: bytes) -> Self:
        """Open the table of an earlier server.

        Raises:
            PoolError: the file does not fit this pool and this version; the text gives the reason.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            fields = os.pread(fd, _FILE_HEADER.size, 0)
            if len(fields) < _FILE_HEADER.size or fields[:8] != MAGIC:
                raise PoolError(f"{path.name} is not an index table")
            _, version, record_bytes, num_records, pool_bytes, table_pool_id, crc = _FILE_HEADER.unpack(fields)
            if crc != zlib.crc32(fields[:-4]):
                raise PoolError(f"{path.name}: its header is damaged")
            if (version, record_bytes) != (TABLE_VERSION, RECORD_BYTES):
                raise PoolError(f"{path.name} has table format {version}, this version writes {TABLE_VERSION}")
            if size != table_size_bytes(num_records):
                raise PoolError(f"{path.name} has {size} bytes instead of {table_size_bytes(num_records)}")
            if (pool_bytes, table_pool_id) != (pool_size_bytes, pool_id):
                raise PoolError(f"{path.name} belongs to another pool (of {pool_bytes} bytes)")
            return cls(mmap.mmap(fd, size), num_records)
        finally:
            os.close(fd)

    @property
    def generation(self) -> int:
        """The generation that ties the table to the pool: see `kvdepot.pool.files`."""
        return self._header_words[_GENERATION]

    @generation.setter
    def generation(self, number: int) -> None:
        self._header_words[_GENERATION] = number

    @property
    def holder(self) -> str:
        """The name of the server that uses the table, for other processes."""
        return holder_of(bytes(self._view[:HEADER_PAGE_BYTES]))

    @holder.setter
    def holder(self, text: str) -> None:
        raw = text.encode(errors="replace")[: HEADER_PAGE_BYTES - _HOLDER_OFFSET - _U32.size]
        _U32.pack_into(self._view, _HOLDER_OFFSET, len(raw))
        self._view[_HOLDER_OFFSET + _U32.size :][: len(raw)] = raw

    def write(self, records: Iterable[NewRecord], *, space: int, label: int, writer: Writer, owner: bytes) -> list[int]:
        """Fill free records and set their state to WRITING. Return the headers that they will have once sealed."""
        headers, content, fields_of, end_of, crc32 = self.headers, self._bytes, _FIELDS.pack, _END.pack, zlib.crc32
        start_time, pid = writer.start_time, writer.pid
        sealed: list[int] = []
        for entry, place, offset, num_bytes, key, parent, depth, check in records:
            base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
            generation = ((headers[entry] >> 8) + 1 & _LAST_GENERATION) << 8  # a damaged header may have the last one
            page = offset // EXTENT_ALIGNMENT_BYTES
            fields = fields_of(
                generation, space, place, page, num_bytes, key, parent, depth, label, check, start_time, pid
            )
            content[base : base + RECORD_BYTES] = fields + end_of(crc32(fields), owner, 0)
            # The state last: after a kill before it, the record is free, and nobody knows its extent.
            headers[entry] = generation | WRITING
            sealed.append(generation | SEALED)
        return sealed

    def seal(self, entries: Iterable[Entry], last_use: int, checksums: bytes = b"") -> None:
        """Mark records as sealed. The checksums of their payloads, packed, replace the owners; empty for none."""
        headers, content = self.headers, self._bytes
        used, nothing, start = last_use.to_bytes(8, "little"), bytes(OWNER_BYTES), 0
        for entry in entries:
            base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
            checksum = checksums[start : start + OWNER_BYTES] or nothing
            start += OWNER_BYTES
            content[base + _CHECKSUM_OFFSET : base + RECORD_BYTES] = checksum + used
            # The state last: after a kill before it, the entry is unfinished.
            headers[entry] = headers[entry] >> 8 << 8 | SEALED

    def free(self, entries: Iterable[Entry]) -> list[tuple[int, int]]:
        """Free records. Return the offset and the payload bytes of each.

        Readers see the change before the extents are reused.
        """
        headers, pages, sizes = self.headers, self.pages, self.sizes
        freed: list[tuple[int, int]] = []
        for entry in entries:
            headers[entry] = ((headers[entry] >> 8) + 1 & _LAST_GENERATION) << 8 | FREE
            freed.append((pages[entry] * EXTENT_ALIGNMENT_BYTES, sizes[entry]))
        return freed

    def header(self, entry: Entry) -> int:
        """Return the present header."""
        return self.headers[entry]

    def headers_of(self, entries: Iterable[Entry]) -> list[int]:
        """Return the present header of each entry."""
        return [self.headers[entry] for entry in entries]

    def state(self, entry: Entry) -> int:
        """Return `FREE`, `WRITING` or `SEALED`; another number if the record is damaged."""
        return self.headers[entry] & _STATE_MASK

    def is_sealed(self, entry: Entry) -> bool:
        """Whether the bytes of an entry are in place."""
        return self.headers[entry] & _STATE_MASK == SEALED

    def sealed_record(self, number: int, header: int) -> Record | None:
        """Decode the record of the entry that a peer names by number and header. None unless it is sealed with it."""
        if not 0 <= number < self.num_records:
            return None
        entry = Entry(number)
        return self.record(entry) if self.header(entry) == header and header & _STATE_MASK == SEALED else None

    def extent(self, entry: Entry) -> tuple[int, int]:
        """Return the offset and the payload bytes of a record in use."""
        return self.pages[entry] * EXTENT_ALIGNMENT_BYTES, self.sizes[entry]

    def num_bytes_of(self, entries: Iterable[Entry]) -> int:
        """Return the payload bytes of records in use, added up."""
        return sum([self.sizes[entry] for entry in entries])

    def check_of(self, entry: Entry) -> int:
        """Return the check of the writer's page sizes."""
        return self.checks[entry]

    def key_of(self, entry: Entry) -> bytes:
        """Return the key of the chunk of a record in use."""
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + _KEY_OFFSET
        return bytes(self._view[base : base + DIGEST_BYTES])

    def writer_of(self, entry: Entry) -> Writer:
        """Return the process that writes, or wrote, a record in use."""
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
        start_time, pid = _WRITER.unpack_from(self._view, base + _WRITER_OFFSET)
        return Writer(pid, start_time)

    def owner_of(self, entry: Entry) -> bytes:
        """Return the owner of a record that is not sealed: its worker within the writing process."""
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + _CHECKSUM_OFFSET
        return bytes(self._view[base : base + OWNER_BYTES])

    def place_of(self, entry: Entry) -> tuple[int, int]:
        """Return the group and the part's number of a record in use."""
        fields = _PLACE.unpack_from(self._view, HEADER_PAGE_BYTES + entry * RECORD_BYTES + _PLACE_OFFSET)[0]
        return fields & 0xFFFF, fields >> 16

    def record(self, entry: Entry) -> Record | None:
        """Decode one record; None if it is free or does not verify."""
        header = self.headers[entry]
        return self._read(entry, header) if header & _STATE_MASK in (WRITING, SEALED) else None

    def verified(self, first: int, stop: int) -> Iterator[Summary]:
        """Read the records from `first` to `stop` that are in use and verify, as `record` does one by one."""
        start, crc32 = HEADER_PAGE_BYTES + first * RECORD_BYTES, zlib.crc32
        content = bytearray(self._view[start : start + (stop - first) * RECORD_BYTES])
        states = bytes(content[::RECORD_BYTES])
        if not any(states):  # the end of a table that never was full
            return
        content[::RECORD_BYTES] = bytes(len(states))  # the checksums cover generations without states
        entries, in_use = cast("Iterable[Entry]", range(first, stop)), (SEALED, WRITING)
        with memoryview(content) as records:
            for entry, state, fields, base in zip(
                entries, states, _SUMMARY.iter_unpack(records), range(0, len(records), RECORD_BYTES), strict=True
            ):
                space, place, page, num_bytes, depth, label, crc = fields
                if state in in_use and crc32(records[base : base + CRC_OFFSET]) == crc:
                    yield entry, state, space, place, page * EXTENT_ALIGNMENT_BYTES, num_bytes, depth, label

    def contents(self, entries: Iterable[Entry]) -> list[Content]:
        """Return the contents of records in use."""
        view, unpack = self._view, _CONTENT.unpack_from
        return [unpack(view, HEADER_PAGE_BYTES + entry * RECORD_BYTES) for entry in entries]

    @property
    def entries(self) -> Sequence[Entry]:
        """The entries of all records, whether free or in use."""
        return cast("Sequence[Entry]", range(self.num_records))  # no call for each

    def records(self) -> Iterator[Record]:
        """Decode all records that are in use and verify."""
        for entry in self.entries:
            record = self.record(entry)
            if record is not None:
                yield record

    def _read(self, entry: Entry, header: int) -> Record | None:
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
        _, space, place, page, num_bytes, key, parent, depth, label, check, start, pid = _FIELDS.unpack_from(
            self._view, base
        )
        crc, owner, last_use = _END.unpack_from(self._view, base + CRC_OFFSET)
        if crc != self.crc_of(entry):
            return None
        return Record(
            entry,
            header & _STATE_MASK,
            space,
            place & 0xFFFF,
            place >> 16,
            page * EXTENT_ALIGNMENT_BYTES,
            num_bytes,
            key,
            parent,
            depth,
            check,
            label,
            Writer(pid, start),
            owner,
            last_use,
        )

    def crc_of(self, entry: Entry) -> int:
        """Compute the checksum of a record's fields and generation."""
        base, generation = HEADER_PAGE_BYTES + entry * RECORD_BYTES, self.headers[entry] >> 8 << 8
        start = generation.to_bytes(8, "little")
        return zlib.crc32(self._view[base + len(start) : base + CRC_OFFSET], zlib.crc32(start))

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        for column in (self.headers, self.pages, self.sizes, self.checks):
            column.release()
        self._bytes.release()
        self._header_words.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
