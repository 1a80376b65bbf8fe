"""The index table: records that fail their checks are ignored."""

import zlib
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvdepot.client.verify import count_valid_chunks
from kvdepot.errors import PoolError
from kvdepot.pool.table import (
    FREE,
    RECORD_BYTES,
    SEALED,
    TABLE_VERSION,
    WRITING,
    Entry,
    IndexTable,
    Record,
    TableReader,
    Writer,
    table_size_bytes,
)
from kvdepot.wire import messages as m
from support.records import write_record

POOL_ID = bytes(range(16))

fields = st.fixed_dictionaries(
    {
        "space": st.integers(0, 2**32 - 1),
        "group": st.integers(0, 63),
        "part": st.integers(0, 2**48 - 1),
        "offset": st.integers(0, 2**32 - 1).map(lambda page: page * 4096),
        "num_bytes": st.integers(1, 2**32 - 1),
        "key": st.binary(min_size=32, max_size=32),
        "parent": st.binary(min_size=16, max_size=16),
        "depth": st.integers(0, 2**32 - 1),
        "check": st.integers(0, 2**32 - 1),
        "label": st.integers(0, 2**32 - 1),
        "owner": st.binary(min_size=16, max_size=16),
        "writer": st.builds(Writer, st.integers(0, 2**22), st.integers(0, 2**63)),
    }
)
SOME: dict[str, Any] = {
    "space": 1,
    "group": 2,
    "part": 3,
    "offset": 4096,
    "num_bytes": 5000,
    "key": bytes(range(32)),
    "parent": bytes(16),
    "depth": 8,
    "check": 9,
    "label": 10,
    "owner": bytes(16),
    "writer": Writer(11, 12),
}


@given(fields, st.booleans())
def test_a_record_is_read_back_as_it_was_written(values: dict[str, Any], sealed: bool) -> None:
    table = IndexTable.in_memory(4)
    header = write_record(table, Entry(2), **values)
    if sealed:
        table.seal([Entry(2)], 99, b"the checksum is.")
        assert table.header(Entry(2)) == header
        values = {**values, "owner": b"the checksum is."}
    (record,) = table.records()
    assert record.state == (SEALED if sealed else WRITING)
    assert {name: getattr(record, name) for name in values} == values
    assert table.extent(Entry(2)) == (values["offset"], values["num_bytes"])
    assert table.place_of(Entry(2)) == (values["group"], values["part"])
    assert table.writer_of(Entry(2)) == values["writer"]
    assert table.owner_of(Entry(2)) == values["owner"]
    assert table.check_of(Entry(2)) == values["check"]


def test_each_use_of_a_record_has_a_generation_of_its_own() -> None:
    table = IndexTable.in_memory(1)
    seen: set[int] = set()
    for _ in range(5):
        seen.add(write_record(table, Entry(0), **SOME))
        seen.add(table.header(Entry(0)))
        table.free([Entry(0)])
        assert table.header(Entry(0)) & 0xFF == FREE
        seen.add(table.header(Entry(0)))
    assert len(seen) == 15


@given(st.integers(0, 104 * 8 - 1))  # then: the checksum, of which a flipped bit is a miss, and the last use
def test_a_flipped_bit_in_a_sealed_record_is_noticed(bit: int) -> None:
    memory = bytearray(table_size_bytes(1))
    table = IndexTable(memory, 1)
    write_record(table, Entry(0), **SOME)
    table.seal([Entry(0)], 1)
    memory[4096 + bit // 8] ^= 1 << bit % 8
    assert list(table.records()) == []


@pytest.fixture
def path(tmp_path: Path) -> Path:
    table = IndexTable.create(tmp_path / "index", 8, 1 << 20, POOL_ID)
    write_record(table, Entry(3), **SOME)
    table.seal([Entry(3)], 5)
    table.close()
    return tmp_path / "index"


def test_a_table_outlives_its_writer(path: Path) -> None:
    table = IndexTable.open(path, 1 << 20, POOL_ID)
    assert [record.entry for record in table.records()] == [3]
    table.close()


@pytest.mark.parametrize(("pool_size", "pool_id"), [(2 << 20, POOL_ID), (1 << 20, bytes(16))])
@pytest.mark.promise(30)
def test_the_table_of_another_pool_is_refused(pool_size: int, pool_id: bytes, path: Path) -> None:
    with pytest.raises(PoolError, match="another pool"):
        IndexTable.open(path, pool_size, pool_id)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 51))
