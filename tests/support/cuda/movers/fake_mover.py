"""A mover whose device is the fake driver, installed like any other. Files in the tests' folder control and record it.

`faults` has arguments of `FakeDriver.fail`, for one mover or for all. While `gate` exists, copies do not end, and
`at-gate-PID` says that one has begun. `violations` collects the driver's violations, and `calls-PID` has the driver's
calls until the last copy ended.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from kvdepot.lab.processes import wait_until
from kvdepot.movers.child import run_mover
from kvdepot_cuda.mover import open_mover
from support.cuda.fake import FakeDriver

FOLDER = Path(os.environ["KVDEPOT_FAKE_DEVICE"])
PIECE_BYTES = 8 << 20


class MoverDriver(FakeDriver):
    def synchronize_stream(self, stream: int) -> None:
        gate = FOLDER / "gate"
        if gate.exists():
            (FOLDER / f"at-gate-{os.getpid()}").touch()
            wait_until(lambda: not gate.exists(), 60)
        try:
            super().synchronize_stream(stream)
        finally:
            path = FOLDER / f"calls-{os.getpid()}"
            with self._lock:
                path.with_suffix(".new").write_text(json.dumps(self.calls))
                path.with_suffix(".new").rename(path)

    def _note(self, violation: str) -> None:
        with (FOLDER / "violations").open("a") as file:
            file.write(f"{violation}\n")


def open_driver(ordinal: int) -> FakeDriver:
    driver = MoverDriver(ordinal)
    faults = FOLDER / "faults"
    if faults.exists():
        fault: dict[str, Any] = json.loads(faults.read_text())
        if fault.pop("is_once"):
            faults.unlink()
        driver.fail(**fault)
    return driver


if __name__ == "__main__":
    run_mover(sys.argv[1:], open_mover(open_driver, PIECE_BYTES))
