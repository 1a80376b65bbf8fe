"""Records of the index table, one by one."""

from kvdepot.pool.table import Entry, IndexTable, Writer, place_number


def write_record(
    table: IndexTable,
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
    """Fill a free record. Return the header that it will have once sealed."""
    row = entry, place_number(group, part), offset, num_bytes, key, parent, depth, check
    (header,) = table.write([row], space=space, label=label, writer=writer, owner=owner)
    return header
