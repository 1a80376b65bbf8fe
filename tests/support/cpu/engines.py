"""Engines in processes of their own, with chunks large enough to fill a small pool."""

import sys
from collections.abc import Sequence
from typing import Final

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.engine import EngineProcess
from kvdepot.testing.plan import GroupPlan, WorkerPlan

LARGE: Final = WorkerPlan((GroupPlan(page_sizes_bytes=(16384,) * 4),))
CHUNK: Final = LARGE.chunk_size_bytes(0)


def command(url: str, instance: str, *plan: str) -> list[str]:
    return [sys.executable, "-m", "support.cpu.engine_child", url, instance, *plan]


def large_engine(depot: DepotProcess, instance: str, prefix: Sequence[str] = ()) -> EngineProcess:
    """Start an engine. `prefix` is a command that runs the engine as its only child."""
    return EngineProcess([*prefix, *command(depot.url, instance, "large")])
