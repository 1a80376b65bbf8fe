"""Without the device, a backend says so and what to do. Discovering it loads no module of the device."""

import importlib
import importlib.machinery
import subprocess
import sys
import types

import pytest

from kvdepot import get_backend, list_backends
from kvdepot_cpu.xpu import backend as xpu
from kvdepot_hpu import backend as hpu
from support.staged.bench import torch
from support.staged.device import FakeDevice
from support.staged.devices import Device

_WITHOUT = """
import importlib.util, sys
name, distribution, *words = sys.argv[1:]
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda module, package=None: (
    None if module in ("torch", "habana_frameworks") else find_spec(module, package)
)
from kvdepot import get_backend, list_backends
from kvdepot.errors import BackendUnavailable
(found,) = (each for each in list_backends() if each.name == name)
assert found.distribution.startswith(distribution + " "), found
assert all(word in found.why_unavailable for word in words), found
assert not {"torch", "numpy", "habana_frameworks", "vllm_xpu_kernels", "intel_extension_for_pytorch"} & set(sys.modules)
try:
    get_backend(name)
except BackendUnavailable as error:
    assert all(word in str(error) for word in words), error
else:
    raise AssertionError("it is available")
"""


@pytest.mark.promise(34)
@pytest.mark.parametrize(
    "names",
    [
        ("xpu", "kvdepot-cpu", "PyTorch's own build for xpu", "kvdepot[cpu]"),
        ("hpu", "kvdepot-hpu", "Gaudi image", "kvdepot[cpu]"),
    ],
)
def test_without_the_software_it_says_so_in_words_and_loads_nothing(names: tuple[str, ...]) -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT, *names], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", ["xpu"], indirect=True)
@pytest.mark.parametrize(
    ("version", "is_available", "expected"),
    [(None, False, "not built for xpu"), ("20250300", False, "ZE_AFFINITY_MASK"), ("20250300", True, None)],
)
def test_torch_of_another_build_and_a_device_out_of_sight_are_told_apart(
    version: str | None, is_available: bool, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch().version, "xpu", version)
    monkeypatch.setattr(torch().xpu, "is_available", lambda: is_available)
    reason = xpu.why_unavailable()
    assert reason is None if expected is None else reason is not None and expected in reason


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", ["xpu"], indirect=True)
def test_a_torch_that_does_not_answer_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> bool:
        raise RuntimeError("level zero is on fire")

    monkeypatch.setattr(torch().xpu, "is_available", broken)
    assert "RuntimeError: level zero is on fire" in str(xpu.why_unavailable())


def test_a_bridge_that_does_not_load_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("habana_frameworks")
    broken.__spec__ = importlib.machinery.ModuleSpec("habana_frameworks", None, is_package=True)
    broken.__path__ = []
    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "habana_frameworks", broken)
    reason = str(hpu.why_unavailable())
    assert "does not load" in reason
    assert "ModuleNotFoundError" in reason


@pytest.mark.parametrize("device", ["hpu"], indirect=True)
def test_no_device_is_said_with_what_to_look_at(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.module, "is_available", lambda: False)
    assert "HABANA_VISIBLE_DEVICES" in str(hpu.why_unavailable())


def test_with_a_device_it_can_be_used(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch().xpu, "is_available", lambda: True)
    assert get_backend(device.name) is {"xpu": xpu, "hpu": hpu}[device.name]
    (status,) = (status for status in list_backends() if status.name == device.name)
    assert status.why_unavailable is None
