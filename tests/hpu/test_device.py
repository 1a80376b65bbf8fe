"""The pretend device is as strict as it says."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from support.staged.bench import torch
from support.staged.device import POISON, FakeDevice, install


def _numbers(count: int = 4) -> Any:
    return torch().arange(count, dtype=torch().int32)


def test_a_copy_to_the_host_holds_poison_until_it_is_waited_for(fake: FakeDevice) -> None:
    source, target = _numbers().to("hpu"), torch().zeros(4, dtype=torch().int32)
    target.copy_(source, non_blocking=True)
    assert set(target.view(torch().uint8).tolist()) == {POISON}
    fake.current_stream().synchronize()
    assert torch().equal(target, _numbers())


def test_a_copy_reads_its_source_as_late_as_it_runs(fake: FakeDevice) -> None:
    source, target = _numbers(), torch().zeros(4, dtype=torch().int32, device="hpu")
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert target.to("cpu").tolist() == [0, 0, 0, 0]


def test_operations_that_write_are_late_and_results_are_not(fake: FakeDevice) -> None:
    target, host = torch().zeros(4, dtype=torch().int32, device="hpu"), torch().zeros(4, dtype=torch().int32)
    stream = fake.module.Stream()
    stream.wait_stream(fake.current_stream())
    with fake.stream(stream):
        target.add_(1)
    host.copy_(target)  # on a stream that does not wait for the other
    assert host.tolist() == [0, 0, 0, 0]
    fake.synchronize()
    assert (target + 1).to("cpu").tolist() == [2, 2, 2, 2]


def test_an_event_finishes_what_is_before_it_and_no_more(fake: FakeDevice) -> None:
    source = _numbers().to("hpu")
    first, second = (torch().zeros(4, dtype=torch().int32) for _ in range(2))
    first.copy_(source, non_blocking=True)
    event = fake.current_stream().record_event()
    second.copy_(source, non_blocking=True)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert torch().equal(first, _numbers())
    assert not torch().equal(second, _numbers())


def test_lazy_work_is_waited_for_only_when_it_was_launched(lazy: FakeDevice) -> None:
    source, target = _numbers().to("hpu"), torch().zeros(4, dtype=torch().int32)
    target.copy_(source, non_blocking=True)
    lazy.synchronize()
    assert not torch().equal(target, _numbers())
    lazy.mark_step()
    assert not torch().equal(target, _numbers()), "mark_step does not wait"
    lazy.synchronize()
    assert torch().equal(target, _numbers())


ATTEMPTS: dict[str, Callable[[Any], object]] = {
    "numpy": lambda tensor: tensor.numpy(),
    "data_ptr": lambda tensor: tensor.data_ptr(),
    "storage": lambda tensor: tensor.untyped_storage().data_ptr(),
    "memoryview": memoryview,
    "an index on the host": lambda tensor: tensor.index_select(0, torch().tensor([1])),
    "an operand on the host": lambda tensor: tensor + _numbers(),
    "a target on the host": lambda tensor: torch().add(tensor, tensor, out=_numbers()),
}


@pytest.mark.parametrize("attempt", ATTEMPTS)
def test_the_host_and_the_device_do_not_mix(attempt: str, fake: FakeDevice) -> None:
    tensor = _numbers().to("hpu")
    with pytest.raises((RuntimeError, TypeError)):
        ATTEMPTS[attempt](tensor)


def test_each_shape_and_type_of_an_operation_is_a_graph(fake: FakeDevice) -> None:
    small, large = _numbers(4).to("hpu"), _numbers(8).to("hpu")
    small + small  # pyright: ignore[reportUnusedExpression]
    known = len(fake.stats.graphs)
    small + small  # pyright: ignore[reportUnusedExpression]
    assert len(fake.stats.graphs) == known
    large + large  # pyright: ignore[reportUnusedExpression]
    assert len(fake.stats.graphs) == known + 1


def test_a_process_has_one_device(fake: FakeDevice) -> None:
    assert install("hpu") is fake
    with pytest.raises(RuntimeError, match="in another one"):
        install("fakexpu")


def test_it_is_known_to_torch_and_to_those_who_ask_habana(fake: FakeDevice) -> None:
    bridge: Any = import_module("habana_frameworks.torch")
    assert bridge.hpu is torch().hpu
    assert torch().accelerator.current_accelerator().type == "hpu"
    assert import_module("habana_frameworks.torch.utils.internal").is_lazy() is False
