"""An engine on a Gaudi, pretended or real, that obeys. Run: python -m support.hpu.engine_child URL INSTANCE MODE"""

import importlib.util
import sys

from kvdepot.testing.backend import WorkerPlan
from kvdepot.testing.device import install
from kvdepot.testing.engine import obey
from support.hpu.workers import HpuWorker


def main() -> None:
    url, instance, mode = sys.argv[1:]
    if importlib.util.find_spec("habana_frameworks") is None:
        install("hpu", lazy=mode == "lazy")

    def make_worker(url: str, plan: WorkerPlan) -> HpuWorker:
        return HpuWorker(url, plan, max_blocks=4)

    obey(make_worker, url, instance)


if __name__ == "__main__":
    main()
