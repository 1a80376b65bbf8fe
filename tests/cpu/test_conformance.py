"""The CPU backend passes the suite of every backend, with the compiled copy and with memcpy."""

from typing import Any

import pytest

from kvdepot.testing.backend import BackendSuite, WorkerPlan
from kvdepot_cpu.kernels import copy as kernels
from support.cpu.workers import NumpyWorker


class TestWithTheCompiledCopy(BackendSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        assert kernels.native_copy_runs() is not None, "the copy kernel was not built: is there a C compiler?"
        return NumpyWorker(url, plan, **options)


@pytest.mark.slow
class TestWithMemcpy(BackendSuite):
    @pytest.fixture(autouse=True)
    def _without_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kernels, "native_copy_runs", lambda: None)

    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        return NumpyWorker(url, plan, **options)


@pytest.mark.slow
class TestWithSeveralCopyThreads(BackendSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> NumpyWorker:
        return NumpyWorker(url, plan, copy_threads=3, **options)
