"""The kernel's part of stores and retrieves, with a driver that has no device: choice of runs, addresses, fallbacks.

The kernel itself runs and compiles in `tests/kernels`. Here, the fake driver does its work.
"""

import logging
import threading
from typing import Any, cast

import numpy as np
import pytest

from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import PLANS, Cache, prompt
from kvdepot_cuda.context import CudaTransferContext
from kvdepot_cuda.gather import (
    LEAST_RUNS,
    MOST_RUN_BYTES,
    compile_gather,
    runs_for_kernel,
)
from kvdepot_cuda.images import KernelImage, KernelUnavailable
from support.cuda.fake import FakeDriver
from support.cuda.fake_worker import NUM_PIECES, FakeWorker

IMAGE = KernelImage(b"image", "gather_runs", 128, 1024, 2)
WAIT_SECONDS = 20.0
KERNEL: dict[str, Any] = {"gather_kernel": True, "compile_gather": lambda _: IMAGE}  # pyright: ignore[reportUnknownLambdaType]


def columns(*runs: tuple[int, int, int]) -> list[Any]:
    return [np.array(column, np.uint64) for column in zip(*runs, strict=True)]


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", [0, 1])
def test_small_runs_go_by_the_kernel_if_there_are_enough_of_them(missing: int) -> None:
    """After them come a larger run, one in a piece that the device does not know, and two that are not aligned."""
    small = [(4096 * (number + 1), (number + 1) << 40, MOST_RUN_BYTES) for number in range(LEAST_RUNS - missing)]
    runs = columns(
        *small,
        (65536, 60 << 40, MOST_RUN_BYTES + 16),
        (0, 61 << 40, 4096),
        (4104, 62 << 40, 4096),
        (4096, (63 << 40) + 8, 4096),
    )
    assert np.flatnonzero(runs_for_kernel(*runs)).tolist() == ([] if missing else list(range(LEAST_RUNS)))


