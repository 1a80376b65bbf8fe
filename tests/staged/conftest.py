"""The device for these tests: each backend's own if it is here, else the pretend one. See `support.staged.devices`."""

import pytest

from support.staged.device import FakeDevice
from support.staged.devices import DEVICES, Device


@pytest.fixture(params=["xpu", "hpu"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device of a backend, real or pretend. A pretend one's staging memory counts as pinned."""
    found = DEVICES[request.param]
    found.need(monkeypatch)
    return found


@pytest.fixture
def fake(device: Device, monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """The pretend device, in the mode in which the backend's work waits longest."""
    fake = device.need(monkeypatch)
    if fake is None:
        pytest.skip("the device is real: what only the pretend one can show is shown elsewhere")
    return fake
