"""If the driver refuses a part of the pool, as much as possible is registered, by halving pieces."""

import ctypes
import gc
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvdepot.copying.runs import Addresses, Runs
from kvdepot.lab.processes import wait_until
from kvdepot.pool.files import PoolMemory
from kvdepot.testing.backend import MakeCache
from kvdepot.testing.plan import prompt
from kvdepot_cuda import registration
from kvdepot_cuda.driver import DriverError
from kvdepot_cuda.registration import PoolRegistration, unit_bytes_of
from support.cuda.fake import FakeDriver, fake_gather
from support.cuda.fake_worker import PIECE_BYTES
from support.cuda.fake_worker import POOL_BYTES as WORKER_S_POOL_BYTES

MIB = 1 << 20
POOL_BYTES = 11 * MIB + 8192  # pieces of 4 MiB, the last one shorter; units of 1 MiB


class FullDevice(FakeDriver):
    """Refuses to register ranges that contain certain grains of the pool, which is registered from its start on."""

    def __init__(
        self, refused: set[int], code: str = "CUDA_ERROR_OUT_OF_MEMORY (2)", *, grain_bytes: int = MIB
    ) -> None:
        super().__init__()
        self.refused, self.code, self.grain_bytes = refused, code, grain_bytes
        self.base = 0
        self.tried: list[tuple[int, int]] = []  # first and last grain

    def register_host(self, address: int, num_bytes: int) -> None:
        if num_bytes == mmap.PAGESIZE:  # this is a table of the kernel
            super().register_host(address, num_bytes)
            return
        self.base = self.base or address
        first, last = ((byte - self.base) // self.grain_bytes for byte in (address, address + num_bytes - 1))
        self.tried.append((first, last))
        if self.refused & set(range(first, last + 1)):
            raise DriverError("register_host", self.code)
        super().register_host(address, num_bytes)


@pytest.fixture(autouse=True)
def smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registration, "SMALLEST_BYTES", MIB)


@pytest.fixture
def pool() -> Iterator[PoolMemory]:
    fd = os.memfd_create("pool")
    os.truncate(fd, POOL_BYTES)
    yield PoolMemory(fd, POOL_BYTES)
    os.close(fd)


def registered(driver: FullDevice, pool: PoolMemory) -> PoolRegistration:
    made = PoolRegistration(driver, pool, 4 * MIB)
    while made.register_next():
        pass
    return made


def offsets() -> Addresses:
    """Return the offsets of the first and the last byte of every MiB."""
    starts = np.arange(0, POOL_BYTES, MIB, dtype=np.uint64)
    return np.concatenate([starts, np.minimum(starts + np.uint64(MIB), np.uint64(POOL_BYTES)) - np.uint64(1)])


