"""An engine on a CUDA device, real or fake, that obeys commands. Run: ... URL INSTANCE MODE [MEMORY]

MEMORY is the folder of the fake device's memory; without it the device is NVIDIA's.
"""

import sys
from pathlib import Path

from kvdepot.testing.backend import Worker
from kvdepot.testing.engine import obey
from kvdepot.testing.plan import WorkerPlan
from support.cuda.device_worker import DeviceWorker
from support.cuda.fake import FakeDriver
from support.cuda.fake_worker import FakeWorker


def main() -> None:
    url, instance, mode, *memory = sys.argv[1:]

    def make_worker(url: str, plan: WorkerPlan) -> Worker:
        if not memory:
            return DeviceWorker(url, plan, mode=mode)
        return FakeWorker(url, plan, driver=FakeDriver(root=Path(memory[0])), mode=mode, mover="fake-cuda")

    obey(make_worker, url, instance)


if __name__ == "__main__":
    main()
