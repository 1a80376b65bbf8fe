"""An engine on a Gaudi, pretend or real, that obeys: `python -m support.hpu.engine_child URL INSTANCE MODE`."""

import importlib.util
import sys

import pytest

from kvdepot.testing.backend.plan import WorkerPlan
from kvdepot.testing.engine import obey
from support.hpu.workers import HpuWorker
from support.staged.device import install
from support.staged.pretend import pretend_to_pin


def main() -> None:
    url, instance, mode = sys.argv[1:]

    def make_worker(url: str, plan: WorkerPlan) -> HpuWorker:
        return HpuWorker(url, plan, max_blocks=4)

    with pytest.MonkeyPatch.context() as monkeypatch:
        if importlib.util.find_spec("habana_frameworks") is None:
            install("hpu", lazy=mode == "lazy")
            pretend_to_pin(monkeypatch)
        obey(make_worker, url, instance)


if __name__ == "__main__":
    main()
