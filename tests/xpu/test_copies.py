"""The copiers themselves: bytes, order and leftovers."""

from typing import Any

import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.copying.staged import Bridge
from kvdepot.errors import LayoutError
from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.plan import WorkerPlan, prompt
from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext
from support.staged.bench import NUM_BLOCKS, Bench, round_trip, torch
from support.staged.device import FakeDevice
from support.staged.suite import CopySuite
from support.xpu.workers import XpuWorker, device_type, load_bridge


class TestCopies(CopySuite):
    @pytest.fixture
    def late(self, fake: FakeDevice) -> FakeDevice:
        return fake

    def make_bench(self, **options: Any) -> Bench:
        return Bench(load_bridge(), **options)


@pytest.mark.usefixtures("device")
def test_moves_are_as_large_as_the_staging_memory_allows() -> None:
    bench = Bench(load_bridge(), max_blocks=5)
    assert all(round_trip(bench, count, seed=count) for count in (2, 10, 38, NUM_BLOCKS))


def test_where_memory_cannot_be_pinned_no_copy_is_late(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    def pageable(_bridge: Bridge, num_bytes: int) -> tuple[Any, bool]:
        return torch().empty(num_bytes, dtype=torch().int8), False

    monkeypatch.setattr(Bridge, "host_buffer", pageable)
    late: list[bool] = []
    copy = fake.copy

    def watched(target: Any, source: Any, non_blocking: bool = False) -> Any:
        if target.device.type != source.device.type:
            late.append(non_blocking)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(fake, "copy", watched)
    assert round_trip(Bench(load_bridge()), 14)
    assert late
    assert not any(late)


@pytest.mark.usefixtures("device")
def test_tensors_that_are_not_on_the_device_are_refused() -> None:
    def make(layers: list[Any]) -> XpuTransferContext:
        return XpuTransferContext(
            KVCache([CacheGroup(layers, 16)], "engine", "bfloat16"), XpuOptions(device_type=device_type())
        )

    cache = torch().zeros(8, 16, 2, 8, device=device_type())
    with pytest.raises(LayoutError, match="tensor on cpu"):
        make([torch().zeros(8, 16)])
    with pytest.raises(LayoutError, match="not contiguous"):
        make([cache[..., ::2]])
    with pytest.raises(LayoutError, match="3 tensors"):
        make([(cache, cache, cache)])


@pytest.mark.usefixtures("device")
def test_keys_and_values_may_be_apart() -> None:
    pairs = [tuple(torch().zeros(8, 16, 2, 8, device=device_type()) for _ in range(2)) for _ in range(3)]
    context = XpuTransferContext(
        KVCache([CacheGroup(pairs, 16)], "engine", "float32"), XpuOptions(device_type=device_type(), url="/x")
    )
    assert len(context.layout.groups[0].pages) == 6
    context.close()


@pytest.mark.usefixtures("xpu")
def test_memory_that_cannot_be_pinned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with DepotProcess() as depot:
        worker = XpuWorker(depot.url, WorkerPlan())
        assert sum("could not be pinned" in record.message for record in caplog.records) == (
            not worker.context.is_pinned
        )
        worker.context.close()


@pytest.mark.usefixtures("device")
def test_views_in_another_order_than_memory_are_the_same_bytes() -> None:
    layers = [torch().zeros(8, 16, 2, 8, device=device_type()) for _ in range(2)]
    views = [layer.transpose(1, 2) for layer in layers]
    with DepotProcess() as depot:
        context = XpuTransferContext(
            KVCache([CacheGroup(views, 16)], "engine", "float32"), XpuOptions(device_type=device_type(), url=depot.url)
        )
        context.wait_until_connected(20)
        for layer in layers:
            layer.copy_(torch().rand(layer.shape))
        before = [layer.to("cpu") for layer in layers]
        assert context.submit_store("request", prompt(1), [[0, 1, 2, 3]]).result(20)
        assert context.submit_retrieve("request", prompt(1), [[4, 5, 6, 7]]).result(20)
        for layer, kept in zip(layers, before, strict=True):
            assert torch().equal(layer.to("cpu")[4:], kept[:4])
        context.close()
