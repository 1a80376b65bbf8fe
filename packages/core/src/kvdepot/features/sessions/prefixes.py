"""The file of the prefixes that agent sessions used last: it maps a session's name to chunks.

A session is identified by its tenant and its name. The file has only hashes of both. A prefix is a list of digests, 32
bytes per chunk, in blocks of 1 KiB. Each block contains its owner and its place in the prefix, so the file needs
nothing beside the blocks, and a crash leaves each block whole or recognisably torn. A prefix with a torn end is
shorter. Digests are used only for lookups, so a wrong one would be a miss.

The file is sparse and takes memory as sessions are added. When it is full, the tenant with the most blocks loses its
least recently used session. So a tenant cannot displace sessions of another tenant while it has more itself.
"""

import mmap
import os
import struct
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

from blake3 import blake3

from kvdepot.errors import PoolError, require
from kvdepot.keys import DIGEST_BYTES, num_digests, slice_digests

SESSIONS_FILE: Final = "sessions"
MAGIC: Final = b"KVDEPOTR\x01\x00\x00\x00"  # includes the version of the file
MAXIMUM_BLOCKS: Final = 131_072  # of 1 KiB; a session of up to 31 chunks takes one
MAXIMUM_TENANTS: Final = 1024  # with sessions; their names stay in memory
MAXIMUM_CHUNKS: Final = 16_384  # per prefix; the rest of a longer one is not remembered

_HEADER: Final = struct.Struct("<8s16sHHI")  # tenant, session, place in the prefix, digests, crc32
_BLOCK_BYTES: Final = 1024  # 31 digests: a session of 2,000 tokens in chunks of 64 takes one
_BLOCK_DIGESTS: Final = (_BLOCK_BYTES - _HEADER.size) // DIGEST_BYTES
_CRC: Final = struct.Struct("<I")
_CRC_AT: Final = _HEADER.size - _CRC.size
_EMPTY: Final = bytes(_HEADER.size)
_NO_DIGEST: Final = bytes(DIGEST_BYTES)
_GROWTH: Final = 64  # blocks
_STEP: Final = 128  # blocks read per step


class _Tenant:
    """The sessions of one tenant, each with its blocks, the most recently used last."""

    def __init__(self) -> None:
        self.sessions: OrderedDict[bytes, array[int]] = OrderedDict()
        self.num_blocks = 0


