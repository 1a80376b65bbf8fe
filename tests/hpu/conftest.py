"""The device of these tests: a Gaudi where there is one, else the pretend one of `kvdepot.testing.device`.

Without torch the tests that need it are skipped, unless KVDEPOT_REQUIRE_TORCH is set, as in the tox environment.
With KVDEPOT_REQUIRE_GAUDI the pretend device does not count.
"""

import importlib.util
import os
from collections.abc import Iterator

import pytest

from kvdepot.testing.device import FakeDevice, install
from support.nursery import Nursery
from support.staged.forked import torch_nursery

_torch_is_here = importlib.util.find_spec("torch") is not None
_fake: FakeDevice | None = None
if _torch_is_here and importlib.util.find_spec("habana_frameworks") is None:
    _fake = install("hpu")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Forks engines."""
    with torch_nursery() as nursery:
        yield nursery


@pytest.fixture
def hpu() -> None:
    """A device is there, pretended or real."""
    assert _fake is None or not os.environ.get("KVDEPOT_REQUIRE_GAUDI"), "no habana_frameworks: this is no Gaudi"
    if not _torch_is_here:
        assert not os.environ.get("KVDEPOT_REQUIRE_TORCH"), "torch is missing, and these tests were to run"
        pytest.skip("torch is not installed: `tox r -e torch` has it")


@pytest.fixture
def fake(hpu: None) -> Iterator[FakeDevice]:
    """The pretend device, with nothing under way, in eager mode."""
    if _fake is None:
        pytest.skip("this machine has habana_frameworks: what only the pretend device can show is shown elsewhere")
    _fake.lazy = False
    _fake.drop_pending()
    yield _fake
    _fake.drop_pending()
    _fake.lazy = False


@pytest.fixture
def lazy(fake: FakeDevice) -> FakeDevice:
    """The pretend device in lazy mode."""
    fake.lazy = True
    return fake
