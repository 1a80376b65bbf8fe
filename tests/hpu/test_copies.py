"""Bytes, shapes, order among streams, and what is refused, on the copier itself."""

import threading

import numpy as np
import pytest

from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind
from kvdepot.protocols import CacheGroup
from kvdepot.testing.device import FakeDevice
from kvdepot_hpu.arrays import byte_view, page_layout_of, tensors_of, without_pad_block
from kvdepot_hpu.context import HpuTransferContext
from kvdepot_hpu.kernels.moves import Move
from tests.hpu.copies import BLOCK_TOKENS, NUM_BLOCKS, Bench, Pool, round_trip
from tests.hpu.workers import TensorTuple, torch


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.usefixtures("hpu")
def test_every_byte_of_every_type_survives(dtype: str) -> None:
    bench = Bench(dtype=dtype)
    assert all(round_trip(bench, count, seed=count) for count in (2, 6, 14, 38, NUM_BLOCKS))


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_no_new_shape_is_met_in_service(mode: str, fake: FakeDevice) -> None:
    fake.lazy = mode == "lazy"
    bench = Bench()
    known = set(fake.stats.graphs)
    for count in range(2, NUM_BLOCKS + 1, 2):
        bench.copier.store(bench.batch(list(range(count))))
        bench.copier.retrieve(bench.batch(list(range(count))))
    assert fake.stats.graphs == known


@pytest.mark.usefixtures("hpu")
def test_warming_up_leaves_the_cache_as_it_was() -> None:
    bench = Bench()
    bench.write(bench.flat, np.random.default_rng(1))
    before = bench.read()
    bench.copier.warm_up()
    assert all(np.array_equal(*pair) for pair in zip(bench.read(), before, strict=True))


@pytest.mark.usefixtures("hpu")
def test_the_block_of_padding_is_never_written() -> None:
    bench = Bench()
    rng = np.random.default_rng(2)
    contents = bench.write(bench.flat, rng)
    bench.copier.store(bench.batch(list(range(14))))
    bench.copier.retrieve(bench.batch(list(range(20, 34))))
    for flat, content in zip(bench.flat, contents, strict=True):
        pad = flat[-BLOCK_TOKENS:].to("cpu").view(torch().uint8)
        assert torch().equal(pad, content[-BLOCK_TOKENS:].view(torch().uint8))


def test_both_directions_at_once_do_not_disturb_each_other(lazy: FakeDevice) -> None:
    bench, outgoing = Bench(max_blocks=4), Pool()
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
    step: str, lazy: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(max_blocks=2)
    calls: list[object] = []

    def broken(*_: object) -> None:
        calls.append(None)
        if len(calls) == 3:
            raise OSError("broken")

    monkeypatch.setattr(Move, step, broken)
    transfer = bench.copier.retrieve if step == "from_pool" else bench.copier.store
    with pytest.raises(OSError, match="broken"):
        transfer(bench.batch(list(range(16))))
    assert all(stream.query() for stream in lazy.streams)


@pytest.mark.usefixtures("hpu")
def test_a_cache_made_in_inference_mode_can_be_filled() -> None:
    with torch().inference_mode():
        bench = Bench()
    assert round_trip(bench, 14)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hpu")
def test_keys_without_values_are_refused_with_the_way_out() -> None:
    keys = [torch().zeros(8, 16, 2, 8, device="hpu") for _ in range(3)]
    with pytest.raises(LayoutError, match="fp8 with dynamic scales"):
        HpuTransferContext([CacheGroup(keys, 16)], "engine", dtype="float8")
    assert len(tensors_of(CacheGroup(keys, 16, is_mla=True))) == 3
    assert len(tensors_of(CacheGroup(keys, 16, GroupKind.RECURRENT))) == 3
    assert len(tensors_of(CacheGroup([*keys, *keys], 16, num_layers=3))) == 6
    assert len(tensors_of(CacheGroup([TensorTuple(keys[:2])] * 2, 16))) == 4


@pytest.mark.usefixtures("hpu")
def test_other_shapes_of_a_layer_are_refused() -> None:
    keys = torch().zeros(8, 16, 2, 8, device="hpu")
    with pytest.raises(LayoutError, match="3 tensors"):
        tensors_of(CacheGroup([(keys, keys, keys)], 16))
    with pytest.raises(LayoutError, match="1 of 2 layers"):
        tensors_of(CacheGroup([(keys, keys), keys], 16))
    with pytest.raises(LayoutError, match="padding"):
        without_pad_block(keys, 16)


@pytest.mark.usefixtures("hpu")
def test_tensors_that_are_no_bytes_on_an_hpu_are_refused() -> None:
    cache = torch().zeros(8, 16, 2, 8, device="hpu")
    with pytest.raises(LayoutError, match="tensor on cpu"):
        page_layout_of(torch().zeros(8, 16))
    with pytest.raises(LayoutError, match="not contiguous"):
        page_layout_of(cache.transpose(1, 2))
    with pytest.raises(LayoutError, match="cannot be seen as bytes"):
        byte_view(cache.transpose(1, 2), torch().int8)
    with pytest.raises(LayoutError, match="none may be empty"):
        page_layout_of(torch().zeros(0, 16, device="hpu"))
