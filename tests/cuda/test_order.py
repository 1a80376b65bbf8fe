"""No bytes are read too early, and no transfer is reported too early.

The fake device does only the work that is waited for, so a missing wait causes wrong bytes every time.
"""

import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import prompt
from kvdepot_cuda.driver import CopyKind
from support.cuda.fake import DEFAULT_STREAM, FakeDriver, FakeEvent, FakeTensor, fake_gather

WAIT_SECONDS = 20.0


@pytest.fixture(params=["DMA", "the kernel"])
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of a worker that copies by DMA, or copies every run by the kernel."""
    monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
    return {"gather_kernel": request.param == "the kernel", "compile_gather": fake_gather}


@pytest.mark.parametrize("with_event", [True, False])
def test_a_store_comes_after_the_kernel_that_writes_its_blocks(
    with_event: bool, cache: MakeCache, driver: FakeDriver, options: dict[str, Any]
) -> None:
    """It comes after the given event, or without one after the work in the engine's stream."""
    run, stream = prompt(3), 0
    writer = cache(**options)
    block_ids = writer.blocks(run)
    if with_event:
        stream = driver.engine_stream()  # not the stream that the context knows
    driver.launch(lambda: writer.fill(run, block_ids), stream)
    ready = FakeEvent(driver, stream) if with_event else None
    assert writer.context.submit_store("request", run, block_ids, ready).result(WAIT_SECONDS)
    assert writer.retrieve(run) == 3
    assert (driver.calls["copy_batch"] == 0) == (driver.calls["gathered"] > 0) == options["gather_kernel"]


def test_a_further_batch_makes_the_device_current_once_to_store_and_twice_to_retrieve(
    cache: MakeCache, driver: FakeDriver
) -> None:
    """Each time is four calls of the driver, which hand over the interpreter's lock that the engine needs."""
    worker, counts = cache(batch_bytes=1), dict[str, list[int]](store=[], retrieve=[])  # one chunk a batch
    for num_chunks in (1, 2, 3):
        run = prompt(num_chunks, salt=num_chunks)
        for name, move in (("store", worker.store), ("retrieve", worker.retrieve)):
            before = driver.calls["activated"]
            assert move(run)
            counts[name].append(driver.calls["activated"] - before)
    assert [b - a for a, b in pairwise(counts["store"])] == [1, 1]
    assert [b - a for a, b in pairwise(counts["retrieve"])] == [2, 2]


@pytest.mark.promise(13, 18)
def test_a_future_is_not_done_while_the_kernel_runs_and_submitting_does_not_wait(
    cache: MakeCache, driver: FakeDriver, options: dict[str, Any]
) -> None:
    """A retrieve that ran before the engine's work would be overwritten by it."""
    worker, run = cache(**options), prompt(3)
    block_ids = worker.blocks(run)
    work: list[tuple[Any, Any]] = [
        (worker.context.submit_store, lambda: worker.fill(run, block_ids)),
        (worker.context.submit_retrieve, worker.wipe),
    ]
    for submit, write in work:
        gate = threading.Event()

        def kernel(gate: threading.Event = gate, write: Callable[[], None] = write) -> None:
            assert gate.wait(WAIT_SECONDS)
            write()

        driver.launch(kernel)
        future = submit("request", run, block_ids)
        with pytest.raises(TimeoutError):
            future.result(0.1)
        gate.set()
        assert future.result(WAIT_SECONDS)
    assert worker.holds(run, block_ids)
    assert worker.retrieve(run) == 3


class Logs(FakeDriver):
    """Logs the calls of retrieves that queue copies or wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def copy_batch(self, sources: Any, targets: Any, sizes: Any, direction: CopyKind, stream: int) -> None:
        if direction is CopyKind.TO_DEVICE:
            self.log.append("queue")
        super().copy_batch(sources, targets, sizes, direction, stream)

    def synchronize_event(self, event: int) -> None:
        self.log.append("wait")
        super().synchronize_event(event)


@pytest.mark.parametrize("driver", [Logs()])
def test_a_retrieve_queues_a_batch_before_it_waits_for_the_one_before(cache: MakeCache, driver: Logs) -> None:
    worker = cache(batch_bytes=1)  # one chunk a batch
    assert worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 4
    assert driver.log == ["queue", "queue", "wait", "queue", "wait", "queue", "wait", "wait"]


@pytest.mark.parametrize("call", ["execute", "copy_batch", "synchronize_event"])
def test_a_batch_that_fails_leaves_none_behind_it_in_the_device(
    call: str, cache: MakeCache, driver: FakeDriver
) -> None:
    """The fake notes the destruction of a stream with copies in it."""
    worker = cache(batch_bytes=1)
    assert worker.store(prompt(4))
    driver.fail(call, "CUDA_ERROR_ILLEGAL_ADDRESS (700)", after=1, times=1)
    assert worker.retrieve(prompt(4)) < 4


def test_a_retrieve_does_not_wait_for_a_store(cache: MakeCache, driver: FakeDriver) -> None:
    """Each direction has its own stream."""
    worker = cache(stream=None)
    assert worker.store(prompt(3))
    stream = driver.engine_stream()
    gate = threading.Event()

    def kernel() -> None:
        gate.wait(WAIT_SECONDS)

    driver.launch(kernel, stream)
    stuck = worker.context.submit_store("request", prompt(2, salt=1), [list(range(56, 64))], FakeEvent(driver, stream))
    assert worker.context.submit_retrieve("request", prompt(3), [list(range(12))]).result(WAIT_SECONDS)
    assert not stuck.query()
    gate.set()
    assert stuck.result(WAIT_SECONDS)


def test_a_transfer_submitted_during_a_graph_capture_is_a_miss(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache()
    assert worker.store(prompt(2))
    driver.capturing.add(DEFAULT_STREAM)
    waits = driver.calls["wait_for_event"]
    assert worker.retrieve(prompt(2)) == 0
    assert not worker.store(prompt(2, salt=1))
    assert driver.calls["wait_for_event"] == waits
    driver.capturing.clear()
    assert worker.retrieve(prompt(2)) == 2


class TorchTensor(FakeTensor):
    __module__ = "torch"


class TorchDriver(FakeDriver):
    def tensor(self, num_blocks: int, page_size_bytes: int, padding_bytes: int = 0) -> FakeTensor:
        made = super().tensor(num_blocks, page_size_bytes, padding_bytes)
        return TorchTensor(made.data_ptr(), made.shape, made.stride())


@pytest.mark.parametrize("driver", [TorchDriver()])
def test_with_tensors_of_torch_its_current_stream_is_waited_for(
    cache: MakeCache, driver: TorchDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = driver.engine_stream()

    def current_stream(ordinal: int) -> SimpleNamespace:
        assert ordinal == 0
        return SimpleNamespace(cuda_stream=stream)

    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=current_stream))
    monkeypatch.setitem(sys.modules, "torch", cast("ModuleType", torch))
    worker = cache(stream=None)
    run = prompt(3)
    block_ids = worker.blocks(run)
    driver.launch(lambda: worker.fill(run, block_ids), stream)
    assert worker.context.submit_store("request", run, block_ids).result(WAIT_SECONDS)
    assert worker.retrieve(run) == 3


def test_events_of_the_engines_stream_are_used_again(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache()
    for salt in range(20):
        assert worker.store(prompt(1, salt=salt))
        assert worker.retrieve(prompt(1, salt=salt)) == 1
    assert driver.calls["record_event"] == 60  # two per retrieve: the engine's stream and its own end
    assert driver.calls["create_event"] <= 4
