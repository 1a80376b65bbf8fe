"""Without an Intel GPU, the backend says so and what to do. Discovering it loads no module of the device."""

import subprocess
import sys

import pytest

from kvdepot import get_backend, list_backends
from kvdepot.errors import BackendUnavailable
from kvdepot_cpu.xpu import backend
from support.staged.bench import torch
from support.staged.pretend import hide

_WITHOUT_TORCH = """
import importlib.util, sys
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find_spec(name, package)
from kvdepot import list_backends
(xpu,) = (backend for backend in list_backends() if backend.name == "xpu")
assert xpu.distribution.startswith("kvdepot-cpu "), xpu
assert "PyTorch's own build for xpu" in xpu.why_unavailable and "kvdepot[cpu]" in xpu.why_unavailable, xpu
assert not {"torch", "vllm_xpu_kernels", "intel_extension_for_pytorch", "numpy"} & set(sys.modules)
"""


@pytest.mark.promise(34)
def test_without_torch_it_says_so_in_words_and_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT_TORCH], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.promise(34)
def test_asking_for_it_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "torch")
    with pytest.raises(BackendUnavailable, match=r"PyTorch's own build for xpu.*kvdepot\[cpu\]"):
        get_backend("xpu")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("version", "is_available", "expected"),
    [(None, False, "not built for xpu"), ("20250300", False, "ZE_AFFINITY_MASK"), ("20250300", True, None)],
)
def test_torch_of_another_build_and_a_device_out_of_sight_are_told_apart(
    version: str | None, is_available: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch().version, "xpu", version)
    monkeypatch.setattr(torch().xpu, "is_available", lambda: is_available)
    reason = backend.why_unavailable()
    assert reason is None if expected is None else reason is not None and expected in reason


@pytest.mark.usefixtures("device")
def test_a_torch_that_does_not_answer_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("level zero is on fire")

    monkeypatch.setattr(torch().xpu, "is_available", broken)
    reason = backend.why_unavailable()
    assert reason is not None
    assert "RuntimeError: level zero is on fire" in reason


@pytest.mark.usefixtures("device")
def test_with_a_device_it_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch().xpu, "is_available", lambda: True)
    assert get_backend("xpu") is backend
    (status,) = (status for status in list_backends() if status.name == "xpu")
    assert status.why_unavailable is None
