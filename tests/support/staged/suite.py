"""Tests of the copies of every backend that stages: inherit `CopySuite` and implement `make_bench`."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvdepot.backends import Direction
from kvdepot.copying.moves import StagedMove
from kvdepot.errors import LayoutError
from support.staged.bench import BLOCK_TOKENS, NUM_BLOCKS, Bench, Pool, round_trip, torch
from support.staged.device import FakeDevice


def _copied(tensor: Any, int8: Any) -> Any:
    return tensor.clone().view(tensor.shape[0], -1).view(int8)


def _converted(tensor: Any, int8: Any) -> Any:
    return tensor.view(tensor.shape[0], -1).to(int8).repeat(1, tensor.element_size())


class CopySuite:
    """Name the class `Test...`. The module needs the fixtures `device` and `fake`, and `late`, the mode in which work
    waits longest."""

    def make_bench(self, **options: Any) -> Bench:
        raise NotImplementedError

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8"])
    @pytest.mark.usefixtures("device")
    def test_every_byte_of_every_type_survives(self, dtype: str) -> None:
        bench = self.make_bench(dtype=dtype)
        assert all(round_trip(bench, count, seed=count) for count in (2, 6, 14, 38, NUM_BLOCKS))

    @pytest.mark.usefixtures("device")
    def test_making_one_leaves_the_cache_as_it_was(self) -> None:
        bench = self.make_bench()
        bench.write(bench.flat, np.random.default_rng(1))
        before = bench.read()
        bench.copy_again()
        assert all(np.array_equal(*pair) for pair in zip(bench.read(), before, strict=True))

    @pytest.mark.usefixtures("device")
    def test_memory_behind_the_blocks_is_never_written(self) -> None:
        bench = self.make_bench()
        contents = bench.write(bench.flat, np.random.default_rng(2))
        bench.copier.store(bench.batch(list(range(14))))
        bench.copier.retrieve(bench.batch(list(range(20, 34))))
        for flat, content in zip(bench.flat, contents, strict=True):
            behind = flat[-BLOCK_TOKENS:].to("cpu").view(torch().uint8)
            assert torch().equal(behind, content[-BLOCK_TOKENS:].view(torch().uint8))

    @pytest.mark.usefixtures("late")
    def test_both_directions_at_once_do_not_disturb_each_other(self) -> None:
        bench, outgoing = self.make_bench(max_blocks=4), Pool()
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
        self, step: str, late: FakeDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bench = self.make_bench(max_blocks=2)
        calls: list[object] = []

        def broken(*_: object) -> None:
            calls.append(None)
            if len(calls) == 3:
                raise OSError("broken")

        monkeypatch.setattr(StagedMove, step, broken)
        transfer = bench.copier.retrieve if step == "from_pool" else bench.copier.store
        with pytest.raises(OSError, match="broken"):
            transfer(bench.batch(list(range(16))))
        assert all(stream.query() for stream in late.streams)

    @pytest.mark.usefixtures("device")
    def test_a_cache_made_in_inference_mode_can_be_filled(self) -> None:
        with torch().inference_mode():
            bench = self.make_bench()
        assert round_trip(bench, 14)

    @pytest.mark.parametrize("view", [_copied, _converted])
    @pytest.mark.usefixtures("fake")
    def test_a_byte_view_that_is_none_is_refused(
        self, view: Callable[[Any, Any], Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvdepot.copying.staged.byte_view", view)
        with pytest.raises(LayoutError, match="do not arrive"):
            self.make_bench()

    def test_a_store_comes_after_what_the_engine_has_launched(self, fake: FakeDevice) -> None:
        bench = self.make_bench()
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

    def test_a_retrieve_comes_after_what_the_engine_has_launched(self, fake: FakeDevice) -> None:
        bench = self.make_bench()
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
