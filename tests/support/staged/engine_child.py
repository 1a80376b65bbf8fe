"""An engine on a device, pretend or real, that obeys: `python -m support.staged.engine_child DEVICE URL INSTANCE`.

DEVICE is xpu, hpu, or lazy, which is an HPU in lazy mode.
"""

import importlib.util
import sys
from functools import partial
from typing import Any

import pytest

from kvdepot.testing.engine import obey
from support.staged.bench import torch
from support.staged.device import install
from support.staged.pretend import pretend_to_pin


def main() -> None:
    device, url, instance = sys.argv[1:]
    make_worker: Any
    if device == "xpu":
        from support.xpu.workers import XpuWorker

        make_worker = XpuWorker
        name, is_real = "fakexpu", torch().xpu.is_available()
    else:
        from support.hpu.workers import HpuWorker

        make_worker = partial(HpuWorker, max_blocks=4)
        name, is_real = "hpu", importlib.util.find_spec("habana_frameworks") is not None
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not is_real:
            install(name, lazy=device == "lazy")
            pretend_to_pin(monkeypatch)
        obey(make_worker, url, instance)


if __name__ == "__main__":
    main()