class PrefixFile:
    """The last prefix of each session. The caller closes it.

    Args:
        memory: the mapped file, in blocks. The first block has the magic.
        fd: the file's descriptor, None for memory without a file.
    """

    def __init__(self, memory: mmap.mmap, fd: int | None = None) -> None:
        self._memory = memory
        self._fd = fd
        self._capacity = len(memory) // _BLOCK_BYTES
        self._end = 1  # the first block that was never used yet
        self._num_ready = 1 if fd is not None else self._capacity  # blocks with allocated memory
        self._free = array("I")
        self._tenants: dict[bytes, _Tenant] = {}

    @classmethod
    def in_memory(cls, num_blocks: int = MAXIMUM_BLOCKS) -> Self:
        """Return an instance without a file, for tests."""
        return cls(mmap.mmap(-1, (num_blocks + 1) * _BLOCK_BYTES))

    @classmethod
    def create(cls, path: Path) -> Self:
        """Create a file without sessions.

        Raises:
            OSError: the file exists, or the disk is full.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(fd, MAGIC, 0)
            os.ftruncate(fd, (MAXIMUM_BLOCKS + 1) * _BLOCK_BYTES)
            os.posix_fallocate(fd, 0, _BLOCK_BYTES)
            return cls(mmap.mmap(fd, 0), fd)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open an earlier server's file. `restore` reads it.

        Raises:
            PoolError: it is not a file of sessions.
            OSError: it cannot be read.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            is_ours = os.pread(fd, len(MAGIC), 0) == MAGIC
            if not is_ours or os.fstat(fd).st_size != (MAXIMUM_BLOCKS + 1) * _BLOCK_BYTES:
                raise PoolError("the file of sessions is empty or was written by another release")
            return cls(mmap.mmap(fd, 0), fd)
        except BaseException:
            os.close(fd)
            raise

    def close(self) -> None:
        """Close it; the file stays."""
        self._memory.close()
        if self._fd is not None:
            os.close(self._fd)

    def __len__(self) -> int:
        return sum(len(tenant.sessions) for tenant in self._tenants.values())

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks in use."""
        return sum(tenant.num_blocks for tenant in self._tenants.values()) * _BLOCK_BYTES

    # --- sessions -------------------------------------------------------------------------------------------------

    def has_room(self, tenant: str) -> bool:
        """Return whether sessions of a tenant are remembered: it has some, or fewer than `MAXIMUM_TENANTS` have."""
        return _names_of(tenant, "")[0] in self._tenants or len(self._tenants) < MAXIMUM_TENANTS

    def remember(self, tenant: str, session: str, digests: bytes) -> bool:
        """Replace the prefix of a session by packed digests, `(num_chunks, 32)`, from chunk 0 on.

        If there is no room, the prefix loses its end. Return False if nothing is remembered, as for a tenant beyond
        `MAXIMUM_TENANTS`.
        """
        if not self.has_room(tenant):
            return False
        owner, name = _names_of(tenant, session)
        of_tenant = self._tenants.setdefault(owner, _Tenant())
        blocks = of_tenant.sessions.pop(name, None) or array("I")
        num_chunks = min(MAXIMUM_CHUNKS, len(digests) // DIGEST_BYTES)
        place = self._num_unchanged(blocks, digests)
        chunk, before = place * _BLOCK_DIGESTS, self._body(blocks[place - 1])[-DIGEST_BYTES:] if place else _NO_DIGEST
        while chunk < num_chunks:
            if place == len(blocks):
                block = self._take(owner)
                if block is None:
                    break
                blocks.append(block)
                of_tenant.num_blocks += 1
            body = slice_digests(digests, chunk, min(chunk + _BLOCK_DIGESTS, num_chunks))
            self._write(blocks[place], owner, name, place, before, body)
            chunk, place, before = chunk + _BLOCK_DIGESTS, place + 1, body[-DIGEST_BYTES:]
        self._give_back(of_tenant, blocks[place:])
        if place:
            of_tenant.sessions[name] = blocks[:place]
        self._drop_if_empty(owner)
        return bool(place)

    def find(self, tenant: str, session: str) -> bytes:
        """Return the packed digests of a session's last prefix; empty if the tenant does not have the session."""
        owner, name = _names_of(tenant, session)
        of_tenant = self._tenants.get(owner)
        blocks = None if of_tenant is None else of_tenant.sessions.get(name)
        if of_tenant is None or blocks is None:
            return b""
        of_tenant.sessions.move_to_end(name)
        return b"".join(map(self._body, blocks))

    def forget(self, tenant: str, session: str) -> None:
        """Forget a session, if it is known."""
        owner, name = _names_of(tenant, session)
        of_tenant = self._tenants.get(owner)
        if of_tenant is not None and name in of_tenant.sessions:
            self._give_back(of_tenant, of_tenant.sessions.pop(name))
            self._drop_if_empty(owner)

    # --- blocks ---------------------------------------------------------------------------------------------------

    def _num_unchanged(self, blocks: "array[int]", digests: bytes) -> int:
        """Return how many blocks from the first on can stay, because they hold the same digests.

        A digest covers the chunks before it. So the last block that is the same shows that all before it are.
        """
        place, step = len(blocks), _BLOCK_DIGESTS
        while place and self._body(blocks[place - 1]) != slice_digests(digests, (place - 1) * step, place * step):
            place -= 1
        return place

    def _write(self, block: int, owner: bytes, name: bytes, place: int, before: bytes, body: bytes) -> None:
        start = block * _BLOCK_BYTES
        header = _HEADER.pack(owner, name, place, num_digests(body), 0)[:_CRC_AT]
        data = header + _CRC.pack(_checksum(header, before, body)) + body
        self._memory[start : start + len(data)] = data

    def _body(self, block: int) -> bytes:
        start = block * _BLOCK_BYTES
        _, _, _, count, _ = _HEADER.unpack_from(self._memory, start)
        return self._memory[start + _HEADER.size : start + _HEADER.size + count * DIGEST_BYTES]

    def _take(self, owner: bytes) -> int | None:
        """Return a free block for a tenant. If needed, forget a session. None if that is impossible."""
        while True:
            if self._free:
                return self._free.pop()
            if self._end < self._capacity and self._has_memory():
                self._end += 1
                return self._end - 1
            if not self._forget_one(owner):
                return None

    def _has_memory(self) -> bool:
        if self._fd is None or self._end < self._num_ready:
            return True
        try:
            os.posix_fallocate(self._fd, self._num_ready * _BLOCK_BYTES, _GROWTH * _BLOCK_BYTES)
        except OSError:  # the file system is full
            return False
        self._num_ready += _GROWTH
        return True

    def _forget_one(self, owner: bytes) -> bool:
        """Forget a session to make room for `owner`.

        Return False if `owner` has the most blocks and no other session.
        """
        most, tenant = max(self._tenants.items(), key=lambda item: item[1].num_blocks)
        if not tenant.sessions:
            return False
        self._give_back(tenant, tenant.sessions.popitem(last=False)[1])
        if most != owner:
            self._drop_if_empty(most)
        return True

    def _give_back(self, tenant: _Tenant, blocks: "array[int]") -> None:
        for block in blocks:
            self._memory[block * _BLOCK_BYTES : block * _BLOCK_BYTES + _HEADER.size] = _EMPTY
        self._free.extend(blocks)
        tenant.num_blocks -= len(blocks)

    def _drop_if_empty(self, owner: bytes) -> None:
        if not self._tenants[owner].sessions:
            del self._tenants[owner]

    # --- the next server ------------------------------------------------------------------------------------------

    def restore(self) -> Iterator[None]:
        """Read an earlier server's sessions in steps. The caller uses no other method before the end."""
        found: dict[tuple[bytes, bytes], dict[int, int]] = {}  # for each session, its blocks by place
        holes = os.lseek(self._fd, 0, os.SEEK_HOLE) if self._fd is not None else len(self._memory)
        self._num_ready = self._end = max(1, min(self._capacity, holes // _BLOCK_BYTES))
        for block in range(1, self._end):
            owner, name, place, count, _ = _HEADER.unpack_from(self._memory, block * _BLOCK_BYTES)
            if 0 < count <= _BLOCK_DIGESTS:
                found.setdefault((owner, name), {})[place] = block
            if block % _STEP == 0:
                yield
        used = set[int]()
        for (owner, name), by_place in found.items():
            blocks = self._whole(by_place)
            if blocks and (owner in self._tenants or len(self._tenants) < MAXIMUM_TENANTS):
                tenant = self._tenants.setdefault(owner, _Tenant())
                tenant.sessions[name] = blocks
                tenant.num_blocks += len(blocks)
                used.update(blocks)
            yield
        for block in range(1, self._end):
            if block not in used:
                self._memory[block * _BLOCK_BYTES : block * _BLOCK_BYTES + _HEADER.size] = _EMPTY
                self._free.append(block)
            if block % _STEP == 0:
                yield

    def _whole(self, by_place: dict[int, int]) -> "array[int]":
        """Return the blocks of a session up to the first missing or torn one."""
        blocks, before = array("I"), _NO_DIGEST
        while (block := by_place.get(len(blocks))) is not None:
            start, body = block * _BLOCK_BYTES, self._body(block)
            header = self._memory[start : start + _CRC_AT]
            (crc,) = _CRC.unpack_from(self._memory, start + _CRC_AT)
            if crc != _checksum(header, before, body):
                break
            blocks.append(block)
            before = body[-DIGEST_BYTES:]
            if len(body) < _BLOCK_DIGESTS * DIGEST_BYTES:
                break
        return blocks

    def check_integrity(self) -> None:
        """Check that each block has one owner, and that the blocks of each session are consistent.

        Raises:
            IntegrityError: a block has no owner or two, or a session's blocks are inconsistent.
        """
        blocks = list(self._free)
        for tenant in self._tenants.values():
            require(bool(tenant.sessions), "a tenant without sessions is kept")
            of_sessions = [block for each in tenant.sessions.values() for block in each]
            require(tenant.num_blocks == len(of_sessions), "the blocks of a tenant are miscounted")
            blocks += of_sessions
            for each in tenant.sessions.values():
                require(self._whole(dict(enumerate(each))) == each, "the blocks of a session do not fit together")
        require(sorted(blocks) == list(range(1, self._end)), "a block has no owner, or two")


def _names_of(tenant: str, session: str) -> tuple[bytes, bytes]:
    """Return the hashes that stand for a tenant and its session in the file."""
    owner = blake3(tenant.encode("utf-8", "surrogatepass")).digest()
    return owner[:8], blake3(owner + session.encode("utf-8", "surrogatepass")).digest()[:16]


def _checksum(header: bytes, before: bytes, body: bytes) -> int:
    """Return the checksum of a block.

    It includes the digest `before`, so that a block of another prefix does not fit.
    """
    return zlib.crc32(body, zlib.crc32(before, zlib.crc32(header)))
