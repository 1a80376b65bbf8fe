"""Each step that a device needs and no CPU does is left out in turn, and must be missed.

This keeps the other tests honest: on the pretend device a step that could go unnoticed would prove nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvdepot.backends import Copier
from kvdepot.copying.runs import Runs
from kvdepot.copying.staged import copy, moves
from kvdepot.copying.staged.copy import StagedCopier
from kvdepot.errors import LayoutError
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot.testing.device import FakeDevice
from kvdepot.testing.xpu_kernels import FakeKernels
from kvdepot_cpu.xpu import registered
from kvdepot_cpu.xpu.context import Path, XpuCopier
from kvdepot_cpu.xpu.kernels import Kernels, NoKernels
from kvdepot_cpu.xpu.registered import RegisteredCopier
from support.staged.bench import Bench, Pool, round_trip, torch
from support.xpu.workers import XpuBench, XpuWorker, load_bridge

Patch = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: object) -> None: ...


def _without(step: str) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(StagedCopier, step, _nothing)


# --- staged -----------------------------------------------------------------------------------------------------------

STAGED: dict[str, Patch] = {
    "waiting before a staging slot is read": _without("_wait_until_staged"),
    "waiting before a staging slot is filled again": _without("_wait_until_free"),
    "waiting before a retrieve is reported": _without("_wait_until_written"),
    "the second staging slot": lambda monkeypatch: monkeypatch.setattr(copy, "_NUM_SLOTS", 1),
}


def _stages_right_bytes() -> bool:
    bench = XpuBench(max_blocks=8)
    return all(round_trip(bench, count, seed=count) for count in (2, 14, 46))


def test_with_every_step_staged_bytes_are_right(fake: FakeDevice) -> None:
    assert _stages_right_bytes()


@pytest.mark.parametrize("step", STAGED)
def test_without_a_step_staged_bytes_are_wrong(step: str, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedCopier, "_check", _nothing)  # it would find most of them before a test could
    STAGED[step](monkeypatch)
    assert not _stages_right_bytes()


def test_without_the_wait_making_one_already_fails(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StagedCopier, "_wait_until_staged", _nothing)
    with pytest.raises(LayoutError, match="do not arrive"):
        XpuBench()


def test_moves_that_are_not_cut_do_not_fit_the_staging_memory(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(num_blocks: int, _: int) -> Iterator[tuple[int, int]]:
        yield num_blocks, num_blocks

    monkeypatch.setattr(moves, "cut_exactly", whole)
    with pytest.raises((ValueError, RuntimeError)):
        round_trip(XpuBench(max_blocks=8), 46)


def test_without_the_byte_view_nothing_moves(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_bytes(tensor: Any, _: Any) -> Any:
        return tensor.view(tensor.shape[0], -1)

    monkeypatch.setattr(copy, "byte_view", not_bytes)
    with pytest.raises(RuntimeError):
        XpuBench()


VIEWS: dict[str, Callable[[Any, Any], Any]] = {
    "a copy": lambda tensor, int8: tensor.clone().view(tensor.shape[0], -1).view(int8),
    "a conversion": lambda tensor, int8: (
        tensor.view(tensor.shape[0], -1).to(int8).repeat(1, tensor.element_size())
    ),
}  # fmt: skip


@pytest.mark.parametrize("view", VIEWS)
def test_a_byte_view_that_is_none_is_refused(view: str, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "byte_view", VIEWS[view])
    with pytest.raises(LayoutError, match="do not arrive"):
        XpuBench()


# --- registered -------------------------------------------------------------------------------------------------------


class _Mapping(Pool):
    """A pool with an address."""

    @property
    def size_bytes(self) -> int:
        return len(self.pool)

    @property
    def address(self) -> int:
        return np.frombuffer(self.pool, np.uint8).ctypes.data


class RegisteredBench(Bench):
    """The copier that goes straight, over the staged one."""

    def __init__(self, kernels: FakeKernels, *, index: int = 0) -> None:
        super().__init__(load_bridge(), follows=False, needs_pinned=True)
        self.pool = _Mapping()
        below = self.copier
        straight = RegisteredCopier(
            self.bridge, Kernels(self.bridge.torch), self.layout, [self.tensors], below, index=index,
            piece_bytes=1 << 20, call_bytes=1 << 14,
        )  # fmt: skip
        straight.attach(self.pool, lambda: load_bridge().module.device(0))  # type: ignore[arg-type]
        wait_until(lambda: straight.is_registered)
        self.copier: Any = straight
        self.kernels = kernels


def _copies_right_bytes(kernels: FakeKernels, *, index: int = 0) -> bool:
    bench = RegisteredBench(kernels, index=index)
    before = kernels.num_calls
    right = all(round_trip(bench, count, seed=count) for count in (2, 14, 46))
    assert kernels.num_calls > before
    assert not bench.copier.is_left
    bench.copier.close()
    return right and not kernels.registered and not kernels.num_waited


def test_with_every_step_registered_bytes_are_right(kernels: FakeKernels) -> None:
    assert _copies_right_bytes(kernels)


def test_without_waiting_registered_bytes_are_wrong(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegisteredCopier, "_probe", _nothing)
    monkeypatch.setattr(RegisteredCopier, "_wait", _nothing)
    assert not _copies_right_bytes(kernels)


def test_without_waiting_probing_already_fails(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegisteredCopier, "_wait", _nothing)
    with pytest.raises(NoKernels, match="do not arrive"):
        RegisteredBench(kernels)


def test_without_registering_each_run_is_waited_for(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegisteredCopier, "_probe", _nothing)

    def pretend(*_: object) -> bool:
        return True

    monkeypatch.setattr(Kernels, "register", pretend)
    assert not _copies_right_bytes(kernels)


def test_without_cutting_at_pieces_a_call_is_too_large(kernels: FakeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _copies_right_bytes(kernels)
    assert kernels.largest_call_bytes <= 1 << 14

    def all_at_once(runs: Runs, _: int) -> Iterator[Runs]:
        yield runs

    monkeypatch.setattr(registered, "_calls", all_at_once)
    assert _copies_right_bytes(kernels), "right bytes all the same: only more pinned memory is taken"
    assert kernels.largest_call_bytes > 1 << 14


@pytest.mark.parametrize("index", [0, 1])
def test_operators_that_queue_on_the_first_device_are_waited_for_on_every_other(index: int, fake: FakeDevice) -> None:
    with FakeKernels(fake, queues_astray=True) as kernels:
        if index:
            assert _copies_right_bytes(kernels, index=1)
        else:  # there the queue is the right one on a device; here the wait is left out
            with pytest.raises(NoKernels, match="do not arrive"):
                RegisteredBench(kernels)


# --- order with the engine --------------------------------------------------------------------------------------------


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess() as depot:
        yield depot


def _follows_writes(worker: XpuWorker, fake: FakeDevice, *, with_event: bool) -> bool:
    """Store what the engine's stream has yet to write."""
    cache, run = Cache(worker, WorkerPlan()), prompt(2)
    block_ids = cache.blocks(run)
    cache.fill(run, block_ids)
    contents = [page.to("cpu") for page in worker.pages[0]]
    cache.wipe()
    for page, content in zip(worker.pages[0], contents, strict=True):
        page.copy_(content, non_blocking=True)
    ready = fake.current_stream().record_event() if with_event else None
    assert worker.context.submit_store("request", run, block_ids, ready).result(20)
    cache.wipe()
    assert worker.context.submit_retrieve("request", run, block_ids).result(20)
    return cache.holds(run, block_ids)


