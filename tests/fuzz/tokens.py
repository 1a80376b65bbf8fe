"""The file of tokens that an earlier server left as a target, raw and with checksums made right."""

import struct
import zlib
from typing import Final

import msgspec

from fuzz.tiers import FOLDER
from kvdepot.features.routers.feature import Routers
from kvdepot.features.routers.holdings import Holdings
from kvdepot.features.routers.messages import DescribedGroup
from kvdepot.features.routers.tokens import TokensFile
from kvdepot.layout import GroupKind
from kvdepot.server.turns import CHORES_FAILED
from kvdepot.wire import messages as m
from support.events import description
from support.index import Bench, prompt

_PATH: Final = FOLDER / "tokens"
_FRAME: Final = struct.Struct("<II")
_RUNS: Final = (prompt(3), prompt(2, 1), prompt(5).slice(3, 5))
_OTHER: Final = m.CacheSpec(2, (m.GroupShape(GroupKind.FULL_ATTENTION, 1),), "another space")


def frame(body: bytes) -> bytes:
    """Return a frame with its right checksum."""
    return _FRAME.pack(len(body), zlib.crc32(body)) + body


def restore(data: bytes) -> None:
    """A file: descriptions with which a server starts, and which the next server finds as they are.

    Byte 0 says whether the rest is the body of a message, before and after which there are others, or all of the file.
    """
    body = data[1:]
    raw = b"".join(map(frame, (_bodies()[0], body, _bodies()[1]))) if data[:1] and data[0] & 1 else body
    _PATH.write_bytes(TokensFile.MAGIC + raw)
    num_bytes, kept = _start()
    assert len(kept) <= len(TokensFile.MAGIC + raw)
    assert _start() == (num_bytes, kept)


def _start() -> tuple[int, bytes]:
    """Start a server on the file. Return the bytes of the descriptions that it takes, and the file then."""
    bench = Bench(pages=20, num_records=24, holdings=Holdings("{model}"))
    worker = bench.worker()
    for run in _RUNS[:2]:
        worker.store(run)
    bench.depot.labels.space_of(_OTHER)
    file = TokensFile.open(_PATH)
    bench.depot.features.of(Routers).desk.keep_in(file)
    bench.depot.features.of(Routers).desk.restore()
    bench.depot.background.work()
    file.close()
    assert not bench.depot.counters[CHORES_FAILED]
    assert bench.holdings is not None
    bench.index.check_integrity()
    bench.holdings.check_integrity(bench.index.visibility.is_visible)
    return bench.holdings.num_bytes, _PATH.read_bytes()


def _bodies() -> list[bytes]:
    """Return the messages that describe the runs."""
    requests = [request for run in _RUNS for request in description(run, 1).requests(1, run)]
    return [msgspec.msgpack.encode((0, "served", request)) for request in requests]


def seeds() -> list[bytes]:
    """Return messages of a known space and of others, then whole, damaged and cut files."""
    (request,) = description(_RUNS[1], 1).requests(1, _RUNS[1])
    more = description(
        _RUNS[0],
        1,
        groups=(DescribedGroup(1, "full_attention"),),
        lora_name="poet",
        extra_keys=(None, ("a", 1), None),
    )
    messages = [(number, "served", request) for number in (0, 1, -1, 2, 1 << 70 >> 7)]
    messages += [(0, "other", each) for each in more.requests(1, _RUNS[0])]
    bodies = [*_bodies(), *map(msgspec.msgpack.encode, messages), b"\x91" * 900, b""]
    whole = b"".join(map(frame, bodies))
    files = [whole, whole[:-1], whole[:200] + b"\xff" + whole[201:], _FRAME.pack(1 << 31, 0), b"\0" * 8 + whole]
    return [*(b"\1" + body for body in bodies), *(b"\0" + file for file in files)]
