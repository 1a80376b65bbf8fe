"""The index table: one record of 128 bytes per entry, in memory that outlives the server.

The server writes it. Workers map it read only. A record's **header** is one 64-bit word with generation and state. It
is written last and in one store, so that a record is never visible half-written. Each change of an extent's content
raises the generation. After a worker has copied from the pool, it compares the header with the one in its plan (a
seqlock), and treats a difference as a miss. Each record has a checksum of itself. After a restart, records that do not
verify are dropped.
"""

import mmap
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NewType, Self, cast

from kvdepot.config import format_size
from kvdepot.errors import PoolError
from kvdepot.keys import DIGEST_BYTES
from kvdepot.pool.extents import EXTENT_ALIGNMENT_BYTES

RECORD_BYTES: Final = 128  # two lines of the cache: no record shares a line with another
HEADER_PAGE_BYTES: Final = 4096  # a page before the records
TABLE_VERSION: Final = 4  # another one starts with an empty pool
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
WRITING: Final = 1
SEALED: Final = 2

_STATE_MASK: Final = 0xFF  # the low bits of a header; the generation is above them
_LAST_GENERATION: Final = (1 << 56) - 1
MAGIC: Final = b"KVDEPOTX"
_FILE_HEADER: Final = struct.Struct("<8sIIQQ16sI")  # magic, version, record size, records, pool bytes, pool id, crc
_GENERATION: Final = 8  # word in the header page: the generation that ties the table to its pool
_HOLDER_OFFSET: Final = 128  # in the header page: length of the text, and the text
# space, group and part (16 and 48 bits), offset in pages, bytes, key, start of the parent's key, depth, label, check of
# the page sizes, owner (16 bytes that identify the worker within its process; once sealed, the payload's checksum),
# start time and pid of the writer, crc, last use
_BODY: Final = struct.Struct("<IQII32s16sIII16sQIIQ")
_CHECKED_BYTES: Final = 108  # leading bytes of the body: all but crc and last use
_CRC: Final = 116  # offset within a record, like the following
_PLACE_OFFSET: Final = 12
_EXTENT_OFFSET: Final = 20
_KEY_OFFSET: Final = 28
_CHECK_OFFSET: Final = 84
_CHECKSUM_OFFSET: Final = 88  # before sealing: the owner
_WRITER_OFFSET: Final = 104
_EXTENT: Final = struct.Struct("<II")
_WRITER: Final = struct.Struct("<QI")
_U64: Final = struct.Struct("<Q")
_U32: Final = struct.Struct("<I")
_DIGEST: Final = struct.Struct(f"{OWNER_BYTES}s")
_END: Final = struct.Struct("<IQ")  # end of the body: crc and last use


