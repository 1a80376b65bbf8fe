"""Data from tiers as targets: files on a disk, replies of Valkey.

A tier may always miss. It never returns other bytes than were written, and raises only errors that its queue expects.
"""

import atexit
import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Sequence
from functools import cache
from io import BufferedReader, BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast
from unittest.mock import patch

from fuzz.depot import Bytes
from kvdepot.keys import DIGEST_BYTES
from kvdepot.testing.tier_traffic import EXTENT_BYTES, content, extents_of, fill, make_key, make_pool
from kvdepot.tiers.base import TierPool
from kvdepot.tiers.disk.files import name_of
from kvdepot.tiers.disk.tier import DiskTier
from kvdepot.tiers.keys import MOST_CHUNKS_A_RUN
from kvdepot.tiers.runs import HEAD_BYTES, RunHead, make_head
from kvdepot.tiers.trailer import TRAILER_BYTES, checksum_of, make_trailer
from kvdepot.tiers.valkey.connections import Server
from kvdepot.tiers.valkey.resp import ReplyError, receive
from kvdepot.tiers.valkey.tier import ValkeyTier
from support.tiers.direct import read_from, write_to

SIZES: Final = (EXTENT_BYTES, 4096, 5000, 1)
KEYS: Final = [make_key(number) for number in range(len(SIZES))]


@cache
def shared_pool() -> TierPool:
    return make_pool(2 * len(SIZES) * EXTENT_BYTES)


def _make_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kvdepot-fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    maker = os.getpid()

    @atexit.register
    def remove() -> None:
        if os.getpid() == maker:  # forks use the folder one after the other, and one that finds a bug runs this too
            shutil.rmtree(folder, ignore_errors=True)

    return Path(folder)


FOLDER: Final = _make_folder()


def disk(data: bytes) -> None:
    """A folder that was modified behind the tier's back: files changed, cut, swapped, renamed, and foreign files.

    An entry is read as it was written or not at all, and foreign files stay.
    """
    source, pool, folder = Bytes(data), shared_pool(), FOLDER / "tier"
    shutil.rmtree(folder, ignore_errors=True)
    tier = DiskTier(pool, folder, 1 << 20, num_threads=2)
    fill(pool, 0, KEYS, SIZES)
    assert write_to(tier, pool, KEYS, extents_of(0, SIZES)) == [True] * len(KEYS)
    paths = [folder / name_of(key) for key in KEYS]
    if source.byte() & 1:  # another depot opens the folder
        tier.close()
        foreign = change(source, folder, paths)
        tier = DiskTier(pool, folder, 1 << 20, num_threads=2)
        list(tier.clear(b"nobody's", None))  # waits for the list
    else:
        foreign = change(source, folder, paths)
    try:
        for number, (key, size) in enumerate(zip(KEYS, SIZES, strict=True)):
            extents = extents_of(len(SIZES) + number, [size])
            with contextlib.suppress(OSError):
                if read_from(tier, pool, [key], extents)[0]:
                    offset = extents[0][0]
                    assert pool.view[offset : offset + size] == content(key, size), "other bytes"
        with contextlib.suppress(OSError):  # raised if a folder lies in the place of a file
            list(tier.clear(None, None))
        usage = tier.usage()
        assert (usage.num_entries, usage.used_bytes) == (0, 0)
        assert all(os.path.lexists(path) for path in foreign), "a file of somebody else was removed"
    finally:
        tier.close()


def change(source: Bytes, folder: Path, paths: Sequence[Path]) -> list[Path]:
    """Change a tier's files as the input says. Return the foreign files, which are not entries."""
    foreign: list[Path] = []
    while not source.is_over:
        choice, path = source.byte(), paths[source.below(len(paths))]
        with contextlib.suppress(OSError):
            match choice % 6:
                case 0:  # overwrite bytes
                    place = int.from_bytes(source.take(2), "little")
                    with path.open("r+b") as file:
                        file.seek(place)
                        file.write(source.take(1 + source.below(16)))
                case 1:
                    os.truncate(path, int.from_bytes(source.take(2), "little"))
                case 2:
                    path.replace(paths[source.below(len(paths))])
                case 3:
                    path.unlink()
                case 4:
                    path.unlink()
                    if choice & 128:
                        path.mkdir()
                    else:
                        path.symlink_to(folder / "elsewhere")
                case _:
                    name = (
                        source.take(source.below(40)).replace(b"/", b"-").replace(b"\0", b"-").decode(errors="replace")
                    )
                    place = path.parent / name if choice & 128 else folder / name
                    if name.strip(".") and not place.exists() and not name.endswith(".tmp"):
                        place.write_bytes(b"somebody's")
                        foreign.append(place)
    return foreign


def disk_seeds() -> list[bytes]:
    """Return one change of each kind, for the tier that wrote and for the next one."""
    changes = [
        bytes([0, 0, 0, 0, 3]) + b"abcd",
        bytes([0, 1, 0, 16, 8]) + b"123456789",
        bytes([0, 2, 200, 31, 4]) + b"12345",
        bytes([1, 0, 0, 16]),
        bytes([1, 1, 0, 0]),
        bytes([1, 2, 255, 255]),
        bytes([2, 0, 1]),
        bytes([2, 1, 0]),
        bytes([3, 0]),
        bytes([4, 0]),
        bytes([134, 1]),
        bytes([5, 0, 5]) + b"names",
        bytes([137, 0, 5]) + b"names",
        bytes([5, 0, 16]) + b"0123456789abcdef",
    ]
    return [bytes([again]) + change for again in (0, 1) for change in [*changes, b"".join(changes)]]