def _follows_reads(worker: XpuWorker, fake: FakeDevice) -> bool:
    """Retrieve into what the engine's stream has yet to read."""
    cache, run = Cache(worker, WorkerPlan()), prompt(2, salt=1)
    assert cache.store(run)
    block_ids = cache.blocks(run)
    cache.wipe()
    expected = [page.to("cpu") for page in worker.pages[0]]
    read = [torch().empty(page.shape, dtype=page.dtype) for page in worker.pages[0]]
    for target, page in zip(read, worker.pages[0], strict=True):
        target.copy_(page, non_blocking=True)
    assert worker.context.submit_retrieve("request", run, block_ids).result(20)
    fake.synchronize()
    return all(torch().equal(*pair) for pair in zip(read, expected, strict=True))


def _does_not_wait(*_: object) -> Any:
    return None


@pytest.mark.parametrize("path", Path)
@pytest.mark.parametrize("waits", [True, False])
def test_without_marking_the_engines_stream_bytes_are_wrong(
    waits: bool, path: Path, kernels: FakeKernels, fake: FakeDevice, depot: DepotProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if not waits:
        monkeypatch.setattr(XpuCopier, "mark_ready", _does_not_wait)
    worker = XpuWorker(depot.url, WorkerPlan(), path=path)
    worker.wait_until_connected(20)
    wait_until(lambda: path is not Path.REGISTERED or worker.context.is_registered)
    for with_event in (True, False):
        assert _follows_writes(worker, fake, with_event=with_event) == waits
    assert _follows_reads(worker, fake) == waits
    worker.context.close()


def test_an_event_that_is_not_waited_for_is_missed(
    fake: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Copier, "wait_for", _nothing)
    worker = XpuWorker(depot.url, WorkerPlan(), path="staged")
    worker.wait_until_connected(20)
    assert not _follows_writes(worker, fake, with_event=True)
    worker.context.close()


def test_a_stream_that_cannot_be_marked_makes_a_miss(
    fake: FakeDevice, depot: DepotProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = XpuWorker(depot.url, WorkerPlan(), path="staged")
    worker.wait_until_connected(20)

    def captured(*_: object) -> Any:
        raise RuntimeError("this stream is being captured into a graph")

    monkeypatch.setattr(fake.module, "current_stream", captured)
    run = prompt(1)
    assert worker.context.submit_store("request", run, [[0, 1, 2, 3]]).result(20) is False
    assert worker.context.submit_retrieve("request", run, [[0, 1, 2, 3]]).result(20) is False
    worker.context.close()
