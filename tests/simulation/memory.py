# pyright: reportPrivateUsage=false
"""Memory that outlives a simulated server: the pool's pages, table and names, with a crash after any write."""

import struct
from dataclasses import dataclass, field
from typing import Any

from kvdepot.pool.names import MAGIC, Names, decode_names, encode_names
from kvdepot.pool.table import IndexTable, table_size_bytes

PAGE = 4096
NUM_RECORDS = 24

Tag = tuple[bytes, int, int, int]  # key, group, shard, page of the entry: the content of one page of the pool
Place = tuple[bytes, int, int]  # key, group, shard


class Violation(BaseException):
    """An invariant was violated. No `except Exception` of the server hides it."""


class Crash(BaseException):
    """The server is killed here. No `except Exception` of the server sees it."""


@dataclass
class Fuse:
    """Kills the server at one of its next writes."""

    num_writes: int = 0  # to the table and the names file
    left: int | None = None  # writes before the crash; None: no crash is planned
    torn: int = 0  # bytes of a larger write that still happen
    is_dead: bool = False

    def burn(self) -> bool:
        """Count a write. Return True if the server dies at it.

        Raises:
            Crash: the server is dead already.
        """
        if self.is_dead:
            raise Crash
        self.num_writes += 1
        if self.left is None:
            return False
        self.left -= 1
        self.is_dead = self.left < 0
        return self.is_dead


class CrashingTable(IndexTable):
    """The table over bytes that outlive it."""

    def __init__(self, memory: bytearray, fuse: Fuse) -> None:
        super().__init__(memory, NUM_RECORDS)
        self._fuse = fuse

    def _put(self, kind: struct.Struct, place: int, *values: object) -> None:
        if self._fuse.burn():
            torn = min(self._fuse.torn, kind.size)
            self._view[place : place + torn] = kind.pack(*values)[:torn]
            raise Crash
        super()._put(kind, place, *values)

    def _put_header(self, place: int, header: int) -> None:
        if self._fuse.burn():
            raise Crash
        super()._put_header(place, header)


class CrashingNames:
    """The names file over bytes that outlive it."""

    def __init__(self, raw: bytearray, fuse: Fuse) -> None:
        self._raw, self._fuse = raw, fuse
        self.found, size = decode_names(bytes(raw))
        del raw[size:]
        self.num_spaces, self.num_labels = len(self.found.spaces), len(self.found.labels)

    def add(self, names: Names) -> None:
        frame = encode_names(names)
        if self._fuse.burn():
            self._raw += frame[: self._fuse.torn]
            raise Crash
        self._raw += frame
        self.num_spaces += len(names.spaces)
        self.num_labels += len(names.labels)


@dataclass(eq=False)
class Claim:
    """The right of one writer to fill one extent, until its copy has ended."""

    holder: str
    place: Place
    first_page: int
    num_pages: int
    num_written: int = 0

    @property
    def is_written(self) -> bool:
        return self.num_written == self.num_pages


@dataclass
class Memory:
    """Table, names and pages, and who may write which page."""

    num_pages: int
    table: bytearray = field(default_factory=lambda: bytearray(table_size_bytes(NUM_RECORDS)))
    names: bytearray = field(default_factory=lambda: bytearray(MAGIC))
    pages: list[Tag | None] = field(default_factory=list[Any])
    claims: dict[int, Claim] = field(default_factory=dict[int, Claim])

    def __post_init__(self) -> None:
        self.pages = [None] * self.num_pages

    def claim(self, holder: str, place: Place, offset: int, num_bytes: int) -> Claim:
        """Grant an extent to a writer.

        Raises:
            Violation: another writer may still write to a page of it.
        """
        claim = Claim(holder, place, offset // PAGE, -(-num_bytes // PAGE))
        for page in range(claim.first_page, claim.first_page + claim.num_pages):
            other = self.claims.get(page)
            if other is not None:
                raise Violation(f"page {page} is given to {holder} while {other.holder} may still write to it")
            self.claims[page] = claim
        return claim

    def write(self, claim: Claim, num_pages: int) -> None:
        """Let a writer fill the next pages of its extent."""
        for _ in range(min(num_pages, claim.num_pages - claim.num_written)):
            page = claim.first_page + claim.num_written
            self.pages[page] = (*claim.place, claim.num_written)
            claim.num_written += 1

    def end(self, claim: Claim) -> None:
        """Note that a writer no longer writes to its extent."""
        for page in range(claim.first_page, claim.first_page + claim.num_pages):
            del self.claims[page]

    def check_content(self, place: Place, offset: int, num_bytes: int, why: str) -> None:
        """Fail unless an extent holds the complete content of a place."""
        first = offset // PAGE
        for number in range(-(-num_bytes // PAGE)):
            if self.pages[first + number] != (*place, number):
                raise Violation(f"{why}: page {first + number} holds {describe(self.pages[first + number])}")


def describe(tag: Tag | None) -> str:
    return "nothing" if tag is None else f"page {tag[3]} of group {tag[1]}, shard {tag[2]} of chunk {tag[0].hex()[:6]}"
