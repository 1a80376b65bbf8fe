"""Each step that a device needs and no CPU does is left out in turn, and must be missed.

This keeps the other tests honest: on the pretend device a step that could go unnoticed would prove nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kvdepot.copying.staged import copy as kernels
from kvdepot.copying.staged import moves
from kvdepot.copying.staged.copy import StagedCopier
from kvdepot.errors import LayoutError
from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot.testing.device import FakeDevice
from support.hpu.workers import HpuBench, HpuWorker
from support.staged.bench import NUM_BLOCKS, Bench, round_trip
from support.staged.suite import moves_right_bytes

Patch = Callable[[pytest.MonkeyPatch], None]


def _nothing(*_: object) -> None: ...


def _does_not_launch(_copier: object, _direction: object, ready: object) -> object:
    return ready


def _without(step: str) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(StagedCopier, step, _nothing)


def _without_following(direction: str) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        follow: Any = StagedCopier._follow_compute  # pyright: ignore[reportPrivateUsage]

        def follow_but_there(copier: Any, chosen: Any) -> None:
            if chosen is not getattr(copier, direction):
                follow(copier, chosen)

        monkeypatch.setattr(StagedCopier, "_follow_compute", follow_but_there)

    return patch


def _with_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_NUM_SLOTS", 1)


def _without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves.Move, "pad", _nothing)


BYTES: dict[str, tuple[Patch, bool]] = {  # the step left out, and whether it is missed in eager mode too
    "waiting before a staging slot is read": (_without("_wait_until_staged"), True),
    "waiting before a staging slot is filled again": (_without("_wait_until_free"), True),
    "waiting before a retrieve is reported": (_without("_wait_until_written"), True),
    "having a store follow the engine's stream": (_without_following("_stores"), True),
    "having a retrieve follow the engine's stream": (_without_following("_retrieves"), True),
    "the second staging slot": (_with_one_slot, True),
    "padding a scatter with the last block's bytes": (_without_padding, True),
    "mark_step behind the copy of a store": (_without("_launch_store"), False),
    "mark_step behind the scatter of a retrieve": (_without("_launch_retrieve"), False),
}


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_with_every_step_the_bytes_are_right(mode: str, fake: FakeDevice) -> None:
    fake.lazy = mode == "lazy"
    assert moves_right_bytes(HpuBench(), fake)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
@pytest.mark.parametrize("step", BYTES)
def test_without_a_step_they_are_wrong(step: str, mode: str, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out, also_eager = BYTES[step]
    if mode == "eager" and not also_eager:
        pytest.skip("eager mode launches by itself")
    fake.lazy = mode == "lazy"
    monkeypatch.setattr(StagedCopier, "_check", _nothing)  # it would find most of them before a test could
    leave_out(monkeypatch)
    assert not moves_right_bytes(HpuBench(), fake)


def test_mark_step_that_does_nothing_is_missed_at_registration(
    lazy: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("habana_frameworks.torch.core.mark_step", _nothing)
    with pytest.raises(LayoutError, match="do not arrive"):
        HpuBench()


@pytest.mark.parametrize("launches", [True, False])
def test_a_store_without_launching_what_the_engine_accumulated_is_wrong(
    launches: bool, lazy: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, run = WorkerPlan(), prompt(2)
    with DepotProcess() as depot:
        worker = HpuWorker(depot.url, plan)
        cache = Cache(worker, plan)
        worker.wait_until_connected(20)
        block_ids = cache.blocks(run)
        cache.fill(run, block_ids)
        contents = [page.to("cpu") for page in worker.pages[0]]
        cache.wipe()
        for page, content in zip(worker.pages[0], contents, strict=True):
            page.copy_(content, non_blocking=True)
        with monkeypatch.context() as patch:
            if not launches:
                patch.setattr(StagedCopier, "mark_ready", _does_not_launch)
            assert worker.context.submit_store("request", run, block_ids).result(20)
        cache.wipe()
        assert worker.context.submit_retrieve("request", run, block_ids).result(20)
        assert cache.holds(run, block_ids) == launches
        worker.context.close()


# --- bytes, not numbers -----------------------------------------------------------------------------------------------


def test_without_the_byte_view_nothing_moves(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_bytes(tensor: Any, _: Any) -> Any:
        return tensor.view(tensor.shape[0], -1)

    monkeypatch.setattr(kernels, "byte_view", not_bytes)
    with pytest.raises(RuntimeError):
        HpuBench()


def test_a_byte_view_that_is_a_copy_is_refused_at_registration(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(tensor: Any, int8: Any) -> Any:
        return tensor.clone().view(tensor.shape[0], -1).view(int8)

    monkeypatch.setattr(kernels, "byte_view", copied)
    with pytest.raises(LayoutError, match="copies where it should view"):
        HpuBench()


def test_converting_instead_of_viewing_is_refused_at_registration(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    def converted(tensor: Any, int8: Any) -> Any:
        num_bytes = tensor.element_size()
        return tensor.view(tensor.shape[0], -1).to(int8).repeat(1, num_bytes)

    monkeypatch.setattr(kernels, "byte_view", converted)
    with pytest.raises(LayoutError, match="do not arrive"):
        HpuBench()


# --- shapes -----------------------------------------------------------------------------------------------------------


def _exact(num_blocks: int, largest: int) -> Any:
    return (
        (min(largest, num_blocks - start), min(largest, num_blocks - start)) for start in range(0, num_blocks, largest)
    )


class _AnyShape(dict[tuple[int, int], Any]):
    """Makes the views of any number of blocks, as code without buckets would."""

    def __missing__(self, key: tuple[int, int]) -> Any:
        group, count = key
        views = self[group, 1 << (count - 1).bit_length()]
        size = len(views.gathered) // len(views.ids)
        pages: list[Any] = []
        start = 0
        for page in views.pages:
            pages.append(views.gathered[start : start + count * page.shape[1]].view(count, page.shape[1]))
            start += count * page.shape[1]
        return dataclasses.replace(
            views, ids=views.ids[:count], gathered=views.gathered[: count * size], pages=tuple(pages),
            staged=tuple(each[: count * size] for each in views.staged),
            staged_ids=tuple(each[:count] for each in views.staged_ids),
        )  # fmt: skip


def _new_shapes(fake: FakeDevice, bench: Bench) -> int:
    known = len(fake.stats.graphs)
    for count in range(2, NUM_BLOCKS + 1, 2):
        bench.copier.store(bench.batch(list(range(count))))
        bench.copier.retrieve(bench.batch(list(range(count))))
    return len(fake.stats.graphs) - known


def test_without_buckets_new_shapes_are_met(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.stats.graphs.clear()
    bench = HpuBench(max_blocks=32)
    assert _new_shapes(fake, bench) == 0
    monkeypatch.setattr(moves, "cut", _exact)
    for direction in (bench.copier._stores, bench.copier._retrieves):  # pyright: ignore[reportPrivateUsage]
        direction.views = _AnyShape(direction.views)
    assert _new_shapes(fake, bench) > 0
    assert round_trip(bench, 14), "right bytes all the same: only the compiler is asked more"


def test_without_warming_up_new_shapes_are_met(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.stats.graphs.clear()
    monkeypatch.setattr(StagedCopier, "warm_up", _nothing)
    assert _new_shapes(fake, HpuBench()) > 0