def runs(data: bytes) -> None:
    """The beginning of an object: None, or a head whose chunks are in it."""
    head = RunHead.parse(data)
    assert head is None or 0 < len(head.chunks) <= MOST_CHUNKS_A_RUN
    if head is not None:
        for digest, (offset, size, trailer) in head.chunks.items():
            assert digest + struct.pack("<QQ", offset, size) + trailer in data[:HEAD_BYTES]


def runs_seeds() -> list[bytes]:
    """Return heads of one and of most chunks, and one that is cut and one with a wrong count."""
    trailer = make_trailer(KEYS[0], SIZES[0], checksum_of(b"something"))
    digests = [number.to_bytes(DIGEST_BYTES, "big") for number in range(MOST_CHUNKS_A_RUN)]
    one, most = (make_head(some, [5] * len(some), [trailer] * len(some)) for some in (digests[:1], digests))
    twice = make_head(digests[:1] * 2, [5, 6], [trailer] * 2)
    return [one + b"12345", most, twice, one[:-1], one[:8] + bytes(8) + one[16:], one[:8] + b"\xff" * 8 + one[16:]]


def resp(data: bytes) -> None:
    """Replies of a server of Valkey or Redis: values, or an `OSError`, and never more bytes than were received."""
    target = memoryview(bytearray(5))
    reader = cast("Any", BufferedReader(cast("Any", BytesIO(data))))
    try:
        for place in range(64):
            reply = receive(reader, target if place % 2 else None)
            if isinstance(reply, ReplyError):
                assert isinstance(reply.text, str)
            if isinstance(reply, bytes | memoryview):
                assert len(reply) <= len(data)
    except OSError:
        return


def resp_seeds() -> list[bytes]:
    """Return every kind of reply, including nested and broken ones."""
    scan = b"*2\r\n$2\r\n17\r\n*2\r\n$3\r\nabc\r\n$-1\r\n"
    return [
        b"+OK\r\n",
        b"-OOM command not allowed\r\n",
        b":12\r\n",
        b":-1\r\n",
        b"$5\r\nhello\r\n$5\r\nworld\r\n",
        b"*-1\r\n",
        scan,
        b"*1\r\n" * 2000,
        b"$70000000\r\n",
        b"*2000000\r\n",
        b"$5\r\nhelloXX",
        b"$-1\r\n",
        b":" + b"9" * 5000 + b"\r\n",
        b"!x\r\n",
        b"+" + b"x" * 9000,
        b"$\r\n",
        b"*0\r\n",
    ]


def valkey(data: bytes) -> None:
    """A server that answers every request with these bytes: as many outcomes as keys, or an `OSError`.

    No entry may be found, as none was written.
    """
    pool, keys, extents = shared_pool(), KEYS[1:3], extents_of(0, SIZES[1:3])
    pool.view[: 2 * EXTENT_BYTES] = bytes(2 * EXTENT_BYTES)
    with contextlib.ExitStack() as sockets:

        def connect(_server: Server) -> socket.socket:
            ours, theirs = socket.socketpair()
            sockets.enter_context(theirs)
            ours.settimeout(1.0)
            theirs.sendall(data)
            theirs.shutdown(socket.SHUT_WR)
            return ours

        sockets.enter_context(patch("kvdepot.tiers.valkey.connections.connect", connect))
        tier = ValkeyTier(pool, Server("nowhere", user="u", password=data[:1].hex()))
        sockets.callback(tier.close)
        for ask in (
            lambda: tier.contains(keys),
            lambda: tier.write(keys, [bytes(TRAILER_BYTES)] * 2, extents),
            lambda: tier.read(keys, extents),
        ):
            with contextlib.suppress(OSError):
                assert len(ask()) == len(keys)
        with contextlib.suppress(OSError):
            for key, is_here in zip(keys, read_from(tier, pool, keys, extents), strict=True):
                assert not is_here, f"{key.hex()} was never written"
        for end in (lambda: tier.remove(keys), lambda: sum(islice(tier.clear(None, None), 8)), tier.probe):
            with contextlib.suppress(OSError):
                end()
        assert all(count >= 0 for count in tier.usage().counters.values())


def valkey_seeds() -> list[bytes]:
    """Return replies to each question, after the reply to the password: right ones, heads without parts, refusals."""
    parts = [b"$%d\r\n%b\r\n" % (size, bytes(size)) for size in SIZES[1:3]]
    heads = [
        make_trailer(key, size, checksum_of(b"something else")) + (1).to_bytes(4, "little")
        for key, size in zip(KEYS[1:3], SIZES[1:3], strict=True)
    ]
    heads = [b"$%d\r\n%b\r\n" % (len(head), head) for head in heads]
    return [
        b"+OK\r\n" + replies
        for replies in (
            b":1\r\n:0\r\n",
            b"+OK\r\n" * 4,
            heads[0] + parts[0] + heads[1] + parts[1],
            heads[0] + b"$-1\r\n" * 3,
            heads[1] + parts[0] + heads[0] + parts[1],
            b"*2\r\n$1\r\n0\r\n*2\r\n$3\r\nabc\r\n:1\r\n",
            b"-OOM full\r\n" * 4,
            b"-MOVED 1 there\r\n",
            b"",
        )
    ]
