"""The targets: functions of bytes that fail on all errors except the documented ones, and their seeds.

Nothing here needs atheris: `tests/core/test_fuzz_corpus.py` calls the same functions with every input of the corpus.
"""

import mmap
import os
import random
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec

from fuzz import control, events, tiers, tokens, weights
from fuzz.depot import PAGE, PROMPTS, SPECS, Bytes, Life, live, spec_of
from fuzz.movers import OFFER, REGISTRATION, LifeWithMovers, live_with_movers
from kvdepot.config import directory_of_url, parse_quota, parse_size
from kvdepot.errors import ConfigError, ErrorCode, PoolError
from kvdepot.features.blend.messages import BLEND_RUN, SEGMENT, BlendLookup, BlendReply, NoteContents
from kvdepot.features.sessions.prefixes import PrefixFile
from kvdepot.index.index import ChunkIndex
from kvdepot.index.restore import restore
from kvdepot.layout import GroupKind
from kvdepot.movers.protocol import (
    MAXIMUM_ANSWER_BYTES,
    Copied,
    Failed,
    MoverError,
    NotCopied,
    Ready,
    Setup,
    encode,
    take_answers,
)
from kvdepot.operate import operations as o
from kvdepot.operate.report import status_of
from kvdepot.pool.extents import ExtentAllocator
from kvdepot.pool.names import Label, Names, NamesFile
from kvdepot.pool.table import (
    CRC_OFFSET,
    HEADER_PAGE_BYTES,
    RECORD_BYTES,
    SEALED,
    WRITING,
    IndexTable,
    table_size_bytes,
)
from kvdepot.server.depot import Depot
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire.status import ContextStatus, DepotStatus, GroupStatus, TenantStatus
from support.features import STANDARD
from support.integrity import check_empty
from support.releases import FOLDER, kept_frames

CORPUS: Final = Path(__file__).with_name("corpus")
_SEQUENCE: Final = bytes(range(8))
_VERSION: Final = m.PROTOCOL_VERSION
_POOL_ID: Final = bytes(range(16))
_A_NAME: Final = Names(labels=[Label("a", "b")])
_NUM_RECORDS: Final = 32
_NUM_LABELS: Final = 2
_SEGMENTS: Final = SEGMENT.pack(bytes(16), 0, 20) + SEGMENT.pack(bytes(range(16)), 20, 1)


# --- messages -------------------------------------------------------------------------------------------------------


def request(data: bytes) -> None:
    """A frame on the control socket: a request that survives another round trip, or a typed error."""
    frames.sequence_of(data)
    try:
        decoded = frames.decode_request(data)
    except frames.FrameError as error:
        assert error.code in (ErrorCode.MALFORMED, ErrorCode.UNKNOWN_OPERATION)
        assert len(str(error)) < 1000
        return
    assert frames.decode_request(bytes(frames.encode_frame(0, decoded))) == decoded


def reply(data: bytes) -> None:
    """A frame from a server."""
    try:
        frames.decode_reply(data)
    except frames.FrameError:
        return


def session(data: bytes) -> None:
    """The first message of a connection, or its answer."""
    for decode in (frames.decode_greeting, frames.decode_session_reply):
        try:
            decoded = decode(data)
        except frames.FrameError:
            continue
        assert frames.encode_greeting(decoded)[4:]


