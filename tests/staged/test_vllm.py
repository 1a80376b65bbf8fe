"""Caches of vllm-gaudi pass the connector's registration into the backend, and their bytes survive a round trip."""

from typing import Any

import numpy as np
import pytest

from kvdepot.backends import KVCache
from kvdepot.lab.processes import DepotProcess
from kvdepot.layout import GroupKind
from kvdepot.testing.plan import prompt
from kvdepot_hpu.context import HpuOptions, HpuTransferContext
from kvdepot_vllm.groups import EngineCache, EngineGroup, worker_groups
from support.staged.bench import torch
from support.staged.device import FakeDevice
from support.staged.devices import TensorTuple, without_pad_block

pytestmark = pytest.mark.parametrize("device", ["hpu"], indirect=True)

NUM_BLOCKS, BLOCK_TOKENS = 16, 16


@pytest.fixture(autouse=True)
def _addresses(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give tensors virtual addresses, as on a Gaudi. The connector compares them."""
    monkeypatch.setattr(fake, "has_addresses", True)


def view() -> Any:
    """Return keys, or values, as vllm-gaudi allocates and views them."""
    flat = torch().zeros(((NUM_BLOCKS + 1) * BLOCK_TOKENS, 2, 8), dtype=torch().bfloat16, device="hpu")
    return without_pad_block(flat, BLOCK_TOKENS)


def group(number: int, kind: GroupKind, names: tuple[str, ...], *, is_mla: bool = False) -> EngineGroup:
    return EngineGroup(number, kind, BLOCK_TOKENS, 40 if kind is GroupKind.SLIDING_WINDOW else 0, names, is_mla, False)


FULL, WINDOW = GroupKind.FULL_ATTENTION, GroupKind.SLIDING_WINDOW
ENGINES: dict[str, tuple[EngineGroup, ...]] = {
    "attention": (group(0, FULL, ("a", "b")),),
    "latent attention": (group(0, FULL, ("a", "b"), is_mla=True),),
    "attention and windows": (group(0, FULL, ("a",)), group(1, WINDOW, ("b", "c"))),
}


def register(groups: tuple[EngineGroup, ...], layers: dict[str, Any], url: str) -> HpuTransferContext:
    cache = EngineCache(groups, len(groups), 64, 1, "bfloat16", "test")
    return HpuTransferContext(
        KVCache(worker_groups(cache, layers, NUM_BLOCKS), "engine", "bfloat16", format="test", chunk_tokens=64),
        HpuOptions(url=url, synchronous=True),
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_the_tensors_of_vllm_gaudi_come_back(engine: str) -> None:
    groups = ENGINES[engine]
    layers: dict[str, Any] = {}
    tensors: list[Any] = []
    blocks_of: list[list[int]] = []  # by tensor
    stored: list[list[int]] = []  # the blocks that each group's chunks keep
    for each in groups:
        per_chunk = each.blocks_per_chunk(64)
        stored.append([block for block in range(8) if block % 4 >= 4 - per_chunk])
        for name in each.layer_names:
            views = [view()] if each.is_mla else [view(), view()]
            layers[name] = views[0] if each.is_mla else TensorTuple(views)
            tensors += views
            blocks_of += [stored[-1]] * len(views)
    with DepotProcess() as depot:
        context = register(groups, layers, depot.url)
        context.wait_until_connected(20)
        rng = np.random.default_rng(1)
        for tensor in tensors:
            raw = torch().from_numpy(rng.integers(0, 256, tensor.numel() * 2, np.uint8))
            tensor.copy_(raw.view(torch().bfloat16).view(tensor.shape))
        before = [tensor.to("cpu").view(torch().uint8) for tensor in tensors]
        assert context.submit_store("request", prompt(2), stored).result(20)
        loaded = [[8 + block for block in blocks] for blocks in stored]
        assert context.submit_retrieve("request", prompt(2), loaded).result(20)
        for tensor, kept, blocks in zip(tensors, before, blocks_of, strict=True):
            after = tensor.to("cpu").view(torch().uint8)
            for block in range(8):
                assert torch().equal(after[8 + block], kept[block if block in blocks else 8 + block])
            assert torch().equal(after[:8], kept[:8])
        context.close()
