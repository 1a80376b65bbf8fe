"""The opt-in extra `kvdepot-cpu[ipex]`: the extension with the torch that it is tied to; nothing of ours needs it."""

import importlib
import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest

from kvdepot.backends import CacheGroup, KVCache
from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.backend import Cache, WorkerPlan, prompt
from kvdepot_cpu.context import CpuOptions, CpuTransferContext


@pytest.fixture
def torch() -> Any:
    """torch with the extension loaded."""
    if importlib.util.find_spec("intel_extension_for_pytorch") is None:
        assert not os.environ.get("KVDEPOT_REQUIRE_IPEX"), "the extension is missing, and these tests were to run"
        pytest.skip("intel-extension-for-pytorch is not installed: `tox r -e ipex` has it")
    importlib.import_module("intel_extension_for_pytorch")
    return importlib.import_module("torch")


def test_it_comes_with_the_torch_that_it_is_tied_to(torch: Any) -> None:
    extension: Any = importlib.import_module("intel_extension_for_pytorch")
    assert extension.__version__.startswith("2.8.")
    assert torch.__version__.startswith("2.8.")


class TensorWorker:
    """A cache of CPU tensors; see `kvdepot.testing.backend.Worker`."""

    def __init__(self, url: str, plan: WorkerPlan, torch: Any) -> None:
        (group,) = plan.groups
        self._torch = torch
        self._pages = [
            torch.zeros((plan.num_blocks, size // 2), dtype=torch.bfloat16) for size in group.page_sizes_bytes
        ]
        self.context = CpuTransferContext(
            KVCache([CacheGroup(self._pages, group.block_tokens)], plan.instance, "bfloat16"), CpuOptions(url=url)
        )
        self.spec = self.context.spec

    def wait_until_connected(self, timeout_seconds: float) -> None:
        self.context.wait_until_connected(timeout_seconds)

    def write_block(self, group: int, page: int, block: int, data: bytes) -> None:
        self._pages[page][block] = self._torch.frombuffer(bytearray(data), dtype=self._torch.bfloat16)

    def read_block(self, group: int, page: int, block: int) -> bytes:
        return self._pages[page][block].view(self._torch.uint8).numpy().tobytes()


def test_a_cache_of_its_tensors_comes_back(torch: Any) -> None:
    plan = WorkerPlan()
    with DepotProcess() as depot:
        worker = TensorWorker(depot.url, plan, torch)
        worker.wait_until_connected(20)
        cache = Cache(worker, plan)
        assert cache.store(prompt(5))
        assert cache.retrieve(prompt(5)) == 5
        worker.context.close()


def test_nothing_of_ours_loads_it() -> None:
    code = (
        "import sys, kvdepot, kvdepot_cpu.context, kvdepot_cpu.xpu.context;"
        " sys.exit(bool({'torch', 'intel_extension_for_pytorch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