def _request_seeds() -> list[bytes]:
    run, spec, detail = PROMPTS[0], SPECS[2], m.GroupDetail((4096, 8), 8, hidden_dims=(2, 4), dtype="f", shape=(1, 2))
    requests: list[frames.Request] = [
        m.Hello(_VERSION, "client"),
        o.Status(),
        o.Clear(),
        o.Clear("tenant"),
        m.Unregister(1),
        m.EndRequest(1, "r"),
        m.RegisterKVCache(_VERSION, "engine", 0, 1, "cpu", "memcpy", "model", spec, (detail,) * 3),
        m.RegisterKVCache(_VERSION, "engine", 0, 1, "cuda", "ipc", "model", spec, (detail,) * 3, OFFER, "why"),
        m.Move(1, 2, True, (bytes(64), b"", bytes(8)), (0, 8, 6), (1, 0, 0), 1.0),
        m.Move(1, 0),
        m.RegisterScheduler(_VERSION, "engine", "model", SPECS[0]),
        m.Lookup(1, "r", run.digests),
        m.Release(1, (1, 2)),
        m.PrepareStore(1, "r", "tenant", run.digests, 0, run.parent, (8,)),
        m.CommitStore(1, 2, bytes(32)),
        m.AbortStore(1, 2),
        m.PrepareRetrieve(1, "r", run.digests, 3, (8, 1, 0)),
        m.ReportCorrupt(1, ((1, 258),)),
        NoteContents(1, run.digests, _SEGMENTS),
        BlendLookup(1, "r", _SEGMENTS, 8),
        m.ChangeWeights(1, "lineage 7"),
    ]
    return [bytes(frames.encode_frame(7, message)) for message in requests]


def _kept_requests() -> list[bytes]:
    """Return the requests that releases wrote."""
    kept = [each for release in FOLDER.iterdir() for each in kept_frames(release)]
    return [bytes(8) + body for table, _, body in kept if table == "request"]


def _reply_seeds() -> list[bytes]:
    context = ContextStatus(
        context=1,
        role="worker",
        instance="e",
        model="m",
        groups=[GroupStatus(kind=GroupKind.SLIDING_WINDOW, block_tokens=1, window_tokens=3)],
    )
    status = DepotStatus(contexts=[context], tenants={"default": TenantStatus(used_bytes=1)}, counters={"stores": 1})
    replies: list[frames.Reply] = [
        m.ErrorReply(1, ErrorCode.MALFORMED, "no"),
        m.HelloReply(1, 1, "0.1", 5),
        m.Registered(1, 2, m.Verify.ALL),
        m.Done(1, 2),
        m.LookupReply(1, 3, 4, 300.0),
        BlendReply(1, 2, 300.0, BLEND_RUN.pack(9, 20, 3, 0, 1, 0), bytes(32)),
        m.StorePlan(1, 2, bytes(40), 0, 1),
        m.RetrievePlan(1, 2, 1, bytes(40)),
        m.Moved(1, m.MoveOutcome.UNAVAILABLE, "no"),
        m.Moved(1, m.MoveOutcome.DONE, is_warm=True),
        o.StatusReply(1, status),
    ]
    return [bytes(frames.encode_frame(7, message)) for message in replies]


def answer(data: bytes) -> None:
    """Answers of a mover: they survive another round trip, or are a `MoverError`."""
    received = bytearray(data)
    with suppress(MoverError):
        for found in take_answers(received):
            assert take_answers(bytearray(encode(found))) == [found]
        assert len(received) < 4 + MAXIMUM_ANSWER_BYTES


def _answer_seeds() -> list[bytes]:
    answers = [encode(each) for each in (Ready(), Copied(1), Copied(2, True), NotCopied(2, "no"), Failed("gone", True))]
    return [*answers, b"".join(answers), b"\xff\xff\xff\xff", encode(Setup(1, REGISTRATION))]


def _session_seeds() -> list[bytes]:
    messages = (
        frames.OpenSession(_VERSION, "client"),
        frames.JoinSession(bytes(16)),
        frames.SessionOpened(1, bytes(16), 1, 1, "0.1"),
        m.ErrorReply(1, ErrorCode.DRAINING, ""),
    )
    return [frames.encode_greeting(message)[4:] for message in messages]


# --- files at the start of a server ---------------------------------------------------------------------------------