def _next_generation(header: int) -> int:
    """Return the header of the next generation, without a state.

    It wraps, as a damaged header may have the last of 2**56.
    """
    return ((header >> 8) + 1 & _LAST_GENERATION) << 8


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
    """The records, in a mapped file or in plain memory."""

    def __init__(self, memory: mmap.mmap | bytearray, num_records: int) -> None:
        self.num_records = num_records
        self._memory = memory
        self._view = memoryview(memory)
        self._header_words = self._view[:HEADER_PAGE_BYTES].cast("Q")
        self._words = self._view[HEADER_PAGE_BYTES:].cast("Q")

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

    def write(
        self,
        entry: Entry,
        *,
        space: int,
        group: int,
        part: int,
        offset: int,
        num_bytes: int,
        key: bytes,
        parent: bytes,
        depth: int,
        check: int,
        label: int,
        writer: Writer,
        owner: bytes,
    ) -> int:
        """Fill a free record and set its state to WRITING. Return the header that it will have once sealed."""
        place = entry * (RECORD_BYTES // 8)
        sealed = _next_generation(self._words[place]) | SEALED
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + 8
        self._put(
            _BODY,
            base,
            space,
            group | part << 16,
            offset // EXTENT_ALIGNMENT_BYTES,
            num_bytes,
            key,
            parent,
            depth,
            label,
            check,
            owner,
            writer.start_time,
            writer.pid,
            0,
            0,
        )
        header = sealed - SEALED + WRITING
        self._put(_U32, base - 8 + _CRC, self.crc_of(base, header))
        # The header last: after a kill before it, the record is free, and nobody knows its extent.
        self._put_header(place, header)
        return sealed

    def seal(self, entry: Entry, last_use: int, checksum: bytes = bytes(OWNER_BYTES)) -> None:
        """Mark a record as sealed. The payload's checksum (zeros: none) replaces the owner."""
        place = entry * (RECORD_BYTES // 8)
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + 8
        header = self._words[place] >> 8 << 8 | SEALED
        self._put(_DIGEST, base - 8 + _CHECKSUM_OFFSET, checksum)
        self._put(_END, base - 8 + _CRC, self.crc_of(base, header), last_use)
        # The header last, and part of the checksum: after a kill before it, the next server drops the record.
        self._put_header(place, header)

    def free(self, entry: Entry) -> None:
        """Free a record. Readers see the change before the extent is reused."""
        place = entry * (RECORD_BYTES // 8)
        self._put_header(place, _next_generation(self._words[place]) | FREE)

    def _put(self, kind: struct.Struct, place: int, *values: object) -> None:
        """Write into a body.

        Only this and `_put_header` modify records, so a crash leaves each field either old or new.
        """
        kind.pack_into(self._view, place, *values)

    def _put_header(self, place: int, header: int) -> None:
        self._words[place] = header

    def header(self, entry: Entry) -> int:
        """Return the present header."""
        return self._words[entry * (RECORD_BYTES // 8)]

    def headers_of(self, entries: Iterable[Entry]) -> list[int]:
        """Return the present header of each entry."""
        return [self._words[entry * (RECORD_BYTES // 8)] for entry in entries]

    def state(self, entry: Entry) -> int:
        """Return `FREE`, `WRITING` or `SEALED`; another number if the record is damaged."""
        return self._words[entry * (RECORD_BYTES // 8)] & _STATE_MASK

    def is_sealed(self, entry: Entry) -> bool:
        """Whether the bytes of an entry are in place."""
        return self._words[entry * (RECORD_BYTES // 8)] & _STATE_MASK == SEALED

    def sealed_entry(self, entry: Entry) -> tuple[Entry, int, int, int] | None:
        """Return an entry with its header, offset and payload bytes, None if it is not sealed."""
        header = self._words[entry * (RECORD_BYTES // 8)]
        return (entry, header, *self.extent(entry)) if header & _STATE_MASK == SEALED else None

    def sealed_record(self, number: int, header: int) -> Record | None:
        """Decode the record of the entry that a peer names by number and header. None unless it is sealed with it."""
        if not 0 <= number < self.num_records:
            return None
        entry = Entry(number)
        return self.record(entry) if self.header(entry) == header and header & _STATE_MASK == SEALED else None

    def extent(self, entry: Entry) -> tuple[int, int]:
        """Return the offset and the payload bytes of a record in use."""
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES
        page, num_bytes = _EXTENT.unpack_from(self._view, base + _EXTENT_OFFSET)
        return page * EXTENT_ALIGNMENT_BYTES, num_bytes

    def num_bytes_of(self, entries: Iterable[Entry]) -> int:
        """Return the payload bytes of records in use, added up."""
        return sum([self.extent(entry)[1] for entry in entries])

    def check_of(self, entry: Entry) -> int:
        """Return the check of the writer's page sizes."""
        return _U32.unpack_from(self._view, HEADER_PAGE_BYTES + entry * RECORD_BYTES + _CHECK_OFFSET)[0]

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
        fields = _U64.unpack_from(self._view, HEADER_PAGE_BYTES + entry * RECORD_BYTES + _PLACE_OFFSET)[0]
        return fields & 0xFFFF, fields >> 16

    def record(self, entry: Entry) -> Record | None:
        """Decode one record; None if it is free or does not verify."""
        header = self._words[entry * (RECORD_BYTES // 8)]
        return self._read(entry, header) if header & _STATE_MASK in (WRITING, SEALED) else None

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
        base = HEADER_PAGE_BYTES + entry * RECORD_BYTES + 8
        fields = _BODY.unpack_from(self._view, base)
        space, place, page, num_bytes, key, parent, depth, label, check, owner, start, pid, crc, last_use = fields
        if crc != self.crc_of(base, header):
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

    def crc_of(self, base: int, header: int) -> int:
        """Compute the checksum of the record at `base` with this header."""
        return zlib.crc32(_U64.pack(header), zlib.crc32(self._view[base : base + _CHECKED_BYTES]))

    def close(self) -> None:
        """Unmap the file. Idempotent."""
        self._words.release()
        self._header_words.release()
        self._view.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
