"""The toy backend passes the suites of every backend, and is found by its name."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from worker import ToyWorker

from kvdepot import get_backend, list_backends
from kvdepot.backends import CacheGroup, KVCache
from kvdepot.errors import LayoutError
from kvdepot.testing.backend import BackendSuite, WorkerPlan
from kvdepot.testing.faults import FaultSuite


class TestConformance(BackendSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> ToyWorker:
        return ToyWorker(url, plan, **options)


class TestFaults(FaultSuite):
    def make_worker(self, url: str, plan: WorkerPlan, **options: Any) -> ToyWorker:
        return ToyWorker(url, plan, **options)

    def engine_command(self, url: str, instance: str) -> Sequence[str]:
        return [sys.executable, str(Path(__file__).with_name("engine.py")), url, instance]


def test_it_is_found_by_its_entry_point() -> None:
    (toy,) = (backend for backend in list_backends() if backend.name == "toy")
    assert toy.distribution == "kvdepot-toy 0.1.0"
    assert toy.why_unavailable is None
    command = [sys.executable, "-m", "kvdepot", "backends"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[:4] for line in listed if line.startswith("toy")] == [
        ["toy", "kvdepot-toy", "0.1.0", "usable"]
    ]


def test_finding_it_loads_no_device() -> None:
    code = "import sys, kvdepot_toy; sys.exit(bool({'numpy', 'kvdepot_toy.device'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_memory_of_another_device_is_refused() -> None:
    with pytest.raises(LayoutError, match="use the backend of its device"):
        get_backend("toy").create_context(KVCache([CacheGroup([bytearray(8)], 16)], "engine", "bytes"))
