"""Without a Gaudi, the backend says so and what to do. Discovering it loads no module of the device."""

import importlib
import importlib.machinery
import subprocess
import sys
import types

import pytest

from kvdepot import get_backend, list_backends
from kvdepot.errors import BackendUnavailable
from kvdepot_hpu import backend
from support.staged.device import FakeDevice
from support.staged.pretend import hide

_WITHOUT = """
import sys
from importlib.util import find_spec
if find_spec("habana_frameworks"):
    sys.exit(0)
from kvdepot_hpu import backend
reason = backend.why_unavailable()
assert "Gaudi image" in reason and "kvdepot[cpu]" in reason, reason
assert not {"torch", "habana_frameworks", "numpy"} & set(sys.modules)
from kvdepot import list_backends
(hpu,) = (backend for backend in list_backends() if backend.name == "hpu")
assert hpu.distribution.startswith("kvdepot-hpu ") and hpu.why_unavailable == reason, hpu
"""


@pytest.mark.promise(34)
def test_without_the_software_it_says_so_in_words_and_loads_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.promise(34)
def test_asking_for_it_is_an_error_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "habana_frameworks")
    with pytest.raises(BackendUnavailable, match=r"Gaudi image.*kvdepot\[cpu\]"):
        get_backend("hpu")


def test_a_bridge_that_does_not_load_is_named_with_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("habana_frameworks")
    broken.__spec__ = importlib.machinery.ModuleSpec("habana_frameworks", None, is_package=True)
    broken.__path__ = []
    for name in [name for name in sys.modules if name.startswith("habana_frameworks")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "habana_frameworks", broken)
    reason = backend.why_unavailable()
    assert reason is not None
    assert "does not load" in reason
    assert "ModuleNotFoundError" in reason


def test_no_device_is_said_with_what_to_look_at(fake: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake.module, "is_available", lambda: False)
    reason = backend.why_unavailable()
    assert reason is not None
    assert "HABANA_VISIBLE_DEVICES" in reason


@pytest.mark.usefixtures("hpu")
def test_with_a_device_it_can_be_used() -> None:
    assert get_backend("hpu") is backend
    (status,) = (status for status in list_backends() if status.name == "hpu")
    assert status.why_unavailable is None