@pytest.mark.parametrize(
    ("given", "has_triton", "uses_it"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_by_default_there_is_a_kernel_where_triton_is_installed(
    given: bool | None,
    has_triton: bool,
    uses_it: bool,
    cache: MakeCache,
    driver: FakeDriver,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An explicit request for a missing one warns: see `test_a_kernel_that_cannot_be_loaded_is_one_warning`."""
    monkeypatch.setattr("kvdepot_cuda.context.has_triton", lambda: has_triton)
    worker = cache(gather_kernel=given)
    assert worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 4
    assert (driver.calls["launch_kernel"] > 0) == (driver.calls["load_kernel"] > 0) == uses_it
    assert warnings(caplog) == []


@pytest.fixture
def every_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel copy also single and large runs."""
    monkeypatch.setattr("kvdepot_cuda.gather.MOST_RUN_BYTES", 1 << 20)
    monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)


# --- whole transfers --------------------------------------------------------------------------------------------------


@pytest.fixture
def worker_options(every_run: None) -> dict[str, Any]:
    del every_run
    return KERNEL


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_stores_and_retrieves_go_by_the_kernel(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache()
    assert worker.store(prompt(4))
    stored = driver.calls["gathered"]
    assert (driver.calls["launch_kernel"], driver.calls["copy_batch"]) == (1, 0)
    assert worker.retrieve(prompt(4)) == 4
    assert (driver.calls["launch_kernel"], driver.calls["copy_batch"]) == (2, 0)
    assert driver.calls["gathered"] == 2 * stored > 0


def test_nothing_waits_for_the_compiler(depot: DepotProcess, driver: FakeDriver) -> None:
    """Until it is done, DMA copies everything, and the pool is registered."""
    gate = threading.Event()

    def compile_late(_capability: int) -> KernelImage:
        assert gate.wait(WAIT_SECONDS)
        return IMAGE

    plan = PLANS["one group"]
    worker = FakeWorker(depot.url, plan, driver=driver, gather_kernel=True, compile_gather=compile_late)
    worker.wait_until_connected(WAIT_SECONDS)
    wait_until(lambda: worker.context.num_registered == NUM_PIECES)
    cache = Cache(worker, plan)
    assert cache.store(prompt(4))
    assert cache.retrieve(prompt(4)) == 4
    assert driver.calls["copy_batch"] > 0
    assert driver.calls["launch_kernel"] == 0
    assert not worker.context.is_warm
    gate.set()
    wait_until(lambda: worker.context.is_warm)
    assert cache.retrieve(prompt(4)) == 4
    assert driver.calls["launch_kernel"] == 1
    worker.context.close()
    assert driver.violations == []
    assert driver.left_over == {}


def test_runs_that_do_not_suit_the_kernel_are_copied_beside_it(cache: MakeCache, driver: FakeDriver) -> None:
    """With pages of 1000, 8 and 4104 bytes, few lie at multiples of 16."""
    worker = cache(plan="odd page sizes")
    assert worker.store(prompt(6))
    launches, batches = driver.calls["launch_kernel"], driver.calls["copy_batch"]
    assert launches > 0
    assert batches > 0
    assert worker.retrieve(prompt(6)) == 6
    assert driver.calls["launch_kernel"] > launches
    assert driver.calls["copy_batch"] > batches


def test_no_launch_has_more_runs_than_its_table(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache(batch_runs=10)
    assert worker.store(prompt(15))
    assert worker.retrieve(prompt(15)) == 15
    assert driver.calls["launch_kernel"] >= driver.calls["gathered"] / 10 > 2


def test_without_addresses_of_the_pool_nothing_goes_by_the_kernel(cache: MakeCache, driver: FakeDriver) -> None:
    driver.fail("device_address_of", "CUDA_ERROR_NOT_SUPPORTED (801)")
    worker = cache()
    assert worker.store(prompt(8))
    assert worker.retrieve(prompt(8)) == 8
    assert driver.calls["launch_kernel"] == 0


# --- fallbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])  # each direction loads it
@pytest.mark.parametrize("call", ["compile", "load_kernel", "allocate_device", "register_host"])
def test_a_kernel_that_cannot_be_loaded_is_one_warning(
    call: str, after: int, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_late(_capability: int) -> KernelImage:
        if call == "compile":
            raise KernelUnavailable("triton is not installed")
        wait_until(lambda: driver.calls["register_host"] == NUM_PIECES)  # the next calls are for the kernel
        driver.fail(call, "CUDA_ERROR_OUT_OF_MEMORY (2)", after=after, times=1)
        return IMAGE

    worker = cache(compile_gather=compile_late)
    assert worker.store(prompt(4))
    for _ in range(3):
        assert worker.retrieve(prompt(4)) == 4
    assert not cast(CudaTransferContext, worker.context).uses_kernel
    assert driver.calls["launch_kernel"] == 0
    (line,) = warnings(caplog)
    assert "the kernel for them cannot be loaded" in line


@pytest.mark.parametrize("is_store", [True, False])
@pytest.mark.parametrize("after", [0, 2])
def test_a_launch_that_is_refused_is_one_warning_and_no_miss(
    after: int, is_store: bool, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache(batch_runs=16)
    if not is_store:
        assert worker.store(prompt(12))
    launches = driver.calls["launch_kernel"]
    driver.fail("launch_kernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)", after=after)
    for salt in range(2):
        assert worker.store(prompt(12, salt=salt))  # copies nothing if the prompt is there
        assert worker.retrieve(prompt(12, salt=salt)) == 12
    assert driver.calls["launch_kernel"] == launches + after + 1
    (line,) = warnings(caplog)
    assert "as the kernel for them failed" in line


@pytest.mark.parametrize("is_store", [True, False])
def test_a_kernel_that_faults_is_a_miss_and_the_end_of_the_device(
    is_store: bool, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache()
    assert worker.store(prompt(4))
    driver.fail("execute", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", after=1, times=1)  # after the copy of the table
    if is_store:
        assert not worker.store(prompt(4, salt=1))
    assert worker.retrieve(prompt(4)) == 0
    assert worker.retrieve(prompt(4)) == 0
    (line,) = warnings(caplog)
    assert "has lost the device" in line


def test_without_triton_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_name: str) -> None:
        return None

    monkeypatch.setattr("importlib.util.find_spec", nothing)
    with pytest.raises(KernelUnavailable, match=r"pip install 'triton>=3\.3'"):
        compile_gather(90)