def sessions(data: bytes) -> None:
    """The file of sessions with the right magic: prefixes with which a server can start, and that it can replace."""
    memory = mmap.mmap(-1, max(2, 2 + len(data) // 1024) * 1024)
    memory[1024 : 1024 + len(data)] = data
    file = PrefixFile(memory)
    for _ in file.restore():
        pass
    file.check_integrity()
    num_bytes = file.num_bytes
    file.remember("a", "agent", data[:64])
    file.check_integrity()
    assert file.find("a", "agent") == data[: min(64, len(data) // 32 * 32)]
    file.forget("a", "agent")
    assert file.num_bytes <= num_bytes
    file.check_integrity()


def names(data: bytes) -> None:
    """The names file, from its magic on and as a frame: `PoolError`, or names with which a server can start."""
    for raw in (data, tokens.frame(data), tokens.frame(msgspec.msgpack.encode(_A_NAME)) + tokens.frame(data) + data):
        fd = os.memfd_create("names")
        try:
            os.write(fd, NamesFile.MAGIC + raw)
            file = NamesFile(fd, Path("names"), os.fstat(fd).st_size)
            found = file.found
            assert file.size_bytes == os.fstat(fd).st_size <= len(NamesFile.MAGIC + raw)
            assert NamesFile(fd, Path("names"), file.size_bytes).found == found
        except PoolError:
            continue
        finally:
            os.close(fd)
        index = ChunkIndex(ExtentAllocator(PAGE), IndexTable.in_memory(4))
        depot = Depot(index, epoch=1, lease_seconds=1.0, clock=lambda: 0.0, features=STANDARD)
        depot.labels.restore(found.labels)
        assert not [record for record in restore(index, found.spaces, len(found.labels)) if record is not None]
        check_empty(index)


def header(data: bytes) -> None:
    """The index table's file: 52 bytes of header, then the difference between the file's length and the header's."""
    source = Bytes(data)
    fixes, fields, extra = source.byte(), source.take(52), int.from_bytes(source.take(2), "little", signed=True)
    if fixes & 1 and len(fields) == 52:
        fields = fields[:48] + zlib.crc32(fields[:48]).to_bytes(4, "little")
    num_records = int.from_bytes(fields[16:24], "little")
    fd = os.memfd_create("index")
    try:
        os.write(fd, fields)
        os.ftruncate(fd, max(0, min(table_size_bytes(num_records), 1 << 20) + extra))
        table = IndexTable.open(Path(f"/proc/self/fd/{fd}"), 1 << 20, _POOL_ID)
    except PoolError:
        return
    finally:
        os.close(fd)
    assert list(table.records()) == []
    table.close()


def records(data: bytes) -> None:
    """The index table's records, with right and with random checksums. Accepted records must be usable.

    Space adds up, restored entries are found, all of them can leave, and afterwards the pool is like new.
    """
    body = data[1 : 1 + _NUM_RECORDS * RECORD_BYTES]
    memory = bytearray(table_size_bytes(_NUM_RECORDS))
    memory[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + len(body)] = body
    if data[:1] and data[0] & 1:
        _repair(memory, len(body) // RECORD_BYTES)
    table = IndexTable(memory, _NUM_RECORDS)
    index = ChunkIndex(ExtentAllocator(64 * PAGE), table, ("auto", "arc")[bool(data[:1]) and data[0] >> 1 & 1])
    depot = Depot(index, epoch=1, lease_seconds=1.0, clock=lambda: 0.0, features=STANDARD)
    depot.labels.restore([Label(f"tenant-{number}", "model") for number in range(_NUM_LABELS)])
    unfinished = [entry for entry in restore(index, SPECS, _NUM_LABELS) if entry is not None]
    index.check_integrity()
    for record in table.records():
        if record.state == WRITING:
            assert record.entry in unfinished
            continue
        node = index.nodes.find(index.spaces[record.space], record.key, record.depth)
        assert node is not None
        assert index.entries.has(node, record.group, record.part)
        found = index.entries.find(node, record.group, record.part)
        assert found is not None
        assert index.entries.is_sealed(found) == (record.state == SEALED)
    status_of(depot)
    for entry in unfinished:
        table.writer_of(entry)
        table.owner_of(entry)
    depot.quarantine.discard(unfinished)
    index.check_integrity()
    while index.evictor.make_room(1, 1):
        pass
    check_empty(index)


def _repair(memory: bytearray, num_records: int) -> None:
    table = IndexTable(memory, _NUM_RECORDS)
    for entry in table.entries[:num_records]:
        start = HEADER_PAGE_BYTES + entry * RECORD_BYTES + CRC_OFFSET
        memory[start : start + 4] = table.crc_of(entry).to_bytes(4, "little")


def _sessions_seeds() -> list[bytes]:
    memory = mmap.mmap(-1, 8 * 1024)
    file = PrefixFile(memory)
    file.remember("a", "agent", bytes(range(96)) * 22)
    file.remember("b", "agent", bytes(32))
    return [memory[1024:], memory[1024:4096], bytes(range(256))]


def _names_seeds() -> list[bytes]:
    return [
        msgspec.msgpack.encode(Names(list(SPECS), [Label("default", "model"), Label("tenant", "")])),
        msgspec.msgpack.encode(Names()),
        b"\x92" + b"\x91" * 900,
        tokens.frame(msgspec.msgpack.encode(Names(list(SPECS))))
        + tokens.frame(msgspec.msgpack.encode(_A_NAME))
        + b"\x05",
    ]


def _header_seeds() -> list[bytes]:
    fields = b"KVDEPOTX" + b"".join(value.to_bytes(size, "little") for value, size in ((2, 4), (128, 4), (8, 8)))
    fields += (1 << 20).to_bytes(8, "little") + _POOL_ID
    return [bytes([1]) + fields + bytes(6), bytes([0]) + fields + zlib.crc32(fields).to_bytes(4, "little") + bytes(2)]


def _records_seeds() -> list[bytes]:
    """Return tables that random lives leave behind."""
    seeds: list[bytes] = []
    for spec, setting in enumerate((0, 4, 8, 12, 16, 20)):
        life = Life(Bytes(bytes([setting, 20]) + random.Random(spec).randbytes(200)))
        for prompt in range(4):
            for who in range(3):
                life.source = Bytes(bytes([who, 0, prompt, 24, 0, 0, 0, 0, 0]))
                life.prepare()
        for _ in range(6):
            for who in range(3):
                life.source = Bytes(bytes([who, 0, 0, 0]))
                life.commit()
        used = 1 + max(record.entry for record in life.depot.index.table.records())
        seeds.append(b"\1" + bytes(life.memory[HEADER_PAGE_BYTES : HEADER_PAGE_BYTES + used * RECORD_BYTES]))
    return seeds


def settings(data: bytes) -> None:
    """Sizes, quotas and URLs from users."""
    text = data.decode(errors="replace")
    with suppress(ConfigError):
        assert parse_size(text) >= 0
    with suppress(ConfigError):
        name, size = parse_quota(text)
        assert name
        assert size >= 0
    with suppress(ConfigError):
        directory_of_url(text)


def _settings_seeds() -> list[bytes]:
    return [
        b"4GiB",
        b"1.5 g",
        b"tenant=512MiB",
        b"=1",
        b"ipc:///a/control.sock",
        b"tcp://a:1",
        b"9" * 400,
        b"9" * 5000,
        b"\xd9\xa3k",
    ]


# --- the depot ------------------------------------------------------------------------------------------------------


def _depot_seeds() -> list[bytes]:
    rng = random.Random(3)
    seeds: list[bytes] = []
    for setting in range(32):
        steps = [bytes([setting, rng.randrange(32)])]
        for _ in range(12):
            who, prompt, request_id = rng.randrange(3), rng.randrange(4), rng.randrange(3)
            covered = bytes(len(SPECS[spec_of(setting)].groups))
            steps += [
                bytes([6, who, 0, prompt, 8 * rng.randrange(8), *covered, request_id]),
                bytes([7, who, 0, 0, 0]),
                bytes([3, who, 0, request_id, prompt, 56, 0x1D]),
                bytes([3, (who + 1) % 3, 0, request_id, prompt, 56, 0x15]),
                bytes([18, who, 0, prompt, 56, 2, 1, 3, 2, 3, 19, who, 0, 0, 2, 1, 3, 2, 3, 0]),
                bytes([rng.randrange(20)]) + rng.randbytes(rng.randrange(6)),
            ]
        seeds.append(b"".join(steps))
    frames = [frame[8:] for frame in _request_seeds()]
    return [*seeds, *(bytes([0, 9, 16, 0, len(frame)]) + frame for frame in frames if len(frame) < 256)]


def _movers_seeds() -> list[bytes]:
    rng, steps_of = random.Random(4), [step.__name__ for step in LifeWithMovers(Bytes(b"")).steps()]
    move, *_, last = range(steps_of.index("move"), len(steps_of))
    seeds: list[bytes] = []
    for setting in range(32):
        steps = [bytes([setting, 20 + rng.randrange(12)])]
        for _ in range(12):
            who, prompt, request_id = rng.randrange(3), rng.randrange(4), rng.randrange(3)
            covered = bytes(len(SPECS[spec_of(setting)].groups))
            steps += [
                bytes([6, who, 0, prompt, 8 * rng.randrange(8), *covered, request_id]),
                bytes([move, who, 0, rng.randrange(256)]),
                bytes([rng.randint(move, last)]) + rng.randbytes(3),
                bytes([rng.choice((7, 8)), who, 0, 0, 0]),
                bytes([9, who, 0, prompt, 56, *covered, request_id]),
                bytes([rng.randint(0, last)]) + rng.randbytes(rng.randrange(6)),
            ]
        seeds.append(b"".join(steps))
    return seeds


@dataclass(frozen=True, slots=True)
class Target:
    """A function to call with bytes, its seeds, and its maximum number of bytes."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]
    maximum_bytes: int = 1000
    is_message: bool = False  # msgpack, after `prefix` bytes
    prefix: int = 0


TARGETS: Final[dict[str, Target]] = {
    "request": Target(request, lambda: [*_request_seeds(), *_kept_requests()], 2000, is_message=True, prefix=8),
    "reply": Target(reply, _reply_seeds, 2000, is_message=True, prefix=8),
    "answer": Target(answer, _answer_seeds, 2000, is_message=True, prefix=4),
    "session": Target(session, _session_seeds, is_message=True),
    "names": Target(names, _names_seeds, is_message=True),
    "sessions": Target(sessions, _sessions_seeds, 8000),
    "header": Target(header, _header_seeds, 55),
    "records": Target(records, _records_seeds, 1 + _NUM_RECORDS * RECORD_BYTES),
    "settings": Target(settings, _settings_seeds, 6000),
    "depot": Target(live, _depot_seeds, 400),
    "movers": Target(live_with_movers, _movers_seeds, 400),
    "control": Target(control.talk, control.seeds, 400),
    "events": Target(events.talk, events.seeds, 1000, is_message=True),
    "disk": Target(tiers.disk, tiers.disk_seeds, 200),
    "resp": Target(tiers.resp, tiers.resp_seeds, 10_000),
    "valkey": Target(tiers.valkey, tiers.valkey_seeds, 12_000),
    "runs": Target(tiers.runs, tiers.runs_seeds, 12_000),
    "tokens": Target(tokens.restore, tokens.seeds, 2000, is_message=True, prefix=1),
    "weights": Target(weights.parse, weights.seeds, 3000),
}
if find_spec("obstore"):  # kvdepot[object]
    from fuzz import objects

    TARGETS["objects"] = Target(objects.objects, objects.seeds, 200)
if find_spec("kvdepot_mooncake"):
    from fuzz import mooncake

    TARGETS["mooncake"] = Target(mooncake.replies, mooncake.seeds, 3000, is_message=True)
if find_spec("kvdepot_plan"):
    from fuzz import trace

    TARGETS["trace"] = Target(trace.read, trace.seeds, 20_000)
if find_spec("kvdepot_vllm"):
    from fuzz import news, wishes

    TARGETS["news"] = Target(news.follow, news.seeds, 2000, is_message=True)
    TARGETS["wishes"] = Target(wishes.parse, wishes.seeds, 2000)
if find_spec("starlette") and find_spec("prometheus_client") and find_spec("uvicorn"):  # kvdepot[http]
    from fuzz import http

    TARGETS["http"] = Target(http.call, http.seeds, 2000)


def kept_inputs(target: str) -> list[Path]:
    """Return a target's corpus: inputs that reached new code, and inputs that crashed."""
    return sorted((CORPUS / target).iterdir())
