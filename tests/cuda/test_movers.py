"""Mode `ipc`: real processes on a fake device are killed or stopped at the worst moments.

Every test ends with right bytes or a miss, and only living processes hold the device's memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import pytest

from kvdepot.client.session import Channel
from kvdepot.keys import KeyRun
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.engine import EngineProcess
from kvdepot.testing.plan import PLANS, Cache, WorkerPlan, prompt
from kvdepot.wire import messages as m
from kvdepot_cuda.move import await_mover
from support.commands import run_kvdepot
from support.cuda.fake import DEFAULT_STREAM, FakeDriver, FakeEvent, FakeTensor
from support.cuda.fake_worker import NUM_PIECES, FakeWorker
from support.cuda.mover_faults import (
    WAIT_SECONDS,
    MoverFaultSuite,
    context_of,
    has_memory,
    wait_for_mover,
    wait_until_nothing_is_held,
)
from support.cuda.node import FakeDevice

pytestmark = pytest.mark.slow

PLAN = PLANS["large pages"]


@pytest.fixture
def depot(depot_with_movers: DepotProcess) -> DepotProcess:
    return depot_with_movers


@pytest.fixture
def cache(device: FakeDevice, depot: DepotProcess) -> Iterator[MakeCache]:
    """Makes workers in this process whose movers are ready."""
    made: list[Cache] = []

    def make(instance: str = "engine", *, url: str = depot.url, wait: bool = True, **options: Any) -> Cache:
        made.append(Cache(device.worker(url, PLAN, instance=instance, **options), PLAN))
        if wait:
            made[-1].context.wait_until_connected(WAIT_SECONDS)
        return made[-1]

    yield make
    device.open_gate()
    for cache in made:
        cache.context.close()
    wait_until(lambda: device.holders() == set(), WAIT_SECONDS, "the device's memory to be given back")


def engine_command(url: str, instance: str, device: FakeDevice) -> list[str]:
    return [sys.executable, "-m", "support.cuda.engine_child", url, instance, "ipc", str(device.memory)]


def mode_of(worker: Cache) -> str:
    context: Any = worker.context
    return str(context.transfer_mode)


# --- who is killed, and when ------------------------------------------------------------------------------------------


class TestWhoIsKilled(MoverFaultSuite):
    """Checks that only living processes hold the device's memory."""

    @pytest.fixture(autouse=True)
    def node(self, device: FakeDevice) -> Iterator[None]:
        self.device = device
        yield
        wait_until(lambda: device.holders() == set(), WAIT_SECONDS, "the device's memory to be given back")

    @pytest.fixture
    def depot(self, node: None, depot_with_movers: DepotProcess) -> DepotProcess:
        del node
        return depot_with_movers

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> FakeWorker:
        return self.device.worker(url, plan, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return engine_command(url, instance, self.device)

    def hold_copies(self, mover: int) -> None:
        del mover
        self.device.close_gate()

    def wait_for_a_copy(self, depot: DepotProcess, mover: int) -> None:
        del depot
        assert self.device.wait_for_a_copy() == mover

    def let_go(self) -> None:
        self.device.open_gate()


@pytest.mark.promise(23)
def test_a_mover_that_is_stopped_is_a_miss_at_its_deadline_and_is_replaced(device: FakeDevice) -> None:
    with DepotProcess("--move-seconds", "2") as depot:
        worker = Cache(device.worker(depot.url, PLAN), PLAN)
        worker.context.wait_until_connected(WAIT_SECONDS)
        assert worker.store(prompt(3))
        before = wait_for_mover(depot)
        os.kill(before, signal.SIGSTOP)
        assert worker.retrieve(prompt(3)) == 0
        wait_for_mover(depot, but=before)
        assert "more than 2 s" in context_of(depot).why_no_mover
        assert worker.retrieve(prompt(3)) == 3
        worker.context.close()


@pytest.mark.parametrize("what", ["store", "retrieve"])
@pytest.mark.promise(28)
def test_a_depot_that_is_stopped_during_a_copy_is_a_miss_and_the_mover_is_dead_before(
    what: str, device: FakeDevice
) -> None:
    """Otherwise the mover could write into blocks that belong to others by then."""
    with DepotProcess("--move-seconds", "2") as depot:
        worker = Cache(device.worker(depot.url, PLAN, deadline_seconds=1.0), PLAN)
        worker.context.wait_until_connected(WAIT_SECONDS)
        assert worker.store(prompt(3))
        run = prompt(3, salt=int(what == "store"))
        block_ids = worker.blocks(run)
        worker.fill(run, block_ids)
        device.close_gate()
        submit = worker.context.submit_store if what == "store" else worker.context.submit_retrieve
        future = submit("request", run, block_ids)
        mover = device.wait_for_a_copy()
        depot.signal(signal.SIGSTOP)
        assert not future.result(WAIT_SECONDS)
        if what == "retrieve":
            assert not has_memory(mover)
        depot.signal(signal.SIGCONT)
        device.open_gate()
        wait_for_mover(depot, but=mover if what == "retrieve" else 0)  # a store may still have ended in time
        worker.context.wait_until_connected(WAIT_SECONDS)
        wait_until_nothing_is_held(depot)
        assert worker.retrieve(prompt(3)) == 3
        assert worker.store(prompt(3, salt=1))
        assert worker.retrieve(prompt(3, salt=1)) == 3
        worker.context.close()


@pytest.mark.promise(9, 13)
@pytest.mark.parametrize("what", ["store", "retrieve"])
def test_memory_that_a_mover_was_copying_when_its_depot_was_killed_is_free_when_it_is_dead(
    what: str, device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    """Blocks on the worker's side, extents on the next depot's side."""
    other, worker = cache("other"), cache(mover="stubborn")
    assert other.store(prompt(3))
    run = prompt(3, salt=int(what == "store"))
    block_ids = worker.blocks(run)
    submit = worker.context.submit_store if what == "store" else worker.context.submit_retrieve
    future = submit("request", run, block_ids)
    mover = device.wait_for_a_copy()
    wait_until(lambda: "State:\tT" in Path(f"/proc/{mover}/status").read_text(), WAIT_SECONDS, "it to stop itself")
    depot.kill()
    depot.start()
    other.context.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: not depot.status().recovering, WAIT_SECONDS)
    with pytest.raises(TimeoutError):
        future.result(0.5)
    assert depot.status().quarantined_bytes == (3 * PLAN.chunk_size_bytes(0) if what == "store" else 0)
    os.kill(mover, signal.SIGKILL)
    assert not future.result(WAIT_SECONDS)
    wait_until_nothing_is_held(depot)
    num_found = 0 if what == "store" else 3
    wait_until(lambda: other.retrieve(run) == num_found, WAIT_SECONDS, "the other worker to be back with its mover")


@pytest.mark.parametrize("is_stopped", [False, True])
def test_after_a_worker_was_closed_nobody_has_its_memory(is_stopped: bool, device: FakeDevice) -> None:
    """At once: drivers do not define what happens to memory that is freed while other processes have it open."""
    with DepotProcess() as depot:
        worker = Cache(device.worker(depot.url, PLAN), PLAN)
        worker.context.wait_until_connected(WAIT_SECONDS)
        assert worker.store(prompt(3))
        assert device.holders() == {wait_for_mover(depot)}
        if is_stopped:
            depot.signal(signal.SIGSTOP)
        worker.context.close()
        assert device.holders() == set()


def test_an_engine_that_sleeps_gives_its_memory_up_each_time_and_has_a_mover_again(
    device: FakeDevice, depot: DepotProcess
) -> None:
    """Sleep mode closes the context before the memory goes, and makes a new one when the memory is back."""
    for night in range(4):
        worker = Cache(device.worker(depot.url, PLAN), PLAN)
        worker.context.wait_until_connected(WAIT_SECONDS)
        assert mode_of(worker) == "ipc"
        assert worker.retrieve(prompt(3)) == (3 if night else 0)
        assert worker.store(prompt(3))
        assert device.holders() == {wait_for_mover(depot)}
        close_during_a_retrieve(worker, prompt(3), device)
        assert device.holders() == set()


def close_during_a_retrieve(worker: Cache, run: KeyRun, device: FakeDevice) -> None:
    """Close the context while its mover copies. The retrieve ends first, with all bytes."""
    worker.wipe()
    block_ids = worker.blocks(run)
    device.close_gate()
    retrieve = worker.context.submit_retrieve("under way", run, block_ids)
    device.wait_for_a_copy()
    closing = Thread(target=worker.context.close)
    closing.start()
    # A retrieve behind the one under way can end before it only as a miss of a context that is closing.
    wait_until(lambda: worker.context.submit_retrieve("late", prompt(0), [[]]).query(), WAIT_SECONDS, "the close")
    assert not retrieve.query()
    device.open_gate()
    closing.join(WAIT_SECONDS)
    assert not closing.is_alive()
    assert retrieve.query()
    assert retrieve.result()
    assert worker.holds(run, block_ids)
    assert worker.untouched(block_ids)


def test_a_mover_of_an_earlier_depot_that_lives_on_is_dead_when_its_worker_is_closed(
    depot: DepotProcess, cache: MakeCache
) -> None:
    """The mover is stopped and has no parent-death signal. The later depots have movers of their own."""
    worker = cache(mover="stubborn")
    movers = [wait_for_mover(depot)]
    os.kill(movers[0], signal.SIGSTOP)
    for _ in range(2):
        depot.kill()
        depot.start()
        worker.context.wait_until_connected(WAIT_SECONDS)
        movers.append(wait_for_mover(depot, but=movers[-1]))
    assert has_memory(movers[0])
    worker.context.close()
    assert not any(map(has_memory, movers))


@pytest.mark.promise(85)
def test_a_forked_child_that_closes_its_copy_of_a_context_leaves_the_mover_to_its_parent(
    depot: DepotProcess, cache: MakeCache
) -> None:
    worker = cache()
    assert worker.store(prompt(3))
    before = wait_for_mover(depot)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python, for a process with threads
        child = os.fork()
    if child == 0:
        signal.alarm(int(WAIT_SECONDS))
        try:
            worker.context.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert has_memory(before)
    assert worker.retrieve(prompt(3)) == 3
    assert wait_for_mover(depot) == before


def test_operators_see_who_copies_and_why(device: FakeDevice, depot: DepotProcess, cache: MakeCache) -> None:
    def shown() -> str:
        found = run_kvdepot("status", "--url", depot.url)
        return found.stdout + found.stderr

    cache("engine")
    before = wait_for_mover(depot)
    wait_until(lambda: f"mover ready, pid {before}\n" in shown(), WAIT_SECONDS)
    os.kill(before, signal.SIGKILL)
    after = wait_for_mover(depot, but=before)
    wait_until(lambda: f"mover ready, pid {after}; the one before: it exited\n" in shown(), WAIT_SECONDS)
    device.fail("open_memory", "CUDA_ERROR_MAP_FAILED (205)")
    cache("other")
    wait_until(
        lambda: "copies by itself: no mover: device GPU-0 or its memory cannot be opened" in shown(), WAIT_SECONDS
    )


def test_a_depot_that_is_asked_to_stop_takes_its_movers_along(
    device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    worker = cache()
    assert worker.store(prompt(2))
    assert depot.terminate() == 0
    assert device.holders() == set()
    assert worker.retrieve(prompt(2)) == 0


# --- two workers ------------------------------------------------------------------------------------------------------


def test_workers_of_one_process_have_a_mover_each(depot: DepotProcess, cache: MakeCache) -> None:
    one, two = cache("one"), cache("two")
    movers = wait_for_mover(depot, "one"), wait_for_mover(depot, "two")
    assert len(set(movers)) == 2
    assert one.store(prompt(3))
    os.kill(movers[0], signal.SIGKILL)
    assert two.retrieve(prompt(3)) == 3
    wait_for_mover(depot, "one", but=movers[0])
    assert wait_for_mover(depot, "two") == movers[1]
    assert one.retrieve(prompt(3)) == 3


NEW_NAMESPACE = ["unshare", "--fork", "--pid", "--kill-child"]


def _is_process_1() -> bool:
    command = [*NEW_NAMESPACE, "sh", "-c", "test $$ = 1"]
    return shutil.which("unshare") is not None and not subprocess.run(command, check=False).returncode


@pytest.mark.skipif(not _is_process_1(), reason="needs PID namespaces")
def test_workers_with_equal_pids_are_two(device: FakeDevice, depot: DepotProcess) -> None:
    """As in two containers where each engine is process 1."""
    one, two = (EngineProcess([*NEW_NAMESPACE, *engine_command(depot.url, "engine", device)]) for _ in range(2))
    one.expect("3", "store 1 3")
    two.expect("3", "retrieve 1 3")
    device.close_gate()
    one.say("store 2 3")
    mover = device.wait_for_a_copy()
    one.close()
    device.open_gate()
    wait_until(lambda: mover not in device.holders(), WAIT_SECONDS)
    wait_until_nothing_is_held(depot)
    two.expect("0", "retrieve 2 3")
    two.expect("3", "store 2 3")
    two.expect("3", "retrieve 2 3")
    two.close()


# --- fallback ---------------------------------------------------------------------------------------------------------


def fell_back(depot: DepotProcess) -> str:
    """Wait until the worker copies by itself. Return the reason in the status."""

    def is_direct() -> bool:
        return [context.transfer_mode for context in depot.status().contexts] == ["direct"]

    wait_until(is_direct, WAIT_SECONDS, "the worker to copy by itself")
    assert depot.status().counters["workers_fallen_back"] == 1
    assert context_of(depot).mover == ""
    return context_of(depot).fallback


def test_a_mover_that_is_lost_twice_makes_the_worker_copy_by_itself(
    depot: DepotProcess, cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache()
    assert mode_of(worker) == "ipc"
    assert worker.store(prompt(3))
    before = 0
    for _ in range(2):
        before = wait_for_mover(depot, but=before)
        os.kill(before, signal.SIGKILL)
    wait_until(lambda: context_of(depot).mover == "unavailable", WAIT_SECONDS)
    assert worker.retrieve(prompt(3)) == 0
    assert "it exited" in fell_back(depot)
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert worker.retrieve(prompt(3)) == 3
    assert worker.store(prompt(3, salt=1))
    assert mode_of(worker) == "direct"
    assert len([record for record in caplog.records if "copies by itself" in record.message]) == 1
    depot.kill()
    depot.start()
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert context_of(depot).transfer_mode == "direct"


def test_a_worker_that_fell_back_lets_go_of_the_pool_of_the_depot_that_had_its_mover(
    depot: DepotProcess, cache: MakeCache
) -> None:
    """The worker keeps a session with movers only until these are dead."""
    worker = cache()
    assert worker.store(prompt(3))
    made: Any = worker.context
    made.copy_route.fall_back("a test")
    worker.context.wait_until_connected(WAIT_SECONDS)
    for salt in range(2):
        depot.kill()
        depot.start()
        worker.context.wait_until_connected(WAIT_SECONDS)
        wait_until(lambda: not depot.status().recovering, WAIT_SECONDS)
        assert worker.store(prompt(3, salt=salt + 1))
        assert (
            worker.retrieve(prompt(3, salt=salt + 1)) == 3
        )  # until then, each direction has a channel of the previous session

    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count(f"{depot.pool_directory}/index")  # there is one for each pool

    wait_until(lambda: num_mapped() == 1, WAIT_SECONDS, "the pools of earlier depots to be let go")


@pytest.mark.parametrize("call", ["open_memory", "create_stream"])
def test_a_handle_that_does_not_open_is_a_fallback(
    call: str, device: FakeDevice, depot: DepotProcess, cache: MakeCache, caplog: pytest.LogCaptureFixture
) -> None:
    device.fail(call, "CUDA_ERROR_MAP_FAILED (205)")
    worker = cache()
    assert "CUDA_ERROR_MAP_FAILED (205)" in fell_back(depot)
    assert worker.store(prompt(3))
    assert worker.retrieve(prompt(3)) == 3
    assert len([record for record in caplog.records if "copies by itself" in record.message]) == 1


def test_a_depot_that_is_restarted_while_its_mover_is_waited_for_is_waited_for(
    depot: DepotProcess, cache: MakeCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = cache(wait=False)
    waits: list[float] = []

    def await_after_a_restart(channel: Channel, wait_seconds: float, deadline_seconds: float) -> None:
        if not waits:
            depot.kill()
            depot.start()
        waits.append(wait_seconds)
        await_mover(channel, wait_seconds, deadline_seconds)

    monkeypatch.setattr("kvdepot_cuda.context.await_mover", await_after_a_restart)
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert len(waits) > 1
    wait_until(lambda: not depot.status().recovering, WAIT_SECONDS)
    assert worker.store(prompt(2))


def test_without_a_call_to_wait_a_worker_falls_back_at_its_first_transfer(
    device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    device.fail("open_memory")
    worker = cache(wait=False)
    wait_until(lambda: [c.mover for c in depot.status().contexts] == ["unavailable"], WAIT_SECONDS)
    assert not worker.store(prompt(2))
    fell_back(depot)
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert worker.store(prompt(2))


def test_a_handle_that_opens_the_second_time_is_no_fallback(
    device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    device.fail("open_memory", is_once=True)
    worker = cache()
    assert worker.store(prompt(3))
    assert mode_of(worker) == "ipc"
    assert depot.status().counters["movers_started"] == 2


class Boasting(FakeDriver):
    """Reports allocations larger than they are."""

    def tensor(self, num_blocks: int, page_size_bytes: int, padding_bytes: int = 0) -> FakeTensor:
        made = super().tensor(num_blocks // 2, page_size_bytes, padding_bytes)
        return FakeTensor(made.data_ptr(), (num_blocks, page_size_bytes), made.stride())

    def export_memory(self, address: int) -> tuple[bytes, int, int]:
        handle, base, num_bytes = super().export_memory(address)
        return handle, base, 2 * num_bytes


def test_memory_that_is_smaller_than_the_worker_says_is_not_used(
    device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    cache(driver=Boasting(root=device.memory))
    assert "the driver gives its size as" in fell_back(depot)


# --- a device that fails ----------------------------------------------------------------------------------------------


@pytest.mark.promise(9)
@pytest.mark.parametrize("call", ["execute", "synchronize_stream"])
@pytest.mark.parametrize("what", ["store", "retrieve"])
def test_an_error_of_the_device_is_a_miss_and_a_new_mover(
    call: str, what: str, device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    worker = cache()
    assert worker.store(prompt(3))
    device.fail(call, "CUDA_ERROR_ILLEGAL_ADDRESS (700)", is_once=True)
    before = wait_for_mover(depot)
    os.kill(before, signal.SIGKILL)
    before = wait_for_mover(depot, but=before)
    if what == "store":
        assert not worker.store(prompt(3, salt=1))
    else:
        assert worker.retrieve(prompt(3)) == 0
    wait_until(lambda: context_of(depot).mover == "unavailable", WAIT_SECONDS)  # after the second failure in a row
    assert "CUDA_ERROR_ILLEGAL_ADDRESS (700)" in context_of(depot).why_no_mover
    wait_until_nothing_is_held(depot)
    assert depot.status().num_entries == 3


def test_a_worker_knows_when_its_mover_has_the_pool_registered(
    device: FakeDevice, depot: DepotProcess, cache: MakeCache
) -> None:
    """A mover that replaces another one does not have it registered yet."""
    worker = cache()
    made: Any = worker.context
    assert worker.store(prompt(4))
    wait_until(lambda: worker.retrieve(prompt(4)) == 4 and made.is_warm, WAIT_SECONDS)
    assert device.calls()["register_host"] == NUM_PIECES
    before = wait_for_mover(depot)
    device.close_gate()
    future = made.submit_retrieve("request", prompt(4), worker.blocks(prompt(4)))
    assert device.wait_for_a_copy() == before
    os.kill(before, signal.SIGKILL)
    assert not future.result(WAIT_SECONDS)
    assert not made.is_warm
    device.open_gate()
    wait_for_mover(depot, but=before)
    wait_until(lambda: worker.retrieve(prompt(4)) == 4 and made.is_warm, WAIT_SECONDS)


# --- bounds of messages -----------------------------------------------------------------------------------------------


def packed(*block_ids: int) -> bytes:
    return b"".join(number.to_bytes(4, "little", signed=True) for number in block_ids)


@pytest.mark.promise(60)
@pytest.mark.parametrize(
    ("block_ids", "first_covered", "why"),
    [
        (packed(*range(60, 68)), 0, "block ids from 60 to 67: group 0 has 64 blocks"),
        (packed(0, 1, 2, -2, 4, 5, 6, 7), 0, "block ids from -2 to 7"),
        (packed(*range(4)), 0, "do not cover"),
        (packed(*range(7)), 0, "do not cover"),
        (packed(*range(8)), 1, "do not cover"),
        (packed(*range(8)), 0xFFFFFFFF, "do not cover"),
        (b"", 0, "do not cover"),
        (packed(*range(8))[:-1], 0, "malformed block ids"),
    ],
)
@pytest.mark.parametrize("is_store", [True, False])
def test_a_message_cannot_make_a_mover_touch_anything_else(
    is_store: bool, block_ids: bytes, first_covered: int, why: str, depot: DepotProcess, cache: MakeCache
) -> None:
    worker = cache()
    assert worker.store(prompt(2))
    worker.wipe()
    before = wait_for_mover(depot)
    connection: Any = cast("Any", worker.context).connection
    session = connection.session
    channel = connection.channel(session)
    run = prompt(2, salt=int(is_store))
    if is_store:
        plan = channel.call(m.PrepareStore(session.context, "r", "t", run.digests, 0, run.parent, (2,)), WAIT_SECONDS)
        number = plan.ticket
    else:
        plan = channel.call(m.PrepareRetrieve(session.context, "r", run.digests, 0, (2,)), WAIT_SECONDS)
        number = plan.lease
    assert number
    message = m.Move(session.context, number, is_store, (block_ids,), (first_covered,), (0,), 1.0)
    reply = channel.call(message, WAIT_SECONDS)
    assert isinstance(reply, m.Moved)
    assert reply.outcome is m.MoveOutcome.FAILED
    assert why in reply.why
    assert worker.untouched([[]])
    assert wait_for_mover(depot) == before
    end = m.AbortStore(session.context, number) if is_store else m.Release(session.context, (number,))
    assert channel.call(end, WAIT_SECONDS).count
    channel.close()
    wait_until_nothing_is_held(depot)
    assert worker.retrieve(prompt(2)) == 2


# --- order ------------------------------------------------------------------------------------------------------------


class EventOfTorch(FakeEvent):
    def synchronize(self) -> None:
        raise AssertionError("with torch's own wait a graph that another thread captures is broken")


@pytest.mark.parametrize("event", [None, FakeEvent, EventOfTorch])
def test_a_store_comes_after_the_kernel_that_writes_its_blocks(
    event: type[FakeEvent] | None, device: FakeDevice, cache: MakeCache
) -> None:
    """The worker waits for the event, by the driver, before it sends a request."""
    driver = FakeDriver(root=device.memory)
    writer, reader = cache(driver=driver), cache("other")
    run = prompt(3)
    block_ids = writer.blocks(run)
    stream = DEFAULT_STREAM
    if event is FakeEvent:
        stream = driver.engine_stream()
    driver.launch(lambda: writer.fill(run, block_ids), stream)
    ready = event(driver, stream) if event else None
    assert writer.context.submit_store("request", run, block_ids, ready).result(WAIT_SECONDS)
    assert reader.retrieve(run) == 3


def test_one_handle_for_all_tensors_of_an_allocation(device: FakeDevice, depot: DepotProcess) -> None:
    """As in torch, where layers share segments."""

    class OneAllocation(FakeDriver):
        def tensor(self, num_blocks: int, page_size_bytes: int, padding_bytes: int = 0) -> FakeTensor:
            size = num_blocks * (page_size_bytes + padding_bytes)
            base = next(iter(self.memory.allocations), None) or self.allocate(16 * size)
            self.used: int = getattr(self, "used", 256) + size
            return FakeTensor(base + self.used - size, (num_blocks, page_size_bytes), (size // num_blocks, 1))

    driver = OneAllocation(root=device.memory)
    plan = replace(PLAN, num_blocks=32)
    worker = Cache(FakeWorker(depot.url, plan, driver=driver, mode="ipc", mover="fake-cuda"), plan)
    worker.context.wait_until_connected(WAIT_SECONDS)
    assert len(list(device.memory.iterdir())) == 1
    assert worker.store(prompt(5))
    assert worker.retrieve(prompt(5)) == 5
    worker.context.close()
