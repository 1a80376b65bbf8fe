"""An engine on an Intel GPU, pretended or real, that obeys: `python -m support.xpu.engine_child URL INSTANCE PATH`."""

import contextlib
import sys
from typing import Any

import pytest

from kvdepot.testing.backend import WorkerPlan
from kvdepot.testing.device import install
from kvdepot.testing.engine import obey
from kvdepot.testing.xpu_kernels import FakeKernels
from support.staged.bench import torch
from support.xpu.workers import RegisteredWorker, XpuWorker, pretend_to_pin


def main() -> None:
    url, instance, path = sys.argv[1:]
    kernels: Any = contextlib.nullcontext()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not torch().xpu.is_available():
            kernels = FakeKernels(install("fakexpu")) if path == "registered" else kernels
            install("fakexpu")
            pretend_to_pin(monkeypatch)

        def make_worker(url: str, plan: WorkerPlan) -> XpuWorker:
            return (RegisteredWorker if path == "registered" else XpuWorker)(url, plan, path=path)

        with kernels:
            obey(make_worker, url, instance)


if __name__ == "__main__":
    main()
