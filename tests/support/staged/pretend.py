"""The device for a folder's tests: the real device if there is one, else the pretend one of `support.staged.device`.

Without torch, tests that need it are skipped. If KVDEPOT_REQUIRE_TORCH is set, as in the tox environment, they fail.
A process has only one pretend device, so run the tests of each device in a process of their own.
"""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvdepot.copying.staged import Bridge
from support.staged.bench import torch
from support.staged.device import FakeDevice, install


class Found:
    """The device, if it is the pretend one, and `why_not`: the reason why there is no device, or "".

    Args:
        name: name of the pretend device.
        is_real: called with torch, returns whether the real device is here.
        required: environment variable that forbids the pretend device.
    """

    def __init__(self, name: str, is_real: Callable[[Any], bool], required: str) -> None:
        self._required = required
        self.why_not, self.fake = "", None
        if importlib.util.find_spec("torch") is None:
            self.why_not = "torch is not installed: `tox r -e torch` has it"
        elif not is_real(importlib.import_module("torch")):
            try:
                self.fake: FakeDevice | None = install(name)
            except RuntimeError as error:
                self.why_not = str(error)

    def need(self) -> None:
        """Skip the test if there is no device, or fail it if the environment requires one."""
        assert self.fake is None or not os.environ.get(self._required), f"{self._required}: no such device is here"
        if self.why_not:
            assert not os.environ.get("KVDEPOT_REQUIRE_TORCH"), self.why_not
            pytest.skip(self.why_not)

    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
        """Yield the pretend device in eager mode with no work pending. Its staging memory counts as pinned."""
        self.need()
        if self.fake is None:
            pytest.skip("the device is real: what only the pretend one can show is shown elsewhere")
        pretend_to_pin(monkeypatch)
        self.fake.lazy = False
        self.fake.drop_pending()
        yield self.fake
        self.fake.drop_pending()
        self.fake.lazy = False


def pretend_to_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make staging memory count as pinned, so that copies run late. The pretend device cannot pin."""

    def host_buffer(_bridge: Bridge, num_bytes: int) -> tuple[Any, bool]:
        return torch().empty(num_bytes, dtype=torch().int8), True

    monkeypatch.setattr(Bridge, "host_buffer", host_buffer)


def hide(monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    """Make a module look as if it were not installed."""
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name == hidden else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
