"""Without a device the backend says so. It refuses impossible options, and releases the device."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

import kvdepot_cuda
from kvdepot import get_backend, list_backends
from kvdepot.backends import CacheGroup, Capability, KVCache
from kvdepot.errors import BackendUnavailable, ConfigError, LayoutError
from kvdepot_cuda import backend
from kvdepot_cuda.context import CudaOptions, CudaTransferContext
from kvdepot_cuda.driver import DriverError
from kvdepot_cuda.nvidia import CudaDriver
from support.cuda.fake import FakeDriver

NEW = "sys.exit(any(name.split('.')[0] in {0} for name in {{*sys.modules}} - before))"  # bindings may have a .pth file
HAS_DEVICE = any(Path("/dev").glob("nvidia[0-9]*"))
without_a_device = pytest.mark.skipif(HAS_DEVICE, reason="there is a device here")


@without_a_device
@pytest.mark.promise(34)
def test_it_says_in_words_why_it_cannot_be_used() -> None:
    found = next(backend for backend in list_backends() if backend.name == "cuda")
    assert found.distribution
    assert found.capabilities == (Capability.ASYNCHRONOUS, Capability.DEPOT_DRIVEN)
    assert backend.settings < {field.name for field in fields(CudaOptions)}
    assert found.why_unavailable is not None
    assert "NVIDIA" in found.why_unavailable


@without_a_device
@pytest.mark.promise(34)
def test_asking_for_it_is_an_error_with_the_way_out() -> None:
    with pytest.raises(BackendUnavailable, match=r"NVIDIA.*"):
        get_backend("cuda")


@without_a_device
def test_the_real_driver_says_that_it_is_not_there() -> None:
    with pytest.raises(DriverError, match=r"CUDA|cu[A-Z]"):
        CudaDriver(0)


@pytest.mark.promise(34)
def test_each_thing_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_name: str) -> None:
        raise OSError

    def a_library(_name: str) -> None:
        pass

    def no_device(_path: Path, _pattern: str) -> Any:
        return iter(())

    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert "libcuda.so.1" in str(backend.why_unavailable())
    monkeypatch.setattr(ctypes, "CDLL", a_library)
    monkeypatch.setattr(Path, "glob", no_device)
    assert "no NVIDIA device" in str(backend.why_unavailable())
    for number in ("12", "12.6.2", "12.8.0", "12.9.0.post1"):
        monkeypatch.setattr(kvdepot_cuda, "version", _version(number))
        assert "keeps Python's lock" in str(backend.why_unavailable())
        assert "cuda-bindings>=12.9.1'" in str(backend.why_unavailable())
    for number in ("12.9.1", "12.9.10", "13.0", "13.5.0.post1"):
        monkeypatch.setattr(kvdepot_cuda, "version", _version(number))
        assert "no NVIDIA device" in str(backend.why_unavailable())
    monkeypatch.setattr(kvdepot_cuda, "version", _version(None))
    assert "kvdepot[cuda]" in str(backend.why_unavailable())


def _version(number: str | None) -> Callable[[str], str]:
    def version(name: str) -> str:
        if number is None:
            raise PackageNotFoundError(name)
        return number

    return version


@pytest.mark.promise(34)
def test_a_driver_that_refuses_is_an_error_with_its_word() -> None:
    def refuse(_ordinal: int) -> FakeDriver:
        raise DriverError("cuInit", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)")

    with pytest.raises(BackendUnavailable, match=r"cuda:0.*cuInit.*MISMATCH"):
        make_context(FakeDriver(), open_driver=refuse)


def test_a_device_without_room_for_streams_is_given_back() -> None:
    driver = FakeDriver()
    driver.fail("create_stream", "CUDA_ERROR_OUT_OF_MEMORY (2)")
    with pytest.raises(BackendUnavailable, match="create_stream"):
        make_context(driver)
    assert driver.left_over == {}


def test_a_worker_whose_memory_cannot_be_shared_copies_by_itself_in_mode_ipc(caplog: pytest.LogCaptureFixture) -> None:
    context = make_context(FakeDriver(), mode="ipc")  # without a folder the fake's memory has no handles
    assert context.transfer_mode == "direct"
    assert len([record for record in caplog.records if "cannot be shared" in record.message]) == 1
    context.close()


def test_a_mover_gets_larger_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[CudaOptions] = []

    def keep(_cache: KVCache, options: CudaOptions) -> None:
        given.append(options)

    monkeypatch.setattr("kvdepot_cuda.context.CudaTransferContext", keep)
    chosen: list[dict[str, Any]] = [{}, {"mode": "direct"}, {"mode": "ipc"}, {"mode": "ipc", "batch_bytes": 1 << 20}]
    for options in chosen:
        backend.create_context(KVCache([], "engine", "bfloat16"), **options)
    assert [options.batch_bytes >> 20 for options in given] == [64, 64, 256, 1]


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="'direct' or 'ipc'"):
        make_context(FakeDriver(), mode="auto")


@pytest.mark.parametrize("options", [{"piece_bytes": 4097}, {"piece_bytes": 128 << 30}, {"batch_runs": 0}])
def test_sizes_that_cannot_work_are_refused_and_the_device_is_given_back(options: dict[str, Any]) -> None:
    driver = FakeDriver()
    with pytest.raises(ConfigError):
        make_context(driver, **options)
    assert driver.left_over == {}


def test_tensors_of_the_host_or_of_two_devices_are_refused() -> None:
    one, other = FakeDriver(0), FakeDriver(1)
    with pytest.raises(LayoutError, match=r"devices \[0, 1\]"):
        make_context(one, tensors=[one.tensor(4, 64), other.tensor(4, 64)])
    on_host = one.tensor(4, 64)
    on_host.device = type(on_host.device)("cpu")
    with pytest.raises(LayoutError, match="backend of cpu"):
        make_context(one, tensors=[on_host])
    with pytest.raises(LayoutError, match="bytearray has no data_ptr"):
        make_context(one, tensors=[bytearray(64)])
    for driver in (one, other):
        driver.close()


def make_context(driver: FakeDriver, *, tensors: list[Any] | None = None, **options: Any) -> CudaTransferContext:
    def open_driver(_ordinal: int) -> FakeDriver:
        return driver

    options.setdefault("open_driver", open_driver)
    groups = [CacheGroup(tensors or [driver.tensor(4, 64)], block_tokens=16)]
    return CudaTransferContext(KVCache(groups, "engine", "bytes"), CudaOptions(**options))


@pytest.mark.parametrize(
    ("module", "others"),
    [("kvdepot_cuda", {"torch", "cuda", "numpy"}), ("kvdepot_cuda.context", {"torch", "cuda"})],
)
def test_finding_it_and_its_context_load_no_device_library(module: str, others: set[str]) -> None:
    code = f"import sys; before = {{*sys.modules}}; import {module}; " + NEW.format(others)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
