"""The device of these tests: an Intel GPU where torch finds one, else the pretend one of `kvdepot.testing.device`.

Without torch the tests that need it are skipped, unless KVDEPOT_REQUIRE_TORCH is set, as in the tox environment.
With KVDEPOT_REQUIRE_XPU the pretend device does not count. A process has one pretend device: run these by themselves.
"""

import importlib
import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest

from kvdepot.testing.device import FakeDevice, install
from kvdepot.testing.xpu_kernels import FakeKernels
from support.nursery import Nursery
from support.staged.forked import torch_nursery
from support.xpu.workers import pretend_to_pin


def _find() -> tuple[str, FakeDevice | None]:
    """Return why there is no device, and the device if it is pretended."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed: `tox r -e torch` has it", None
    torch: Any = importlib.import_module("torch")
    if torch.xpu.is_available():
        return "", None
    try:
        return "", install("fakexpu")
    except RuntimeError as error:
        return str(error), None


_reason, _fake = _find()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks engines."""
    with torch_nursery() as nursery:
        yield nursery


@pytest.fixture
def xpu() -> None:
    """A device is there, pretended or real."""
    assert _fake is None or not os.environ.get("KVDEPOT_REQUIRE_XPU"), "torch finds no Intel GPU here"
    if _reason:
        assert not os.environ.get("KVDEPOT_REQUIRE_TORCH"), _reason
        pytest.skip(_reason)


@pytest.fixture
def fake(xpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The pretend device, with nothing under way; its staging memory counts as pinned."""
    if _fake is None:
        pytest.skip("this machine has an Intel GPU: what only the pretend device can show is shown elsewhere")
    pretend_to_pin(monkeypatch)
    _fake.drop_pending()
    yield _fake
    _fake.drop_pending()


@pytest.fixture
def kernels(fake: FakeDevice) -> Iterator[FakeKernels]:
    """Pretend operators of vllm_xpu_kernels."""
    with FakeKernels(fake) as kernels:
        yield kernels


@pytest.fixture
def device(xpu: None, request: pytest.FixtureRequest) -> None:
    """A device is there; staging memory of a pretended one counts as pinned."""
    if _fake is not None:
        request.getfixturevalue("fake")
