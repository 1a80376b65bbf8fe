"""The device for these tests: an Intel GPU if torch finds one, else the pretend one. See `support.staged.pretend`."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.staged.device import FakeDevice
from support.staged.pretend import Found


def _is_real(torch: Any) -> bool:
    return bool(torch.xpu.is_available())


_found = Found("fakexpu", _is_real, "KVDEPOT_REQUIRE_XPU")  # torch reserves the name xpu


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The pretend device. Its staging memory counts as pinned."""
    yield from _found.pretended(monkeypatch)


@pytest.fixture
def xpu() -> None:
    """A device, pretend or real. Without one, the test is skipped. A pretend one cannot pin staging memory."""
    _found.need()


@pytest.fixture
def device(xpu: None, request: pytest.FixtureRequest) -> None:
    """Like `xpu`, but a pretend device's staging memory counts as pinned."""
    if _found.fake is not None:
        request.getfixturevalue("fake")
