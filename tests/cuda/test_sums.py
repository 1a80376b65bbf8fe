"""Checksums of a store that kernels compute on the device, with a driver that has none: choice, order, fallbacks.

The kernels themselves run and compile in `tests/kernels`. Here, the fake driver does their work.
"""

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvdepot.copying.runs import Addresses, Runs
from kvdepot.lab.processes import DepotProcess, wait_until
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import prompt
from kvdepot.wire.messages import EXTENT
from kvdepot_cuda.driver import CopyKind
from kvdepot_cuda.images import KernelImage, KernelUnavailable, compile_kernels
from kvdepot_cuda.sums import DeviceSums, rows_of
from support.cuda.fake import FakeDriver, fake_sums
from support.cuda.fake.kernels import run_kernel
from support.cuda.fake_worker import NUM_PIECES

SUMS: dict[str, Any] = {"checksum_kernel": True, "compile_sums": fake_sums}


@pytest.fixture
def depot() -> Iterator[DepotProcess]:
    with DepotProcess("--verify", "all", pool_size="64MiB") as depot:
        yield depot


@pytest.fixture
def worker_options() -> dict[str, Any]:
    return SUMS


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def column(*numbers: int) -> Addresses:
    return np.array(numbers, np.uint64)


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_row_is_made_for_every_extent_and_every_run() -> None:
    """The second run fills the end of one extent and the beginning of the next."""
    runs = Runs(column(0x1000, 0x9000, 0x5000), column(0, 0, 0), column(2048, 3072, 1024))
    rows = rows_of(column(4096, 2048), runs)
    assert rows is not None
    extents, of_runs = rows[:2].tolist(), rows[2:].tolist()
    assert extents == [[0, 4, 0x9000 + 2048 - 64], [4, 2, 0x5000 + 1024 - 64]]
    assert of_runs == [[0x1000, 0, 2], [0x9000, 2, 3], [0x5000, 5, 1]]


@pytest.mark.parametrize(
    ("extents", "blocks", "sizes"),
    [
        (column(2048), column(0x1000), column(1024)),
        (column(1024), column(0x1008), column(1024)),
        (column(2048), column(0x1000, 0x2000), column(1000, 1048)),
        (column(1000, 1048), column(0x1000), column(2048)),
    ],
    ids=["a part is missing", "odd address", "odd run", "odd extent"],
)
def test_runs_that_are_no_whole_blocks_have_no_table(extents: Addresses, blocks: Addresses, sizes: Addresses) -> None:
    assert rows_of(extents, Runs(blocks, np.zeros_like(blocks), sizes)) is None


def test_a_batch_without_extents_or_beyond_the_memory_has_no_checksums(driver: FakeDriver) -> None:
    empty: Any = SimpleNamespace(extents=b"")
    large: Any = SimpleNamespace(extents=EXTENT.pack(0, 0, 0, 0, 0, 0, 0, 4096))
    with driver.activated():
        sums, stream = DeviceSums(driver, fake_sums(90), 2048), driver.create_stream()
        assert sums.begin(empty, Runs(column(), column(), column()), stream) is None
        assert sums.begin(large, Runs(column(0x1000), column(0), column(4096)), stream) is None
        sums.close()
    assert driver.calls["launch_kernel"] == 0


# --- whole transfers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["one group", "large pages", "several block sizes", "window and full"])
def test_the_depot_gets_the_checksums_of_the_device(plan: str, cache: MakeCache, driver: FakeDriver) -> None:
    """The retrieve compares each of them with the bytes in the pool."""
    worker = cache(plan=plan)
    assert worker.store(prompt(9))
    assert driver.calls["digest_extents"] >= 9
    assert worker.retrieve(prompt(9)) == 9


