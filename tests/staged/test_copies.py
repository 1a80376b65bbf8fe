"""The copiers themselves: bytes, shapes, order among streams, leftovers and refusals."""

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvdepot.backends import CacheGroup, Direction, KVCache
from kvdepot.copying.arrays import byte_view, page_layout_of
from kvdepot.copying.moves import StagedMove
from kvdepot.errors import LayoutError
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.testing.plan import prompt
from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext
from kvdepot_hpu.context import HpuTransferContext, tensors_of
from support.staged.bench import BLOCK_TOKENS, NUM_BLOCKS, Bench, Pool, round_trip, torch
from support.staged.device import FakeDevice
from support.staged.devices import Device, TensorTuple

MakeBench = Callable[..., Bench]

of_xpu = pytest.mark.parametrize("device", ["xpu"], indirect=True)
of_hpu = pytest.mark.parametrize("device", ["hpu"], indirect=True)


@pytest.fixture
def make_bench(device: Device) -> MakeBench:
    return partial(Bench, device.bridge())


def _copied(tensor: Any, int8: Any) -> Any:
    return tensor.clone().view(tensor.shape[0], -1).view(int8)


def _converted(tensor: Any, int8: Any) -> Any:
    return tensor.view(tensor.shape[0], -1).to(int8).repeat(1, tensor.element_size())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
def test_every_byte_of_every_type_survives(make_bench: MakeBench, dtype: str) -> None:
    bench = make_bench(dtype=dtype)
    assert all(round_trip(bench, count, seed=count) for count in (2, 6, 14, 38, NUM_BLOCKS))


def test_making_one_leaves_the_cache_as_it_was(make_bench: MakeBench) -> None:
    bench = make_bench()
    bench.write(bench.flat, np.random.default_rng(1))
    before = bench.read()
    bench.copy_again()
    assert all(np.array_equal(*pair) for pair in zip(bench.read(), before, strict=True))


def test_memory_behind_the_blocks_is_never_written(make_bench: MakeBench) -> None:
    bench = make_bench()
    contents = bench.write(bench.flat, np.random.default_rng(2))
    bench.copier.store(bench.batch(list(range(14))))
    bench.copier.retrieve(bench.batch(list(range(20, 34))))
    for flat, content in zip(bench.flat, contents, strict=True):
        behind = flat[-BLOCK_TOKENS:].to("cpu").view(torch().uint8)
        assert torch().equal(behind, content[-BLOCK_TOKENS:].view(torch().uint8))


def test_both_directions_at_once_do_not_disturb_each_other(make_bench: MakeBench) -> None:
    bench, outgoing = make_bench(max_blocks=4), Pool()
    lower, upper = list(range(32)), list(range(32, 64))
    bench.write(bench.flat, np.random.default_rng(3))
    incoming = bench.read()
    bench.copier.store(bench.batch(upper))
    bench.write(bench.flat, np.random.default_rng(4))
    before = bench.read()
    thread = threading.Thread(target=bench.copier.store, args=(bench.batch(lower, outgoing),))
    thread.start()
    bench.copier.retrieve(bench.batch(upper))
    thread.join()
    assert all(np.array_equal(after[32:], came[32:]) for after, came in zip(bench.read(), incoming, strict=True))
    bench.copier.retrieve(bench.batch(upper, outgoing))
    assert all(np.array_equal(after[32:], left[:32]) for after, left in zip(bench.read(), before, strict=True))


