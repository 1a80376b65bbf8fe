"""The device of these tests: an Intel GPU where torch finds one, else the pretend one. See `support.staged.pretend`."""

from collections.abc import Iterator
from typing import Any

import pytest

from support.staged.device import FakeDevice
from support.staged.pretend import Found, nursery

__all__ = ["nursery"]


def _is_real(torch: Any) -> bool:
    return bool(torch.xpu.is_available())


_found = Found("fakexpu", _is_real, "KVDEPOT_REQUIRE_XPU")  # torch refuses the name xpu to others


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """The pretend device; its staging memory counts as pinned."""
    yield from _found.pretended(monkeypatch)


@pytest.fixture
def xpu() -> None:
    """A device is there, pretended or real; staging memory of a pretended one cannot be pinned."""
    _found.need()


@pytest.fixture
def device(xpu: None, request: pytest.FixtureRequest) -> None:
    """A device is there; staging memory of a pretended one counts as pinned."""
    if _found.fake is not None:
        request.getfixturevalue("fake")
