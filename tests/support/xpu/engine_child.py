"""An engine on an Intel GPU, pretend or real, that obeys: `python -m support.xpu.engine_child URL INSTANCE`."""

import sys

import pytest

from kvdepot.testing.engine import obey
from support.staged.bench import torch
from support.staged.device import install
from support.staged.pretend import pretend_to_pin
from support.xpu.workers import XpuWorker


def main() -> None:
    url, instance = sys.argv[1:]
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch().xpu.is_available():
            install("fakexpu")
            pretend_to_pin(monkeypatch)
        obey(XpuWorker, url, instance)


if __name__ == "__main__":
    main()
