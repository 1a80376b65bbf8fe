"""Frames, pools and tiers that a release wrote, kept so that every later build reads them.

`python -m support.releases VERSION` in tests/ writes those of this build to `releases/VERSION`. Until a version is
released, it may be written again.
"""

import mmap
import sys
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import inspect

from kvdepot.keys import DIGEST_BYTES, KeyRun, digest_at
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.pool.files import _pool_id as pool_id  # pyright: ignore[reportPrivateUsage]
from kvdepot.pool.folder import POOL_FILE, TABLE_FILE
from kvdepot.pool.table import _FILE_HEADER as FILE_HEADER  # pyright: ignore[reportPrivateUsage]
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot.wire import operation as o
from support.peer import Peer, prompt

FOLDER = Path(__file__).parents[1] / "releases"
STORED = prompt(6, "kept")
POOL_BYTES = 1 << 20

_GREETINGS = (frames.OpenSession, frames.JoinSession, frames.SessionOpened)


def message_types() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    """Yield each kind of message with the name of its table."""
    for kind in frames.request_types():
        yield "request", kind
    for kind in o.Reply.__subclasses__():
        if kind.__module__.startswith("kvdepot"):  # tests define replies, too
            yield "reply", kind
    for kind in _GREETINGS:
        yield "greeting", kind


def sample(kind: inspect.Type) -> Any:
    """Return a value of a type. All fields of structs are set."""
    match kind:
        case inspect.StructType():
            return kind.cls(**{field.name: sample(field.type) for field in kind.fields})
        case inspect.UnionType():
            return sample(next(each for each in kind.types if not isinstance(each, inspect.NoneType)))
        case inspect.VarTupleType() | inspect.ListType() | inspect.SetType():
            return (tuple if isinstance(kind, inspect.VarTupleType) else list)([sample(kind.item_type)])
        case inspect.TupleType():
            return tuple(map(sample, kind.item_types))
        case inspect.DictType():
            return {sample(kind.key_type): sample(kind.value_type)}
        case inspect.EnumType():
            return list(kind.cls)[-1]
        case inspect.BytesType():
            return bytes(range(kind.min_length or min(32, kind.max_length or 32)))
        case inspect.IntType():
            return max(kind.ge or 0, 1) if kind.lt != 1 else 0
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return True
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.Metadata():
            return sample(kind.type)
        case inspect.AnyType():
            return "anything"
        case _:
            raise AssertionError(f"no sample of {kind}")


def kept_frames(release: Path) -> list[tuple[str, str, bytes]]:
    """Return the table, the tag and the body of each message that a release wrote."""
    lines = (release / "frames.txt").read_text().splitlines()
    return [(table, tag, bytes.fromhex(body)) for table, tag, body in map(str.split, lines)]


def unpack(archive: Path, into: Path) -> None:
    """Unpack a kept folder."""
    with tarfile.open(archive) as packed:
        packed.extractall(into, filter="data")


def unpack_pool(release: Path, into: Path) -> None:
    """Unpack the kept pool. Its table has an id of the pool's file, which changes here as after a reboot."""
    unpack(release / "pool.tar.xz", into)
    with (into / POOL_FILE).open("rb") as pool, (into / TABLE_FILE).open("r+b") as table:
        magic, version, record_bytes, num_records, pool_bytes, _, _ = FILE_HEADER.unpack(table.read(FILE_HEADER.size))
        fields = magic, version, record_bytes, num_records, pool_bytes, pool_id(pool.fileno(), pool_bytes)
        table.seek(0)
        table.write(FILE_HEADER.pack(*fields, zlib.crc32(FILE_HEADER.pack(*fields, 0)[:-4])))


_NEXT: Final = (
    "import kvdepot.wire.messages as m; m.PROTOCOL_VERSION += 1; from kvdepot.operate.cli import main; main()"
)


class NextDepot(DepotProcess):
    """A depot of the next protocol."""

    def start(self, timeout_seconds: float = 60.0) -> None:
        arguments = self._arguments
        assert arguments[1:3] == ["-m", "kvdepot"]
        self._arguments = [arguments[0], "-c", _NEXT, *arguments[3:]]
        super().start(timeout_seconds)
        self._arguments = arguments


class Copier(Peer):
    """A worker that writes and reads the pool."""

    maps_pool = True

    def put(self, run: KeyRun) -> None:
        """Store a run. The bytes of a chunk are its key, repeated."""
        plan = self.prepare(run)
        for chunk, _, _, _, _, _, offset, num_bytes in m.EXTENT.iter_unpack(plan.extents):
            self._memory[offset : offset + num_bytes] = digest_at(run.digests, chunk) * (num_bytes // DIGEST_BYTES)
        self.ask(m.CommitStore(self.context, plan.ticket))

    def get(self, run: KeyRun) -> int:
        """Return how many leading chunks can be read with the right bytes."""
        plan = self.ask(m.PrepareRetrieve(self.context, "r", run.digests, 0, (run.num_chunks,)))
        assert isinstance(plan, m.RetrievePlan)
        found = [
            self._memory[offset : offset + num_bytes] == digest_at(run.digests, chunk) * (num_bytes // DIGEST_BYTES)
            for chunk, _, _, _, _, _, offset, num_bytes in m.EXTENT.iter_unpack(plan.extents)
        ]
        assert all(found), "wrong bytes"
        return plan.num_chunks

    @property
    def _memory(self) -> mmap.mmap:
        assert self.session.mapping is not None
        return self.session.mapping.pool


def _write(release: Path) -> None:
    release.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{table} {frames.operation_of(kind)} {msgspec.msgpack.encode(sample(inspect.type_info(kind))).hex()}\n"
        for table, kind in message_types()
    ]
    (release / "frames.txt").write_text("".join(sorted(lines)))
    with tempfile.TemporaryDirectory() as name:
        tier = Path(name) / "tier"
        depot = DepotProcess(
            "--max-entries",
            "64",
            "--tier",
            f"file://{tier}",
            "--tier",
            f"disk://{tier}/disk?capacity=1MiB",
            pool_size=str(POOL_BYTES),
        )
        try:
            peer = Copier(depot)
            peer.put(STORED)
            peer.close()
            counts = lambda: [each.counters.get("written_entries") for each in depot.status().tiers]  # noqa: E731
            wait_until(lambda: counts() == [STORED.num_chunks] * 2)
            depot.terminate()
            for part, folder in (("pool", depot.pool_directory), ("tier", tier)):
                with tarfile.open(release / f"{part}.tar.xz", "w:xz") as packed:
                    packed.add(folder, ".")
        finally:
            depot.close()


if __name__ == "__main__":
    _write(FOLDER / sys.argv[1])