@pytest.mark.parametrize(
    ("refused", "num_ranges"),
    [
        (set[int](), 3),
        ({0}, 4),  # 1 2-3 4-7 8-11
        ({3, 4}, 5),  # 0-1 2 5 6-7 8-11
        ({5, 6}, 4),  # 0-3 4 7 8-11
        ({8}, 4),  # 0-3 4-7 9 10-11
        ({11}, 4),  # 0-3 4-7 8-9 10
        ({4, 5, 6, 7}, 2),
        (set(range(12)), 0),
        (set(range(1, 12)), 1),
    ],
)
def test_only_memory_that_is_really_refused_stays_pageable(
    refused: set[int], num_ranges: int, pool: PoolMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning names the bytes and the reason. The kernel gets the registered memory and no other."""
    driver = FullDevice(refused)
    made = registered(driver, pool)
    expected = [offset // MIB not in refused for offset in offsets().tolist()]
    assert made.covers(offsets()).tolist() == expected
    for offset, found in zip(offsets().tolist(), made.device_addresses(offsets()).tolist(), strict=True):
        assert (found != 0) == (offset // MIB not in refused)
        if found:  # it is the second mapping of the same memory
            pool.pool[offset] = 1 + offset % 250
            assert ctypes.c_uint8.from_address(found).value == 1 + offset % 250
    assert made.num_registered == num_ranges
    refused_bytes = sum(min(POOL_BYTES - number * MIB, MIB) for number in refused)
    assert driver.registered_bytes == POOL_BYTES - refused_bytes
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(lines) == bool(refused)
    assert all("of the pool's 11.0 MiB with the device" in line and "OUT_OF_MEMORY" in line for line in lines)
    made.close()
    made.close()
    assert driver.left_over == {"open": 1}
    assert driver.calls["unregister_host"] == num_ranges
    driver.close()


@pytest.mark.parametrize(
    ("refused", "code", "tried"),
    [
        (set(range(12)), "CUDA_ERROR_NOT_SUPPORTED (801)", 7 + 1 + 1),
        ({4, 5, 6, 7, 9}, "CUDA_ERROR_OUT_OF_MEMORY (2)", 1 + 7 + 1),
        ({2, 9}, "CUDA_ERROR_OUT_OF_MEMORY (2)", 5 + 1 + 5),
        (set(range(12)), "CUDA_ERROR_ILLEGAL_ADDRESS (700)", 1),
        ({2}, "CUDA_ERROR_ILLEGAL_ADDRESS (700)", 1),
    ],
)
def test_a_driver_that_refuses_everything_is_not_asked_for_every_half(
    refused: set[int], code: str, tried: int, pool: PoolMemory
) -> None:
    """After a piece that is refused entirely, the next ones are tried only whole. A lost device is not called."""
    driver = FullDevice(refused, code)
    made = registered(driver, pool)
    assert len(driver.tried) == tried
    made.close()
    driver.close()


@pytest.mark.parametrize("times", [0, 1, 3])
def test_a_mapping_that_stays_registered_stays_mapped(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the driver would have pages registered at addresses that others use by then."""
    monkeypatch.setattr(registration, "still_registered", list[PoolMemory]())
    monkeypatch.setattr(registration.logger, "disabled", True)  # log records keep errors, whose frames keep the mapping
    fd = os.memfd_create("pool")
    os.truncate(fd, POOL_BYTES)
    driver, pool = FakeDriver(), PoolMemory(fd, POOL_BYTES)
    os.close(fd)
    is_mapped = weakref.ref(pool.pool)
    made = PoolRegistration(driver, pool, 4 * MIB)
    while made.register_next():
        pass
    driver.fail("unregister_host", times=times)
    made.close()
    made.close()
    del made, pool
    gc.collect()
    assert (is_mapped() is not None) == bool(times)
    assert driver.registered_bytes == min(times, 2) * 4 * MIB + (times == 3) * (POOL_BYTES - 8 * MIB)


def test_it_stops_between_two_halves(pool: PoolMemory, caplog: pytest.LogCaptureFixture) -> None:
    class Stopping(FullDevice):
        def register_host(self, address: int, num_bytes: int) -> None:
            if len(self.tried) == 3:
                made.stop()
            super().register_host(address, num_bytes)

    driver = Stopping({0})
    made = PoolRegistration(driver, pool, 4 * MIB)
    made.register()
    assert driver.tried == [(0, 3), (0, 1), (0, 0), (1, 1)]
    assert caplog.records == []
    made.close()
    assert driver.left_over == {"open": 1}
    driver.close()


@pytest.mark.parametrize(
    ("piece_bytes", "unit_bytes"),
    [(1 << 30, MIB), (4096, 4096), (MIB, MIB), (3 * MIB, 3 * MIB // 2), (5 * MIB + 4096, 5 * MIB + 4096)],
)
def test_units_are_whole_pages_and_pieces_whole_units(piece_bytes: int, unit_bytes: int) -> None:
    assert unit_bytes_of(piece_bytes) == unit_bytes


class TestALargePool:
    @pytest.fixture(autouse=True)
    def large(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registration, "SMALL_POOL_BYTES", 0)

    def runs(self, *places: tuple[int, int]) -> Runs:
        """Return runs, given their offsets and sizes in MiB."""
        offsets, sizes = (np.array(column, np.uint64) * np.uint64(MIB) for column in zip(*places, strict=True))
        return Runs(offsets, offsets, sizes)

    def test_pieces_that_copies_touch_are_registered_those_with_most_bytes_first(self, pool: PoolMemory) -> None:
        driver = FullDevice(set())
        driver.base = pool.address
        made = PoolRegistration(driver, pool, 4 * MIB)
        assert made.is_idle
        assert not made.register_next()
        made.want(self.runs((9, 1), (0, 1), (1, 1)))
        made.want(self.runs((10, 1), (11, 0), (8, 1)))
        assert not made.is_idle
        while made.register_next():
            pass
        assert driver.tried == [(8, 11), (0, 3)]
        assert made.is_idle
        made.want(self.runs((0, 3)))
        assert made.is_idle
        made.close()
        driver.close()

    def test_a_thread_registers_pieces_as_they_are_wanted(self, pool: PoolMemory) -> None:
        driver = FullDevice(set())
        made = PoolRegistration(driver, pool, 4 * MIB)
        thread = threading.Thread(target=made.register)
        thread.start()
        for piece in range(3):
            made.want(self.runs((4 * piece, 1)))
            wait_until(lambda piece=piece: made.num_registered == piece + 1)
        thread.join(10)  # nothing is left to register
        assert not thread.is_alive()
        made.close()
        driver.close()

    def test_a_thread_ends_when_it_is_told_to(self, pool: PoolMemory) -> None:
        made = PoolRegistration(FullDevice(set()), pool, 4 * MIB)
        thread = threading.Thread(target=made.register)
        thread.start()
        made.stop()
        thread.join(10)
        assert not thread.is_alive()

    @pytest.mark.parametrize(
        ("code", "tried"), [("CUDA_ERROR_OUT_OF_MEMORY (2)", 3), ("CUDA_ERROR_ILLEGAL_ADDRESS (700)", 1)]
    )
    def test_a_refused_piece_is_not_tried_again(
        self, code: str, tried: int, pool: PoolMemory, caplog: pytest.LogCaptureFixture
    ) -> None:
        driver = FullDevice({8}, code)
        driver.base = pool.address
        made = PoolRegistration(driver, pool, 4 * MIB)
        for _ in range(2):
            made.want(self.runs((8, 2), (0, 1)))
            while made.register_next():
                pass
        assert (8, 11) in driver.tried
        assert made.is_idle
        assert len([each for each in driver.tried if each == (8, 11)]) == 1
        assert made.covers(self.runs((0, 1)).offsets).all() == (tried > 1)
        assert len(caplog.records) == 1
        made.close()
        driver.close()

    def test_a_worker_registers_what_its_copies_touch(
        self, cache: MakeCache, driver: FakeDriver, caplog: pytest.LogCaptureFixture
    ) -> None:
        worker = cache(num_pieces=0)
        context: Any = worker.context
        assert worker.store(prompt(8))
        assert driver.calls["pageable"] > 0
        wait_until(lambda: context.num_registered == 1 and context.is_warm)
        num_pageable = driver.calls["pageable"]
        assert worker.retrieve(prompt(8)) == 8
        assert driver.calls["pageable"] == num_pageable
        assert driver.registered_bytes == PIECE_BYTES
        assert not caplog.records


class TestAWorker:
    """The driver refuses half of every other piece of its pool, and its pages of 64 KiB cross all of them."""

    UNIT_BYTES = 5 * 4096
    NUM_PIECES = WORKER_S_POOL_BYTES // (2 * UNIT_BYTES)  # and a refused remainder

    @pytest.fixture
    def driver(self, monkeypatch: pytest.MonkeyPatch) -> FullDevice:
        monkeypatch.setattr(registration, "SMALLEST_BYTES", 4 * 4096)
        return FullDevice(set(range(0, 2 * self.NUM_PIECES + 1, 4)), grain_bytes=self.UNIT_BYTES)

    @pytest.fixture
    def worker_options(self) -> dict[str, Any]:
        return {"piece_bytes": 2 * self.UNIT_BYTES, "plan": "large pages", "num_pieces": self.NUM_PIECES}

    @pytest.mark.slow
    @pytest.mark.parametrize("has_kernel", [False, True])
    def test_no_copy_crosses_the_end_of_what_is_registered(
        self, has_kernel: bool, cache: MakeCache, driver: FullDevice, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Like real drivers, the fake refuses such a copy."""
        monkeypatch.setattr("kvdepot_cuda.gather.MOST_RUN_BYTES", 1 << 20)
        monkeypatch.setattr("kvdepot_cuda.gather.LEAST_RUNS", 1)
        worker = cache(compile_gather=fake_gather, gather_kernel=has_kernel)
        for salt in range(4):
            assert worker.store(prompt(8, salt=salt))
            assert worker.retrieve(prompt(8, salt=salt)) == 8
        assert driver.calls["pageable"] > 0
        assert (driver.calls["copy_batch"] > 0, driver.calls["gathered"] > 0) == (not has_kernel, has_kernel)
