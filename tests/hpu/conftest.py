"""The device for these tests: a Gaudi if there is one, else the pretend one. See `support.staged.pretend`."""

import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest

from support.staged.device import FakeDevice
from support.staged.pretend import Found


def _is_real(_torch: Any) -> bool:
    return importlib.util.find_spec("habana_frameworks") is not None


_found = Found("hpu", _is_real, "KVDEPOT_REQUIRE_GAUDI")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The pretend device in eager mode."""
    yield from _found.pretended(monkeypatch)


@pytest.fixture
def lazy(fake: FakeDevice) -> FakeDevice:
    """The pretend device in lazy mode."""
    fake.lazy = True
    return fake


@pytest.fixture
def hpu(request: pytest.FixtureRequest) -> None:
    """A device, pretend or real. Without one, the test is skipped."""
    _found.need()
    if _found.fake is not None:
        request.getfixturevalue("fake")