@pytest.mark.promise(30)
def test_a_damaged_table_header_is_refused(place: int, path: Path) -> None:
    good = path.read_bytes()
    path.write_bytes(good[:place] + bytes([good[place] ^ 0x40]) + good[place + 1 :])
    with pytest.raises(PoolError):
        IndexTable.open(path, 1 << 20, POOL_ID)
    path.write_bytes(good)


@pytest.mark.parametrize("size", [0, 10, 4096, 4096 + RECORD_BYTES])
@pytest.mark.promise(30)
def test_a_truncated_table_is_refused(size: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(PoolError):
        IndexTable.open(path, 1 << 20, POOL_ID)


def test_the_header_of_a_record_only_ever_grows() -> None:
    table = IndexTable.in_memory(1)
    seen = [table.header(Entry(0))]
    for _ in range(5):
        sealed = write_record(table, Entry(0), **SOME)
        seen.append(table.header(Entry(0)))
        table.seal([Entry(0)], 1)
        assert table.header(Entry(0)) == sealed
        seen.append(sealed)
        table.free([Entry(0)])
        seen.append(table.header(Entry(0)))
    assert seen == sorted(set(seen))


class _Headers:
    """Reads a record back at the moment when its header is written."""

    def __init__(self, table: IndexTable) -> None:
        self.seen: Record | None = None
        self._table = table
        self._headers = table.headers
        table.headers = cast("memoryview[int]", self)

    def __getitem__(self, entry: Entry) -> int:
        return self._headers[entry]

    def __setitem__(self, entry: Entry, header: int) -> None:
        self._headers[entry] = header
        self.seen = self._table.record(entry)


@pytest.mark.promise(30)
def test_a_record_is_whole_when_its_header_comes() -> None:
    """A reader or a crash of the server may come between any two writes."""
    table = IndexTable.in_memory(1)
    headers = _Headers(table)
    for _ in range(2):
        write_record(table, Entry(0), **SOME)
        assert headers.seen is not None
        assert (headers.seen.state, headers.seen.key) == (WRITING, SOME["key"])
        table.seal([Entry(0)], 7, bytes(range(16)))
        assert headers.seen is not None
        assert (headers.seen.state, headers.seen.owner, headers.seen.last_use) == (SEALED, bytes(range(16)), 7)
        table.free([Entry(0)])
        assert headers.seen is None


@pytest.mark.promise(30, 60)
def test_a_header_at_the_last_generation_can_be_freed_and_used() -> None:
    """Regression: a record overwritten with 0xFF bytes, by damage or malice, ended the server that read it."""
    memory = bytearray(table_size_bytes(1))
    memory[4096:] = b"\xff" * RECORD_BYTES
    table = IndexTable(memory, 1)
    assert list(table.records()) == []
    table.free([Entry(0)])
    assert table.header(Entry(0)) == 0
    write_record(table, Entry(0), **SOME)
    table.seal([Entry(0)], 1)
    assert [record.entry for record in table.records()] == [0]


def test_a_table_of_another_format_is_refused_by_its_number(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] += 1
    content[48:52] = zlib.crc32(content[:48]).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(PoolError, match=f"table format {TABLE_VERSION + 1}"):
        IndexTable.open(path, 1 << 20, POOL_ID)


@pytest.mark.promise(65)
def test_a_client_that_is_given_another_chunk_s_record_has_a_miss() -> None:
    memory = bytearray(table_size_bytes(4))
    table, keys = IndexTable(memory, 4), [bytes([number]) * 32 for number in range(3)]
    extents = b""
    for number, key in enumerate(keys):
        header = write_record(
            table,
            Entry(number),
            space=0,
            group=0,
            part=0,
            offset=4096 * number,
            num_bytes=4096,
            key=key,
            parent=b"",
            depth=number,
            check=0,
            label=0,
            writer=Writer(),
            owner=bytes(16),
        )
        table.seal([Entry(number)], 0)
        extents += m.EXTENT.pack(number, 0, 0, number, 0, header, 4096 * number, 4096)
    plan = m.RetrievePlan(1, 1, 3, extents)
    digests = b"".join(keys)
    assert count_valid_chunks(plan, digests, TableReader(memory)) == 3
    assert count_valid_chunks(plan, digests[:64] + b"x" * 32, TableReader(memory)) == 2
    table.free([Entry(1)])
    assert count_valid_chunks(plan, digests, TableReader(memory)) == 1