def test_a_byte_that_changes_on_its_way_to_the_pool_is_a_miss(
    cache: MakeCache, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checksums that are computed from the pool are those of the wrong bytes."""

    def copy_wrongly(
        sources: Addresses, targets: Addresses, sizes: Addresses, direction: CopyKind, stream: int
    ) -> None:
        copied(sources[::-1] if direction is CopyKind.TO_HOST else sources, targets, sizes, direction, stream)

    worker, copied = cache(), driver.copy_batch
    monkeypatch.setattr(driver, "copy_batch", copy_wrongly)
    assert worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 0


@pytest.mark.parametrize("given", [{"plan": "odd page sizes"}, {"checksum_kernel": False}])
def test_threads_compute_the_other_checksums(given: dict[str, Any], cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache(**given)
    assert worker.store(prompt(4))
    assert driver.calls["launch_kernel"] == 0
    assert worker.retrieve(prompt(4)) == 4


def test_a_chunk_that_is_larger_than_a_batch_has_checksums_of_the_device(cache: MakeCache, driver: FakeDriver) -> None:
    worker = cache(batch_bytes=1024)
    assert worker.store(prompt(4))
    assert (driver.calls["digest_extents"], driver.calls["launch_kernel"]) == (4, 8)
    assert worker.retrieve(prompt(4)) == 4


def test_no_run_of_a_thread_block_is_long(
    cache: MakeCache, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of neighbouring blocks is one run, which one thread block would sum alone."""
    launches: list[tuple[str, int, int]] = []

    def note(name: str, arguments: tuple[int, ...], num_programs: int) -> None:
        launches.append((name, arguments[2], num_programs))
        run_kernel(name, arguments, num_programs)

    monkeypatch.setattr(driver, "run_kernel", note)
    worker = cache(plan="large pages")
    blocks = [list(range(len(worker.blocks(prompt(4))[0])))]
    worker.fill(prompt(4), blocks)
    assert worker.context.submit_store("request", prompt(4), blocks).result(20)
    num_bytes = len(blocks[0]) * 2 * 65536
    assert launches == [("sum_blocks", num_bytes >> 16, num_bytes >> 18), ("digest_extents", num_bytes >> 16, 1)]
    assert num_bytes > 16 << 16


# --- fallbacks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["compile", "load_kernel", "allocate_device", "register_host"])
def test_kernels_that_cannot_be_loaded_are_one_warning(
    call: str, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_late(capability: int) -> tuple[KernelImage, ...]:
        if call == "compile":
            raise KernelUnavailable("triton is not installed")
        wait_until(lambda: driver.calls["register_host"] == NUM_PIECES)  # the next calls are for the kernels
        driver.fail(call, "CUDA_ERROR_OUT_OF_MEMORY (2)", after=call == "load_kernel", times=1)
        return fake_sums(capability)

    worker = cache(compile_sums=compile_late)
    assert worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 4
    assert driver.calls["launch_kernel"] == 0
    (line,) = warnings(caplog)
    assert "threads compute checksums, as the kernels for them cannot be loaded" in line


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_launch_that_is_refused_is_one_warning_and_no_miss(
    after: int, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache()
    driver.fail("launch_kernel", "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES (701)", after=after)
    for salt in range(3):
        assert worker.store(prompt(4, salt=salt))
        assert worker.retrieve(prompt(4, salt=salt)) == 4
    assert driver.calls["launch_kernel"] == after + 1
    (line,) = warnings(caplog)
    assert "threads compute checksums from now on" in line


def test_a_kernel_that_faults_is_a_miss_and_the_end_of_the_device(
    cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
) -> None:
    worker = cache()
    driver.fail("execute", "CUDA_ERROR_ILLEGAL_ADDRESS (700)", after=1, times=1)  # after the copy of the table
    assert not worker.store(prompt(4))
    assert worker.retrieve(prompt(4)) == 0
    (line,) = warnings(caplog)
    assert "has lost the device" in line


def test_without_triton_the_reason_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvdepot_cuda.images.has_triton", lambda: False)
    with pytest.raises(KernelUnavailable, match=r"pip install 'triton>=3\.3'"):
        compile_kernels("sum_kernel", 90)
