"""The devices of the backends that stage: an Intel GPU and a Gaudi if they are here, else the pretend one for both.

Without torch, tests that need a device are skipped. If KVDEPOT_REQUIRE_TORCH is set, as in the tox environment, they
fail.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Final

import pytest

from kvdepot.backends import CacheGroup
from kvdepot.copying.staged import Bridge
from kvdepot.testing.plan import STATE, GroupPlan, WorkerPlan
from kvdepot_cpu.xpu.context import XpuOptions, XpuTransferContext
from kvdepot_hpu.context import HpuOptions, HpuTransferContext, load_bridge
from support.staged.bench import read_blocks, torch, write_blocks
from support.staged.device import NAME, FakeDevice, install, is_installed

MAX_BLOCKS: Final = 4  # a small move, so that a batch is many and the staging slots take turns


class StagedWorker:
    """See `kvdepot.testing.backend.Worker`. Like an engine, it touches the cache only by operations of the device."""

    def __init__(self, pages: list[list[Any]], context: Any) -> None:
        self.pages = pages
        self.context = context
        self.spec = context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_blocks(self, group: int, page: int, blocks: Sequence[int], data: bytes) -> None:
        write_blocks(self.pages[group][page], blocks, data)

    def read_blocks(self, group: int, page: int, blocks: Sequence[int]) -> bytes:
        return read_blocks(self.pages[group][page], blocks)


class Device:
    """The device of one backend, real or pretend."""

    name: str
    required: str  # environment variable that forbids the pretend device
    is_lazy: bool  # whether the backend is to work in the pretend device's lazy mode

    def find(self) -> bool:
        """Return whether the real device is here."""
        raise NotImplementedError

    @property
    def device_type(self) -> str:
        """Torch's name of the device. Torch reserves the name xpu, so a pretend one has another."""
        return self.name if self.is_real else NAME

    def bridge(self) -> Bridge:
        raise NotImplementedError

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> StagedWorker:
        """Return a worker whose cache is arranged as vLLM arranges it on this device."""
        raise NotImplementedError

    @cached_property
    def is_real(self) -> bool:
        return self.find()

    def prepare(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice | None:
        """Return the pretend device if there is no real one. No work is pending, and staging memory counts as pinned.

        Raises:
            RuntimeError: torch has no room for the pretend device.
        """
        if self.is_real:
            return None
        fake = install()

        def host_buffer(_bridge: Bridge, num_bytes: int) -> tuple[Any, bool]:
            return torch().empty(num_bytes, dtype=torch().int8), True

        monkeypatch.setattr(Bridge, "host_buffer", host_buffer)  # only copies from pinned memory run late
        fake.drop_pending()
        fake.lazy = self.is_lazy
        return fake

    def need(self, monkeypatch: pytest.MonkeyPatch) -> FakeDevice | None:
        """Like `prepare`, but skip the test if there is no device, or fail it if the environment requires one."""
        why_not = ""
        if importlib.util.find_spec("torch") is None:
            why_not = "torch is not installed: `tox r -e torch` has it"
        else:
            try:
                fake = self.prepare(monkeypatch)
                assert fake is None or not os.environ.get(self.required), f"{self.required}: no such device is here"
                return fake
            except RuntimeError as error:
                why_not = str(error)
        assert not os.environ.get("KVDEPOT_REQUIRE_TORCH"), why_not
        pytest.skip(why_not)


def _pages_of(plan: WorkerPlan, device_type: str, make_page: Callable[[int, int, int], Any]) -> list[list[Any]]:
    """Return the zeroed tensors of a plan, group by group, `(num_blocks, ...)` each.

    Args:
        plan: the sizes.
        device_type: torch's name of the device.
        make_page: returns the engine's tensor of bfloat16 for blocks, tokens of a block and elements of a token. Pages
            that do not divide evenly are bytes.
    """

    def page(num_blocks: int, block_tokens: int, size_bytes: int, padding_bytes: int) -> Any:
        if padding_bytes or size_bytes % (2 * block_tokens):
            shape = (num_blocks, size_bytes + padding_bytes)
            return torch().zeros(shape, dtype=torch().uint8, device=device_type)[:, :size_bytes]
        return make_page(num_blocks, block_tokens, size_bytes // block_tokens // 2)

    return [
        [page(plan.num_blocks, group.block_tokens, size, group.padding_bytes) for size in group.page_sizes_bytes]
        for group in plan.groups
    ]


class Xpu(Device):
    name, required, is_lazy = "xpu", "KVDEPOT_REQUIRE_XPU", False

    def find(self) -> bool:
        return bool(torch().xpu.is_available())

    def bridge(self) -> Bridge:
        return Bridge(torch(), self.device_type, getattr(torch(), self.device_type), index=0)

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> StagedWorker:
        def page(num_blocks: int, block_tokens: int, width: int) -> Any:
            shape = (num_blocks, 1, block_tokens, width)
            return torch().zeros(shape, dtype=torch().bfloat16, device=self.device_type)

        pages = _pages_of(plan, self.device_type, page)
        given: dict[str, Any] = {"device_type": self.device_type, "max_blocks": MAX_BLOCKS} | options
        return StagedWorker(pages, XpuTransferContext(plan.cache(pages), XpuOptions(url=url, **given)))


class Hpu(Device):
    name, required, is_lazy = "hpu", "KVDEPOT_REQUIRE_GAUDI", True

    def find(self) -> bool:
        return not is_installed() and importlib.util.find_spec("habana_frameworks") is not None

    def bridge(self) -> Bridge:
        return load_bridge()

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> StagedWorker:
        def page(num_blocks: int, block_tokens: int, width: int) -> Any:
            shape = ((num_blocks + 1) * block_tokens, 1, width)
            return without_pad_block(torch().zeros(shape, dtype=torch().bfloat16, device="hpu"), block_tokens)

        pages = _pages_of(plan, "hpu", page)
        groups = [_cache_group(group, tensors) for group, tensors in zip(plan.groups, pages, strict=True)]
        cache = replace(plan.cache(pages), groups=groups)
        given: dict[str, Any] = {"max_blocks": MAX_BLOCKS} | options
        return StagedWorker(pages, HpuTransferContext(cache, HpuOptions(url=url, **given)))


DEVICES: Final[dict[str, Device]] = {"xpu": Xpu(), "hpu": Hpu()}


# --- as in vllm-gaudi -------------------------------------------------------------------------------------------------


class TensorTuple(tuple[Any, ...]):
    """Keys and values of one layer, with the attributes of a tensor."""

    __slots__ = ()

    @property
    def shape(self) -> Any:
        return self[0].shape


def without_pad_block(flat: Any, block_tokens: int) -> Any:
    """Return a view of `((num_blocks + 1) * block_tokens, ...)` as `(num_blocks, block_tokens, ...)`.

    vllm-gaudi allocates keys and values in this shape. The last block is padding that any request may write.
    """
    return flat.view(-1, block_tokens, *flat.shape[1:])[:-1]


def _cache_group(plan: GroupPlan, pages: list[Any]) -> CacheGroup:
    """Return keys and values in pairs where the plan has pairs, else tensors of latent attention."""
    sizes = plan.page_sizes_bytes
    is_paired = plan.kind is not STATE and sizes[::2] == sizes[1::2]
    tensors = [TensorTuple(pages[place : place + 2]) for place in range(0, len(pages), 2)] if is_paired else pages
    return CacheGroup(
        tensors,
        plan.block_tokens,
        plan.kind,
        plan.window_tokens,
        plan.part,
        plan.plane,
        plan.rows,
        is_mla=not is_paired,
    )
