"""The copier itself: bytes, shapes, order among streams, and refusals."""

from typing import Any

import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.copying.arrays import byte_view, page_layout_of
from kvdepot.errors import LayoutError
from kvdepot.layout import GroupKind
from kvdepot_hpu.context import HpuTransferContext, load_bridge, tensors_of
from support.hpu.workers import TensorTuple
from support.staged.bench import NUM_BLOCKS, Bench, torch
from support.staged.device import FakeDevice
from support.staged.suite import CopySuite


class TestCopies(CopySuite):
    @pytest.fixture
    def device(self, hpu: None) -> None: ...

    @pytest.fixture
    def late(self, lazy: FakeDevice) -> FakeDevice:
        return lazy

    def make_bench(self, **options: Any) -> Bench:
        return Bench(load_bridge(), **options)


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_no_new_shape_is_met_in_service(mode: str, fake: FakeDevice) -> None:
    fake.lazy = mode == "lazy"
    bench = Bench(load_bridge())
    known = set(fake.stats.graphs)
    for count in range(2, NUM_BLOCKS + 1, 2):
        bench.copier.store(bench.batch(list(range(count))))
        bench.copier.retrieve(bench.batch(list(range(count))))
    assert fake.stats.graphs == known


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("hpu")
def test_keys_without_values_are_refused_with_the_way_out() -> None:
    keys = [torch().zeros(8, 16, 2, 8, device="hpu") for _ in range(3)]
    with pytest.raises(LayoutError, match="fp8 with dynamic scales"):
        HpuTransferContext(KVCache([CacheGroup(keys, 16)], "engine", "float8"))
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


@pytest.mark.usefixtures("hpu")
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