@pytest.mark.parametrize("step", ["from_pool", "to_pool"])
def test_after_an_error_half_way_nothing_is_under_way(
    step: str, make_bench: MakeBench, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench(max_blocks=2)
    calls: list[object] = []

    def broken(*_: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise OSError("broken")

    monkeypatch.setattr(StagedMove, step, broken)
    transfer = bench.copier.retrieve if step == "from_pool" else bench.copier.store
    with pytest.raises(OSError, match="broken"):
        transfer(bench.batch(list(range(16))))
    assert all(stream.query() for stream in fake.streams)


def test_a_cache_made_in_inference_mode_can_be_filled(make_bench: MakeBench) -> None:
    with torch().inference_mode():
        bench = make_bench()
    assert round_trip(bench, 14)


@pytest.mark.parametrize("view", [_copied, _converted])
@pytest.mark.usefixtures("fake")
def test_a_byte_view_that_is_none_is_refused(
    view: Callable[[Any, Any], Any], make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdepot.copying.staged.byte_view", view)
    with pytest.raises(LayoutError, match="do not arrive"):
        make_bench()


def test_a_store_comes_after_what_the_engine_has_launched(make_bench: MakeBench, fake: FakeDevice) -> None:
    bench = make_bench()
    source = np.random.default_rng(9).integers(0, 256, bench.tensors[0].numel() * 2, np.uint8)
    written = torch().from_numpy(source).view(torch().bfloat16).view(bench.tensors[0].shape)
    for tensor in bench.tensors:
        tensor.copy_(written, non_blocking=True)
    ready = bench.copier.mark_ready(Direction.STORE, None)
    assert ready is not None
    bench.copier.wait_for(Direction.STORE, ready)
    bench.copier.store(bench.batch(list(range(14))))
    fake.synchronize()
    kept = [page[:14] for page in bench.read()]
    bench.copier.retrieve(bench.batch(list(range(30, 44))))
    for page, each in zip(bench.read(), kept, strict=True):
        assert np.array_equal(page[30:44], each)
        assert np.array_equal(each.reshape(-1), source[: each.size])


def test_a_retrieve_comes_after_what_the_engine_has_launched(make_bench: MakeBench, fake: FakeDevice) -> None:
    bench = make_bench()
    bench.write(bench.flat, np.random.default_rng(8))
    bench.copier.store(bench.batch(list(range(14))))
    expected = bench.read()
    read = [torch().empty(tensor.shape, dtype=tensor.dtype) for tensor in bench.tensors]
    for target, tensor in zip(read, bench.tensors, strict=True):
        target.copy_(tensor, non_blocking=True)
    ready = bench.copier.mark_ready(Direction.RETRIEVE, None)
    assert ready is not None
    bench.copier.wait_for(Direction.RETRIEVE, ready)
    bench.copier.retrieve(bench.batch(list(range(30, 44))))
    fake.synchronize()
    raw = [target.view(torch().uint8).numpy().reshape(NUM_BLOCKS, -1) for target in read]
    assert all(np.array_equal(*pair) for pair in zip(raw, expected, strict=True))


# --- an Intel GPU -----------------------------------------------------------------------------------------------------


def xpu_context(layers: list[Any], device: Device, url: str | None = None) -> XpuTransferContext:
    cache = KVCache([CacheGroup(layers, 16)], "engine", "float32")
    return XpuTransferContext(cache, XpuOptions(device_type=device.device_type, url=url))


@of_xpu
def test_moves_are_as_large_as_the_staging_memory_allows(make_bench: MakeBench) -> None:
    bench = make_bench(max_blocks=5)
    assert all(round_trip(bench, count, seed=count) for count in (2, 10, 38, NUM_BLOCKS))


@of_xpu
def test_where_memory_cannot_be_pinned_no_copy_is_late_and_that_is_said_once(
    device: Device, fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.undo()  # staging memory is what torch gives
    late: list[bool] = []
    copy = fake.copy

    def watched(target: Any, source: Any, non_blocking: bool = False) -> Any:
        if target.device.type != source.device.type:
            late.append(non_blocking)
        return copy(target, source, non_blocking)

    monkeypatch.setattr(fake, "copy", watched)
    assert round_trip(Bench(device.bridge()), 14)
    assert late
    assert not any(late)
    assert sum("could not be pinned" in record.message for record in caplog.records) == 1


@of_xpu
def test_tensors_that_are_not_on_the_device_are_refused(device: Device) -> None:
    cache = torch().zeros(8, 16, 2, 8, device=device.device_type)
    with pytest.raises(LayoutError, match="tensor on cpu"):
        xpu_context([torch().zeros(8, 16)], device)
    with pytest.raises(LayoutError, match="not contiguous"):
        xpu_context([cache[..., ::2]], device)
    with pytest.raises(LayoutError, match="3 tensors"):
        xpu_context([(cache, cache, cache)], device)


@of_xpu
def test_keys_and_values_may_be_apart(device: Device) -> None:
    pairs = [tuple(torch().zeros(8, 16, 2, 8, device=device.device_type) for _ in range(2)) for _ in range(3)]
    context = xpu_context(pairs, device, "/x")
    assert len(context.layout.groups[0].pages) == 6
    context.close()


@of_xpu
def test_views_in_another_order_than_memory_are_the_same_bytes(device: Device) -> None:
    layers = [torch().zeros(8, 16, 2, 8, device=device.device_type) for _ in range(2)]
    with DepotProcess() as depot:
        context = xpu_context([layer.transpose(1, 2) for layer in layers], device, depot.url)
        context.wait_until_connected(20)
        for layer in layers:
            layer.copy_(torch().rand(layer.shape))
        before = [layer.to("cpu") for layer in layers]
        assert context.submit_store("request", prompt(1), [[0, 1, 2, 3]]).result(20)
        assert context.submit_retrieve("request", prompt(1), [[4, 5, 6, 7]]).result(20)
        for layer, kept in zip(layers, before, strict=True):
            assert torch().equal(layer.to("cpu")[4:], kept[:4])
        context.close()


# --- a Gaudi ----------------------------------------------------------------------------------------------------------


@of_hpu
def test_no_new_shape_is_met_in_service(fake: FakeDevice, make_bench: MakeBench) -> None:
    bench = make_bench()
    known = set(fake.graphs)
    for count in range(2, NUM_BLOCKS + 1, 2):
        bench.copier.store(bench.batch(list(range(count))))
        bench.copier.retrieve(bench.batch(list(range(count))))
    assert fake.graphs == known


@of_hpu
@pytest.mark.usefixtures("device")
def test_keys_without_values_are_refused_with_the_way_out() -> None:
    keys = [torch().zeros(8, 16, 2, 8, device="hpu") for _ in range(3)]
    with pytest.raises(LayoutError, match="fp8 with dynamic scales"):
        HpuTransferContext(KVCache([CacheGroup(keys, 16)], "engine", "float8"))
    assert len(tensors_of(CacheGroup(keys, 16, is_mla=True))) == 3
    assert len(tensors_of(CacheGroup(keys, 16, GroupKind.RECURRENT))) == 3
    assert len(tensors_of(CacheGroup([*keys, *keys], 16, num_layers=3))) == 6
    assert len(tensors_of(CacheGroup([TensorTuple(keys[:2])] * 2, 16))) == 4


@of_hpu
@pytest.mark.usefixtures("device")
def test_other_shapes_of_a_layer_are_refused() -> None:
    keys = torch().zeros(8, 16, 2, 8, device="hpu")
    with pytest.raises(LayoutError, match="3 tensors"):
        tensors_of(CacheGroup([(keys, keys, keys)], 16))
    with pytest.raises(LayoutError, match="1 of 2 layers"):
        tensors_of(CacheGroup([(keys, keys), keys], 16))


@of_hpu
@pytest.mark.usefixtures("device")
def test_tensors_that_are_no_bytes_on_an_hpu_are_refused() -> None:
    cache = torch().zeros(8, 16, 2, 8, device="hpu")
    with pytest.raises(LayoutError, match="tensor on cpu"):
        page_layout_of(torch().zeros(8, 16), "hpu", has_address=False)
    with pytest.raises(LayoutError, match="not contiguous"):
        page_layout_of(cache[..., ::2], "hpu", has_address=False)
    with pytest.raises(LayoutError, match="cannot be seen as bytes"):
        byte_view(cache.transpose(1, 2), torch().int8)
    with pytest.raises(LayoutError, match="first dimension counts the blocks"):
        page_layout_of(torch().zeros(0, 16, device="hpu"), "hpu", has_address=False)
