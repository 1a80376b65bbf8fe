"""The children of a fault suite as forks of one process that has torch: importing it is most of their start."""

from collections.abc import Iterator

import pytest

from kvdepot.lab.processes import DepotProcess
from kvdepot.testing.engine import EngineProcess
from kvdepot.testing.faults import FaultSuite, Spawn
from support.nursery import Fork, Nursery


class _ForkedEngine(EngineProcess):
    def __init__(self, fork: Fork) -> None:
        self._process = fork  # pyright: ignore[reportIncompatibleVariableOverride, reportAttributeAccessIssue]
        self._unread = b""
        self.expect("ready")


def torch_nursery() -> Nursery:
    """Return what has torch, and what else the children import that is not kvdepot's."""
    return Nursery("torch", "pytest", "hypothesis", "numpy", "zmq", "msgspec")


class ForkedFaultSuite(FaultSuite):
    """As `FaultSuite`, with a fixture `nursery`; `engine_command` is `python -m MODULE ...`."""

    @pytest.fixture
    def spawn(self, depot: DepotProcess, nursery: Nursery) -> Iterator[Spawn]:
        engines: list[EngineProcess] = []

        def spawn(instance: str) -> EngineProcess:
            _, option, module, *arguments = self.engine_command(depot.url, instance)
            assert option == "-m"
            engines.append(_ForkedEngine(nursery.fork(module, *arguments)))
            return engines[-1]

        yield spawn
        for engine in engines:
            engine.close()
