"""A node with a fake device. Other processes can open its memory, and depots have a mover for it."""

import gc
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvdepot.lab.processes import wait_until
from kvdepot.testing.plan import WorkerPlan
from support.cuda.fake import FakeDriver, holders
from support.cuda.fake_worker import FakeWorker

MOVERS = Path(__file__).with_name("movers")


class FakeDevice:
    """The device, and controls of its movers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = folder / "memory"
        self.memory.mkdir()

    def worker(self, url: str, plan: WorkerPlan, *, driver: FakeDriver | None = None, **options: Any) -> FakeWorker:
        options = {"mode": "ipc", "mover": "fake-cuda"} | options
        return FakeWorker(url, plan, driver=driver or FakeDriver(root=self.memory), **options)

    def fail(self, call: str, code: str = "CUDA_ERROR_UNKNOWN (999)", *, is_once: bool = False) -> None:
        """Make a call fail in the next mover, or in all movers that start from now on."""
        fault = {"call": call, "code": code, "is_once": is_once}
        (self.folder / "faults").write_text(json.dumps(fault))

    def close_gate(self) -> None:
        (self.folder / "gate").touch()

    def open_gate(self) -> None:
        (self.folder / "gate").unlink(missing_ok=True)

    def wait_for_a_copy(self) -> int:
        """Wait until a mover is copying and return its PID. The gate must be closed."""
        wait_until(lambda: list(self.folder.glob("at-gate-*")), 30, "a mover to begin a copy")
        (found,) = self.folder.glob("at-gate-*")
        found.unlink()
        return int(found.name.rpartition("-")[2])

    def calls(self) -> Counter[str]:
        """Return the calls of all movers' drivers up to the end of each mover's last copy."""
        total = Counter[str]()
        for path in self.folder.glob("calls-*[0-9]"):
            total.update(json.loads(path.read_text()))
        return total

    @property
    def violations(self) -> str:
        path = self.folder / "violations"
        return path.read_text() if path.exists() else ""

    def holders(self) -> set[int]:
        """Return the PIDs of other processes that have memory of the device mapped."""
        return holders(self.memory) - {os.getpid()}

    def close(self) -> None:
        gc.collect()  # closed workers still map memory of the device, with one descriptor each
        shutil.rmtree(self.memory, ignore_errors=True)
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def fake_device(monkeypatch: pytest.MonkeyPatch) -> Generator[FakeDevice]:
    """Make a device. Depots that start inside the block have a mover for it."""
    device = FakeDevice(Path(tempfile.mkdtemp(prefix="kvd-", dir="/dev/shm")))
    path = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(MOVERS), *([path] if path else [])]))
    monkeypatch.setenv("KVDEPOT_FAKE_DEVICE", str(device.folder))
    try:
        yield device
    finally:
        device.close()
