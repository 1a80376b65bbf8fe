"""Memory that outlives a simulated server: the pool's pages, table and names, with a crash after any write."""

import mmap
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvdepot.errors import PoolError
from kvdepot.layout import Part
from kvdepot.pool.names import NamesFile
from kvdepot.pool.table import IndexTable, table_size_bytes

PAGE = 4096
NUM_RECORDS = 24

Tag = tuple[bytes, int, int, int]  # key, group, cell, page of the cell: the content of one page of the pool
Place = tuple[bytes, int, int]  # key, group, number of the part


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


class _Fused:
    """Memory of which the server may be killed while it writes there."""

    def __init__(self, memory: "memoryview[int]", fuse: Fuse) -> None:
        self._memory = memory
        self._fuse = fuse

    def __getitem__(self, place: int) -> int:
        return self._memory[place]

    def __setitem__(self, place: "int | slice[int, int, int]", content: Any) -> None:
        if self._fuse.burn():
            if isinstance(place, slice):  # a header is whole
                torn = min(self._fuse.torn, len(content))
                self._memory[place.start : place.start + torn] = content[:torn]
            raise Crash
        self._memory[place] = content

    def release(self) -> None:
        self._memory.release()


class CrashingTable(IndexTable):
    """The table over bytes that outlive it."""

    def __init__(self, memory: bytearray, fuse: Fuse) -> None:
        super().__init__(memory, NUM_RECORDS)
        self._bytes = cast("memoryview[int]", _Fused(self._bytes, fuse))
        self.headers = cast("memoryview[int]", _Fused(self.headers, fuse))


class CrashingNames(NamesFile):
    """The names file. The server may be killed while it appends a name."""

    fuse: Fuse

    def _write(self, frame: bytes) -> None:
        if self.fuse.burn():
            os.pwrite(self._fd, frame[: self.fuse.torn], self.size_bytes)
            raise Crash
        super()._write(frame)


def num_pages(num_bytes: int) -> int:
    """Return how many pages `num_bytes` cover from the start of a page."""
    return -(-num_bytes // PAGE)


def tags_of(place: Place, num_pages: int) -> list[Tag]:
    """Return the content of an entry's pages, cell by cell of its part. All cells have the same number of pages."""
    key, group, number = place
    part = Part.of(number)
    cells = [
        layer << 8 | head
        for layer in range(part.first_layer, part.first_layer + part.num_layers)
        for head in range(part.first_head, part.first_head + part.num_heads)
    ]
    pages_a_cell = num_pages // len(cells)
    return [(key, group, cell, page) for cell in cells for page in range(pages_a_cell)]


def pages_in(offset: int, num_bytes: int) -> range:
    """Return the numbers of the pages that an extent touches."""
    return range(offset // PAGE, num_pages(offset + num_bytes))


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


class Memory:
    """Table, names and pages, and which writer may write to which page. Must be closed."""

    def __init__(self, num_pages: int, ready_pages: int) -> None:
        self.num_pages = num_pages
        self.ready_pages = ready_pages  # the first pages; the others have no memory yet
        self.table = bytearray(table_size_bytes(NUM_RECORDS))
        self.sessions = mmap.mmap(-1, 64 * 1024)
        self.names_fd = os.memfd_create("names")
        os.write(self.names_fd, NamesFile.MAGIC)
        self.pages: list[Tag | None] = [None] * num_pages
        self.claims: dict[int, Claim] = {}  # by page
        self.copied = Counter[int]()  # pages that a tier copies

    def close(self) -> None:
        os.close(self.names_fd)
        self.sessions.close()

    def open_names(self, fuse: Fuse) -> CrashingNames:
        """Open the names as a server that starts does.

        Raises:
            Violation: a server could not start with them, or the next one could read what a crash has left.
        """
        try:
            names = CrashingNames(os.dup(self.names_fd), Path("names"), os.fstat(self.names_fd).st_size)
        except PoolError as error:
            raise Violation(f"the names of an earlier server cannot be read: {error}") from error
        if os.fstat(self.names_fd).st_size > names.size_bytes:  # a shorter new name would keep the old end
            raise Violation("the names keep a part of a name behind their end")
        names.fuse = fuse
        return names

    def claim(self, holder: str, place: Place, offset: int, num_bytes: int) -> Claim:
        """Grant an extent to a writer.

        Raises:
            Violation: a page of it has no memory, a tier copies it, or another writer may still write to it.
        """
        pages = pages_in(offset, num_bytes)
        claim = Claim(holder, place, pages.start, len(pages))
        for page in pages:
            if page >= self.ready_pages:
                raise Violation(f"page {page} is given to {holder} and has no memory yet")
            if self.copied[page]:
                raise Violation(f"page {page} is given to {holder} while a tier copies it")
            other = self.claims.get(page)
            if other is not None:
                raise Violation(f"page {page} is given to {holder} while {other.holder} may still write to it")
            self.claims[page] = claim
        return claim

    def write(self, claim: Claim, num_pages: int) -> None:
        """Let a writer fill the next pages of its extent."""
        for _ in range(min(num_pages, claim.num_pages - claim.num_written)):
            page = claim.first_page + claim.num_written
            self.pages[page] = tags_of(claim.place, claim.num_pages)[claim.num_written]
            claim.num_written += 1

    def end(self, claim: Claim) -> None:
        """Note that a writer no longer writes to its extent."""
        for page in range(claim.first_page, claim.first_page + claim.num_pages):
            del self.claims[page]

    def pages_of(self, offset: int, num_bytes: int) -> list[Tag | None]:
        """Return the content of the pages of an extent."""
        return [self.pages[page] for page in pages_in(offset, num_bytes)]

    def check_content(self, place: Place, offset: int, num_bytes: int, why: str) -> None:
        """Fail unless an extent holds the complete content of a place."""
        pages = pages_in(offset, num_bytes)
        for page, tag in zip(pages, tags_of(place, len(pages)), strict=True):
            if self.pages[page] != tag:
                raise Violation(f"{why}: page {page} holds {describe(self.pages[page])}")


def describe(tag: Tag | None) -> str:
    return "nothing" if tag is None else f"page {tag[3]} of group {tag[1]}, cell {tag[2]} of chunk {tag[0].hex()[:6]}"
