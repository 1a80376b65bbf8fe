"""`CudaDriver` without a device: its handling of answers and errors.

A stand-in for `cuda.bindings.driver` answers the calls. `test_stub_library.py` shows that every value arrives in C.
Only a GPU can show how NVIDIA's driver handles them.
"""

import importlib
import re
import types
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot_cuda import nvidia
from kvdepot_cuda.driver import PERMANENT, DriverError
from kvdepot_cuda.nvidia import CudaDriver

REAL: Any = importlib.import_module("cuda.bindings.driver")
ANSWERS: dict[str, tuple[Any, ...]] = {
    "cuDriverGetVersion": (13000,),
    "cuDeviceGet": (7,),
    "cuDeviceGetName": (b"NVIDIA H100" + bytes(117),),
    "cuDevicePrimaryCtxRetain": (70,),
    "cuCtxGetStreamPriorityRange": (0, -5),
    "cuStreamCreateWithPriority": (71,),
    "cuEventCreate": (72,),
    "cuThreadExchangeStreamCaptureMode": (0,),
    "cuStreamIsCapturing": (REAL.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE,),
    "cuCtxPopCurrent": (70,),
    "cuDeviceGetUuid": (types.SimpleNamespace(bytes=bytes(range(16))),),
    "cuPointerGetAttribute": (True,),
    "cuMemGetAddressRange": (REAL.CUdeviceptr(4096), 8192),  # for `export_memory`
    "cuIpcOpenMemHandle": (REAL.CUdeviceptr(1 << 40),),
    "cuDeviceGetAttribute": (9,),
    "cuMemHostGetDevicePointer": (4097,),
    "cuMemAlloc": (73,),
    "cuModuleLoadData": (74,),
    "cuModuleGetFunction": (75,),
}
HANDLE = bytes(64)


class StandIn(types.SimpleNamespace):
    """Records calls, and checks that each has as many arguments as the real function takes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.codes: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        real = getattr(REAL, name)
        if not (name.startswith("cu") and callable(real)):
            return real
        first_line = str(real.__doc__).partition("\n")[0]
        parameters = first_line[first_line.index("(") + 1 : first_line.rindex(")")]
        expected = len([part for part in parameters.split(",") if part.strip()])

        def call(*arguments: Any) -> tuple[Any, ...]:
            assert len(arguments) == expected, f"{first_line} was called with {arguments}"
            self.calls.append((name, *arguments))
            code = self.codes.get(name, 0)
            if name == "cuGetProcAddress":
                return code, 1, 0
            return (code, *ANSWERS.get(name, ()))

        return call

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    monkeypatch.setattr(nvidia, "load_bindings", lambda: stand_in)
    yield stand_in


def test_a_thread_is_left_as_it_was_after_an_error_too(cuda: StandIn) -> None:
    driver = CudaDriver(0)
    cuda.calls.clear()
    cuda.codes["cuMemHostRegister"] = 712
    with pytest.raises(DriverError, match=r"cuMemHostRegister: .*ALREADY_REGISTERED \(712\)"), driver.activated():
        driver.register_host(4096, 4096)
    relaxed = REAL.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    assert cuda.calls == [
        ("cuCtxPushCurrent", 70),
        ("cuThreadExchangeStreamCaptureMode", relaxed),
        ("cuMemHostRegister", 4096, 4096, 3),
        ("cuThreadExchangeStreamCaptureMode", 0),
        ("cuCtxPopCurrent",),
    ]


def test_a_stream_that_is_captured_is_not_marked(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    active = REAL.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    monkeypatch.setitem(ANSWERS, "cuStreamIsCapturing", (active,))
    with pytest.raises(DriverError, match="STATUS_ACTIVE"):
        CudaDriver(0).record_event(72, 0)
    assert "cuEventRecord" not in cuda.names()


def test_an_image_without_the_kernel_is_unloaded(cuda: StandIn) -> None:
    cuda.codes["cuModuleGetFunction"] = 500
    with pytest.raises(DriverError, match=r"cuModuleGetFunction: CUDA_ERROR_NOT_FOUND \(500\)"):
        CudaDriver(0).load_kernel(b"image", "gather_runs")
    assert ("cuModuleUnload", 74) in cuda.calls


def test_errors_after_which_nothing_works_are_known_by_the_names_that_the_bindings_have(cuda: StandIn) -> None:
    """They include all errors that the bindings document as permanent, and only names that the bindings have."""
    del cuda
    final = re.compile(r"inconsistent\s+state|must\s+be\s+terminated\s+and\s+relaunched")
    documented = {code.name for code in REAL.CUresult if final.search(code.__doc__ or "")}
    assert documented <= PERMANENT <= {code.name for code in REAL.CUresult}
    assert DriverError("call", "CUDA_ERROR_ILLEGAL_ADDRESS (700)").is_permanent
    assert not DriverError("call", "CUDA_ERROR_OUT_OF_MEMORY (2)").is_permanent


def test_after_a_wait_that_failed_the_stream_is_waited_for(cuda: StandIn) -> None:
    driver = CudaDriver(0)
    with driver.activated():
        stream = driver.create_stream()
        cuda.codes["cuEventRecord"] = 400
        with pytest.raises(DriverError, match="cuEventRecord"):
            driver.synchronize_stream(stream)
    assert ("cuStreamSynchronize", stream) in cuda.calls


def test_a_driver_older_than_12_8_has_no_batches(cuda: StandIn) -> None:
    cuda.codes["cuGetProcAddress"] = 1
    assert not CudaDriver(0).has_batch_copy


def test_memory_without_a_handle_says_whose_it_is(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ANSWERS, "cuPointerGetAttribute", (False,))
    with pytest.raises(DriverError, match="expandable segments"):
        CudaDriver(0).export_memory(5000)
    assert "cuIpcGetMemHandle" not in cuda.names()


@pytest.mark.parametrize("handle", [b"", HANDLE[:-1], HANDLE + b"x"])
def test_a_handle_of_another_size_is_refused(handle: bytes, cuda: StandIn) -> None:
    with pytest.raises(DriverError, match="a handle of"):
        CudaDriver(0).open_memory(handle)
    assert "cuIpcOpenMemHandle" not in cuda.names()


def test_a_handle_that_opens_inside_an_allocation_is_refused(cuda: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the allocation's end would be mistaken for the end of the opened memory, which lies elsewhere."""
    del cuda
    monkeypatch.setitem(ANSWERS, "cuMemGetAddressRange", (REAL.CUdeviceptr((1 << 40) - 512), 8192))
    with pytest.raises(DriverError, match="512 bytes behind the base"):
        CudaDriver(0).open_memory(HANDLE)


def test_a_driver_that_fails_its_first_call_is_an_error_with_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    stand_in.codes["cuDriverGetVersion"] = 3

    def import_module(_name: str) -> StandIn:
        return stand_in

    monkeypatch.setattr(importlib, "import_module", import_module)
    with pytest.raises(DriverError, match=r"cuDriverGetVersion: CUDA_ERROR_NOT_INITIALIZED \(3\)"):
        CudaDriver(0)
    assert stand_in.names() == ["cuDriverGetVersion"]
