"""The CPU backend passes the fault suite of every backend. Further faults need no device and happen here alone."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from msgspec import structs

from kvdepot.backends import CacheGroup, CopyBatch, KVCache
from kvdepot.client.connection import Connection
from kvdepot.client.session import Channel, Session
from kvdepot.client.transfers import BATCH_BYTES
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.engine import PLAN
from kvdepot.testing.faults import FaultSuite, Spawn
from kvdepot.testing.plan import WorkerPlan, prompt
from kvdepot.wire import frames
from kvdepot.wire import messages as m
from kvdepot_cpu.context import CpuOptions, CpuTransferContext, PageCopier
from support.cpu.engines import command
from support.cpu.workers import NumpyWorker

_CHUNK_BYTES: Final = PLAN.chunk_size_bytes(0)


@pytest.mark.slow
class TestFaults(FaultSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        return NumpyWorker(url, plan, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return command(url, instance)

    @pytest.mark.promise(10, 24, 26)
    def test_a_forked_child_that_lives_on_does_not_keep_what_a_killed_engine_held(
        self, depot: DepotProcess, spawn: Spawn
    ) -> None:
        before = os.listdir(f"/proc/{depot.pid}/fd")
        victim = spawn("victim")
        victim.expect("3", "store 1 3")
        child = int(victim.ask("fork"))
        assert child > 1  # 0 and -1 would name more processes than the child
        try:
            victim.expect("3", "lookup 1 3")
            victim.expect("armed", "gate store half")
            victim.expect("reached", "store 2 3")
            status = depot.status()
            assert (status.num_leases, status.num_tickets) == (1, 1)
            victim.kill()
            wait_until(lambda: depot.status().num_leases == depot.status().num_tickets == 0, 1.0)
            wait_until(lambda: depot.status().pool_used_bytes == 3 * _CHUNK_BYTES, 1.0)
            assert depot.status().num_sessions == 0
            wait_until(lambda: len(os.listdir(f"/proc/{depot.pid}/fd")) <= len(before))
            os.kill(child, 0)  # it lives
        finally:
            os.kill(child, signal.SIGKILL)
        other = spawn("other")
        other.expect("3", "retrieve 1 3")
        other.expect("0", "lookup 2 3")

    def test_two_engines_that_store_the_same_at_once_make_one_copy(self, depot: DepotProcess, spawn: Spawn) -> None:
        engines = [spawn("one"), spawn("two")]
        for engine in engines:
            engine.say("store 1 16")
        assert [engine.listen() for engine in engines] == ["16", "16"]
        wait_until(lambda: depot.status().num_tickets == 0)
        assert depot.status().pool_used_bytes == 16 * _CHUNK_BYTES
        assert [engine.ask("retrieve 1 16") for engine in engines] == ["16", "16"]

    def test_unfinished_chunks_of_a_live_writer_wait_until_it_comes_back_or_dies(
        self, depot: DepotProcess, spawn: Spawn
    ) -> None:
        victim, other = spawn("victim"), spawn("other")
        victim.expect("armed", "gate store half")
        victim.expect("reached", "store 2 3")
        victim.signal(signal.SIGSTOP)
        depot.kill()
        depot.start()
        wait_until(lambda: not depot.status().recovering)
        assert depot.status().quarantined_bytes == 3 * _CHUNK_BYTES
        wait_until(lambda: other.ask("store 1 3") == "3")
        victim.kill()
        wait_until(lambda: depot.status().quarantined_bytes == 0, 2.0)
        other.expect("0", "lookup 2 3")
        other.expect("3", "retrieve 1 3")


# --- in this process: gates in the copy -----------------------------------------------------------------------------


class Gate:
    """Holds a copier before its copy until the gate is opened."""

    def __init__(self, context: CpuTransferContext, name: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        copier = context.copier
        self._copy = getattr(copier, name)
        setattr(copier, name, self)

    def __call__(self, batch: CopyBatch) -> None:
        self.reached.set()
        assert self.opened.wait(20)
        self._copy(batch)


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., CpuTransferContext]]:
    made: list[CpuTransferContext] = []

    def make(
        depot: DepotProcess, instance: str = "engine", fill: int = 0, batch_bytes: int = BATCH_BYTES
    ) -> CpuTransferContext:
        cache = np.full((1, 64, 65536), fill, np.uint8)
        options = CpuOptions(url=depot.url, batch_bytes=batch_bytes)
        made.append(CpuTransferContext(KVCache([CacheGroup(list(cache), 16)], instance, "bytes"), options))
        made[-1].cache = cache  # type: ignore[attr-defined]
        made[-1].wait_until_connected(10)
        return made[-1]

    yield make
    for context in made:
        context.close()


@pytest.mark.parametrize(("num_stored", "num_left"), [(8, 0), (3, 5)])
@pytest.mark.promise(14, 15)
def test_chunks_evicted_during_a_retrieve_are_misses_and_the_others_count(
    make: Callable[..., CpuTransferContext], num_stored: int, num_left: int
) -> None:
    with DepotProcess("--lease-seconds", "0.2", pool_size="2MiB") as depot:
        reader, writer = make(depot, "reader", fill=1), make(depot, "writer", fill=2)
        assert reader.submit_store("r", prompt(8), [list(range(32))]).result(10)
        gate = Gate(reader, "retrieve")
        future = reader.submit_retrieve("r", prompt(8), [list(range(32))])
        assert gate.reached.wait(10)
        wait_until(lambda: depot.status().num_leases == 0, 5.0)
        evicting = writer.submit_store("r", prompt(num_stored, salt=1), [list(range(4 * num_stored))])
        assert evicting.result(10)
        gate.opened.set()
        assert future.result(10) is False
        assert future.num_chunks == num_left
        assert (reader.cache[0, : 4 * num_left] == 1).all()  # type: ignore[attr-defined]


def test_a_store_asks_for_the_next_batch_before_it_copies_one(
    depot: DepotProcess, make: Callable[..., CpuTransferContext]
) -> None:
    context = make(depot, batch_bytes=1)  # one chunk a batch
    gate = Gate(context, "store")
    future = context.submit_store("r", prompt(4), [list(range(16))])
    assert gate.reached.wait(10)
    wait_until(lambda: depot.status().num_tickets == 2)
    gate.opened.set()
    assert future.result(10)
    assert depot.status().num_tickets == 0
    assert context.submit_retrieve("r", prompt(4), [list(range(16, 32))]).result(10)


@pytest.mark.parametrize("batch_bytes", [BATCH_BYTES, 1])
@pytest.mark.promise(9)
def test_a_copy_that_fails_is_a_miss_and_gives_its_space_back(
    depot: DepotProcess, make: Callable[..., CpuTransferContext], monkeypatch: pytest.MonkeyPatch, batch_bytes: int
) -> None:
    context = make(depot, batch_bytes=batch_bytes)

    def fail(_copier: PageCopier, _batch: CopyBatch) -> None:
        raise OSError("the device is on fire")

    with monkeypatch.context() as patch:
        patch.setattr(PageCopier, "store", fail)
        assert context.submit_store("r", prompt(4), [list(range(16))]).result(10) is False
    wait_until(lambda: depot.status().pool_used_bytes == 0)
    assert context.submit_store("r", prompt(4), [list(range(16))]).result(10)


@pytest.mark.parametrize("direction", ["store", "retrieve"])
@pytest.mark.parametrize(
    "forged",
    [
        {"offset": (1 << 64) - 4096},
        {"offset": (1 << 64) - 1},
        {"offset": (64 << 20) - 4096},  # the last page of the pool
        {"offset": (64 << 20) - (1 << 18) + 1},
        {"num_bytes": (1 << 64) - 4096},
        {"num_bytes": 4096},
        {"chunk": 4},
        {"group": 1},
        {"layers": 1},
    ],
    ids=str,
)
def test_nothing_is_copied_for_a_depot_that_names_other_bytes(
    forged: dict[str, int],
    direction: str,
    depot: DepotProcess,
    make: Callable[..., CpuTransferContext],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = make(depot)
    assert context.submit_store("r", prompt(4), [list(range(16))]).result(10)
    wait = Channel.wait
    names = ("chunk", "group", "heads", "entry", "layers", "header", "offset", "num_bytes")

    def lie(channel: Channel, sequence: int, deadline_seconds: float) -> frames.Reply:
        reply = wait(channel, sequence, deadline_seconds)
        if not isinstance(reply, m.StorePlan | m.RetrievePlan):
            return reply
        last = dict[str, int](zip(names, m.EXTENT.unpack(reply.extents[-m.EXTENT.size :]), strict=True)) | forged
        return structs.replace(reply, extents=reply.extents[: -m.EXTENT.size] + m.EXTENT.pack(*last.values()))

    copied: list[CopyBatch] = []

    def copy(_copier: PageCopier, batch: CopyBatch) -> None:
        copied.append(batch)

    with monkeypatch.context() as patch:
        patch.setattr(Channel, "wait", lie)
        patch.setattr(PageCopier, direction, copy)
        run = prompt(4, salt=1) if direction == "store" else prompt(4)
        submit = context.submit_store if direction == "store" else context.submit_retrieve
        assert submit("r", run, [list(range(16, 32))]).result(10) is False
    assert not copied
    wait_until(lambda: depot.status().num_tickets == depot.status().num_leases == 0)
    assert context.submit_retrieve("r", prompt(4), [list(range(16, 32))]).result(10)


def test_a_store_that_fails_counts_no_unconfirmed_chunk_and_keeps_no_reply(
    depot: DepotProcess, make: Callable[..., CpuTransferContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, channels = Connection.channel, list[Channel]()

    def open_seen(connection: Connection, session: Session) -> Channel:
        channels.append(opened(connection, session))
        return channels[-1]

    monkeypatch.setattr(Connection, "channel", open_seen)
    context = make(depot, batch_bytes=1)  # one chunk a batch
    copy, copied = PageCopier.store, list[CopyBatch]()

    def fail_later(copier: PageCopier, batch: CopyBatch) -> None:
        copied.append(batch)
        if len(copied) == 3:
            raise OSError("the device is on fire")
        copy(copier, batch)

    with monkeypatch.context() as patch:
        patch.setattr(PageCopier, "store", fail_later)
        future = context.submit_store("r", prompt(4), [list(range(16))])
        assert future.result(10) is False
    assert future.num_chunks == 0
    assert context.submit_store("r", prompt(4), [list(range(16))]).result(10)
    assert [channel.num_kept for channel in channels] == [0, 0]  # of the registration and of the stores
    assert context.submit_retrieve("r", prompt(4), [list(range(16, 32))]).result(10)


@pytest.mark.slow
@pytest.mark.promise(27)
def test_ten_restarts_leave_no_descriptor_mapping_or_thread_in_a_worker(
    depot: DepotProcess, make: Callable[..., CpuTransferContext]
) -> None:
    context = make(depot)
    assert context.submit_store("r", prompt(4), [list(range(16))]).result(10)

    def restart() -> None:
        depot.kill()
        depot.start()
        wait_until(lambda: context.submit_retrieve("r", prompt(4), [list(range(16))]).result(10))

    def count() -> tuple[int, int, int]:
        maps = Path("/proc/self/maps").read_text()
        return (
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            maps.count(str(depot.pool_directory)),
        )

    for _ in range(2):
        restart()
    before = count()
    for _ in range(10):
        restart()
    wait_until(
        lambda: all(now <= then for now, then in zip(count(), before, strict=True)), what=f"{before} from {count()}"
    )
