"""Unusual caches of vllm-gaudi are registered, or refused with a reason. Stand-ins follow its source.

`tests/staged/test_vllm.py` tests the common caches with their bytes.
"""

from dataclasses import dataclass
from typing import Any

import pytest

from kvdepot.layout import GroupKind, Part, Plane
from kvdepot_vllm.groups import EngineCache, EngineGroup, Unsupported, worker_groups

NUM_BLOCKS = 8


@dataclass(frozen=True)
class Tensor:
    """The used part of a tensor. On a Gaudi its address is virtual, and is only compared."""

    address: int
    shape: tuple[int, ...] = (NUM_BLOCKS, 128, 2, 64)

    def data_ptr(self) -> int:
        return self.address

    def view(self, *shape: int) -> "Tensor":
        return Tensor(self.address, shape)


class TensorTuple(tuple[Any, ...]):
    """As in vllm-gaudi: keys and values of one layer, with the attributes of a tensor."""

    __slots__ = ()

    @property
    def shape(self) -> Any:
        return self[0].shape


def pair(number: int) -> TensorTuple:
    return TensorTuple((Tensor(number * 10 + 1), Tensor(number * 10 + 2)))


def full(number: int, *names: str, is_mla: bool = False) -> EngineGroup:
    return EngineGroup(number, GroupKind.FULL_ATTENTION, 128, 0, names, is_mla, False)


def state(number: int, *names: str) -> EngineGroup:
    return EngineGroup(number, GroupKind.RECURRENT, 128, 0, names, False, False)


def cache(*groups: EngineGroup) -> EngineCache:
    return EngineCache(groups, len(groups), 128, 1, "bfloat16", "test")


def test_layers_that_share_memory_are_registered_once() -> None:
    layers = {"a": pair(1), "b": pair(2), "c": pair(1)}
    (group,) = worker_groups(cache(full(0, "a", "b", "c")), layers, NUM_BLOCKS)
    assert [tensor.address for tensor in group.tensors] == [11, 12, 21, 22]
    assert (group.part, group.plane) == (Part(), Plane())
    assert group.num_layers == 2


def test_kernel_blocks_of_pairs_join_to_blocks() -> None:
    small = TensorTuple(Tensor(address, (NUM_BLOCKS * 4, 32, 2, 64)) for address in (1, 2))
    (group,) = worker_groups(cache(full(0, "a")), {"a": small}, NUM_BLOCKS)
    assert [tensor.shape for tensor in group.tensors] == [(NUM_BLOCKS, 4, 32, 2, 64)] * 2
    assert group.physical_block_tokens == 32


@pytest.mark.parametrize(
    ("group", "layers", "reason"),
    [
        (full(0, "a"), {"a": TensorTuple((Tensor(1), Tensor(2), Tensor(3)))}, "has 3 tensors"),
        (full(0, "a"), {"a": TensorTuple(())}, "has 0 tensors"),
        (state(0, "a"), {"a": pair(1)}, r"recurrent\) has 2 tensors"),
        (full(0, "a", "b"), {"a": pair(1), "b": Tensor(3)}, "some layers have keys and values apart"),
        (full(0, "a", "b"), {"a": pair(1)}, "no tensor for layer b"),
        (full(0, "a"), {"a": TensorTuple((Tensor(1), Tensor(2, (NUM_BLOCKS + 1, 128))))}, "8 blocks in tensors of"),
    ],
)
def test_tensors_that_are_not_pairs_are_refused(group: EngineGroup, layers: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        worker_groups(cache(group), layers, NUM_BLOCKS)
